"""The wrapper with its collaborators: search, chunks, placement and lazy values behind keywords."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_booster._launch import check_world_size
from gemini_booster._shards import ChunkShard
from gemini_booster._units import Precision, compute_dtype, to_bytes
from gemini_chunk import Chunk, ChunkManager, Tier, TierName, device_tier, disk_tier, host_tier
from gemini_ddp import ZeroDDP
from gemini_lazy import forget, is_lazy, materialize, materialize_value
from gemini_placement import (
    AutoPlacementPolicy,
    MemStats,
    Placement,
    Plan,
    StaticPlacementPolicy,
)
from gemini_placement.interfaces import ChunkFacts, Trace
from gemini_search import ChunkConfiguration, search_chunk_configuration

logger = logging.getLogger("gemini_booster")

PolicyName = Literal["static", "auto"]
_ChunkT = TypeVar("_ChunkT", bound=ChunkFacts)

_DEFAULT_HIDDEN_DIM = 1024


class _Planner(Generic[_ChunkT]):
    """A policy that has placed the chunks, as the planner of a `ZeroDDP`; it remembers its plans."""

    def __init__(self, policy: StaticPlacementPolicy | AutoPlacementPolicy, placement: Placement[_ChunkT]) -> None:
        self._policy = policy
        self._placement = placement
        self.plans: list[Plan[_ChunkT]] = []

    def schedule(self, trace: Trace[_ChunkT]) -> Plan[_ChunkT]:
        """Plan one recorded step."""
        self.plans.append(self._policy.schedule(trace, self._placement))
        return self.plans[-1]


class GeminiDDP(ZeroDDP[Chunk]):
    """Wraps a model for ZeRO training with chunks in device, host and disk memory.

    Parameters are packed into chunks, sharded over the ranks and placed by a policy; a model built under
    `gemini_lazy.LazyInitContext` is materialised straight into shards, one parameter at a time. Rank 0's values are
    given to every rank.

    Args:
        module: the model, on the CPU, on the compute device, or lazily initialised.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``, of working parameters and gradients.
        placement_policy: ``"static"`` obeys the three fractions; ``"auto"`` fits the capacities.
        shard_param_frac: share of parameter bytes released after use: 1.0 is ZeRO-3, 0.0 is ZeRO-2. Static only.
        offload_optim_frac: share of optimizer states and master weights that rest on the host. Static only.
        offload_param_frac: share of parameter shards that rest on the host; acts when the other two are 1.0. Static
            only.
        warmup_non_model_data_ratio: share of the device kept free of model data before the first step. Auto only.
        steady_cuda_cap_ratio: share of the device that may be used later. Auto only.
        device_capacity: bytes of model states that the compute device may hold (``"2GiB"`` or a number); None for no
            limit.
        host_capacity: likewise for main memory.
        offload_directory: folder for memory-mapped files; None for no disk tier.
        max_prefetch: chunks gathered ahead of their use.
        hidden_dim: step of the chunk search in elements; by default 1024.
        min_chunk_size_m: smallest chunk in units of 2**20 elements; a group of parameters smaller than that is one
            chunk that stays gathered.
        search_range_m: width of the chunk search in units of 2**20 elements.
        chunk_configuration: takes the place of the search's result for the trainable parameters.
        memstats: a recorded trace, whose order of first use the packing follows.
        pin_memory: page-lock host memory.
        master_weights: keep fp32 master weights for 16-bit parameters.
        enable_gradient_accumulation: sum the gradients of several backwards in fp32 memory of their own.
        force_outputs_fp32: cast floating outputs to fp32.
        process_group: ranks that share the model; None is the default group.
        verbose: log the packing and the placement on rank 0.

    Raises:
        ValueError: a setting is out of its range; the message says what is allowed.
        RuntimeError: the process group is not the one that the launcher announced.
        gemini_placement.PlacementError: the model states do not fit the capacities.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        precision: Precision = "fp16",
        placement_policy: PolicyName = "static",
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        device_capacity: int | str | None = None,
        host_capacity: int | str | None = None,
        offload_directory: str | None = None,
        max_prefetch: int = 0,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        search_range_m: float = 32,
        chunk_configuration: ChunkConfiguration | None = None,
        memstats: MemStats | None = None,
        pin_memory: bool = False,
        master_weights: bool = True,
        enable_gradient_accumulation: bool = False,
        force_outputs_fp32: bool = False,
        process_group: dist.ProcessGroup | None = None,
        verbose: bool = False,
    ) -> None:
        dtype = compute_dtype(precision)
        policy: StaticPlacementPolicy | AutoPlacementPolicy
        if placement_policy == "static":
            policy = StaticPlacementPolicy(
                shard_param_frac=shard_param_frac,
                offload_optim_frac=offload_optim_frac,
                offload_param_frac=offload_param_frac,
                max_prefetch=max_prefetch,
            )
        elif placement_policy == "auto":
            policy = AutoPlacementPolicy(
                warmup_non_model_data_ratio=warmup_non_model_data_ratio,
                steady_cuda_cap_ratio=steady_cuda_cap_ratio,
                max_prefetch=max_prefetch,
            )
        else:
            raise ValueError(f"placement_policy must be 'static' or 'auto', got {placement_policy!r}.")
        device = device_tier(capacity=_device_capacity(policy, device_capacity, memstats))
        host = host_tier(to_bytes(host_capacity, "host_capacity"), pin_memory=pin_memory)
        disk = None if offload_directory is None else disk_tier(offload_directory)
        check_world_size(process_group)
        manager = ChunkManager(device=device, host=host, disk=disk, process_group=process_group)
        search = partial(
            search_chunk_configuration,
            world_size=manager.world_size,
            hidden_dim=_DEFAULT_HIDDEN_DIM if hidden_dim is None else hidden_dim,
            search_range_m=search_range_m,
            min_chunk_size_m=min_chunk_size_m,
        )
        _check_meta(module)
        order = [] if memstats is None else list(memstats.param_order)
        for trainable in (True, False):
            for group_dtype, params in _groups(module, trainable, dtype, order).items():
                sizes = {name: param.numel() for name, param in params.items()}
                given = chunk_configuration if trainable else None
                _add_chunks(
                    manager, params, group_dtype, given or search(sizes), trainable, enable_gradient_accumulation
                )
        placement = policy.place(
            manager.chunks,
            capacities={name: tier.capacity for name, tier in manager.tiers.items()},
            world_size=manager.world_size,
        )
        self.process_group = _group(process_group, manager.world_size)
        _check_alike(self.process_group, placement.digest)
        states: dict[Chunk, Tier] = {}
        for chunk in manager.chunks:
            place = placement.of(chunk)
            states[chunk] = manager.tier(place.optim_tier)
            master: TierName | None = place.optim_tier if master_weights else None
            manager.close(chunk, rest=place.param_tier, master=master, keep_gathered=place.keep_gathered)
            for info in chunk.tensors:
                forget(info.tensor)
        _settle_buffers(module, device.device)
        planner = _Planner(policy, placement)
        super().__init__(
            module,
            manager,
            planner,
            input_dtype=None if precision == "fp32" else dtype,
            scales_loss=precision == "fp16",
            force_outputs_fp32=force_outputs_fp32,
        )
        self.precision = precision
        self.chunk_manager = manager
        self.plans = planner.plans
        self.placement = placement
        self.shards: Sequence[ChunkShard] = [ChunkShard(c, states[c]) for c in manager.chunks if c.trainable]
        if verbose and manager.collectives.rank == 0:
            logger.info("%s\n%s", manager.describe(), placement.describe())


def _device_capacity(
    policy: StaticPlacementPolicy | AutoPlacementPolicy, asked: int | str | None, memstats: MemStats | None
) -> int | None:
    """Return the bytes that model states may take on the device: as asked, or what auto measures and leaves to them."""
    if asked is None and isinstance(policy, AutoPlacementPolicy) and torch.accelerator.is_available():
        _, total = torch.accelerator.get_memory_info()
        return policy.model_bytes(total, memstats)
    return to_bytes(asked, "device_capacity")


def _groups(
    module: nn.Module, trainable: bool, dtype: torch.dtype, order: Sequence[str]
) -> Mapping[torch.dtype, dict[str, nn.Parameter]]:
    """Return parameters by the dtype of their chunk, each once, in the order given first and then the module's."""
    named = {name: param for name, param in module.named_parameters() if param.requires_grad is trainable}
    names = dict.fromkeys([*(name for name in order if name in named), *named])
    groups: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for name in names:
        param = named[name]
        groups.setdefault(dtype if param.is_floating_point() else param.dtype, {})[name] = param
    return groups


def _add_chunks(
    manager: ChunkManager,
    params: Mapping[str, nn.Parameter],
    dtype: torch.dtype,
    configuration: ChunkConfiguration,
    trainable: bool,
    accumulates: bool,
) -> None:
    for spec in configuration.chunks:
        named = [(slot.name, params[slot.name]) for slot in spec.tensors]
        sources: dict[str, Callable[[], Tensor]] = {
            name: partial(materialize_value, param) for name, param in named if is_lazy(param)
        }
        manager.add_chunk(
            named, numel=spec.numel, dtype=dtype, trainable=trainable, accumulates=accumulates, sources=sources
        )


def _check_meta(module: nn.Module) -> None:
    meta = [name for name, param in module.named_parameters() if param.is_meta]
    if meta:
        raise ValueError(
            f"{len(meta)} parameters are on the meta device and have no values, among them {meta[0]!r}. Build the "
            "model under gemini_lazy.LazyInitContext() to defer its memory."
        )


def _settle_buffers(module: nn.Module, device: torch.device) -> None:
    """Give buffers their values, on the compute device, in their own dtype; rotary tables must not be rounded."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                if is_lazy(buffer):
                    materialize(buffer)
                child._buffers[name] = buffer.to(device)


def _group(process_group: dist.ProcessGroup | None, world_size: int) -> dist.ProcessGroup | None:
    """Return the group to communicate in, or None for a single rank."""
    if world_size == 1:
        return None
    return dist.group.WORLD if process_group is None else process_group


def _check_alike(process_group: dist.ProcessGroup | None, digest: str) -> None:
    """Raise on every rank if the ranks have planned differently, as they do for unlike models or settings."""
    if process_group is None:
        return
    digests: list[str | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(digests, digest, group=process_group)
    unlike = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if unlike:
        raise RuntimeError(
            f"Ranks {unlike} placed the model's chunks unlike rank 0. Every rank must build the same model and give "
            "the same settings."
        )
