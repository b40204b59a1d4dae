"""Keeping a compiler away from where it would be of no use, or wrong."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def not_compiled(function: FunctionT) -> FunctionT:
    """Return a function that no compiler traces, nor what it calls.

    In a hook and in the store that it calls, a compiler would guard on each count and each buffer, and compile anew at
    every change. It imports the compiler, so it is not for use as a decorator: that would work at import.

    Where nothing is compiled, that costs no more than one more call; what torch puts around the function takes ten
    times as long as that.
    """
    alone = _apart()

    def call(*args: Any) -> Any:
        return alone(function, args) if is_dynamo_compiling() else function(*args)

    return cast("FunctionT", call)


def hook_of(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Return a function that calls a bound method as long as its object lives: hooks live as long as what they hang on.

    No compiler traces it, see `not_compiled`. A copy of a module shares its hooks, as it shares all functions, with
    what is bound here; a `functools.partial` would be copied with it.

    Args:
        method: what is called.
        first: its first arguments.
    """
    alone = _apart()
    reference, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined] # of a method

    def call(*args: Any) -> Any:
        if is_dynamo_compiling():
            return alone(call, args)
        target = reference()
        return None if target is None else function(target, *first, *args)

    return call


@functools.cache
def _apart() -> Callable[..., Any]:
    """Return a function that calls another one where the compiler does not look."""
    alone: Callable[..., Any] = torch.compiler.disable(lambda function, args: function(*args))
    return alone


class Uncompiled:
    """Lets compiled functions of this process run as they were written, while any object of this class holds them so.

    What a recorded pass reads is to be seen operation by operation, which a compiled graph does not show. And what
    was recorded so must be recomputed so, for a graph saves other tensors.
    """

    _holders: ClassVar[int] = 0
    _stance: ClassVar[AbstractContextManager[object] | None] = None

    def __init__(self) -> None:
        self._holds = False

    def hold(self) -> None:
        """Begin; does nothing once begun."""
        if not self._holds:
            self._holds = True
            if Uncompiled._holders == 0:
                Uncompiled._stance = torch.compiler.set_stance("force_eager")
            Uncompiled._holders += 1

    def release(self) -> None:
        """End, for the last holder; does nothing once ended."""
        if self._holds:
            self._holds = False
            Uncompiled._holders -= 1
            if Uncompiled._holders == 0 and Uncompiled._stance is not None:
                Uncompiled._stance.__exit__(None, None, None)

    def __del__(self) -> None:
        self.release()
