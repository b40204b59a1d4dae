"""Modules that settings name, by patterns of their paths or by class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle


def find_modules(module: nn.Module, named: Collection[str | type[nn.Module]], setting: str) -> dict[str, nn.Module]:
    """Return the modules that a setting names, by path.

    Args:
        module: the model.
        named: paths, patterns of paths such as ``"layers.*.norm"``, or classes.
        setting: its name, for the message.

    Raises:
        ValueError: one of them names nothing.
    """
    found: dict[str, nn.Module] = {}
    for which in named:
        matches = {name: child for name, child in module.named_modules() if _is_named(which, name, child)}
        if not matches:
            what = which if isinstance(which, str) else which.__name__
            raise ValueError(f"{setting} names {what!r}, but the model has no such module.")
        found |= matches
    return found


def batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose running statistics a 16-bit sum would lose, by path.

    Not every kernel of torch's takes 16-bit inputs beside statistics in fp32, either.
    """
    return {name: child for name, child in module.named_modules() if isinstance(child, _BatchNorm)}


def widen_buffers(modules: Mapping[str, nn.Module]) -> None:
    """Let floating buffers in these modules have 32 bits at least."""
    for part in {part for child in modules.values() for part in child.modules()}:
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype.itemsize < 4:
                part._buffers[name] = buffer.float()


def _is_named(which: str | type[nn.Module], name: str, child: nn.Module) -> bool:
    return fnmatchcase(name, which) if isinstance(which, str) else isinstance(child, which)


def check_called(modules: Mapping[str, nn.Module], setting: str) -> None:
    """Refuse containers, which nobody calls, unless they are within another of the modules.

    Raises:
        ValueError: there is one.
    """
    for name, child in modules.items():
        inner = any(other != name and _is_within(name, other) for other in modules)
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and not inner:
            raise ValueError(
                f"{setting} names {name!r}, a {type(child).__name__}, which nobody calls. Name the module that calls "
                "what is in it."
            )


def params_of(modules: Mapping[str, nn.Module]) -> set[nn.Parameter]:
    """Return all parameters in these modules."""
    return {param for child in modules.values() for param in child.parameters()}


def compute_in_fp32(modules: Mapping[str, nn.Module], dtype: torch.dtype) -> list[RemovableHandle]:
    """Let modules get floating inputs in fp32 and return floating outputs in ``dtype``, by hooks.

    Modules within one of them compute in fp32 throughout.

    Returns:
        What removes the hooks.
    """
    handles: list[RemovableHandle] = []
    for name, child in modules.items():
        if any(other != name and _is_within(name, other) for other in modules):
            continue
        handles.append(child.register_forward_pre_hook(_cast_inputs, with_kwargs=True))
        handles.append(child.register_forward_hook(_cast_outputs(dtype)))
    return handles


def _is_within(name: str, other: str) -> bool:
    return not other or name.startswith(f"{other}.")


def _cast_inputs(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    del module
    cast = _cast_to(torch.float32)
    return tree_map_only(Tensor, cast, args), tree_map_only(Tensor, cast, kwargs)


def _cast_outputs(dtype: torch.dtype) -> Callable[[nn.Module, object, object], object]:
    def hook(module: nn.Module, args: object, output: object) -> object:
        del module, args
        return tree_map_only(Tensor, _cast_to(dtype), output)

    return hook


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
