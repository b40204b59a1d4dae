"""A training step run on paper: which parameters it uses when, and the memory that it takes beside them. Needs torch.

``pip install gemini-placement[tracer]``
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from gemini_placement._stats import AccessStats, MemStats
from gemini_placement.interfaces import Phase

try:
    import torch
    from torch import Tensor, nn
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter, tree_map_only
except ImportError as error:
    raise ImportError(
        "gemini_placement.tracer needs torch, the rest of the package does not: pip install gemini-placement[tracer]."
    ) from error

__all__ = ["MemoryMeter", "Meter", "StepRecorder", "trace_model"]


def trace_model(
    model: nn.Module,
    sample_batch: Mapping[str, object] | Sequence[object],
    *,
    loss: Callable[[object], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> MemStats:
    """Run forward and backward on tensors without memory, and record what a training step uses.

    Nothing of the model changes: its parameters and buffers are replaced for the run, its hooks are called. A model
    that was built lazily, or on the meta device, will do.

    Args:
        model: the model, not wrapped.
        sample_batch: what it is called with: arguments by name, or in order. Only shapes and dtypes of tensors matter.
        loss: makes the loss of the model's output; by default its ``loss``, or the sum of a tensor.
        dtype: floating parameters and inputs are taken to have this dtype; None leaves theirs.

    Returns:
        Accesses of modules that own parameters, in the order of the step, with the bytes of activations and other
        temporary memory at most until the next one.

    Raises:
        ValueError: the model's course depends on values, which are not there; or its output has no loss.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        with fake_mode:
            return torch.empty(tensor.shape, dtype=to, device="cpu")

    state: dict[str, Tensor] = {name: fake(buffer) for name, buffer in model.named_buffers()}
    for name, param in model.named_parameters():
        state[name] = fake(param).requires_grad_(param.requires_grad)
    batch = tree_map_only(Tensor, fake, sample_batch)
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    meter = MemoryMeter()
    recorder = StepRecorder(model, meter)
    with contextlib.ExitStack() as stack:
        stack.callback(recorder.stop)
        recorder.start(state)
        for tensor in state.values():
            meter.ignore(tensor)
            if tensor.requires_grad:  # where a gradient goes is the business of the model states
                stack.callback(tensor.register_post_accumulate_grad_hook(_drop_gradient).remove)
        stack.enter_context(_replaced(model, state))
        stack.enter_context(fake_mode)
        stack.enter_context(meter)
        meter.listener = recorder.read
        try:
            output = model(*args, **kwargs)
            total = loss(output) if loss is not None else _loss_of(output)
            del output
            total.backward()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"{type(model).__name__} looks at values ({error}), which a run without memory does not have. Leave "
                "memstats out: the first step then records the order of use."
            ) from error
        return recorder.stop()


@contextlib.contextmanager
def _replaced(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a model compute with other parameters and buffers, to the end of backward: recompute reads them there."""
    named = [*model.named_parameters(), *model.named_buffers()]
    others = {tensor: state[name] for name, tensor in named}
    places: list[dict[str, Tensor | None]] = []
    for child in model.modules():
        places += [cast("dict[str, Tensor | None]", child._parameters), child._buffers]  # any tensor serves for a step
    found = [(tensors, key, tensor) for tensors in places for key, tensor in tensors.items() if tensor is not None]
    for tensors, key, tensor in found:
        tensors[key] = others[tensor]
    try:
        yield
    finally:
        for tensors, key, tensor in found:
            tensors[key] = tensor


def _loss_of(output: object) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if not isinstance(found, Tensor):
        raise ValueError(f"The output is a {type(output).__name__} without a loss; give loss=, which makes one of it.")
    return found.sum()


@dataclass(slots=True, eq=False)
class _Scope:
    """A module that uses parameters, and what became of its calls.

    Attributes:
        path: its path in the model.
        names: its own parameters, then those it was seen to read of other modules.
        expects: those that get gradients.
        reads: whether backward reads their values; that of an embedding does not.
        ends_with_inputs: whether its backward is over when the gradients of its inputs exist.
        needs_inputs: whether those must exist beside the gradients of its parameters.
    """

    path: str
    names: list[str]
    expects: set[str]
    reads: bool
    ends_with_inputs: bool
    needs_inputs: bool
    is_root: bool
    borrows: bool = False
    in_backward: bool = False
    waiting: set[str] = field(default_factory=set)
    inputs_left: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to come of its backward."""
        if self.is_root and self.borrows:
            return False
        if self.ends_with_inputs and not self.borrows:
            return self.inputs_left == 0
        return not self.waiting and not (self.needs_inputs and self.inputs_left)


@dataclass(slots=True, eq=False)
class _Access:
    phase: Phase
    scope: _Scope
    within: tuple[tuple[_Scope, Phase], ...]
    gradients: list[str] = field(default_factory=list)
    ends: list[tuple[_Scope, int]] = field(default_factory=list)
    peak: int = 0


class Meter(Protocol):
    """What tells a `StepRecorder` how much memory a step takes."""

    def lap(self) -> int:
        """Return the most bytes beside the model states since the last call."""


class StepRecorder:
    """Records a training step of a model: which modules are entered and left, when gradients come, and the memory.

    Args:
        model: the model.
        meter: tells the memory.
    """

    def __init__(self, model: nn.Module, meter: Meter) -> None:
        self._meter = meter
        self._accesses: list[_Access] = []
        self._stack: list[_Scope] = []
        self._active: dict[_Scope, None] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._params = dict(model.named_parameters())
        self._trains = {name for name, param in self._params.items() if param.requires_grad}
        names = {param: name for name, param in self._params.items()}
        paths = {child: path for path, child in model.named_modules()}
        owned = {child: [names[param] for param in child.parameters(recurse=False)] for child in model.modules()}
        owners = Counter(name for own in owned.values() for name in own)
        trains = self._trains
        self._scopes = {
            child: _Scope(
                paths[child],
                own,
                trains.intersection(own),
                reads=not (_is_plain(child, nn.Embedding) and getattr(child, "max_norm", None) is None),
                ends_with_inputs=trains.isdisjoint(own)
                or (_is_plain(child, nn.Linear) and any(owners[name] > 1 for name in trains.intersection(own))),
                needs_inputs=not trains.issuperset(own),
                is_root=child is model,
            )
            for child, own in owned.items()
            if own or child is model
        }
        self._names: dict[torch.UntypedStorage, str] = {}

    def start(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Begin to record.

        Args:
            state: by name, what takes the place of parameters in the step, each in memory of its own; uses of those
                outside the module that owns them are noted where `read` hears of them. None for the parameters.
        """
        for child, scope in self._scopes.items():
            self._handles.append(
                child.register_forward_pre_hook(lambda *_, scope=scope: self._enter(scope), prepend=True)
            )
            self._handles.append(
                child.register_forward_hook(
                    lambda _, args, kwargs, output, scope=scope: self._leave(scope, (args, kwargs), output),
                    with_kwargs=True,
                    always_call=True,  # recompute may stop early
                )
            )
        for name, param in self._params.items():
            tensor = param if state is None else state[name]
            if state is not None:
                self._names[tensor.untyped_storage()] = name
            if name in self._trains:
                hook = tensor.register_post_accumulate_grad_hook(lambda _, name=name: self._on_gradient(name))
                self._handles.append(hook)

    def stop(self) -> MemStats:
        """Take the hooks off and return the record."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._accesses:
            self._accesses[-1].peak = max(self._accesses[-1].peak, self._meter.lap())
        return MemStats(
            accesses=tuple(
                AccessStats(
                    phase=access.phase,
                    params=_names([(access.scope, access.phase)]),
                    non_model_bytes=access.peak,
                    module=access.scope.path,
                    within=_names(access.within),
                    gradients=tuple(access.gradients),
                    ends=tuple((name, number) for scope, number in access.ends for name in scope.names),
                )
                for access in self._accesses
            )
        )

    def read(self, storages: set[torch.UntypedStorage]) -> None:
        """Hear what memory an operation reads; give parameters that are used outside their owner to who uses them."""
        if _in_autograd() or not self._stack:
            return
        for storage in storages:
            name = self._names.get(storage)
            if name is not None and not any(name in scope.names for scope in self._stack):
                scope = self._stack[-1]
                scope.names.append(name)
                scope.borrows = True
                if name in self._trains:
                    scope.expects.add(name)

    def _enter(self, scope: _Scope) -> None:
        if not (_in_autograd() and scope.in_backward):
            self._access("backward" if _in_autograd() else "forward", scope)
        self._stack.append(scope)

    def _leave(self, scope: _Scope, inputs: object, output: object) -> None:
        if not self._stack or self._stack[-1] is not scope:
            return  # entering it failed
        self._stack.pop()
        if not torch.is_grad_enabled():
            return
        if _in_autograd() and not scope.in_backward:
            self._start_backward(scope)
        begun = {tensor.grad_fn: None for tensor in _tensors(output) if tensor.grad_fn is not None}
        given = {tensor.grad_fn: None for tensor in _tensors(inputs) if tensor.grad_fn is not None}
        if len(begun) > 1:  # what it only hands on is another's
            begun = {node: None for node in begun if node not in given}
        for node in begun:
            node.register_prehook(lambda _: self._begin_backward(scope))
        if begun and (scope.ends_with_inputs or scope.needs_inputs):
            scope.inputs_left += len(given)
            for node in given:
                node.register_prehook(lambda _: self._on_input_gradient(scope))

    def _begin_backward(self, scope: _Scope) -> None:
        if not scope.in_backward and scope.names:
            self._access("backward", scope)
            self._start_backward(scope)

    def _start_backward(self, scope: _Scope) -> None:
        scope.in_backward = True
        scope.waiting = set(scope.expects)
        self._active[scope] = None

    def _on_input_gradient(self, scope: _Scope) -> None:
        scope.inputs_left -= 1
        self._end_if_over(scope)

    def _on_gradient(self, name: str) -> None:
        for scope in [scope for scope in self._active if name in scope.expects]:
            scope.waiting.discard(name)
            self._end_if_over(scope)
        self._accesses[-1].gradients.append(name)

    def _end_if_over(self, scope: _Scope) -> None:
        if scope.in_backward and scope.is_over:
            scope.in_backward = False
            del self._active[scope]
            self._accesses[-1].ends.append((scope, len(self._accesses[-1].gradients)))

    def _access(self, phase: Phase, scope: _Scope) -> None:
        if scope.is_root and not scope.names:
            return
        if self._accesses:
            self._accesses[-1].peak = self._meter.lap()
        else:
            self._meter.lap()
        within: list[tuple[_Scope, Phase]] = [(outer, "forward") for outer in self._stack]
        within += [(other, "backward") for other in self._active]
        self._accesses.append(_Access(phase, scope, tuple(within)))


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of what operations return while this mode is on, as long as it lives.

    Views and what operations write in place take none, nor does memory that came about unseen, such as parameters.

    Attributes:
        listener: hears of each operation, what memory it is about to read.
        is_on: whether it counts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.listener: Callable[[set[torch.UntypedStorage]], None] | None = None
        self.is_on = True
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._used = self._peak = 0

    def lap(self) -> int:
        """Return the most bytes since the last call."""
        peak, self._peak = self._peak, self._used
        return peak

    def ignore(self, tensor: Tensor) -> None:
        """Take a tensor's memory as none of what is to be counted."""
        self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(  # type: ignore[no-untyped-def] # torch's signature
        self, func, types, args=(), kwargs=None
    ):
        if not self.is_on:
            return func(*args, **(kwargs or {}))
        storages = {tensor.untyped_storage() for tensor in _tensors((args, kwargs))}
        if self.listener is not None:
            self.listener(storages)
        # Of a product of experts' matrices on paper torch knows the shape in bf16 only.
        known = func is not torch.ops.aten._grouped_mm.default or not isinstance(args[0], FakeTensor)
        call = (args, kwargs or {}) if known else tree_map_only(Tensor, _to_bf16, (args, kwargs or {}))
        result = func(*call[0], **call[1])
        if not known:
            result = result.to(args[0].dtype)
        self._count(storages, result)
        return result

    def _count(self, given: set[torch.UntypedStorage], result: object) -> None:
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage in self._known or storage in given:
                continue
            self._known.add(storage)
            amount = storage.nbytes()
            self._used += amount
            self._peak = max(self._peak, self._used)
            weakref.finalize(storage, self._give_back, amount).atexit = False

    def _give_back(self, amount: int) -> None:
        self._used -= amount


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


def _to_bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def _names(uses: Iterable[tuple[_Scope, Phase]]) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(name for scope, phase in uses if phase == "forward" or scope.reads for name in scope.names)
    )


def _tensors(value: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))


def _is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    return isinstance(module, cls) and type(module).forward is cls.forward


def _in_autograd() -> bool:
    return torch._C._current_graph_task_id() != -1
