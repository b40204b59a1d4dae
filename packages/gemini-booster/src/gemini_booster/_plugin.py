"""The plugin: all settings of a run in one value, and what they make of a model, an optimizer and a data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from gemini_booster._gemini_ddp import GeminiDDP, agreement
from gemini_booster._launch import group_of
from gemini_booster._optimizer import GeminiOptimizer
from gemini_booster._settings import PolicyName, Precision, compute_dtype, make_policy, to_bytes
from gemini_optim import DynamicLossScaler
from gemini_placement import MemStats
from gemini_search import ChunkConfiguration

_SampleT = TypeVar("_SampleT", covariant=True)

_SCALER_SETTINGS = (
    "initial_scale",
    "min_scale",
    "max_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
)
_OPTIMIZER_SETTINGS = (*_SCALER_SETTINGS, "max_norm", "norm_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiPlugin:
    """Settings of a `Booster`: those of `GeminiDDP` and `GeminiOptimizer` under the same names.

    See `GeminiDDP` for what concerns the model and `GeminiOptimizer` for loss scaling and clipping.

    Raises:
        ValueError: a setting is unknown or out of its range; the message says what is allowed.
        TypeError: a setting has the wrong type.
    """

    precision: Precision = "fp16"
    placement_policy: PolicyName = "static"
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    disk_optim_frac: float = 0.0
    disk_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    gpu_margin_mem_ratio: float = 1.0
    device_capacity: int | str | None = None
    host_capacity: int | str | None = None
    offload_directory: str | None = None
    max_prefetch: int = 0
    max_fetch: int = 0
    max_held: int = 0
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    search_range_m: float = 32
    chunk_configuration: ChunkConfiguration | None = None
    memstats: MemStats | None = None
    pin_memory: bool = False
    master_weights: bool = True
    enable_gradient_accumulation: bool = False
    reduce_dtype: torch.dtype | None = None
    keep_fp32: Collection[str | type[nn.Module]] = ()
    leaf_modules: Collection[str | type[nn.Module]] = ()
    scatter_after_inference: bool = True
    force_outputs_fp32: bool = False
    process_group: dist.ProcessGroup | None = None
    initial_scale: float = 2**16
    min_scale: float = 1
    max_scale: float = 2**32
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_norm: float = 0.0
    norm_type: float = 2.0
    verbose: bool = False

    def __post_init__(self) -> None:
        compute_dtype(self.precision)
        make_policy(
            self.placement_policy,
            shard_param_frac=self.shard_param_frac,
            offload_optim_frac=self.offload_optim_frac,
            offload_param_frac=self.offload_param_frac,
            disk_optim_frac=self.disk_optim_frac,
            disk_param_frac=self.disk_param_frac,
            offload_directory=self.offload_directory,
            warmup_non_model_data_ratio=self.warmup_non_model_data_ratio,
            steady_cuda_cap_ratio=self.steady_cuda_cap_ratio,
            gpu_margin_mem_ratio=self.gpu_margin_mem_ratio,
            max_prefetch=self.max_prefetch,
            max_fetch=self.max_fetch,
            max_held=self.max_held,
        )
        to_bytes(self.device_capacity, "device_capacity")
        to_bytes(self.host_capacity, "host_capacity")
        GeminiOptimizer.check(None, max_norm=self.max_norm, norm_type=self.norm_type)
        DynamicLossScaler(**{name: getattr(self, name) for name in _SCALER_SETTINGS})

    def check_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Refuse an optimizer while the model is not wrapped yet, for it cannot be unwrapped; every rank calls it.

        Raises:
            ValueError: the optimizer is not element-wise, or has trainable parameters that are not the model's.
        """
        with agreement(group_of(self.process_group)):
            GeminiOptimizer.check(optimizer)
            known = set(model.parameters())
            params = [param for group in optimizer.param_groups for param in group["params"]]
            trained = [(index, param) for index, param in enumerate(params) if param.requires_grad and param.numel()]
            foreign = [index for index, param in trained if param not in known]
            if foreign:
                raise ValueError(
                    f"{len(foreign)} of the optimizer's {len(params)} parameters are not the model's, such as number "
                    f"{foreign[0]} of shape {tuple(params[foreign[0]].shape)}. Build the optimizer on the parameters "
                    "of the model that is passed beside it."
                )

    def wrap_model(self, model: nn.Module) -> GeminiDDP:
        """Return the wrapped model."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in _OPTIMIZER_SETTINGS:
            del settings[name]
        return GeminiDDP(model, **settings)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, model: GeminiDDP) -> GeminiOptimizer:
        """Return the optimizer over the shards of a wrapped model."""
        settings = {name: getattr(self, name) for name in _OPTIMIZER_SETTINGS}
        return GeminiOptimizer(optimizer, model, verbose=self.verbose, **settings)

    def prepare_dataloader(
        self,
        dataset: Dataset[_SampleT],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[_SampleT]], object] | None = None,
    ) -> DataLoader[_SampleT]:
        """Return a loader that gives each rank samples of its own.

        Args:
            dataset: the same on every rank.
            batch_size: samples a rank takes at a time.
            shuffle: draw in a new order each epoch (``loader.sampler.set_epoch(epoch)``), alike on all ranks.
            seed: of that order, and with the rank of the generators of each worker, anew in each epoch.
            drop_last: leave out samples that do not fill a batch on every rank.
            pin_memory: page-lock the batches.
            num_workers: processes that load.
            collate_fn: makes a batch of samples.
        """
        joined = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size(self.process_group) if joined else 1
        rank = dist.get_rank(self.process_group) if joined else 0
        sampler: DistributedSampler[_SampleT] = DistributedSampler(
            dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            collate_fn=collate_fn,
            # Workers are seeded from this in each epoch: one seed for all ranks would repeat augmentations.
            generator=torch.Generator().manual_seed(seed + rank),
        )
