"""The systems that train side by side: plain DDP, its peers, and ours."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from training_cases import LEARNING_RATE, Case, loss_of

# While these stay gathered, gradients are not there yet: they do not raise the peak of model states.
_HELD = 12
_MESSAGE_NUMEL = 2**22  # DeepSpeed's buckets: 16 MiB, where gloo is fastest; its default of 2 GB counts as memory


@dataclass(frozen=True, slots=True)
class Trainer:
    """A system with a model in it.

    Attributes:
        step: trains on token ids and returns the loss.
        chunks: chunks that the parameters lie in (ours).
        working_set_bytes: of the chunks in use and prefetched, and one chunk of gradients (ours).
    """

    step: Callable[[Tensor], Tensor]
    chunks: int = 0
    working_set_bytes: int = 0


def _plain(case: Case) -> Trainer:
    """Train without communication: DDP's work on one rank, a bound for the others on several."""
    return _torch_trainer(case, case.model())


def _ddp(case: Case) -> Trainer:
    model = case.model()
    return _torch_trainer(case, model if case.world_size == 1 else DistributedDataParallel(model))


def _torch_trainer(case: Case, model: nn.Module) -> Trainer:
    """Train with torch's own fused AdamW; bf16 is autocast, which keeps fp32 weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step)


def _fsdp2(case: Case) -> Trainer:
    model = case.model()
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16 if case.world_size == 1 else torch.float32)
    policy = mixed if case.precision == "bf16" else MixedPrecisionPolicy()
    mesh = dist.init_device_mesh("cpu", (case.world_size,))
    for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step)


def _ours(
    case: Case,
    *,
    shard_param_frac: float = 1.0,
    max_prefetch: int = 2,
    max_held: int = 0,
    offload_optim_frac: float = 0.0,
    offload_param_frac: float = 0.0,
) -> Trainer:
    model = GeminiDDP(
        case.model(),
        precision=case.precision,
        min_chunk_size_m=case.chunk_m,
        search_range_m=case.chunk_m,
        hidden_dim=case.width,
        shard_param_frac=shard_param_frac,
        max_prefetch=max_prefetch,
        max_held=max_held,
        offload_optim_frac=offload_optim_frac,
        offload_param_frac=offload_param_frac,
    )
    optimizer = GeminiAdamOptimizer(model, lr=LEARNING_RATE)

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        optimizer.backward(loss)
        optimizer.step()
        return loss.detach()

    full_bytes = [chunk.full_bytes for chunk in model.chunk_manager.chunks]
    in_row = (sum(full_bytes[first:][: 1 + max_prefetch]) for first in range(len(full_bytes)))
    return Trainer(step, len(full_bytes), max(in_row) + max(full_bytes))


def _deepspeed(case: Case, *, stage: int) -> Trainer:
    # Read when the package is imported.
    rank = str(dist.get_rank())
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": rank, "LOCAL_RANK": rank, "LOCAL_SIZE": str(case.world_size)}
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.logger.setLevel(logging.ERROR)
    # What it compiles at the start serves inference, and would wait for ever where a compilation was interrupted.
    setattr(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)  # noqa: B010
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    model = case.model()
    # Fused, and not torch's class itself, which it would replace by one that it compiles.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    settings = {
        "train_micro_batch_size_per_gpu": case.batch(0, 0).shape[0],
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_bucket_size": _MESSAGE_NUMEL,
            "allgather_bucket_size": _MESSAGE_NUMEL,
            "stage3_prefetch_bucket_size": _MESSAGE_NUMEL,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(step)


SYSTEMS: Mapping[str, Callable[[Case], Trainer]] = {
    "DDP": _ddp,
    "no communication": _plain,
    "FSDP2": _fsdp2,
    "DeepSpeed ZeRO-2": partial(_deepspeed, stage=2),
    "DeepSpeed ZeRO-3": partial(_deepspeed, stage=3),
    "ours ZeRO-2": partial(_ours, shard_param_frac=0.0),
    "ours ZeRO-3": partial(_ours, max_held=_HELD),
    "ours ZeRO-3, none held": _ours,
    "ours ZeRO-3, optimizer offloaded": partial(_ours, offload_optim_frac=1.0),
    "ours, all offloaded": partial(_ours, offload_optim_frac=1.0, offload_param_frac=1.0),
}
