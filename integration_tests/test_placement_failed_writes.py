"""A step that cannot write all it has to is finished later, and then nothing tells it from a step that did not fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer
from gemini_chunk import ChunkError, TierFullError
from gemini_chunk.testing import FailingCopier
from gemini_optim import UnfinishedStepError
from models import SMALL_CHUNKS, batch, lm_loss, seeded_model
from ranks import run_ranks

Writes = Literal["weights", "states", "disk"]
STEPS = 3
FULL_AT = {"weights": 1, "states": 0, "disk": 0}
SAYS = {
    "weights": r"Taking new weights over into chunk \d+, which rests on the host tier, failed",
    "states": r"TierFullError: The host tier cannot hold [\d,]+ more bytes for chunk \d+ (exp_avg|momentum)",
    "disk": r"No space left on device: the disk tier cannot take it for chunk \d+ exp_avg",
}


def wrap(
    rank: int,
    precision: Literal["fp16", "bf16", "fp32"],
    optim: str,
    folder: str,
    reduce_dtype: torch.dtype | None = None,
) -> GeminiOptimizer:
    model = GeminiDDP(
        seeded_model("llama"),
        precision=precision,
        offload_param_frac=1.0,
        offload_optim_frac=0.0 if folder else 1.0,
        disk_optim_frac=1.0 if folder else 0.0,
        offload_directory=folder or None,
        reduce_dtype=reduce_dtype,
        **SMALL_CHUNKS,
    )
    if optim == "adam":
        return GeminiAdamOptimizer(model, lr=1e-2, weight_decay=0.1, initial_scale=2.0**10, max_norm=0.05)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return GeminiOptimizer(sgd, model, initial_scale=2.0**10, max_norm=0.05)


def make_full(optimizer: GeminiOptimizer, writes: Writes) -> Callable[[], None]:
    """Let later writes of a step fail, and return what lets them succeed again."""
    host = optimizer.module.chunk_manager.tier("host")
    if writes == "weights":
        incoming = host.incoming
        host.incoming = FailingCopier(range(2, 2**20), when="wait")
        return lambda: setattr(host, "incoming", incoming)
    if writes == "states":
        largest = max(shard.chunk.shard_bytes for shard in optimizer.module.shards)
        host.capacity = host.used + 3 * largest
        return lambda: setattr(host, "capacity", None)
    disk = optimizer.module.chunk_manager.tier("disk")
    allocate, calls = disk.allocate, iter(range(2**20))

    def refuse(numel: int, dtype: torch.dtype, holder: str) -> Tensor:
        if next(calls) >= 3:
            raise OSError(28, f"No space left on device: the disk tier cannot take it for {holder}")
        return allocate(numel, dtype, holder)

    setattr(disk, "allocate", refuse)  # noqa: B010 # mypy would have no method assigned
    return lambda: delattr(disk, "allocate")


def check_that_nothing_else_is_done(optimizer: GeminiOptimizer, rank: int) -> None:
    model = optimizer.module
    loss = torch.zeros((), requires_grad=True)
    others: list[Callable[[], object]] = [
        lambda: lm_loss(model, batch(rank, 0)),
        lambda: optimizer.backward(loss),
        optimizer.zero_grad,
        model.zero_grad,
        model.reset,
        model.state_dict,
        lambda: dict(model.named_master_values(torch.float32)),
        lambda: model.load_state_dict({}),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
    ]
    for other in others:
        with pytest.raises(UnfinishedStepError, match=r"call step\(\) again on every rank"):
            other()


def fail_and_finish(optimizer: GeminiOptimizer, writes: Writes, rank: int, world_size: int) -> None:
    last = world_size - 1
    make_room = make_full(optimizer, writes) if rank == last else lambda: None
    before = [chunk.generation for chunk in optimizer.module.chunk_manager.chunks]
    for _ in range(2):  # the second time nothing has changed, and nothing must have
        with pytest.raises(UnfinishedStepError, match=f"Rank {last}: .*{SAYS[writes]}") as raised:
            optimizer.step()
        assert (raised.value.__cause__ is not None) == (rank == last)
    if rank == last:
        after = [chunk.generation for chunk in optimizer.module.chunk_manager.chunks]
        updated = sum(old != new for old, new in zip(before, after, strict=True))
        assert writes != "weights" or 0 < updated < len(before), "it failed half-way"
        assert isinstance(raised.value.__cause__, TierFullError) == (writes == "states")
    check_that_nothing_else_is_done(optimizer, rank)
    make_room()
    optimizer.step()


def train(
    rank: int,
    world_size: int,
    writes: Writes,
    precision: Literal["fp16", "bf16", "fp32"],
    optim: str,
    folder: str,
    *,
    fails: bool,
) -> tuple[list[float], dict[str, Tensor], object]:
    optimizer = wrap(rank, precision, optim, folder if writes == "disk" else "")
    model, losses = optimizer.module, []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        loss = lm_loss(model, batch(rank, step))
        losses.append(loss.item())
        optimizer.backward(loss)
        if fails and step == FULL_AT[writes]:
            fail_and_finish(optimizer, writes, rank, world_size)
        else:
            optimizer.step()
        scheduler.step()
        losses.append(optimizer.get_grad_norm() or 0.0)
        optimizer.zero_grad()
    return losses, dict(model.named_master_values(torch.float32)), optimizer.state_dict(only_rank_0=False)


def check_finished_step(
    rank: int, world_size: int, writes: Writes, precision: Literal["fp16", "bf16", "fp32"], optim: str, folder: str
) -> None:
    wanted = train(rank, world_size, writes, precision, optim, folder, fails=False)
    found = train(rank, world_size, writes, precision, optim, folder, fails=True)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("writes", "precision", "optim"),
    [
        ("weights", "fp16", "adam"),
        ("weights", "bf16", "momentum"),
        ("states", "bf16", "adam"),
        ("states", "fp32", "momentum"),
        ("disk", "fp32", "adam"),
    ],
)
def test_a_step_that_failed_is_finished_with_the_bits_of_one_that_did_not(
    writes: Writes, precision: str, optim: str, world_size: int, tmp_path: object
) -> None:
    run_ranks(check_finished_step, world_size, writes, precision, optim, str(tmp_path))


def check_lost_gradient(rank: int, world_size: int) -> None:
    # Summed in fp32, gradients are carried to the host even where that is the memory of the device.
    found, wanted = (wrap(rank, "bf16", "adam", "", torch.float32) for _ in range(2))
    copier = found.module.chunk_manager.tier("host").incoming = FailingCopier(())
    copies = 0
    for step in range(2):
        loss = lm_loss(found.module, batch(rank, step))
        before = copier.started
        if step == 1 and rank == 1:
            copier.at = [before + copies - 1]  # the gradient of the last chunk: the other ranks have got theirs
            with pytest.raises(ChunkError, match=r"Carrying the gradient of chunk \d+ to the host tier failed"):
                found.backward(loss)
        else:
            found.backward(loss)
        copies = copier.started - before
        if step == 1:
            with pytest.raises(RuntimeError, match=r"Only some ranks have a gradient .* of all ranks are dropped"):
                found.step()
            assert all(shard.grad() is None for shard in found.module.shards)
        found.step()
    for step in (0, 2):
        if step:
            found.backward(lm_loss(found.module, batch(rank, step)))
            found.step()
        wanted.backward(lm_loss(wanted.module, batch(rank, step)))
        wanted.step()
    values = [dict(one.module.named_master_values(torch.float32)) for one in (found, wanted)]
    torch.testing.assert_close(*values, rtol=0.0, atol=0.0)
    states = [one.state_dict(only_rank_0=False) for one in (found, wanted)]
    torch.testing.assert_close(*states, rtol=0.0, atol=0.0)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_that_one_rank_could_not_carry_away_loses_the_step_on_all(world_size: int) -> None:
    run_ranks(check_lost_gradient, world_size)
