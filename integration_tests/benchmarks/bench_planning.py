"""What deciding costs: the chunk search and the planner, beside making nothing but their result.

    python integration_tests/benchmarks/bench_planning.py

Both are plain Python over many small objects, so the limit is to sort the sizes and to make one object for each tensor,
or one for each access of the trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from against_limit import Beside, beside, show
from gemini_placement import AutoPlacementPolicy, Placement, PlanStep, StaticPlacementPolicy, TierName
from gemini_placement.testing import UNLIMITED, PaperChunk, paper_chunks, there_and_back
from gemini_search import TensorSlot, search_chunk_configuration

PREFETCH = 2


def gpt2_sizes(layers: int, width: int) -> dict[str, int]:
    """Return elements of each tensor of a GPT-2."""
    sizes = {"wte": 50257 * width, "wpe": 1024 * width}
    block = {"ln_1.weight": 1, "ln_1.bias": 1, "ln_2.weight": 1, "ln_2.bias": 1}
    block |= {"attn.weight": 3 * width, "attn.bias": 3, "attn_proj.weight": width, "attn_proj.bias": 1}
    block |= {"mlp.weight": 4 * width, "mlp.bias": 4, "mlp_proj.weight": 4 * width, "mlp_proj.bias": 1}
    sizes |= {f"h.{layer}.{name}": width * times for layer in range(layers) for name, times in block.items()}
    return sizes


def random_sizes(count: int) -> dict[str, int]:
    """Return elements of many tensors from 16 to 2**20, evenly spread over the scales."""
    generator = random.Random(0)
    return {f"layers.{index // 4}.{index}": int(2 ** generator.uniform(4, 20)) for index in range(count)}


def module_of(name: str) -> str:
    """Return the path of a tensor's module."""
    return name.rpartition(".")[0]


def search(what: str, sizes: Mapping[str, int]) -> Beside:
    """Measure one search as the booster makes it."""

    def least() -> object:
        sorted(sizes.values())
        return [TensorSlot(name, 0, numel) for name, numel in sizes.items()]

    call = partial(search_chunk_configuration, sizes, 8, group_by=module_of)
    return beside(what, f"{len(sizes):,} tensors", call, "sort, and a slot each", least, repeats=3)


def plan(accesses: int) -> list[Beside]:
    """Measure placing chunks and planning a step over them, with and without a limit on the device."""
    chunks = paper_chunks(accesses // 2)
    trace = there_and_back(chunks)
    static = StaticPlacementPolicy(max_prefetch=PREFETCH)
    auto = AutoPlacementPolicy(max_prefetch=PREFETCH)
    half: dict[TierName, int | None] = {"device": sum(chunk.optim_bytes for chunk in chunks) // 2, "host": None}

    def place_static() -> Placement[PaperChunk]:
        return static.place(chunks, capacities=UNLIMITED, world_size=2)

    def place_auto() -> Placement[PaperChunk]:
        return auto.place(chunks, capacities=half, world_size=2)

    def least() -> Sequence[PlanStep[PaperChunk]]:
        return [PlanStep(access.chunks, (), (), ()) for access in trace.accesses]

    parts: dict[str, Callable[[], object]] = {
        "place, static": place_static,
        "plan, static": partial(static.schedule, trace, place_static()),
        "place, auto in half the room": place_auto,
        "plan, auto in half the room": partial(auto.schedule, trace, place_auto()),
    }
    size = f"{accesses:,} accesses"
    return [beside(what, size, call, "a step each", least, repeats=2) for what, call in parts.items()]


def main() -> None:
    """Print the table."""
    rows = [
        search("search, GPT-2 12 x 768", gpt2_sizes(12, 768)),
        search("search, GPT-3 96 x 12288", gpt2_sizes(96, 12288)),
        search("search, random sizes", random_sizes(10_000)),
        search("search, random sizes", random_sizes(100_000)),
    ]
    for accesses in (100, 1_000, 10_000):
        rows += plan(accesses)
    show("search and planner", rows)


if __name__ == "__main__":
    main()
