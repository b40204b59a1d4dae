"""Pretrained weights: lazy tensors whose values lie in ``.safetensors`` files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from gemini_lazy._placeholders import View, lazy_view, value_of, view_of
from gemini_lazy._safetensors import StoredTensor, stored_tensors
from gemini_lazy._tape import Operation, record, undisturbed


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a checkpoint and a module do not share, by name.

    Attributes:
        missing: entries of the module's ``state_dict`` that have no value in the checkpoint.
        unexpected: tensors of the checkpoint that have no place in the module.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_pretrained(module: nn.Module, source: str | os.PathLike[str], *, strict: bool = True) -> LoadReport:
    """Let the parameters and persistent buffers of a module take their values from ``.safetensors`` files.

    A lazy tensor only notes where its value lies: materialising it reads that part of the file, `read_slice` less than
    that, and its random initialisation is never computed. An ordinary tensor is filled at once. Values are cast to the
    module's dtypes. A tied tensor needs its value under one of its names. The files must stay until all is
    materialised.

    Args:
        module: lazy, in part or not at all.
        source: a ``.safetensors`` file, a ``*.safetensors.index.json``, or the folder of either.
        strict: raise when a name is missing or unexpected.

    Returns:
        The names that did not match; empty if ``strict``.

    Raises:
        ValueError: names do not match and ``strict``, or shapes do not match; nothing was changed then. Also if a file
            is damaged.
        FileNotFoundError: there is no such checkpoint.
    """
    stored = stored_tensors(Path(source))
    with undisturbed():
        state = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        ties: dict[object, list[str]] = {}
        for name, tensor in state.items():
            ties.setdefault(_place(tensor), []).append(name)
        loaded = {names[0]: found for names in ties.values() if (found := [name for name in names if name in stored])}
        missing = [names[0] for names in ties.values() if names[0] not in loaded]
        unexpected = [name for name in stored if name not in state]
        shapes = [
            f"{name} is {stored[name].shape}, the module wants {tuple(state[name].shape)}"
            for found in loaded.values()
            for name in found
            if stored[name].shape != state[name].shape
        ]
        if shapes or (strict and (missing or unexpected)):
            problems = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
            raise ValueError(f"{source} does not fit {type(module).__name__}. " + _listed(problems.items()))
        for found in loaded.values():
            _assign(state[found[0]], stored[found[0]])
    return LoadReport(tuple(missing), tuple(unexpected))


def _place(tensor: Tensor) -> object:
    # Two names are tied if they reach the same memory; this holds for placeholders as well.
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def _listed(problems: Iterable[tuple[str, list[str]]]) -> str:
    return " ".join(f"{kind[0].upper()}{kind[1:]}: {', '.join(names)}." for kind, names in problems if names)


def _assign(tensor: Tensor, stored: StoredTensor) -> None:
    view = view_of(tensor)
    if view is None or view.memory.value is not None:
        stored.read_into(tensor.detach() if view is None else view.ref.of(view.memory.real()))
        return
    history = view.ref.history
    whole = view.ref.covers_all()
    touched = (history,)
    operation = Operation(
        stored.read_into, (view.ref,), {}, reads=() if whole else touched, replaces=touched if whole else ()
    )
    record(operation, touched)


def read_slice(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return a run of the elements of a lazy tensor, in the order of ``tensor.flatten()``.

    Where `load_pretrained` found the value in a file, only these elements are read. Otherwise the whole value is made
    and cut.

    Args:
        tensor: a lazy tensor; it stays lazy.
        start: first element, ``0 <= start <= stop``.
        stop: one past the last element, at most ``tensor.numel()``.

    Returns:
        A new tensor of shape ``(stop - start,)`` and the dtype and device of ``tensor``.

    Raises:
        ValueError: the range is not within the tensor.
        LazyError: as `materialize_value`.
    """
    if not 0 <= start <= stop <= tensor.numel():
        raise ValueError(f"Elements {start} to {stop} do not lie within a tensor of {tensor.numel()} elements.")
    with undisturbed():
        view = lazy_view(tensor)
        stored = _stored(view)
        if stored is None:
            return value_of(view).flatten()[start:stop].clone()
        return stored.read(start, stop).to(device=tensor.device, dtype=tensor.dtype)


def _stored(view: View) -> StoredTensor | None:
    writes = view.ref.history.writes
    if view.memory.value is not None or not writes or not view.ref.covers_all():
        return None
    owner: object = getattr(writes[-1].function, "__self__", None)
    return owner if isinstance(owner, StoredTensor) else None
