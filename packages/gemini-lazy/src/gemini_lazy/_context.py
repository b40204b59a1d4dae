"""`LazyInitContext`, and the materialisation of whole modules."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType

import torch
from torch import Tensor, nn

from gemini_lazy._placeholders import is_lazy, materialize
from gemini_lazy._reads import Reader
from gemini_lazy._record import Recorder

_NOT_THE_MODULES = (type, ModuleType, FrameType, CodeType, *weakref.ProxyTypes)


class _Active(threading.local):
    depth = 0


_active = _Active()


class LazyInitContext:
    """Defer all tensors made in the body: a model is built without its memory.

    ```python
    with LazyInitContext():
        model = build()  # no parameter memory
    LazyInitContext.materialize(model)
    ```

    Materialising gives bit for bit what construction without the context would have given, in any order, and the
    random generators are left where they would have been left. Tensors that exist already are ordinary: operations on
    them run at once. Values that the construction reads (``.item()``, ``if``, ``.tolist()``) are computed exactly.
    The context can be nested and entered again, also to change or copy a model that is still lazy.

    After the context nothing is intercepted. An operation on a tensor that is still lazy computes with NaN, and an
    in-place one raises. The context holds for the thread that entered it.

    Args:
        default_device: where tensors are made for which no device is given, as under ``torch.device(...)``.
    """

    def __init__(self, *, default_device: torch.device | str | None = None) -> None:
        self._default_device = None if default_device is None else torch.device(default_device)
        self._stacks: list[contextlib.ExitStack] = []

    def __enter__(self) -> LazyInitContext:
        with contextlib.ExitStack() as stack:
            if _active.depth == 0:
                stack.enter_context(Recorder(sys._getframe(1)))
                stack.enter_context(Reader())
            if self._default_device is not None:
                stack.enter_context(self._default_device)
            _active.depth += 1
            self._stacks.append(stack.pop_all())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _active.depth -= 1
        self._stacks.pop().__exit__(kind, error, traceback)

    @staticmethod
    def materialize(module: nn.Module, *, skip: Iterable[Tensor] = (), verbose: bool = False) -> nn.Module:
        """Give memory to every lazy tensor of a module, in place.

        Besides parameters and buffers, these are all tensors that can be reached from it: in plain attributes,
        containers, closures of hooks. Every object keeps its identity, so ties and optimizers hold.

        Args:
            module: the module; it may be lazy in part or not at all.
            skip: tensors that stay lazy, such as parameters of which a sharded wrapper takes one value at a time.
            verbose: print how many parameters and buffers were lazy.

        Returns:
            ``module`` itself.

        Raises:
            LazyError: as `materialize_value`.
        """
        if verbose:
            for kind, tensors in (("parameters", [*module.parameters()]), ("buffers", [*module.buffers()])):
                print(f"gemini_lazy: {sum(map(is_lazy, tensors))} of {len(tensors)} {kind} are lazy.")
        skipped = {id(tensor) for tensor in skip}
        for tensor in (*module.parameters(), *module.buffers(), *_reachable_tensors(module)):
            if id(tensor) not in skipped and is_lazy(tensor):
                materialize(tensor)
        return module


def _reachable_tensors(root: object) -> Iterator[Tensor]:
    """Yield each tensor that ``root`` leads to by attributes, containers, closures and bound methods."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        # isinstance would ask the object, and a weak proxy may have nobody left to ask.
        if id(item) in seen or issubclass(type(item), _NOT_THE_MODULES):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        if isinstance(item, FunctionType):  # its globals are not the module's
            stack.extend((item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__))
        else:
            stack.extend(gc.get_referents(item))
