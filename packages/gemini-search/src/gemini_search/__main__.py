"""Command line: `python -m gemini_search --world-size 8 sizes.txt` prints the chunks for a list of sizes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gemini_search import search_chunk_configuration


def read_sizes(text: str) -> list[tuple[str, int]]:
    """Parse ``name numel`` lines, a JSON object, or a JSON list of pairs.

    Raises:
        ValueError: a line or an entry is neither.
    """
    if text.lstrip()[:1] in ("{", "["):
        parsed: object = json.loads(text, object_pairs_hook=list)
        if not isinstance(parsed, list):
            raise ValueError("The JSON must be an object, name to numel, or a list of pairs.")
        return [tuple(pair) if isinstance(pair, list) else pair for pair in parsed]
    sizes: list[tuple[str, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) != 2 or not fields[1].replace("_", "").isdecimal():
            raise ValueError(f"Line {number} must read `name numel`, got {line!r}.")
        sizes.append((fields[0], int(fields[1])))
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 for input that cannot be searched."""
    parser = argparse.ArgumentParser(
        prog="python -m gemini_search", description="Cut tensors into chunks that waste little and shard evenly."
    )
    parser.add_argument("file", nargs="?", help="`name numel` lines or JSON; standard input if left out")
    parser.add_argument("--world-size", type=int, default=1, help="ranks that share a chunk (default 1)")
    parser.add_argument("--hidden-dim", type=int, default=1024, help="step between sizes (default 1024)")
    parser.add_argument("--search-range-m", type=float, default=32, help="in 2**20 elements (default 32)")
    parser.add_argument("--min-chunk-size-m", type=float, default=32, help="in 2**20 elements (default 32)")
    parser.add_argument("--method", choices=["best", "sweep"], default="best")
    parser.add_argument("--keep-exlarge-params", action="store_true", help="outliers raise the chunk size too")
    options = parser.parse_args(arguments)
    try:
        text = Path(options.file).read_text(encoding="utf-8") if options.file else sys.stdin.read()
        configuration = search_chunk_configuration(
            read_sizes(text),
            options.world_size,
            hidden_dim=options.hidden_dim,
            search_range_m=options.search_range_m,
            min_chunk_size_m=options.min_chunk_size_m,
            filter_exlarge_params=not options.keep_exlarge_params,
            method=options.method,
        )
    except (OSError, TypeError, ValueError) as error:
        print(f"gemini_search: {error}", file=sys.stderr)
        return 2
    print(configuration.describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
