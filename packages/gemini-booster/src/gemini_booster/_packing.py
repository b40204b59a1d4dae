"""Packing: which parameters lie together in a chunk, in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial

import torch
from torch import Tensor, nn

from gemini_chunk import ChunkManager
from gemini_lazy import is_lazy, materialize_value
from gemini_search import ChunkConfiguration, ChunkSpec

_MOST_16_BIT_TERMS = 8


def pack(
    manager: ChunkManager,
    module: nn.Module,
    *,
    dtype: torch.dtype,
    fp32: Set[nn.Parameter],
    order: Sequence[str],
    configuration: ChunkConfiguration | None,
    search: Callable[[Mapping[str, int]], ChunkConfiguration],
    accumulates: bool,
    reduce_dtype: torch.dtype | None,
) -> None:
    """Add chunks for all parameters of a module; trainable and frozen ones, and those of each dtype, have their own.

    Args:
        manager: has no chunks yet; they stay open.
        module: the model.
        dtype: of floating parameters in chunks.
        fp32: parameters that are in fp32 all the same.
        order: names of parameters that come first, in this order; the others follow in the module's.
        configuration: chunks of trainable parameters, instead of those that are searched for.
        search: returns chunks for parameters of these sizes in elements.
        accumulates: whether gradients of several backwards are summed in memory of their own.
        reduce_dtype: in which gradients are summed over ranks, or None for the default.

    Raises:
        ValueError: the configuration is not for these parameters, or ``reduce_dtype`` is no floating dtype.
    """
    for trainable in (True, False):
        groups = _groups(module, trainable, dtype, order, fp32)
        given = _given(configuration, groups) if trainable and configuration is not None else {}
        for group_dtype, params in groups.items():
            sizes = {name: param.numel() for name, param in params.items()}
            _add_chunks(
                manager,
                params,
                group_dtype,
                given.get(group_dtype) or search(sizes).chunks,
                trainable,
                accumulates=accumulates,
                reduce_dtype=_reduced_in(reduce_dtype, group_dtype, manager.world_size),
            )


def module_of(name: str) -> str:
    """Return the path of the module that owns a parameter: if they lie in one chunk, the module needs but one."""
    return name.rpartition(".")[0]


def _groups(
    module: nn.Module, trainable: bool, dtype: torch.dtype, order: Sequence[str], fp32: Set[nn.Parameter]
) -> Mapping[torch.dtype, dict[str, nn.Parameter]]:
    """Return parameters by the dtype of their chunk, each once, in the order given first and then the module's."""
    named = {name: param for name, param in module.named_parameters() if param.requires_grad is trainable}
    names = dict.fromkeys([*(name for name in order if name in named), *named])
    groups: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for name in names:
        param = named[name]
        given = torch.float32 if param in fp32 else dtype
        groups.setdefault(given if param.is_floating_point() else param.dtype, {})[name] = param
    return groups


def _reduced_in(asked: torch.dtype | None, dtype: torch.dtype, world_size: int) -> torch.dtype:
    """Return in which dtype gradients are summed: a sum of many 16-bit numbers loses the small ones."""
    if asked is None:
        asked = torch.float32 if world_size > _MOST_16_BIT_TERMS else dtype
    elif not asked.is_floating_point:
        raise ValueError(f"reduce_dtype must be a floating dtype, such as torch.float32; got {asked}.")
    return asked if dtype.is_floating_point else dtype


def _given(
    configuration: ChunkConfiguration, groups: Mapping[torch.dtype, Mapping[str, nn.Parameter]]
) -> Mapping[torch.dtype, Sequence[ChunkSpec]]:
    """Return the chunks of a configuration by their dtype.

    Raises:
        ValueError: a chunk is of several dtypes, or the parameters are not all those of one or more dtypes.
    """
    dtypes = {name: dtype for dtype, params in groups.items() for name in params}
    given: dict[torch.dtype, list[ChunkSpec]] = {}
    placed: set[str] = set()
    for spec in configuration.chunks:
        first, *others = [slot.name for slot in spec.tensors]
        placed |= {first, *others}
        for name in others:
            if name in dtypes and first in dtypes and dtypes[name] != dtypes[first]:
                raise ValueError(
                    f"chunk_configuration puts {first!r} of {dtypes[first]} and {name!r} of {dtypes[name]} into one "
                    "chunk. Give each dtype chunks of its own, or none: then they are searched for."
                )
        if first in dtypes:
            given.setdefault(dtypes[first], []).append(spec)
    wanted = {name for name, dtype in dtypes.items() if dtype in given} or dtypes.keys()
    if placed != wanted:
        raise ValueError(
            "chunk_configuration must place each trainable parameter of a dtype, and no other: it lacks "
            f"{sorted(wanted - placed)} and has {sorted(placed - wanted)} too many."
        )
    return given


def _add_chunks(
    manager: ChunkManager,
    params: Mapping[str, nn.Parameter],
    dtype: torch.dtype,
    specs: Iterable[ChunkSpec],
    trainable: bool,
    *,
    accumulates: bool,
    reduce_dtype: torch.dtype,
) -> None:
    for spec in specs:
        named = [(slot.name, params[slot.name]) for slot in spec.tensors]
        sources: dict[str, Callable[[], Tensor]] = {
            name: partial(materialize_value, param) for name, param in named if is_lazy(param)
        }
        manager.add_chunk(
            named,
            numel=spec.numel,
            dtype=dtype,
            trainable=trainable,
            accumulates=accumulates,
            reduce_dtype=reduce_dtype,
            sources=sources,
        )
