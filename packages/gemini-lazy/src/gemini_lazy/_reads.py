"""The function mode of `LazyInitContext`: it answers what torch answers without dispatching an operation."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import warn_if_has_hooks

from gemini_lazy._placeholders import View, materialize_in_place, value_of, view_of
from gemini_lazy._tape import LazyError, map_leaves, undisturbed


class Reader(TorchFunctionMode):
    """Answers questions about strides, and reads of raw memory, with those that the real tensor would have."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named: dict[str, object] = dict(kwargs or {})
        if func in _CONSTRUCTORS:
            with undisturbed():
                args = tuple(_with_numbers(arg) for arg in args)
                named = {name: _with_numbers(arg) for name, arg in named.items()}
        answer = _ANSWERS.get(func)
        if answer is not None and isinstance(args[0], Tensor):
            with undisturbed():
                view = view_of(args[0])
            if view is not None:
                return answer(args[0], view, *args[1:], **named)
        return func(*args, **named)


def _with_numbers(argument: object) -> object:
    # Tensors of one element in nested lists are read without dispatching.
    def number(leaf: object) -> object:
        view = view_of(leaf) if isinstance(leaf, Tensor) else None
        return leaf if view is None else value_of(view)

    return map_leaves(number, argument) if isinstance(argument, (list, tuple)) else argument


# Methods of tensors have no common signature.
def _answer_layout(method: Callable[..., object]) -> Callable[..., object]:
    def answer(_: Tensor, view: View, *args: Any, **kwargs: Any) -> object:
        with undisturbed():
            return method(view.ref.meta, *args, **kwargs)

    return answer


def _answer_by_value(method: Callable[..., object]) -> Callable[..., object]:
    def answer(_: Tensor, view: View, *args: Any, **kwargs: Any) -> object:
        with undisturbed():
            return method(value_of(view), *args, **kwargs)

    return answer


def _answer_in_memory(method: Callable[..., object]) -> Callable[..., object]:
    # The caller may write through what it gets: an array shares the tensor's memory.
    def answer(tensor: Tensor, view: View, *args: Any, **kwargs: Any) -> object:
        with undisturbed():
            materialize_in_place(tensor, view)
        return method(tensor, *args, **kwargs)

    return answer


def _contiguous(tensor: Tensor, view: View, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    if view.ref.meta.is_contiguous(memory_format=memory_format):
        return tensor
    return tensor.contiguous(memory_format=memory_format)


def _deepcopy(tensor: Tensor, _: View, memo: dict[int, object]) -> object:
    if id(tensor) not in memo:
        # torch copies the storage, which holds a single element here.
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        copied.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def _refuse_to_pickle(tensor: Tensor, _: View, protocol: object) -> NoReturn:
    del protocol
    raise LazyError(
        f"A lazy tensor of shape {tuple(tensor.shape)} has no memory to be pickled, saved or copied by copy.copy. "
        "Materialise it first; copy.deepcopy and clone keep it lazy."
    )


def _backward_hooks(tensor: Tensor, view: View) -> object:
    # Of all that pickling asks of a plain tensor, only this can be told from other uses.
    if sys._getframe(2).f_code is warn_if_has_hooks.__code__:
        _refuse_to_pickle(tensor, view, None)
    return tensor._backward_hooks


_CONSTRUCTORS: frozenset[Callable[..., object]] = frozenset({torch.tensor, torch.as_tensor, Tensor.new_tensor})
_ANSWERS: dict[Callable[..., object], Callable[..., Any]] = {
    Tensor.stride: _answer_layout(Tensor.stride),
    Tensor.is_contiguous: _answer_layout(Tensor.is_contiguous),
    Tensor.storage_offset: _answer_layout(Tensor.storage_offset),
    Tensor.tolist: _answer_by_value(Tensor.tolist),
    Tensor.__repr__: _answer_by_value(Tensor.__repr__),
    Tensor.numpy: _answer_in_memory(Tensor.numpy),
    Tensor.__array__: _answer_in_memory(Tensor.__array__),
    Tensor.__dlpack__: _answer_in_memory(Tensor.__dlpack__),
    Tensor.contiguous: _contiguous,
    Tensor.__deepcopy__: _deepcopy,
    Tensor._backward_hooks.__get__: _backward_hooks,  # type: ignore[union-attr] # of the class it is a descriptor
    Tensor.__reduce_ex__: _refuse_to_pickle,
}
