"""The wrapper with its collaborators: search, chunks, placement and lazy values behind keywords."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_booster._auto_run import AutoRun, device_total
from gemini_booster._first_step import FirstStep
from gemini_booster._launch import check_world_size, group_of
from gemini_booster._modules import batch_norms, check_called, compute_in_fp32, find_modules, params_of, widen_buffers
from gemini_booster._packing import module_of, pack
from gemini_booster._settings import PolicyName, Precision, compute_dtype, make_policy, to_bytes, writable
from gemini_booster._shards import ChunkShard, WriteBehind
from gemini_booster._shared_memory import check_memory
from gemini_chunk import Chunk, ChunkManager, Collectives, Tier, TierName, device_tier, disk_tier, host_tier
from gemini_ddp import ZeroDDP
from gemini_lazy import LazyInitContext, forget
from gemini_optim import ZeroOptimizer
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

_ChunkT = TypeVar("_ChunkT", bound=ChunkFacts)

_DEFAULT_HIDDEN_DIM = 1024
# Modules whose parameters were taken into chunks. That lasts: a wrapper that is detached leaves them there.
_wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Planner(Generic[_ChunkT]):
    """A policy that has placed the chunks, as the planner of a `ZeroDDP`; it remembers its plans.

    Args:
        policy: the policy.
        placement: returns where the chunks rest now.
        learn: returns a plan for the first training step, if there is more to it than its trace.
    """

    def __init__(
        self,
        policy: StaticPlacementPolicy | AutoPlacementPolicy,
        placement: Callable[[], Placement[_ChunkT]],
        learn: Callable[[Trace[_ChunkT]], Plan[_ChunkT] | None] | None,
    ) -> None:
        self._policy = policy
        self._placement = placement
        self._learn = learn
        self.plans: list[Plan[_ChunkT]] = []

    def schedule(self, trace: Trace[_ChunkT]) -> Plan[_ChunkT]:
        """Plan one recorded step."""
        plan = None
        if self._learn is not None and any(access.phase == "backward" for access in trace.accesses):
            plan = self._learn(trace)
        self.plans.append(plan or self._policy.schedule(trace, self._placement()))
        return self.plans[-1]


class GeminiDDP(ZeroDDP[Chunk]):
    """Wraps a model for ZeRO training with chunks in device, host and disk memory.

    Parameters are packed into chunks, sharded over the ranks and placed by a policy; a model built under
    `gemini_lazy.LazyInitContext` is materialised straight into shards, one parameter at a time, and its other tensors
    (buffers, plain attributes) in place. Rank 0's parameters and buffers are given to every rank.

    Args:
        module: the model, on the CPU, on the compute device, or lazily initialised.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``, of working parameters and gradients.
        placement_policy: ``"static"`` obeys the five fractions; ``"auto"`` fits the capacities.
        shard_param_frac: share of parameter bytes released after use: 1.0 is ZeRO-3, 0.0 is ZeRO-2. Static only.
        offload_optim_frac: share of optimizer states and master weights that rest on the host. Static only.
        offload_param_frac: share of parameter shards that rest on the host. Static only.
        disk_optim_frac: share of optimizer states and master weights that rest on the disk. Static only.
        disk_param_frac: share of parameter shards that rest on the disk. Static only.
        warmup_non_model_data_ratio: share of the device kept free of model data before the first step. Auto only.
        steady_cuda_cap_ratio: share of the device that may be used later. Auto only.
        gpu_margin_mem_ratio: share that optimizer states may take of what parameters leave free there. Auto only.
        device_capacity: bytes of the compute device (``"2GiB"`` or a number); None for all that an accelerator has, or
            for no limit on the CPU. Static counts model states alone. Auto counts all that a step takes there, which
            the first training step shows; so it may refuse at the end of that step.
        host_capacity: bytes of model states in main memory; None for no limit.
        offload_directory: folder for memory-mapped files; None for no disk tier.
        max_prefetch: chunks gathered ahead of their use.
        max_fetch: beyond those, chunks brought from host or disk to the device ahead of their gather.
        max_held: chunks that stay gathered from the end of forward to their backward (``max_prefetch`` do anyhow). Each
            saves a gather, and takes its full buffer while activations take most. Of the static policy only.
        hidden_dim: step of the chunk search in elements; by default 1024.
        min_chunk_size_m: smallest chunk in units of 2**20 elements; a group of parameters smaller than that is one
            chunk that stays gathered.
        search_range_m: width of the chunk search in units of 2**20 elements.
        chunk_configuration: takes the place of the search's result for the trainable parameters. Of two dtypes, as
            with ``keep_fp32``, each has chunks of its own there, or one has none and is searched for.
        memstats: a record of a step, from `gemini_placement.tracer.trace_model` or a file: the packing follows its
            order of first use, auto leaves room for the memory it tells of, and ``expected_plan`` is made of it.
        pin_memory: page-lock host memory.
        master_weights: keep fp32 master weights for 16-bit parameters.
        enable_gradient_accumulation: sum the gradients of several backwards in fp32 memory of their own.
        reduce_dtype: in which gradients are summed over ranks; by default fp32 for more than 8 ranks, else that of the
            parameters.
        keep_fp32: modules that must not be rounded, by patterns of their paths (``"*.norm"``) or by class: their
            parameters are fp32, they get fp32 and return the compute dtype. Batch norms are kept in any case.
        leaf_modules: modules that are gathered as one with all modules within them, named in the same way. Ranks may
            use different ones of those, as in a mixture of experts.
        scatter_after_inference: whether a forward without gradients leaves nothing gathered. Otherwise what it
            gathered stays, as far as there is room, until a forward with gradients.
        force_outputs_fp32: cast floating outputs to fp32.
        process_group: ranks that share the model; None is the default group.
        verbose: log the packing and the placement on rank 0.

    Raises:
        ValueError: a setting is out of its range, or the module is wrapped already, has no values, or has a parameter
            that shares memory with another tensor; the message says what is allowed.
        RuntimeError: the process group is not the one that the launcher announced, another rank failed, or the ranks
            have unlike models or settings.
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
        disk_optim_frac: float = 0.0,
        disk_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        gpu_margin_mem_ratio: float = 1.0,
        device_capacity: int | str | None = None,
        host_capacity: int | str | None = None,
        offload_directory: str | None = None,
        max_prefetch: int = 0,
        max_fetch: int = 0,
        max_held: int = 0,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        search_range_m: float = 32,
        chunk_configuration: ChunkConfiguration | None = None,
        memstats: MemStats | None = None,
        pin_memory: bool = False,
        master_weights: bool = True,
        enable_gradient_accumulation: bool = False,
        reduce_dtype: torch.dtype | None = None,
        keep_fp32: Collection[str | type[nn.Module]] = (),
        leaf_modules: Collection[str | type[nn.Module]] = (),
        scatter_after_inference: bool = True,
        force_outputs_fp32: bool = False,
        process_group: dist.ProcessGroup | None = None,
        verbose: bool = False,
    ) -> None:
        check_world_size(process_group)
        group = group_of(process_group)
        with agreement(group) as facts:
            dtype = compute_dtype(precision)
            policy = make_policy(
                placement_policy,
                shard_param_frac=shard_param_frac,
                offload_optim_frac=offload_optim_frac,
                offload_param_frac=offload_param_frac,
                disk_optim_frac=disk_optim_frac,
                disk_param_frac=disk_param_frac,
                offload_directory=offload_directory,
                warmup_non_model_data_ratio=warmup_non_model_data_ratio,
                steady_cuda_cap_ratio=steady_cuda_cap_ratio,
                gpu_margin_mem_ratio=gpu_margin_mem_ratio,
                max_prefetch=max_prefetch,
                max_fetch=max_fetch,
                max_held=max_held,
            )
            _check_fresh(module)
            check_memory(module)
            leaves = find_modules(module, leaf_modules, "leaf_modules")
            check_called(leaves, "leaf_modules")
            kept = find_modules(module, keep_fp32, "keep_fp32") | batch_norms(module)
            asked = to_bytes(device_capacity, "device_capacity")
            device = device_tier(capacity=asked)
            host = host_tier(to_bytes(host_capacity, "host_capacity"), pin_memory=pin_memory)
            disk = None if offload_directory is None else disk_tier(writable(offload_directory))
            manager = ChunkManager(device=device, host=host, disk=disk, process_group=process_group)
            pack(
                manager,
                module,
                dtype=dtype,
                fp32=params_of(kept),
                order=[] if memstats is None else memstats.param_order,
                configuration=chunk_configuration,
                search=partial(
                    search_chunk_configuration,
                    world_size=manager.world_size,
                    hidden_dim=_DEFAULT_HIDDEN_DIM if hidden_dim is None else hidden_dim,
                    search_range_m=search_range_m,
                    min_chunk_size_m=min_chunk_size_m,
                    group_by=module_of,
                ),
                accumulates=enable_gradient_accumulation,
                reduce_dtype=reduce_dtype,
            )
            auto: AutoRun | None = None
            if isinstance(policy, AutoPlacementPolicy):
                auto = AutoRun(policy, manager, device_total(asked), memstats)
                placement = auto.placement
            else:
                placement = policy.place(
                    manager.chunks,
                    capacities={name: tier.capacity for name, tier in manager.tiers.items()},
                    world_size=manager.world_size,
                )
            # While the parameters are still lazy: a plain attribute may be a view of one.
            LazyInitContext.materialize(module, skip=module.parameters())
            facts += [placement.digest, *(_fingerprint(chunk) for chunk in manager.chunks)]
            facts += [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in module.named_buffers()]
        _wrapped.update(_owners(module))
        states: dict[Chunk, Tier] = {}
        for chunk in manager.chunks:
            place = placement.of(chunk)
            states[chunk] = manager.tier(place.optim_tier)
            master: TierName | None = place.optim_tier if master_weights else None
            # What a single rank has on the device is gathered as long as it rests there, and may leave it later.
            keep = place.keep_gathered and manager.world_size > 1
            manager.close(chunk, rest=place.param_tier, master=master, keep_gathered=keep)
            for info in chunk.tensors:
                forget(info.tensor)
        _settle_buffers(module, device.device, manager.collectives)
        widen_buffers(kept)
        planner = _Planner(
            policy,
            (lambda: placement) if auto is None else (lambda: auto.placement),
            None if auto is None else auto.learn,
        )
        casts = [] if dtype == torch.float32 else compute_in_fp32(kept, dtype)
        super().__init__(
            module,
            manager,
            planner,
            process_group=group,
            leaf_modules=list(leaves),
            scatter_after_inference=scatter_after_inference,
            input_dtype=None if precision == "fp32" else dtype,
            scales_loss=precision == "fp16",
            force_outputs_fp32=force_outputs_fp32,
        )
        self._handles += casts
        self._is_mixed = bool(casts)
        self.process_group = group
        self.precision = precision
        self.chunk_manager = manager
        self.plans = planner.plans
        self.optimizers: weakref.WeakSet[ZeroOptimizer] = weakref.WeakSet()
        self._auto = auto
        self._placement = placement
        self._memstats = memstats
        self.expected_plan: Plan[Chunk] | None = None
        if memstats is not None:
            chunks = {name: manager.chunk_of(param) for name, param in module.named_parameters()}
            self.expected_plan = policy.schedule(memstats.trace(chunks, world_size=manager.world_size), placement)
        self.shards: Sequence[ChunkShard] = _shards(states, host)
        stays = all(shard.chunk.rest is device and shard.states_tier == "device" for shard in self.shards)
        # As it is built: whoever moves a shard of a model without limits has all the memory that a step may ask for.
        self.is_resident = auto is None and device.capacity is None and stays
        if auto is not None:
            auto.start(module, self.shards, self._ranks.exchange)
            weakref.finalize(self, _end, auto.first_step).atexit = False
        if verbose and manager.collectives.rank == 0:
            logger.info("%s\n%s", manager.describe(), placement.describe())

    @property
    def placement(self) -> Placement[Chunk]:
        """Where chunks rest; auto places them anew when the first training step is over."""
        return self._placement if self._auto is None else self._auto.placement

    @property
    def memstats(self) -> MemStats | None:
        """The record of a step: as given, or with auto that of the first training step once its backward is over."""
        return self._memstats if self._auto is None else self._auto.memstats

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with inputs and outputs cast as asked for.

        Raises:
            gemini_optim.UnfinishedStepError: see `check_finished`.
        """
        self.check_finished()
        auto = self._auto
        if auto is None:
            self._level()
            return super().forward(*args, **kwargs)
        if self.is_interrupted:
            self.reset()
            auto.forget_step()
        trains = self.training and torch.is_grad_enabled()
        auto.begin_forward((args, kwargs), trains=trains, keeps_local=not self._engine.reduces)
        self._level()
        try:
            output = super().forward(*args, **kwargs)
        except BaseException:
            auto.end_forward(failed=True)
            raise
        auto.end_forward(failed=False)
        return output

    def _level(self) -> None:
        """Let the ranks answer alike whether the device has room: that decides what is gathered ahead.

        They may have unlike bytes in use: a rank has no optimizer states of parameters that were never used, or of
        what pads its shards.
        """
        device = self.chunk_manager.tier("device")
        if device.capacity is not None:
            device.used_elsewhere = max(used for (used,) in self._ranks.exchange([device.used])) - device.used

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """See `ZeroDDP`; with ``keep_fp32`` all parameters are in fp32, for nothing casts between the modules."""
        copied = super().__deepcopy__(memo)
        for param in copied.parameters() if self._is_mixed else ():
            if param.is_floating_point():
                param.data = param.data.float()
        return copied

    def end_recording(self) -> None:
        """Leave nothing of the recorded first step behind; an optimizer calls it once it steps."""
        if self._auto is not None:
            self._auto.end_recording()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used.

        Args:
            set_to_none: has no effect: dropped gradients take no memory either way.
        """
        del set_to_none
        self.check_finished()
        for shard in self.shards:
            shard.discard()
        self._engine.forget_gradients()

    def check_finished(self) -> None:
        """Raise if a step of an optimizer has failed and can be finished, for its weights are of two steps.

        Raises:
            gemini_optim.UnfinishedStepError: there is one; the message says what has failed and what to do.
        """
        for optimizer in self.optimizers:
            optimizer.check_finished()

    def reset(self) -> None:
        """See `ZeroDDP.reset`."""
        self.check_finished()
        super().reset()

    def named_full_values(self) -> Iterator[tuple[str, Tensor]]:
        """See `ZeroDDP.named_full_values`."""
        self.check_finished()
        return super().named_full_values()

    def load_state_dict(  # type: ignore[override] # as in ZeroDDP
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> torch.nn.modules.module._IncompatibleKeys:
        """See `ZeroDDP.load_state_dict`."""
        self.check_finished()
        return super().load_state_dict(state_dict, strict)

    def named_master_values(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield like `named_full_values`, but the master weights of trainable parameters.

        Args:
            dtype: what floating parameters are cast to; in ``torch.float32`` master weights are exact.
        """
        self.check_finished()
        for name, entry in self.module.state_dict(keep_vars=True).items():
            if isinstance(entry, nn.Parameter) and entry in self.chunk_manager:
                value = self.chunk_manager.full_master(entry)
                yield name, value.to(dtype) if value.is_floating_point() else value
            elif isinstance(entry, Tensor):
                yield name, entry.detach()


def _end(first_step: FirstStep | None) -> None:
    """Leave nothing of a recorded step behind when its model goes."""
    if first_step is not None:
        first_step.cancel()


def _shards(states: Mapping[Chunk, Tier], host: Tier) -> Sequence[ChunkShard]:
    """Return the shards of trainable chunks, each of which knows the one after it."""
    shards: list[ChunkShard] = []
    behind = WriteBehind()
    for chunk, tier in reversed(list(states.items())):
        if chunk.trainable:
            shards.append(ChunkShard(chunk, tier, host, shards[-1] if shards else None, behind))
    return shards[::-1]


def _owners(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.modules() if next(child.parameters(recurse=False), None) is not None]


def _check_fresh(module: nn.Module) -> None:
    """Refuse a module whose parameters have no values, or have been taken into chunks already."""
    if isinstance(module, ZeroDDP) or not _wrapped.isdisjoint(_owners(module)):
        raise ValueError(f"This {type(module).__name__}, or a part of it, is wrapped already; wrap a module once.")
    meta = [name for name, param in module.named_parameters() if param.is_meta]
    if meta:
        raise ValueError(
            f"{len(meta)} parameters are on the meta device and have no values, among them {meta[0]!r}. Build the "
            "model under gemini_lazy.LazyInitContext() to defer its memory."
        )
    if next(module.parameters(), None) is None:
        raise ValueError(f"This {type(module).__name__} has no parameters: there is nothing to shard.")


def _settle_buffers(module: nn.Module, device: torch.device, collectives: Collectives) -> None:
    """Give buffers rank 0's values, on the compute device, in their own dtype; rotary tables must not be rounded."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                settled = child._buffers[name] = buffer.to(device)
                flat = settled.reshape(-1)
                collectives.broadcast(flat.view(torch.uint8))  # not every backend knows every dtype
                settled.data = flat.view(settled.shape)  # the same memory, unless it had gaps or was expanded


def _fingerprint(chunk: Chunk) -> str:
    tensors = [(info.name, tuple(info.shape)) for info in chunk.tensors]
    return f"{chunk.name} {chunk.numel} {chunk.dtype} {chunk.trainable} {chunk.accumulates} {tensors}"


@contextlib.contextmanager
def agreement(process_group: dist.ProcessGroup | None) -> Iterator[list[str]]:
    """Let what goes wrong on one rank be raised on every rank, and so if ranks leave unlike facts in the list."""
    facts: list[str] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    if process_group is not None:
        digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        mine = (digest, None if error is None else f"{type(error).__name__}: {error}")
        everyones = [mine] * dist.get_world_size(process_group)
        dist.all_gather_object(everyones, mine, group=process_group)
        unlike = [rank for rank, (other, _) in enumerate(everyones) if other != everyones[0][0]]
        failed = [(rank, text) for rank, (_, text) in enumerate(everyones) if text is not None]
        if error is None and failed:
            error = RuntimeError(f"Rank {failed[0][0]} could not wrap the model: {failed[0][1]}")
        elif error is None and unlike:
            error = RuntimeError(
                f"Ranks {unlike} have chunks unlike those of rank 0. Every rank must build the same model and give the "
                "same settings."
            )
    if error is not None:
        raise error
