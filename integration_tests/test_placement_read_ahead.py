"""What rests on the disk is read before it is asked for: by number of calls between the two, not by the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gemini_booster.zero import GeminiDDP
from gemini_chunk import Chunk, Tier
from gemini_optim import HybridAdam, ZeroOptimizer
from models import SMALL_CHUNKS, batch, lm_loss, seeded_model
from ranks import run_ranks


class Disk:
    """A disk on paper: a read that was asked for takes one call, in which a chunk is gathered or updated."""

    def __init__(self) -> None:
        self.calls = 0
        self.asked: dict[int, int] = {}
        self.exposed: list[str] = []

    def ask(self, memory: Tensor) -> None:
        self.asked.setdefault(memory.data_ptr(), self.calls)

    def use(self, memory: Tensor, what: str) -> None:
        """Note whether a read was over when its bytes were needed; they leave the process afterwards."""
        if self.calls - self.asked.pop(memory.data_ptr(), self.calls) < 1:
            self.exposed.append(what)


def watch(disk: Disk, model: GeminiDDP) -> None:
    page_in, start_gather, commit = Tier.page_in, Chunk.start_gather, Chunk.start_commit

    def asking(self: Tier, memory: Tensor) -> None:
        if self.name == "disk":
            disk.ask(memory)
        page_in(self, memory)

    def gathering(self: Chunk) -> Any:
        if self.missing_bytes and self.tier == "disk":
            disk.use(self.shard, f"gather of {self.name}")
            disk.calls += 1
        return start_gather(self)

    def committing(self: Chunk) -> Any:
        if self.master is not None:
            disk.use(self.master, f"update of {self.name}")
            disk.calls += 1
        return commit(self)

    Tier.page_in = asking  # type: ignore[method-assign] # the ranks' processes end here
    Chunk.start_gather = gathering  # type: ignore[method-assign]
    Chunk.start_commit = committing  # type: ignore[method-assign]


def check_read_ahead(rank: int, world_size: int, folder: str) -> None:
    model = GeminiDDP(
        seeded_model("llama", layers=6),
        precision="bf16",
        disk_param_frac=1.0,
        disk_optim_frac=1.0,
        offload_directory=folder,
        **SMALL_CHUNKS,
    )
    # Small chunks would share one call of the optimizer, and so all be needed at once.
    optimizer = ZeroOptimizer(HybridAdam(model.parameters(), lr=1e-3), model, block_numel=2048)
    disk = Disk()
    watch(disk, model)
    exposed = []
    for step in range(4):
        disk.exposed.clear()
        optimizer.backward(lm_loss(model, batch(rank, step)))
        optimizer.step()
        exposed.append(list(disk.exposed))
    chunks = model.chunk_manager.chunks
    assert len(chunks) >= 6
    assert len(exposed[0]) > len(chunks), "nothing is known of the first step"
    # Once the plan has been followed for a step, the first gather and the first update wait alone: before the one came
    # a gather of the same chunk, at the end of the last backward, and nothing announces the other.
    assert exposed[3] == [f"gather of {chunks[0].name}", f"update of {chunks[0].name}"], exposed[3]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_but_the_first_gather_and_the_first_update_of_a_step_are_read_ahead(
    world_size: int, tmp_path: Path
) -> None:
    run_ranks(check_read_ahead, world_size, str(tmp_path), timeout_s=60)
