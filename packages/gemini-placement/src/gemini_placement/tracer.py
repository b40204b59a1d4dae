"""A training step run on paper: which parameters it uses when, and the memory that it takes beside them. Needs torch.

``pip install gemini-placement[tracer]``
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from gemini_placement._stats import AccessStats, MemStats
from gemini_placement.interfaces import Phase

try:
    import torch
    from torch import Tensor, nn
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter, tree_map_only
except ImportError as error:
    raise ImportError(
        "gemini_placement.tracer needs torch, the rest of the package does not: pip install gemini-placement[tracer]."
    ) from error

__all__ = ["trace_model"]


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
    recorder = _Recorder(model, state)
    with contextlib.ExitStack() as stack:
        for handle in recorder.hooks():
            stack.callback(handle.remove)
        stack.enter_context(_replaced(model, state))
        stack.enter_context(fake_mode)
        stack.enter_context(_Operations(recorder.meter, recorder.read))
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
    return recorder.stats()


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


class _Recorder:
    """Notes which modules are entered and left, when gradients come, and what memory is in use meanwhile."""

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        self.meter = MemoryMeter()
        self._accesses: list[_Access] = []
        self._stack: list[_Scope] = []
        self._active: dict[_Scope, None] = {}
        self._model = model
        self._state = state
        names = {param: name for name, param in model.named_parameters()}
        owned = {child: [names[param] for param in child.parameters(recurse=False)] for child in model.modules()}
        paths = {child: path for path, child in model.named_modules()}
        owners = Counter(name for own in owned.values() for name in own)
        trains = {name for name, param in model.named_parameters() if param.requires_grad}
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
        self._names = {state[name].untyped_storage(): name for name in names.values()}

    def stats(self) -> MemStats:
        """Return the record."""
        if self._accesses:
            self._accesses[-1].peak = self.meter.lap()
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

    def hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Hook the modules that own parameters, and the parameters of the run."""
        for child, scope in self._scopes.items():
            yield child.register_forward_pre_hook(lambda *_, scope=scope: self._enter(scope), prepend=True)
            yield child.register_forward_hook(
                lambda _, args, kwargs, output, scope=scope: self._leave(scope, (args, kwargs), output),
                with_kwargs=True,
                always_call=True,  # recompute may stop early
            )
        for name, tensor in self._state.items():
            self.meter.ignore(tensor)
            if tensor.requires_grad:
                yield tensor.register_post_accumulate_grad_hook(lambda param, name=name: self._on_gradient(name, param))

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
                if self._state[name].requires_grad:
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

    def _on_gradient(self, name: str, param: Tensor) -> None:
        param.grad = None  # where it goes is the business of the model states
        for scope in self._scopes.values():
            if name in scope.expects:
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
            self._accesses[-1].peak = self.meter.lap()
        else:
            self.meter.lap()
        within: list[tuple[_Scope, Phase]] = [(outer, "forward") for outer in self._stack]
        within += [(other, "backward") for other in self._active]
        self._accesses.append(_Access(phase, scope, tuple(within)))


class MemoryMeter:
    """Counts the bytes of what operations return, as long as it lives; views and in-place results take none.

    Under `counting`, or whatever else calls `count` with the inputs and results of operations.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._used = self._peak = 0

    def lap(self) -> int:
        """Return the most bytes since the last call."""
        peak, self._peak = self._peak, self._used
        return peak

    def ignore(self, tensor: Tensor) -> None:
        """Take a tensor's memory as none of what is to be counted."""
        self._known.add(tensor.untyped_storage())

    def count(self, storages: set[torch.UntypedStorage], result: object) -> None:
        """Count new memory in what an operation returned that was given memory of these storages."""
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage in self._known or storage in storages:
                continue
            self._known.add(storage)
            amount = storage.nbytes()
            self._used += amount
            self._peak = max(self._peak, self._used)
            weakref.finalize(storage, self._give_back, amount).atexit = False

    def _give_back(self, amount: int) -> None:
        self._used -= amount


class _Operations(TorchDispatchMode):
    """Tells a meter, and a listener, of each operation."""

    def __init__(self, meter: MemoryMeter, read: Callable[[set[torch.UntypedStorage]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._meter = meter
        self._read = read

    def __torch_dispatch__(  # type: ignore[no-untyped-def] # torch's signature
        self, func, types, args=(), kwargs=None
    ):
        storages = {tensor.untyped_storage() for tensor in _tensors((args, kwargs))}
        self._read(storages)
        # Of a product of experts' matrices torch knows the shape in bf16 only.
        known = func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16
        cast = (args, kwargs or {}) if known else tree_map_only(Tensor, _to_bf16, (args, kwargs or {}))
        result = func(*cast[0], **cast[1])
        if not known:
            result = result.to(args[0].dtype)
        self._meter.count(storages, result)
        return result


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
