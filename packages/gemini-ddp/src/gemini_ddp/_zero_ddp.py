"""The wrapper that a user trains."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_ddp._debug import debug_is_asked_for
from gemini_ddp._engine import Engine
from gemini_ddp._errors import ZeroDDPError
from gemini_ddp._ranks import Ranks
from gemini_ddp._tensors import map_tensors
from gemini_ddp.interfaces import ChunkStore, Planner

ChunkT = TypeVar("ChunkT", bound=Hashable)

_MARK = "_gemini_ddp_wrapped"


class ZeroDDP(nn.Module, Generic[ChunkT]):
    """Runs an unmodified module whose parameters lie in a chunk store.

    The wrapped model is called, put into ``train`` or ``eval`` mode and iterated like the module itself: parameters,
    buffers and state have the module's own names, and attributes that the wrapper does not have are the module's.
    Gradients do not appear in ``param.grad``; the store holds them, reduced, for an optimizer over its shards.

    Args:
        module: the model; every parameter that is to be sharded is managed by ``store`` already.
        store: holds the parameters.
        planner: turns the first step's trace into a plan; None gathers on demand.
        process_group: the ranks that share the store; None for a single rank.
        leaf_modules: classes, or paths in the model, of modules that are gathered as one with all modules within
            them. Ranks may use different ones of those, as in a mixture of experts.
        scatter_after_inference: whether a forward without gradients leaves nothing gathered. Otherwise what it gathered
            stays, as far as there is room, until a forward with gradients.
        debug: log each gather, release and reduction (logger ``gemini_ddp``, level INFO), and let the ranks compare
            where they are at each of them, so that those that part are named at once; by default whether the
            environment has ``GEMINI_DEBUG=1``.
        input_dtype: floating inputs are cast to it; None leaves them.
        scales_loss: whether the loss must be scaled (fp16): ``loss.backward()`` raises, `backward` within
            an optimizer that scales is the way.
        force_outputs_fp32: cast floating outputs to fp32.

    Raises:
        ValueError: the module is wrapped already, or has no module that ``leaf_modules`` names.
    """

    def __init__(
        self,
        module: nn.Module,
        store: ChunkStore[ChunkT],
        planner: Planner[ChunkT] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        leaf_modules: Collection[type[nn.Module] | str] = (),
        scatter_after_inference: bool = True,
        debug: bool | None = None,
        input_dtype: torch.dtype | None = None,
        scales_loss: bool = False,
        force_outputs_fp32: bool = False,
    ) -> None:
        if getattr(module, _MARK, False) or isinstance(module, ZeroDDP):
            raise ValueError(f"This {type(module).__name__} is wrapped already; wrap a module once.")
        super().__init__()
        self.module = module
        self.store = store
        self.scales_loss = scales_loss
        self._input_dtype = input_dtype
        self._force_outputs_fp32 = force_outputs_fp32
        self._ranks = Ranks(process_group)
        self._engine = Engine(
            module,
            store,
            planner,
            self._ranks,
            leaf_modules=leaf_modules,
            scatter_after_inference=scatter_after_inference,
            debug=debug_is_asked_for() if debug is None else debug,
            scales_loss=scales_loss,
        )
        self._handles = [module.register_state_dict_pre_hook(_refuse_placeholders)]
        setattr(module, _MARK, True)
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with inputs and outputs cast as asked for."""
        output = self._call(self.module, args, kwargs)
        return map_tensors(output, _to_fp32) if self._force_outputs_fp32 else output

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._input_dtype is not None:
            args, kwargs = map_tensors((args, kwargs), self._cast_input)  # type: ignore[misc] # same structure
        with self._engine.unwinding():
            return function(*args, **kwargs)

    def _cast_input(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._input_dtype) if tensor.is_floating_point() else tensor

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module's ``generate``; a transformers model goes on until it is done on every rank.

        A rank whose sequences have ended early calls the model on, for the others gather with it.
        """
        if self._ranks.world_size > 1 and kwargs.get("synced_gpus") is None and _can_wait_for_ranks(self.module):
            kwargs["synced_gpus"] = True
        return self._call(generate, args, kwargs)

    def backward(self, loss: Tensor) -> None:
        """Run backward and finish all reductions.

        Args:
            loss: a scalar, multiplied by the loss scale where the model needs one.
        """
        with self._engine.scaled_backward():
            loss.backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of the backwards inside on this rank; the next one outside reduces the sum.

        That sends fewer bytes than reducing after each backward, and takes the memory of a full, unsharded gradient in
        the working dtype; without it, sums lie in shards. Every rank enters and leaves alike.
        """
        with self._engine.no_sync():
            yield

    def unwrap(self) -> nn.Module:
        """Return the user's module."""
        return self.module

    def memory_usage(self) -> Mapping[str, Mapping[str, int | None]]:
        """Return bytes of model states ``used``, ``peak`` and ``capacity`` by tier."""
        return self.store.memory_usage()

    @property
    def is_interrupted(self) -> bool:
        """Whether the last backward never came to its end; the next forward forgets it."""
        return self._engine.is_interrupted

    @property
    def deviations(self) -> int:
        """Accesses that came out of the recorded order so far."""
        return self._engine.deviations

    def watch_next_step(self) -> None:
        """Let the next training forward find weights that are used outside the module that owns them.

        The first does so by itself. A branch that it did not take may use such a weight later, and finds NaN; call this
        once a loss or gradient was not finite, and the branch is right from the next time on. Every rank calls it.
        """
        self._engine.watch_next_step()

    def reset(self) -> None:
        """Return to rest after an interrupted step, dropping its gradients; the next forward does so by itself."""
        self._engine.reset()

    def detach(self) -> nn.Module:
        """Take the hooks off and return the module; its parameters stay in the store."""
        self._engine.remove_hooks()
        for handle in self._handles:
            handle.remove()
        setattr(self.module, _MARK, False)
        return self.module

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a plain copy of the module, not wrapped, with full values on the CPU; every rank calls it.

        It has the working dtype, and may be called, trained or wrapped on its own: as a reference or an average, say.
        Its parameters have the classes and the attributes of the model's.
        """
        managed = [param for param in self.module.parameters() if param in self.store]
        for param in managed:
            value = self.store.full_value(param).cpu()
            memo[id(param)] = Tensor._make_subclass(type(param), value, param.requires_grad)
        for param in managed:
            vars(memo[id(param)]).update(copy.deepcopy(vars(param), memo))
        # A copied handle removes the copied hook.
        copied, handles = copy.deepcopy((self.module, [*self._engine.handles, *self._handles]), memo)
        for handle in handles:
            handle.remove()
        setattr(copied, _MARK, False)
        plain: nn.Module = copied.cpu()
        return plain

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled, for parameters lie in shards.

        Raises:
            ZeroDDPError: always.
        """
        del protocol
        raise ZeroDDPError(
            "A wrapped model cannot be pickled: its parameters lie in shards. Save its state_dict(), or "
            "booster.save_model(wrapped_model, ...). copy.deepcopy(wrapped_model) makes a plain module of it."
        )

    # -- the module's own face ----------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            attribute = getattr(super().__getattr__("module"), name)
            return functools.partial(self._generate, attribute) if name == "generate" else attribute

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters under their own names."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's buffers under their own names."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Raise: gradients lie in the store, where the optimizer drops them.

        Raises:
            ZeroDDPError: always.
        """
        del set_to_none
        raise ZeroDDPError("The model's gradients lie in shards. Call optimizer.zero_grad() instead of the model's.")

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:  # noqa: ARG002
        raise ZeroDDPError(
            "A wrapped model cannot be moved or cast: its parameters lie in chunks. Move or cast the module before "
            "it is wrapped, or choose the precision and the device of the wrapper."
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def named_full_values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the module's ``state_dict`` with its full value, one at a time, in its order.

        A tied parameter comes under each of its names. Every rank iterates to the end; chunks are gathered on the
        way and released again, so that no more than one chunk and one tensor are there at a time.
        """
        for name, entry in self.module.state_dict(keep_vars=True).items():
            if isinstance(entry, Tensor):
                managed = isinstance(entry, nn.Parameter) and entry in self.store
                yield name, self.store.full_value(entry) if managed else entry.detach().clone()

    def state_dict(  # type: ignore[override] # positional destination has long been deprecated in torch
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the full state on the CPU of every rank, in the working dtype; every rank calls it.

        Args:
            destination: a mapping to fill; by default a new one.
            prefix: put before every name.
            keep_vars: not supported: full values are copies.

        Raises:
            ValueError: ``keep_vars`` is set.
        """
        if keep_vars:
            raise ValueError("keep_vars=True is not possible: full values are copies of what lies in shards.")
        target: dict[str, Any] = OrderedDict() if destination is None else destination
        shared: dict[Tensor, Tensor] = {}
        values = self.named_full_values()
        for name, entry in self.module.state_dict(keep_vars=True).items():
            if not isinstance(entry, Tensor):  # what a module's get_extra_state returns
                target[prefix + name] = entry
                continue
            _, value = next(values)
            if entry not in shared:
                shared[entry] = value.cpu()
            target[prefix + name] = shared[entry]
        return target

    def load_state_dict(  # type: ignore[override] # assign would replace managed parameters
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> torch.nn.modules.module._IncompatibleKeys:
        """Overwrite parameters and buffers from full values, the same on every rank.

        Args:
            state_dict: full values by the module's own names.
            strict: raise for missing and unexpected names.

        Raises:
            RuntimeError: names or shapes do not match; the message lists all of them and nothing was loaded.
        """
        self._engine.end_interrupted_step()
        entries = self.module.state_dict(keep_vars=True)
        missing = [name for name in entries if name not in state_dict]
        unexpected = [name for name in state_dict if name not in entries]
        shapes = [
            f"{name}: {tuple(given)} given, {tuple(entry.shape)} wanted"
            for name, entry in entries.items()
            if name in state_dict and not _is_extra(name) and (given := state_dict[name].shape) != entry.shape
        ]
        problems = [*(f"missing: {name}" for name in missing), *(f"unexpected: {name}" for name in unexpected)]
        if shapes or (strict and problems):
            found = "\n  ".join([*(problems if strict else []), *shapes])
            raise RuntimeError(f"The state does not fit {type(self.module).__name__}:\n  {found}")
        with torch.no_grad():
            for name, entry in entries.items():
                if name not in state_dict:
                    continue
                if _is_extra(name):
                    self.module.get_submodule(name.rpartition(".")[0]).set_extra_state(state_dict[name])
                elif isinstance(entry, nn.Parameter) and entry in self.store:
                    self.store.load_value(entry, state_dict[name])
                else:
                    entry.copy_(state_dict[name])
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def _refuse_placeholders(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Let nobody save placeholders for parameters; who asks for the entries themselves knows what they are."""
    del prefix
    if not keep_vars and any(p.untyped_storage().nbytes() < p.numel() * p.element_size() for p in module.parameters()):
        raise ZeroDDPError(
            f"The parameters of this {type(module).__name__} lie in shards: its own state_dict() would hold "
            "placeholders. Call state_dict() of the wrapped model, or save with booster.save_model(wrapped_model, ...)."
        )


def _is_extra(name: str) -> bool:
    """Whether an entry of a state is what a module's ``get_extra_state`` returned: a tensor, or anything else."""
    return name.rpartition(".")[2] == torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def _can_wait_for_ranks(module: nn.Module) -> bool:
    """Whether a transformers model generates here, or one within what PEFT puts around it."""
    methods = (getattr(child, "generate", None) for child in module.modules())
    return any("synced_gpus" in inspect.signature(method).parameters for method in methods if callable(method))


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
