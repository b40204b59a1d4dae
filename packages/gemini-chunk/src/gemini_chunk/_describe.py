"""A table of chunks that a person can read."""

from __future__ import annotations

from collections.abc import Iterable

from gemini_chunk._chunk import Chunk

_HEADER = ("chunk", "tensors", "elements", "of", "bytes", "tier", "state", "first tensor")


def table(chunks: Iterable[Chunk]) -> str:
    """Return one row for each chunk, under a header."""
    rows = [_HEADER, *(_row(chunk) for chunk in chunks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(chunk: Chunk) -> tuple[str, ...]:
    state = "open" if not chunk.is_closed else "gathered" if chunk.is_gathered else "released"
    return (
        chunk.name,
        str(len(chunk.tensors)),
        f"{chunk.used_numel:,}",
        f"{chunk.numel:,}",
        f"{chunk.full_bytes:,}",
        chunk.tier if chunk.is_closed else "-",
        state if chunk.trainable else f"{state}, frozen",
        chunk.tensors[0].name if chunk.tensors else "-",
    )
