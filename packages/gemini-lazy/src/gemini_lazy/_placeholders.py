"""Placeholders: ordinary tensors that stand for deferred memory.

[Note: Placeholders] A placeholder is a plain tensor of the right shape, dtype and device over a storage of one
element, with strides of zero. The element is NaN (zero for integers): a value that was never materialised poisons what
it touches instead of training silently wrong. What it stands for is an attribute of its *storage*: whatever torch
makes of the tensor without asking (``nn.Parameter(x)``, ``x.data``, a shallow copy) keeps the storage, and with it the
meaning. The record dies with the last tensor on that storage. Each view of deferred memory has a storage of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini_lazy._tape import History, LazyError, Ref, replay, undisturbed

_ATTRIBUTE = "_geminilazy_view"


class Memory:
    """Deferred memory as placeholders share it.

    Attributes:
        history: how to make it.
        value: the real memory, once a tensor over it was materialised in place; the others join it.
    """

    # Operations refer to the history only, so a real value never outlives the placeholders that may ask for it.
    __slots__ = ("history", "value")

    def __init__(self, history: History) -> None:
        self.history = history
        self.value: Tensor | None = None

    def real(self) -> Tensor:
        """Return the real memory, made at the first call and kept."""
        if self.value is None:
            self.value = self.history.in_layout(replay(self.history, transient=False))
        return self.value


@dataclass(frozen=True, slots=True)
class View:
    """What a placeholder stands for: ``ref`` into ``memory``."""

    memory: Memory
    ref: Ref


def new_memory(meta: Tensor, device: torch.device) -> View:
    """Return deferred memory laid out like ``meta``, with an empty history."""
    history = History(meta, device)
    return View(Memory(history), Ref(history, history.meta))


def view_of(tensor: Tensor) -> View | None:
    """Return what ``tensor`` stands for, or None if it is an ordinary tensor."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have none
        return None
    view: View | None = getattr(storage, _ATTRIBUTE, None)
    return view


def new_placeholder(view: View) -> Tensor:
    """Return a placeholder for ``view``."""
    meta = view.ref.meta
    storage = _new_storage(view)
    tensor = torch.empty(0, dtype=meta.dtype, device=view.ref.history.device)
    return tensor.set_(storage, 0, meta.shape, (0,) * meta.dim())


def retarget(tensor: Tensor, view: View) -> None:
    """Make the placeholder ``tensor`` stand for ``view``, as an in-place change of shape does."""
    meta = view.ref.meta
    tensor.set_(_new_storage(view), 0, meta.shape, (0,) * meta.dim())


def _new_storage(view: View) -> torch.UntypedStorage:
    meta, device = view.ref.meta, view.ref.history.device
    floating = meta.dtype.is_floating_point or meta.dtype.is_complex
    storage = torch.full((1,), math.nan if floating else 0, dtype=meta.dtype, device=device).untyped_storage()
    setattr(storage, _ATTRIBUTE, view)
    return storage


def value_of(view: View) -> Tensor:
    """Return a new real tensor with what ``view`` holds now."""
    memory, ref = view.memory, view.ref
    if memory.value is not None:
        return ref.of(memory.value).clone()
    whole = replay(ref.history, transient=True)
    return whole if ref.is_all() else ref.of(ref.history.in_layout(whole)).clone()


def materialize_in_place(tensor: Tensor, view: View) -> None:
    """Turn the placeholder ``tensor`` into an ordinary tensor over the real memory of ``view``."""
    tensor.data = view.ref.of(view.memory.real())


def lazy_view(tensor: Tensor) -> View:
    """Return what ``tensor`` stands for; raise `LazyError` if it is ordinary or its placeholder was written to."""
    view = view_of(tensor)
    if view is None:
        raise LazyError(
            f"This tensor of shape {tuple(tensor.shape)} is not lazy: it was made outside LazyInitContext, is "
            "materialised already, or was forgotten. Ask is_lazy() first."
        )
    cell = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    cell.set_(tensor.untyped_storage(), 0, (1,), (1,))
    written = not cell.isnan() if tensor.is_floating_point() or tensor.is_complex() else cell != 0
    if written:
        raise LazyError(
            f"A lazy tensor of shape {tuple(tensor.shape)} was written to outside LazyInitContext, where nothing is "
            "recorded. Materialise it first, or make the change under a LazyInitContext."
        )
    return view


def is_lazy(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` stands for memory that is still to be made."""
    with undisturbed():
        return view_of(tensor) is not None


def materialize_value(tensor: Tensor) -> Tensor:
    """Return what eager construction would have put into a lazy tensor.

    The tensor stays lazy, so this can be called again: a sharded wrapper asks for one parameter at a time, keeps its
    slice, and lets the value go.

    Args:
        tensor: a lazy tensor.

    Returns:
        A new tensor of the same shape, dtype and device, without gradient history, that shares memory with no other.
        Its memory goes back to the system as soon as it is let go, and its storage cannot be resized.

    Raises:
        LazyError: ``tensor`` is not lazy, or something that its construction read has changed since.
    """
    with undisturbed():
        return value_of(lazy_view(tensor))


def materialize(tensor: Tensor) -> Tensor:
    """Give a lazy tensor its memory, in place.

    The object stays the same: ties, optimizers and hooks that refer to it are unaffected. Lazy tensors over the same
    memory (``nn.Parameter(x)`` and ``x``, a tensor and its views) stay lazy until they are materialised too; they then
    share this memory.

    Args:
        tensor: a lazy tensor.

    Returns:
        ``tensor`` itself.

    Raises:
        LazyError: as `materialize_value`.
    """
    with undisturbed():
        materialize_in_place(tensor, lazy_view(tensor))
    return tensor


def forget(tensor: Tensor) -> None:
    """Drop the record of a lazy tensor whose value now lives elsewhere; an ordinary tensor is left alone.

    The tensor remains a placeholder full of NaN, and so does every other tensor on the same storage. Assigning
    ``tensor.data`` drops the record as well.

    Args:
        tensor: a tensor, lazy or not.
    """
    with undisturbed():
        if view_of(tensor) is not None:
            delattr(tensor.untyped_storage(), _ATTRIBUTE)
