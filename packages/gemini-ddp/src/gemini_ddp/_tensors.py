"""Finding tensors in what modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

_DEPTH = 8


def walk_tensors(value: object) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, sets, mappings, dataclasses and plain objects."""
    found: list[Tensor] = []
    _collect((value,), found, _DEPTH)
    return found


def _collect(values: Iterable[object], found: list[Tensor], depth: int) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif value is None or depth == 0 or isinstance(value, (str, bytes, int, float, torch.dtype, torch.device)):
            continue
        elif isinstance(value, Mapping):
            _collect(value.values(), found, depth - 1)
        elif isinstance(value, (list, tuple, set, frozenset)):
            _collect(value, found, depth - 1)
        elif not isinstance(value, (torch.nn.Module, type)) and hasattr(value, "__dict__"):
            _collect(vars(value).values(), found, depth - 1)


def map_tensors(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """Return ``value`` with ``change`` applied to the tensors in tuples, lists, dicts and dataclasses.

    What holds no tensor that changes is returned as it is, not copied.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        items = {key: map_tensors(item, change) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        if type(value) is dict:
            return items
        if hasattr(value, "__dataclass_fields__"):  # a ModelOutput is built from its fields
            build: Callable[..., object] = type(value)
            return build(**items)
        changed = copy.copy(value)  # only the class knows how to build a defaultdict, say
        for key, item in items.items():
            changed[key] = item
        return changed
    if isinstance(value, (list, tuple)):
        entries = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        make: Callable[..., object] = type(value)
        return make(*entries) if hasattr(value, "_fields") else make(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: map_tensors(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        if all(new is getattr(value, name) for name, new in changes.items()):
            return value
        return dataclasses.replace(value, **changes)
    return value
