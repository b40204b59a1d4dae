"""The dispatch mode of `LazyInitContext`: it puts operations on the tape instead of running them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from gemini_lazy._placeholders import (
    View,
    materialize_in_place,
    new_memory,
    new_placeholder,
    retarget,
    value_of,
    view_of,
)
from gemini_lazy._tape import (
    Captured,
    GeneratorSlot,
    Operation,
    RandomState,
    Ref,
    StandIn,
    leaves,
    map_arguments,
    map_leaves,
    record,
    transient_like,
    undisturbed,
)

aten = torch.ops.aten

# In-place operations that read nothing of what they write to.
_REPLACING = frozenset(
    f"aten::{name}_"
    for name in (
        *("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric"),
        *("log_normal", "normal", "random", "uniform", "zero"),
    )
)
# Operations that take from their tensor argument no more than its layout.
_LAYOUT_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
# Operations whose results have other strides on meta tensors. What is computed from them may depend on the layout.
_LAID_OUT_BY_KERNEL = frozenset({"aten::_linalg_svd", "aten::_fft_r2c", "aten::convolution"})
# In-place operations on the tensor object, not on its memory, that need no help: the record follows the storage.
_OBJECT_ONLY = frozenset({"aten::set_", "aten::detach_"})


@dataclass(frozen=True, slots=True)
class _Traits:
    """What the schema of an operation says of it.

    Attributes:
        written: position and name of each argument that it writes to.
        aliases: for each result, whether it is one of the written arguments.
        reshapes: it changes the shape of the tensor object it is given.
        resizes: it may give the tensor object more memory.
        out: what it writes to are ``out=`` arguments.
        random: it draws random numbers.
        reads_values: it returns something that is no tensor.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    aliases: tuple[bool, ...]
    reshapes: bool
    resizes: bool
    out: bool
    random: bool
    reads_values: bool

    @property
    def layout_only(self) -> bool:
        return self.name in _LAYOUT_ONLY

    @property
    def replaces(self) -> bool:
        """Whether it replaces what it writes to, and reads nothing of it."""
        return self.out or self.name in _REPLACING


@functools.cache
def _traits(function: OpOverload) -> _Traits:
    schema = function._schema
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    if schema.name.endswith("batch_norm"):  # its schema keeps quiet about the statistics that it updates
        written = [argument.name in ("running_mean", "running_var") for argument in schema.arguments]
    return _Traits(
        name=schema.name,
        written=tuple((at, schema.arguments[at].name) for at, is_written in enumerate(written) if is_written),
        aliases=tuple(result.alias_info is not None and result.alias_info.is_write for result in schema.returns),
        reshapes=torch.Tag.inplace_view in function.tags,
        resizes=schema.name.startswith("aten::resize"),
        out=any(argument.is_out for argument in schema.arguments),
        random=torch.Tag.nondeterministic_seeded in function.tags,
        reads_values=bool(schema.returns) and not any("Tensor" in str(result.type) for result in schema.returns),
    )


class Recorder(TorchDispatchMode):
    """Records what makes new memory or changes deferred memory; anything else runs.

    Args:
        frame: the frame that entered the context: what it imports further up the stack is not construction.
    """

    def __init__(self, frame: FrameType | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._frame = frame

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if any(types):  # a tensor subclass with a dispatch of its own
            return func(*args, **kwargs)
        with undisturbed():
            call = _Call(func, args, kwargs)
            if not call.views:
                return call.record() if self._makes_memory(call) else func(*args, **kwargs)
            return call.on_lazy()

    def _makes_memory(self, call: _Call) -> bool:
        tensors = call.tensors
        if tensors and not (call.traits.layout_only and tensors[0].layout is torch.strided):
            return False
        if call.device.type == "meta" or call.kwargs.get("layout") not in (None, torch.strided):
            return False
        return bool(call.traits.aliases) and not call.traits.reads_values and not self._is_importing()

    def _is_importing(self) -> bool:
        # A Python module that is imported for the first time under the context may keep tensors as globals, which
        # nobody would ever materialise.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            if frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
                return True
            frame = frame.f_back
        return False


class _Call:
    """One call that reached the recorder, with its tensors sorted into lazy and ordinary ones."""

    def __init__(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.traits = _traits(func)
        self.tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.views: dict[int, View] = {}
        for tensor in self.tensors:
            view = view_of(tensor)
            if view is None:
                continue
            if view.memory.value is not None:  # another tensor over this memory was materialised: join it
                materialize_in_place(tensor, view)
            else:
                self.views[id(tensor)] = view
        positions = self.traits.written
        self.written = leaves([args[at] if at < len(args) else kwargs.get(name) for at, name in positions])

    @property
    def device(self) -> torch.device:
        """Where a new result will be."""
        device = self.kwargs.get("device")
        if device is not None:
            assert isinstance(device, (torch.device, str))
            return torch.device(device)
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.dim() == 0):
            return tensor.device
        return torch.device("cpu")

    def on_lazy(self) -> object:
        """Do what the call asks, given that at least one of its tensors is lazy."""
        traits = self.traits
        if traits.name in _OBJECT_ONLY:
            return self.func(*self.args, **self.kwargs)
        if traits.reads_values:
            return self._run(self._value)
        if traits.resizes or any(isinstance(leaf, Tensor) and id(leaf) not in self.views for leaf in self.written):
            return self._run_in_memory()
        if traits.reshapes:
            return self._reshape()
        return self.record()

    def _is_written(self, leaf: object) -> bool:
        return any(leaf is written for written in self.written)

    def _value(self, leaf: object) -> object:
        view = self.views.get(id(leaf))
        return leaf if view is None else value_of(view)

    def _run(self, substitute: Callable[[object], object]) -> object:
        args, kwargs = map_arguments(substitute, self.args, self.kwargs)
        return self.func(*args, **kwargs)

    def _run_in_memory(self) -> object:
        # Something real is written to, or something lazy has to grow: what is written to becomes real.
        for leaf in self.written:
            if isinstance(leaf, Tensor) and id(leaf) in self.views:
                materialize_in_place(leaf, self.views.pop(id(leaf)))
        return self._run(self._value)

    def _reshape(self) -> object:
        tensor = self.args[0]
        assert isinstance(tensor, Tensor)
        view = self.views[id(tensor)]
        meta = view.ref.of(view.ref.history.meta)
        self.func(meta, *self.args[1:], **self.kwargs)
        retarget(tensor, View(view.memory, Ref(view.ref.history, meta)))
        return tensor

    def record(self) -> object:
        """Put the call on the tape and return placeholders for its results."""
        func, result = self._foretell()
        if func is None:
            return result
        if self.traits.out and any(
            isinstance(foretold, Tensor) and isinstance(leaf, Tensor) and foretold.shape != leaf.shape
            for foretold, leaf in zip(leaves(result), self.written, strict=True)
        ):
            return self._run_in_memory()
        origin = {view.ref.meta.untyped_storage()._cdata: view for view in self.views.values()}
        made: list[View | None] = []
        returned: list[object] = []
        for at, leaf in enumerate(leaves(result)):
            if at < len(self.traits.aliases) and self.traits.aliases[at]:
                made.append(None)
                returned.append(self.written[at])
            elif not isinstance(leaf, Tensor):
                made.append(None)
                returned.append(leaf)
            else:
                source = origin.get(leaf.untyped_storage()._cdata)
                if source is None:
                    view = new_memory(leaf, self.device)
                    made.append(view)
                else:
                    view = View(source.memory, Ref(source.ref.history, leaf))
                    made.append(None)
                returned.append(new_placeholder(view))
        if self.traits.written or any(view is not None for view in made):
            self._write_down(func, made)
        remaining = iter(returned)
        return map_leaves(lambda _: next(remaining), result)

    def _foretell(self) -> tuple[OpOverload | None, object]:
        """Find out the layout of the results, on meta tensors where these tell.

        Returns:
            The operation to record and results of the right layout; or None and the real result, where that depends on
            values, has no meta version or is more than memory seen through strides.
        """
        if self.traits.random and self.traits.written and not self.traits.out:
            return self.func, self.written[0]  # the draw on scratch memory shows any error
        if self.traits.name in _LAID_OUT_BY_KERNEL:
            return self.func, self._run(self._value)
        try:
            foretold = self._run_on_meta(self.func)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            pass
        else:
            return (self.func, foretold) if _is_plain(foretold) else (None, self._run(self._value))
        if self.func is aten.view.default:
            # The strides of a placeholder never forbid a view: torch's ``reshape`` asks for one where it should copy.
            return aten.reshape.default, self._run_on_meta(aten.reshape.default)
        if not self.traits.written:
            return None, self._run(self._value)
        # Whether the call is an error can be told from the values only.
        return self.func, self._run(self._value)

    def _run_on_meta(self, function: OpOverload) -> object:
        def to_meta(leaf: object) -> object:
            if isinstance(leaf, Tensor):
                view = self.views.get(id(leaf))
                if view is None:
                    return _meta_like(leaf)
                # An ``out=`` argument of the wrong shape is resized: not the one that others share.
                return _meta_like(view.ref.meta) if self.traits.out and self._is_written(leaf) else view.ref.meta
            return None if isinstance(leaf, torch.Generator) else leaf

        args, kwargs = map_arguments(to_meta, self.args, self.kwargs)
        if "device" in kwargs or not self.tensors:
            kwargs["device"] = torch.device("meta")
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    def _write_down(self, function: OpOverload, made: list[View | None]) -> None:
        traits = self.traits
        changed_leaves = [leaf for leaf in self.written if id(leaf) in self.views]
        changed = [self.views[id(leaf)].ref for leaf in changed_leaves]
        given_ids = [id(tensor) for tensor in self.tensors]
        for leaf in changed_leaves:  # once: it may be given as an input too
            given_ids.remove(id(leaf))
        given = {self.views[key].ref.history for key in given_ids if key in self.views}
        replaced = {ref.history for ref in changed if traits.replaces and ref.covers_all()} - given
        reads = set() if traits.layout_only else given | {ref.history for ref in changed} - replaced
        new = [view.ref.history for view in made if view is not None]
        operation = Operation(
            function,
            tuple(self._stand_in(arg) for arg in self.args),
            {name: self._stand_in(arg) for name, arg in self.kwargs.items()},
            reads=tuple(reads),
            replaces=(*replaced, *new),
            outputs=tuple(None if view is None else view.ref.history for view in made),
            random=self._draw() if traits.random else None,
        )
        record(operation, [*(ref.history for ref in changed), *new])

    def _stand_in(self, value: object) -> object:
        def substitute(leaf: object) -> object:
            if isinstance(leaf, torch.Generator):
                return GeneratorSlot()
            if not isinstance(leaf, Tensor):
                return leaf
            view = self.views.get(id(leaf))
            if self.traits.layout_only:
                return StandIn(_meta_like(leaf) if view is None else view.ref.meta, leaf.device)
            return Captured(leaf) if view is None else view.ref

        return map_leaves(substitute, value)

    def _draw(self) -> RandomState:
        """Draw the call's random numbers on scratch memory: the generator moves on as it would have.

        What it moves by may depend on the shape, the strides and even the values of the arguments.

        Returns:
            The state before the draw.
        """
        generators = [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Generator)]
        before = RandomState.now(self.device, generators[0] if generators else None)

        def substitute(leaf: object) -> object:
            view = self.views.get(id(leaf))
            if view is None:
                return leaf
            if self.traits.layout_only or (self.traits.replaces and self._is_written(leaf)):
                return transient_like(_meta_like(view.ref.meta), view.ref.history.device)
            return self._value(leaf)

        self._run(substitute)
        return before


def _is_plain(result: object) -> bool:
    return not any(
        isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg())
        for leaf in leaves(result)
    )


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
