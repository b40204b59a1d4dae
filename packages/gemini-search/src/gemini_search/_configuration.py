"""The result of a search: a frozen value that says which tensor lies where."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class TensorSlot(NamedTuple):
    """Where one tensor lies in its chunk; a named tuple, since a model has thousands.

    Attributes:
        name: the tensor's name, unique in the configuration.
        offset: first element within the chunk.
        numel: number of elements; zero for an empty tensor.
    """

    name: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """One chunk: its size and the consecutive tensors in it.

    Attributes:
        numel: elements of the full buffer, a multiple of the world size.
        tensors: the tensors in the order given to the search, without gaps between them.
        keep_gathered: whether every rank should hold the whole chunk all the time; so for a group too
            small to be worth sharding.
    """

    numel: int
    tensors: tuple[TensorSlot, ...]
    keep_gathered: bool = False

    @property
    def used_numel(self) -> int:
        """Elements that belong to tensors; the rest of the full buffer is padding."""
        last = self.tensors[-1]
        return last.offset + last.numel


@dataclass(frozen=True, kw_only=True)
class ChunkConfiguration:
    """How to cut a list of tensors into chunks. Equal inputs give equal values on every rank.

    Attributes:
        chunks: the chunks in order; put together, their tensors are the input in its order.
        chunk_numel: the chunk size; with several size classes the largest of them. A tensor above it has
            a chunk of its own size.
        world_size: number of ranks among which each chunk is sharded.
    """

    chunks: tuple[ChunkSpec, ...]
    chunk_numel: int
    world_size: int

    @cached_property
    def total_numel(self) -> int:
        """Elements of all tensors."""
        return sum(chunk.used_numel for chunk in self.chunks)

    @cached_property
    def waste_numel(self) -> int:
        """Elements of padding in all full buffers, those of large tensors and of the last chunk included."""
        return sum(chunk.numel for chunk in self.chunks) - self.total_numel

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that differ whenever two configurations do; for comparing ranks."""
        content = [
            self.world_size,
            self.chunk_numel,
            [[chunk.numel, chunk.keep_gathered, chunk.tensors] for chunk in self.chunks],
        ]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    def describe(self) -> str:
        """Return a table for people: a summary, the buffer sizes, then one line per chunk."""
        buffer_numel = self.total_numel + self.waste_numel
        share = self.waste_numel / buffer_numel if buffer_numel else 0.0
        counts: dict[int, int] = {}
        for chunk in self.chunks:
            counts[chunk.numel] = counts.get(chunk.numel, 0) + 1
        lines = [
            f"tensors {sum(len(chunk.tensors) for chunk in self.chunks):,}, elements {self.total_numel:,}, "
            f"chunks {len(self.chunks):,}, ranks {self.world_size}",
            f"padding {self.waste_numel:,} elements ({share:.2%} of the full buffers)",
            "buffers " + ", ".join(f"{counts[numel]} x {numel:,}" for numel in sorted(counts, reverse=True)),
            f"digest {self.digest[:16]}",
            "",
            f"{'chunk':>5}  {'numel':>15}  {'used':>15}  {'tensors':>7}  first .. last",
        ]
        for index, chunk in enumerate(self.chunks):
            first, last = chunk.tensors[0].name, chunk.tensors[-1].name
            span = first if first == last else f"{first} .. {last}"
            mark = "  [gathered]" if chunk.keep_gathered else ""
            lines.append(
                f"{index:>5}  {chunk.numel:>15,}  {chunk.used_numel:>15,}  {len(chunk.tensors):>7}  {span}{mark}"
            )
        return "\n".join(lines)
