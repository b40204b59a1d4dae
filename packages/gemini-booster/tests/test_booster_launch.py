"""Starting the ranks: from torchrun's environment, or a world of one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gemini_booster import launch_from_torch
from gemini_booster.zero import GeminiDDP
from ranks import run_ranks

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process that no launcher started."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_torchrun_there_is_a_world_of_one(alone: pytest.MonkeyPatch) -> None:
    launch_from_torch()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    launch_from_torch()  # again does nothing
    assert dist.get_world_size() == 1
    assert GeminiDDP(nn.Linear(2, 2)).process_group is None


def test_seed_is_set_for_python_and_torch(alone: pytest.MonkeyPatch) -> None:
    drawn = []
    for seed in (5, 5, 6):
        launch_from_torch(seed=seed)
        drawn.append((random.random(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0]
    assert drawn[0][1] != drawn[2][1]


def test_environment_of_torchrun_is_followed(alone: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    alone.setenv("RANK", "3")
    alone.setenv("WORLD_SIZE", "8")
    alone.setattr(dist, "init_process_group", lambda backend, **_: started.append(backend))
    launch_from_torch()
    backend = "gloo"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        backend = dist.get_default_backend_for_device(accelerator)
    assert started == [backend]


def test_a_world_size_without_a_rank_is_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 4, but RANK is not set\. Start the script with torchrun"):
        launch_from_torch()
    assert not dist.is_initialized()


def check_existing_group(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world_size))
        launch_from_torch()
        assert dist.get_world_size() == world_size
        patch.setenv("WORLD_SIZE", "7")
        for call in (launch_from_torch, lambda: GeminiDDP(nn.Linear(2, 2))):
            with pytest.raises(RuntimeError, match=f"announced WORLD_SIZE=7, but the process group has {world_size}"):
                call()


@pytest.mark.distributed
def test_a_group_unlike_the_launchers_is_refused() -> None:
    run_ranks(check_existing_group, 2)
