"""A training step run on paper: which parameters it uses when, and the memory that it takes beside them. Needs torch.

``pip install gemini-placement[tracer]``
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

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
    recorder = _Recorder()
    with contextlib.ExitStack() as stack:
        for handle in recorder.hooks(model, state):
            stack.callback(handle.remove)
        stack.enter_context(fake_mode)
        stack.enter_context(recorder)
        try:
            output = torch.func.functional_call(model, state, args, kwargs)
            total = loss(output) if loss is not None else _loss_of(output)
            del output
            total.backward()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"{type(model).__name__} looks at values ({error}), which a run without memory does not have. Leave "
                "memstats out: the first step then records the order of use."
            ) from error
    return recorder.stats()


def _loss_of(output: object) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if not isinstance(found, Tensor):
        raise ValueError(f"The output is a {type(output).__name__} without a loss; give loss=, which makes one of it.")
    return found.sum()


class _Recorder(TorchDispatchMode):
    """Counts the bytes of what operations return as long as it lives, and notes which modules are entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._used = self._peak = 0
        self._accesses: list[tuple[Phase, tuple[str, ...]]] = []
        self._peaks: list[int] = []

    def stats(self) -> MemStats:
        """Return the record."""
        peaks = [*self._peaks[1:], self._peak]
        return MemStats(
            accesses=tuple(
                AccessStats(phase=phase, params=params, non_model_bytes=peak)
                for (phase, params), peak in zip(self._accesses, peaks, strict=True)
            )
        )

    def hooks(self, model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Hook the modules that own parameters, and the parameters of a run.

        Args:
            model: the model.
            state: its parameters and buffers in the run; they are no memory beside the model states.
        """
        names = {param: name for name, param in model.named_parameters()}
        for module in model.modules():
            own = tuple(names[param] for param in module.parameters(recurse=False))
            if own:
                yield module.register_forward_pre_hook(lambda *_, own=own: self._enter(own))
                # Backward of an embedding does not read its values.
                read = () if type(module) is nn.Embedding and module.max_norm is None else own
                yield module.register_forward_hook(lambda *call, read=read: self._hook_outputs(read, call[-1]))
        for tensor in state.values():
            self._known.add(tensor.untyped_storage())
            if tensor.requires_grad:
                yield tensor.register_post_accumulate_grad_hook(_drop_gradient)

    def _enter(self, params: tuple[str, ...]) -> None:
        recomputes = torch._C._current_graph_task_id() != -1
        self._access("backward" if recomputes else "forward", params)

    def _access(self, phase: Phase, params: tuple[str, ...]) -> None:
        if self._accesses and self._accesses[-1] == (phase, params):
            return  # recompute, and the backward that it was for; or one of several outputs
        self._accesses.append((phase, params))
        self._peaks.append(self._peak)
        self._peak = self._used

    def _hook_outputs(self, params: tuple[str, ...], output: object) -> None:
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: self._access("backward", params))

    def __torch_dispatch__(  # type: ignore[no-untyped-def] # torch's signature
        self, func, types, args=(), kwargs=None
    ):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        amount = storage.nbytes()
        self._used += amount
        self._peak = max(self._peak, self._used)
        weakref.finalize(storage, self._give_back, amount).atexit = False

    def _give_back(self, amount: int) -> None:
        self._used -= amount


def _drop_gradient(param: Tensor) -> None:
    """Forget a gradient: where it goes is the business of the model states."""
    param.grad = None
