"""The step engine: hooks that gather what a module needs, follow its backward, and hand gradients to the store."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from gemini_ddp._compiler import Uncompiled, hook_of
from gemini_ddp._course import Course
from gemini_ddp._debug import LoggedStore, logger
from gemini_ddp._errors import ZeroDDPError
from gemini_ddp._gradients import Gradients
from gemini_ddp._outside import ParameterReads
from gemini_ddp._ranks import Ranks
from gemini_ddp._scopes import Call, Layout, Scope, find_scopes
from gemini_ddp._tensors import walk_tensors
from gemini_ddp.interfaces import ChunkStore, Phase, Planner

ChunkT = TypeVar("ChunkT", bound=Hashable)

_RETURNED_BY = "gemini_ddp"  # in the metadata of an autograd node


@dataclass(slots=True)
class _Use:
    """A scope that is being called: the parameters begun for it, and the operations seen to read them."""

    scope: Scope
    params: tuple[nn.Parameter, ...]
    readers: dict[torch.autograd.graph.Node, None] = field(default_factory=dict)


class Engine(Generic[ChunkT]):
    """Runs a module whose parameters lie in a chunk store.

    [Note: Scopes]
    A scope is one call of a module that owns managed parameters. Entering it gathers them; leaving it lets their
    chunks go, unless the plan keeps them. Backward enters it again through a hook on the ``grad_fn`` of each output
    tensor, and leaves it once the gradients of its parameters have arrived.

    [Note: Uses outside the owner]
    A parameter, or a view of it, may be read by another module than its owner. The first pass in each mode runs under
    a ``TorchFunctionMode`` that sees such reads and adds the parameter to the innermost active scope for good; later
    passes run without it and see only what a module returns. Should a read be missed, for instance in a branch that
    the first pass did not take, the placeholder's NaN shows in the loss. Whoever sees that, say an optimizer whose
    gradients are not finite, has the next pass watched again, and from then on the read is known.

    [Note: Hidden outputs]
    A module may hand on results in an object that cannot be searched, or leave them in an attribute. The first pass
    also hooks each operation that reads a parameter: when backward reaches one whose scope it has not entered, it
    enters it there, and from then on that scope keeps its parameters gathered from forward to the end of backward.

    [Note: Recompute]
    Activation checkpointing calls modules again inside backward. Such a call gathers like any other, but what it
    gathered stays until the scope's backward is over, for that is about to run.

    Args:
        module: the model.
        store: holds its parameters.
        planner: turns the first step's trace into a plan; None gathers on demand and releases at the next scope.
        ranks: who else runs the model.
        leaf_modules: see `find_scopes`.
        scatter_after_inference: see `Course`.
        debug: see `Course`; also log what happens to chunks.
        scales_loss: refuse a backward that `scaled_backward` did not announce.

    Attributes:
        handles: remove the hooks on the module and its parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        store: ChunkStore[ChunkT],
        planner: Planner[ChunkT] | None,
        ranks: Ranks,
        *,
        leaf_modules: Collection[type[nn.Module] | str] = (),
        scatter_after_inference: bool = True,
        debug: bool = False,
        scales_loss: bool,
    ) -> None:
        if debug:
            store = cast("ChunkStore[ChunkT]", LoggedStore(store, ranks.rank, lambda: ranks.place()))
        self._store = store
        self._ranks = ranks
        self._scales_loss = scales_loss
        self._announced = False
        self._scopes = find_scopes(module, store.__contains__, store.chunk_of, leaf_modules)
        self._layout = Layout(module, self._scopes, store.__contains__)
        self._stack: list[_Use] = []
        self._active: dict[Scope, tuple[nn.Parameter, ...]] = {}
        self._recomputed: dict[Scope, None] = {}
        self._watch: ParameterReads | None = None
        self._watches_next = False
        self._has_told = False
        self._uncompiled = Uncompiled()
        self._memory: dict[int, list[tuple[int, int, nn.Parameter]]] = {}
        self._in_backward = False
        self._is_recorded = False
        self._reduces = True
        # What nodes of the graph call; they may outlive the engine.
        self._begin_backward = hook_of(self._on_output_gradients)
        self._begin_hidden = hook_of(self._on_hidden_gradient)
        self._end_call = hook_of(self._on_input_gradient)
        self._end_backward = hook_of(self._finish_backward)
        self.handles = [handle for child, scope in self._scopes.items() for handle in self._hook(child, scope)]
        params = list({param: None for scope in self._scopes.values() for param in scope.params})
        self._gradients = Gradients(store, params)
        self._course: Course[ChunkT] = Course(
            store,
            planner,
            ranks,
            self._gradients,
            list(self._scopes.values()),
            weakref.proxy(self),
            scatter_after_inference=scatter_after_inference,
            debug=debug,
        )
        users: dict[int, list[Scope]] = {}
        for scope in self._scopes.values():
            for key in scope.expects:
                users.setdefault(key, []).append(scope)
        for index, slot in enumerate(self._gradients.slots):
            slot.users = users[slot.key]
            take = hook_of(self._on_gradient, index)
            self.handles.append(slot.param.register_post_accumulate_grad_hook(take))

    @property
    def deviations(self) -> int:
        """Accesses that came out of the recorded order so far."""
        return self._course.deviations

    def watch_next_step(self) -> None:
        """Look for uses outside the owner in the next pass that records gradients, too."""
        self._watches_next = True

    def remove_hooks(self) -> None:
        """Detach from the module."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    @contextlib.contextmanager
    def scaled_backward(self) -> Iterator[None]:
        """Allow a backward: the loss has been multiplied by the loss scale."""
        self._announced = True
        try:
            yield
        finally:
            self._announced = False

    def forget_gradients(self) -> None:
        """Hear that the store's gradients were dropped: no parameter has one any more."""
        if not self._in_backward:
            self._gradients.forget()

    @property
    def reduces(self) -> bool:
        """Whether a backward now would reduce its gradients."""
        return self._reduces

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards keep their gradients on this rank, for the next backward outside to add to and reduce."""
        self._course.agree_on_no_sync()
        reduces, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = reduces

    @contextlib.contextmanager
    def unwinding(self) -> Iterator[None]:
        """Leave every scope that an exception left: torch calls no hooks after a KeyboardInterrupt."""
        depth = len(self._stack)
        try:
            yield
        except BaseException as error:
            self._ranks.explain(error)
            while len(self._stack) > depth:
                self._leave(self._stack[-1].scope, None, (), {}, None)
            raise

    # -- forward ------------------------------------------------------------------------------------------------------

    def _hook(self, module: nn.Module, scope: Scope) -> Iterator[Any]:
        yield module.register_forward_pre_hook(hook_of(self._enter, scope), prepend=True)
        # Also after an exception, and after recompute that stops early: a scope that was entered is always left.
        yield module.register_forward_hook(hook_of(self._leave, scope), with_kwargs=True, always_call=True)

    def _enter(self, scope: Scope, module: nn.Module, _: tuple[object, ...]) -> None:
        if scope.cover is not None and scope.is_covered:
            return
        recompute = _in_autograd()
        if scope.is_root and not recompute and (self._in_backward or not self._stack):
            self._start_pass(module.training)
        elif self._watches_next and not self._stack and not recompute:
            self._tell_of_call_outside(scope)
        if self._watch is None:
            self._begin(scope, recompute)
        else:
            with torch._C.DisableTorchFunction():  # what the store does with its buffers is no reading by the model
                self._begin(scope, recompute)
                self._remember_memory(scope.params)

    def _tell_of_call_outside(self, scope: Scope) -> None:
        """Say, once, what may be why a step was not finite: no pass sees what is read around this call."""
        if torch.is_grad_enabled() and not self._has_told:
            self._has_told = True
            logger.warning(
                "A step was not finite, and module %r is called outside of the model's forward, by another method, "
                "say. A parameter that its caller reads there without calling the module that owns it is NaN. Call the "
                "wrapped model, and let its forward call that method.",
                scope.name,
            )

    def _begin(self, scope: Scope, recompute: bool) -> None:
        params = scope.params
        if recompute and scope.in_backward:
            self._store.begin_use(params)
        else:
            self._course.enter(scope, "backward" if recompute else "forward", params)
        self._stack.append(_Use(scope, params))
        scope.depth += 1

    def _leave(
        self, scope: Scope, _: nn.Module | None, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> None:
        if not self._stack or self._stack[-1].scope is not scope:
            return  # entering failed, or a call of the cover is under way: nothing was begun
        use = self._stack.pop()
        scope.depth -= 1
        recompute = _in_autograd()
        failed = True
        try:
            if self._watch is None:
                self._end_use(use, args, kwargs, output, recompute)
            else:
                with torch._C.DisableTorchFunction():
                    self._end_use(use, args, kwargs, output, recompute)
            failed = output is None
        finally:
            if scope.is_root and not recompute and not self._stack:
                self._stop_watching()
                self._course.finish_pass(failed=failed)

    def _end_use(
        self, use: _Use, args: tuple[object, ...], kwargs: dict[str, object], output: object, recompute: bool
    ) -> None:
        scope, params = use.scope, use.params
        tensors = walk_tensors(output)
        with_backward = torch.is_grad_enabled() and output is not None
        if self._stack:
            self._pin_what_escapes(tensors)
        if not recompute:
            self._course.note_end_of_call(scope)
        if recompute and torch.is_grad_enabled() and not scope.in_backward:
            self._start_scope_backward(scope, begun=params)
            self._recomputed[scope] = None
        elif not (scope.hides_outputs and with_backward and not recompute):
            self._store.end_use(params, in_backward=recompute)
            self._course.leave(scope, "forward")
        else:  # they stay in use until backward is over, but forward is
            self._store.begin_use(params)
            self._store.end_use(params, in_backward=False)
        if with_backward:
            self._hook_outputs(use, args, kwargs, tensors)
        elif scope.expects:  # re-entrant checkpoints call it without gradients, and again in backward
            scope.reaches_backward = True

    def _start_pass(self, training: bool) -> None:
        """Begin the model's forward."""
        self.end_interrupted_step()
        mode = (training, torch.is_grad_enabled())
        if mode[1]:
            self._layout.check()
        self._course.start_pass(mode)
        if self._course.is_recording or (self._watches_next and mode[1]):
            self._watches_next = self._watches_next and not mode[1]
            self._uncompiled.hold()
            self._watch = ParameterReads(self._before_read, self._after_read)
            self._watch.__enter__()  # type: ignore[no-untyped-call] # torch's mode is untyped

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call] # torch's mode is untyped
            self._watch = None
            self._memory.clear()
            self._uncompiled.release()

    def _before_read(self, tensor: Tensor) -> _Use | None:
        """Return the active use of the parameter that a torch function reads; pin it to the innermost if none did."""
        param = self._parameter_of(tensor)
        if param is None or not self._stack:
            return None
        return self._pin(param)

    def _pin(self, param: nn.Parameter) -> _Use:
        """Return the active use of a parameter; where there is none, make it one of the innermost scope for good."""
        for use in reversed(self._stack):
            if any(param is used for used in use.params):
                return use
        use = self._stack[-1]
        use.scope.add(param)
        for slot in self._gradients.slots:
            if slot.param is param:
                slot.users.append(use.scope)
        self._course.find_needs()
        self._course.keep_gathered(self._store.chunk_of(param))
        self._store.begin_use((param,))
        use.params += (param,)
        if self._watch is not None:
            self._remember_memory((param,))
        return use

    def _pin_what_escapes(self, tensors: Sequence[Tensor]) -> None:
        """Let the calling scope use the parameters that a module returned, or returned views of."""
        for tensor in tensors:
            base = tensor._base if tensor._is_view() else tensor
            if isinstance(base, nn.Parameter) and base in self._store:
                self._pin(base)

    def _after_read(self, use: _Use, result: object) -> None:
        if use.scope.value_in_backward and torch.is_grad_enabled():
            use.readers.update(_grad_fns(walk_tensors(result)))

    def _parameter_of(self, tensor: Tensor) -> nn.Parameter | None:
        """Return the managed parameter that a tensor is or shares memory with."""
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # within vmap or grad
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if isinstance(tensor, nn.Parameter):
            return tensor if tensor in self._store else None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor, say, has none
            return None
        start = tensor.storage_offset()
        for first, end, param in self._memory.get(storage._cdata, ()):
            if first <= start < end:
                return param
        return None

    def _remember_memory(self, params: Sequence[nn.Parameter]) -> None:
        """Note where parameters lie that are valid now, so that views of them are known by their place."""
        for param in params:
            start = param.storage_offset()
            places = self._memory.setdefault(param.untyped_storage()._cdata, [])
            if not any(param is known for _, _, known in places):
                places.append((int(start), int(start) + param.numel(), param))

    # -- backward -----------------------------------------------------------------------------------------------------

    def _hook_outputs(
        self, use: _Use, args: tuple[object, ...], kwargs: dict[str, object], tensors: Sequence[Tensor]
    ) -> None:
        scope = use.scope
        nodes = _grad_fns(tensors)
        for node in use.readers:
            if node not in nodes:
                node.register_prehook(functools.partial(self._begin_hidden, scope))
        if len(nodes) > 1:  # what it only hands on is another's: it would enter again when that one's backward comes
            for node in _grad_fns(walk_tensors((args, kwargs))):
                nodes.pop(node, None)
        if not nodes or not (scope.params or scope.is_root):
            return
        scope.reaches_backward = scope.reaches_backward or bool(scope.params)
        call: Call | None = None
        if scope.watches_inputs:
            call = Call(scope)
            inputs = {t.grad_fn: None for t in walk_tensors((args, kwargs)) if t.grad_fn is not None}
            # A leaf whose inputs need no gradient is over at the end of backward.
            call.inputs_left = len(inputs) or scope.is_leaf
            for node in inputs:
                node.register_prehook(functools.partial(self._end_call, call))
            if not inputs and not scope.needs_inputs and not scope.is_leaf:
                call = None
        for node in nodes:
            # What a module returns may be what a module within it returned. The outer one comes first, as it does where
            # it adds an operation of its own.
            metadata = cast("dict[str, list[tuple[Scope, Call | None]]]", node.metadata)  # a method in torch's stubs
            returned = metadata.get(_RETURNED_BY)
            if returned is None:
                returned = metadata[_RETURNED_BY] = []
                node.register_prehook(functools.partial(self._begin_backward, returned))
            returned.append((scope, call))

    def _on_output_gradients(self, returned: Sequence[tuple[Scope, Call | None]], _: object) -> None:
        for scope, call in reversed(returned):
            self._on_output_gradient(scope, call)

    def _on_output_gradient(self, scope: Scope, call: Call | None) -> None:
        if not self._in_backward:
            self._refuse_second_derivatives()
            self._start_backward()
        if call is not None and call.inputs_left > 0:
            scope.calls.add(call)
        self._recomputed.pop(scope, None)
        scope.is_done = False  # it may have been held for another rank, or for another call
        if not scope.in_backward and scope.params:
            params = scope.params if scope.value_in_backward else ()
            self._course.enter(scope, "backward", params)
            self._start_scope_backward(scope, begun=params)

    def _on_hidden_gradient(self, scope: Scope, _: object) -> None:
        if not scope.in_backward:
            scope.hides_outputs = True
            self._on_output_gradient(scope, None)

    def _start_scope_backward(self, scope: Scope, begun: tuple[nn.Parameter, ...]) -> None:
        """Let a scope's backward begin; what was begun to be used stays in use until it is over."""
        if not self._in_backward:
            self._start_backward()
        if not scope.value_in_backward:
            self._store.end_use(begun, in_backward=True)
            self._course.leave(scope, "forward")
            begun = ()
        scope.in_backward, scope.is_done = True, False
        scope.waiting = set(scope.expects)
        self._active[scope] = begun

    def _on_input_gradient(self, call: Call, _: object) -> None:
        call.inputs_left -= 1
        if call.inputs_left == 0:
            call.scope.calls.discard(call)
            if call.scope.in_backward and call.scope.is_over:
                self._course.done(call.scope)

    def hold(self, scope: Scope) -> None:
        """See `BackwardUses`."""
        params = scope.params if scope.value_in_backward else ()
        self._store.begin_use(params)
        self._start_scope_backward(scope, begun=params)
        scope.is_done = True

    def end(self, scope: Scope) -> None:
        """See `BackwardUses`."""
        scope.in_backward = False
        scope.waiting.clear()
        self._recomputed.pop(scope, None)
        params = self._active.pop(scope)
        self._store.end_use(params, in_backward=True)
        self._course.leave(scope, "backward")

    def give_back(self) -> bool:
        """End the use of a scope that recompute has gathered for its backward, which will gather again."""
        if not self._recomputed:
            return False
        self.end(next(iter(self._recomputed)))
        return True

    def in_use(self) -> Iterator[tuple[Scope, Phase]]:
        """See `BackwardUses`."""
        for use in self._stack:
            yield use.scope, "forward"
        for scope in self._active:
            yield scope, "backward"

    def _on_gradient(self, index: int, param: Tensor) -> None:
        gradient = param.grad
        if gradient is None:
            return
        param.grad = None
        if not self._in_backward:
            self._refuse_second_derivatives()
            self._start_backward()
        slot = self._gradients.slots[index]
        for scope in slot.users:
            scope.waiting.discard(slot.key)
            if scope.in_backward and (scope.ends_with_inputs or not scope.waiting) and scope.is_over:
                self._course.done(scope)
        if self._is_recorded:
            self._course.note_gradient(slot.chunk)
        self._gradients.take(slot, gradient)

    def _refuse_second_derivatives(self) -> None:
        if torch.is_grad_enabled():
            self._course.give_up()
            raise ZeroDDPError(
                "Backward with create_graph=True is not supported: second derivatives would read parameters after "
                "they were released."
            )

    def _start_backward(self) -> None:
        if self._scales_loss and not self._announced:
            self._course.give_up()
            raise ZeroDDPError(
                "loss.backward() was called on a model in fp16, whose loss must be scaled first. Call "
                "optimizer.backward(loss), or booster.backward(loss, optimizer), instead."
            )
        self._in_backward = True
        self._is_recorded = self._course.is_recording
        if self._is_recorded:
            self._uncompiled.hold()
        self._gradients.start(reduces=self._reduces)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _finish_backward(self) -> None:
        self._course.finish_backward()
        for scope in self._active:
            scope.in_backward = False
            scope.waiting.clear()
        for scope in self._scopes.values():
            scope.calls.clear()
        self._active.clear()
        self._recomputed.clear()
        self._in_backward = False
        self._uncompiled.release()

    @property
    def is_interrupted(self) -> bool:
        """Whether the last backward never came to its end."""
        return self._in_backward and not _in_autograd()

    def end_interrupted_step(self) -> None:
        """Return to rest if the last backward never came to its end."""
        if self.is_interrupted:
            self.reset()

    def reset(self) -> None:
        """Return to rest after an interrupted step."""
        self._stop_watching()
        self._stack.clear()
        for scope in self._scopes.values():
            scope.depth = 0
            scope.in_backward = False
            scope.waiting.clear()
            scope.calls.clear()
        for slot in self._gradients.slots:
            slot.param.grad = None  # what came between autograd and our hook would be added to the next one
        self._active.clear()
        self._recomputed.clear()
        self._in_backward = False
        self._uncompiled.release()
        self._course.reset()
        self._store.reset()


def _in_autograd() -> bool:
    """Whether this code runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _grad_fns(tensors: Iterable[Tensor]) -> dict[torch.autograd.graph.Node, None]:
    """Return the nodes of the graph that tensors come from."""
    nodes: dict[torch.autograd.graph.Node, None] = {}
    for tensor in tensors:
        if (node := tensor.grad_fn) is not None:
            nodes[node] = None
            # An in-place operation on a view drops the view's own grad_fn, but not its base's.
            if tensor._is_view() and tensor._base is not None and tensor._base.grad_fn is not None:
                nodes[tensor._base.grad_fn] = None
    return nodes
