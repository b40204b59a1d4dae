"""ZeroOptimizer: an optimizer of the user's choice over the shards of a model."""

from __future__ import annotations

import copy
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn, overload

import torch
from torch import Tensor
from torch.profiler import record_function

from gemini_optim import _collectives
from gemini_optim._clip import SUPPORTED_NORMS, clip_coefficient, total_norm
from gemini_optim._errors import ShardLayoutError, UnfinishedStepError
from gemini_optim._one_per_model import replace, replaceable_by
from gemini_optim._pieces import Piece, StateMemory, cut_pieces, list_segments, parts_of, split_pieces
from gemini_optim._scaler import DynamicLossScaler
from gemini_optim._state import SavedStates, gather_states, pieces_with_states
from gemini_optim._step import BegunStep, Failure, agree_on_failure, take_grads
from gemini_optim._update import BlockUpdate
from gemini_optim.interfaces import ShardedModel

__all__ = ["ZeroOptimizer"]

logger = logging.getLogger("gemini_optim")

# These look at a parameter as a whole (or at all of them), so they cannot update a slice of one.
_WHOLE_PARAMETER: Final = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.Muon,
    torch.optim.SparseAdam,
)

_ALL_DROPPED: Final = "The gradients of all ranks are dropped. Go on with the next forward and backward."


class ZeroOptimizer(torch.optim.Optimizer):
    """Train a model whose gradients, master weights and optimizer states are spread over ranks.

    A step takes the averaged gradients of this rank's shards, unscales and clips them, and runs the arithmetic of
    ``optim`` on the master weights block by block. ``optim`` keeps its identity: its parameter groups are those
    of the ``ZeroOptimizer``, so a scheduler may be given either of the two, and a changed hyper-parameter acts at the
    next step. Hooks on either run once per step, save or load. Optimizers that look at a whole parameter at once cannot
    work on shards; torch's own (LBFGS, Muon, Adafactor, SparseAdam) are refused, and others are found out at the first
    step if the shapes of their states tell.

    A step with a gradient that is not finite on any rank is skipped on all: no weight and no state changes. Trainable
    parameters of the model that ``optim`` does not have are not updated and do not count in the norm. State that
    ``optim`` already has is taken over. A model has one optimizer: one that is built later, over the same parameters or
    more of them, replaces it.

    Step, save and load by this one. ``optim`` sees neither gradients nor states: its own ``step()`` finds nothing to
    do, and its ``state_dict()`` is empty. A state that is loaded there is taken over at the next step.

    Args:
        optim: any element-wise optimizer, built on the parameters of the user's model. Frozen parameters may be there;
            like torch, it leaves them alone.
        model: holds the shards. All ranks construct, step, save and load alike.
        initial_scale: see ``DynamicLossScaler``, as the next five; they matter if ``model.scales_loss``.
        min_scale: see ``DynamicLossScaler``.
        max_scale: see ``DynamicLossScaler``.
        growth_factor: see ``DynamicLossScaler``.
        backoff_factor: see ``DynamicLossScaler``.
        growth_interval: see ``DynamicLossScaler``.
        hysteresis: see ``DynamicLossScaler``.
        max_norm: total norm to which the unscaled gradients are clipped, as ``torch.nn.utils.clip_grad_norm_`` does;
            0.0 leaves them alone.
        norm_type: 2.0 or ``math.inf``.
        block_numel: elements that are updated at a time, but for shards that our Adams can update all at once where
            they are (``model.is_resident``, nothing to cast or to scale). The scratch buffer has this many elements on
            every device that holds master weights, for each dtype of those; a block should stay in cache.
        verbose: log every skipped step.

    Raises:
        ValueError: an argument is out of bounds, ``optim`` is not element-wise, or it has trainable parameters that
            the model does not manage, or lacks some of an optimizer that the model already has.
        UnfinishedStepError: that optimizer has to finish a step.
        ShardLayoutError: the model's shards do not hold every element of a parameter exactly once.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        model: ShardedModel,
        *,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        max_scale: float = 2**32,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        block_numel: int = 2**20,
        verbose: bool = False,
    ) -> None:
        self.check(optim, max_norm=max_norm, norm_type=norm_type)
        if block_numel < 1:
            raise ValueError(f"block_numel must be at least 1 element, got {block_numel}.")
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.verbose = verbose
        self.loss_scaler = DynamicLossScaler(
            initial_scale=initial_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        self._optim = optim
        self._model = model
        self._block_numel = block_numel
        self._grad_norm: float | None = None
        self._stepped = False
        self._warned = False
        self._begun: BegunStep | None = None
        self._is_replaced = False
        others = replaceable_by(self)
        # The way torch restores an optimizer: it makes this one complete without copying the groups, whose dicts
        # (and their list) stay those of `optim`.
        self.__setstate__({"defaults": optim.defaults, "state": optim.state, "param_groups": optim.param_groups})
        self._pieces: list[Piece] = []
        self._lay_out()
        replace(others, self)

    @staticmethod
    def check(optim: torch.optim.Optimizer | None, *, max_norm: float = 0.0, norm_type: float = 2.0) -> None:
        """Raise what the constructor raises for these, while the model is not sharded yet and can still be used.

        Args:
            optim: the user's optimizer; None for the settings alone.
            max_norm: as for the constructor.
            norm_type: as for the constructor.

        Raises:
            ValueError: ``optim`` is not element-wise, or a setting is out of bounds.
        """
        if isinstance(optim, ZeroOptimizer):
            raise ValueError("optim is a ZeroOptimizer already; give the optimizer that it was built on.")
        if isinstance(optim, _WHOLE_PARAMETER):
            raise ValueError(
                f"{type(optim).__name__} looks at whole parameters, which shards do not hold. Use an element-wise "
                "optimizer, such as HybridAdam, torch.optim.AdamW or torch.optim.SGD."
            )
        if not max_norm >= 0.0:
            raise ValueError(f"max_norm must be positive, or 0.0 for no clipping; got {max_norm}.")
        if norm_type not in SUPPORTED_NORMS:
            raise ValueError(f"norm_type must be 2.0 or math.inf, got {norm_type}.")

    @property
    def loss_scale(self) -> float:
        """What ``backward`` multiplies the loss by; 1.0 unless the model needs a loss scale."""
        return self.loss_scaler.scale if self._model.scales_loss else 1.0

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        return self._optim

    def backward(self, loss: Tensor) -> None:
        """Run backward from the loss times the loss scale, a product in fp32.

        The gradient of the loss itself is the scale. So a loss in fp16 skips steps until the scale is within fp16's
        range, 2**15 at most; a loss in fp32 does not.

        Args:
            loss: a scalar; this rank's loss, which the model averages over ranks through the gradients.

        Raises:
            TypeError: ``loss`` is not a tensor.
            ValueError: ``loss`` has more than one element.
            UnfinishedStepError: see `step`, as in all that raise it.
        """
        self.check_finished()
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward() takes the loss as a tensor, got {type(loss).__name__}.")
        if loss.numel() != 1:
            raise ValueError(
                f"backward() takes a scalar loss, got shape {tuple(loss.shape)}. Reduce it first, as by loss.mean()."
            )
        self._model.backward(loss.float() * self.loss_scale if self._model.scales_loss else loss)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters, or skip on all ranks if a gradient of any is not finite.

        After the update ranks wait to hear whether all have done it, unless the model is resident and all states are
        there: then nothing can be refused on any. An error there all the same, in a hook, say, is raised on its own
        rank, and the model is not to be trained any further.

        Args:
            closure: evaluates the model, calls ``backward`` and returns the loss.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            RuntimeError: another optimizer has replaced this one, or an error has befallen another rank.
            ValueError: the members of ``param_groups`` were changed by hand; those of loaded states do not fit.
            UnfinishedStepError: memory for states was refused, or new weights did not get to where they rest, on this
                rank or another; every rank raises. Weights and states are as if the step had stopped for a while: the
                next call, on every rank, finishes it, without ``closure``. Until then gradients can be neither computed
                nor dropped, and nothing can be saved or loaded.
        """
        if self._is_replaced:
            raise RuntimeError("Another optimizer was built on this one's model and has replaced it. Step that one.")
        begun, self._begun = self._begun, None
        loss = None if begun is None else begun.loss
        if closure is not None and begun is None:
            with torch.enable_grad():
                loss = closure()
        with record_function("gemini::step"):
            step = self._begin(loss) if begun is None else begun
            if step is not None:
                self._go_on(step)
        # A scheduler built on the user's optimizer asks whether that one has stepped.
        self._optim._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers set it, untyped
        return loss

    def _begin(self, loss: float | None) -> BegunStep | None:
        """Return the step that is to be taken, or None if all ranks skip it."""
        self._adopt_users_changes()
        shards = self._model.shards
        grads, error, is_lost = take_grads(shards)
        self._memory.follow(self._pieces, self._optim.param_groups)
        active = self._active(grads)
        parts = parts_of(active, grads)
        # No rank goes on unless all have gradients of the same chunks; where one has an error, all look why.
        tag = 0 if error is not None else 1 + zlib.crc32(bytes(map(grads.__contains__, range(len(shards))))) % 2**20
        norm, alike, may_fail = total_norm(
            parts,
            self.norm_type,
            self._model.process_group,
            exact=self.max_norm > 0.0,
            tag=tag,
            may_fail=not self._model.is_resident or self._blocks.takes_memory(active, parts),
        )
        if error is not None or not alike:
            self._lose_step(error, is_lost)
        scale = self.loss_scale
        self._grad_norm = norm / scale
        if self._model.scales_loss:
            self.loss_scaler.update(not math.isfinite(norm))
        if not math.isfinite(norm):
            self._skip()
            return None
        self._stepped = True
        clip = clip_coefficient(self._grad_norm, self.max_norm) if self.max_norm else 1.0
        step = BegunStep(
            shards,
            self._blocks,
            list(grads),
            active,
            parts,
            multiplier=clip / scale,
            may_fail=may_fail,
            loss=loss,
        )
        self._call_hooks(self._optim._optimizer_step_pre_hooks)
        return step

    def _lose_step(self, error: Exception | None, is_lost: bool) -> NoReturn:
        """Raise on every rank, for a gradient could not be given on one of them, or only some have one. Collective."""
        failure, text = agree_on_failure(error, can_go_on=not is_lost, process_group=self._model.process_group)
        if failure != "repeatable":
            # The step is lost on this rank as well: a later one must not update a chunk on some ranks alone.
            for shard in self._model.shards:
                shard.discard()
            text = f"{text or 'Only some ranks have a gradient of a chunk: a backward has failed.'} {_ALL_DROPPED}"
            if error is not None:
                error.add_note(_ALL_DROPPED)
        raise error or RuntimeError(f"The ranks cannot begin the step. {text}")

    def _go_on(self, step: BegunStep) -> None:
        """Finish a step. [Note: A step that fails]."""
        error: Exception | None = None
        try:
            step.run()
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        # Where nothing can fail, nobody waits to hear it. What does all the same is final: the others are past it.
        can_go_on = step.may_fail and step.can_go_on and isinstance(error, OSError | RuntimeError)
        group = self._model.process_group if step.may_fail else None
        failure, text = agree_on_failure(error, can_go_on=can_go_on, process_group=group)
        if failure == "repeatable":
            self._begun, step.failure = step, text
            raise UnfinishedStepError(_what_is_left(step)) from error
        self._raise_together(failure, text, error)
        self._blocks.end_step()
        self._call_hooks(self._optim._optimizer_step_post_hooks)

    def _raise_together(self, failure: Failure, text: str, error: Exception | None) -> None:
        """Raise this rank's error, or else say what those of others are."""
        if error is not None:
            raise error
        if failure != "none":
            raise RuntimeError(f"Another rank failed in the step. {text}")

    def check_finished(self) -> None:
        """Raise if a step has failed that another call of ``step`` can finish.

        Raises:
            UnfinishedStepError: there is one; the message says what has failed and what to do.
        """
        if self._begun is not None:
            raise UnfinishedStepError(_what_is_left(self._begun))

    def _call_hooks(self, hooks: Mapping[int, Callable[..., object]]) -> None:
        """Call the hooks of the user's optimizer. [Note: One step, many calls]."""
        for hook in list(hooks.values()):
            hook(self._optim, (), {})

    def _active(self, grads: Mapping[int, Tensor]) -> list[Piece]:
        """Return the pieces in shards that have gradients, cut so that they hold no parameter without one."""
        unused: set[Tensor] = set()
        for index in grads:
            unused.update(self._model.shards[index].without_gradient())
        active = [piece for piece in self._pieces if piece.shard_index in grads]
        if not unused:
            return active
        numbers = {number for number, param in enumerate(self._params()) if param in unused}
        self._pieces = list(split_pieces(self._pieces, lambda part: part.param_index in numbers, self._memory))
        return [
            piece
            for piece in self._pieces
            if piece.shard_index in grads and piece.segments[0].param_index not in numbers
        ]

    def get_grad_norm(self) -> float | None:
        """Return the norm of the unscaled, unclipped gradients of the last step, over all ranks.

        Infinite if the step was skipped; None before the first one.
        """
        return self._grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used.

        Args:
            set_to_none: has no effect: dropped gradients take no memory either way.
        """
        del set_to_none
        self.check_finished()
        for shard in self._model.shards:
            shard.discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that the model manages, on every rank, before the first step.

        Raises:
            RuntimeError: the optimizer has stepped or loaded a state.
            ValueError: the model does not manage the parameters.
        """
        if self._stepped:
            raise RuntimeError("add_param_group() must come before the first step and before load_state_dict().")
        self._optim.add_param_group(param_group)
        try:
            self._lay_out()
        except Exception:
            self._optim.param_groups.pop()
            raise

    def state_dict(self, *, only_rank_0: bool = True) -> dict[str, Any]:
        """Gather the state in torch's format: full shapes, in the memory of the CPU. Collective.

        Args:
            only_rank_0: other ranks get an empty ``"state"``, and need no memory for it; their hooks see it so.

        Returns:
            ``state`` and ``param_groups`` as ``optim`` alone would give them (floating-point states in the dtype of the
            master weights), and ``loss_scaler``.
        """
        for handle in self._handles:
            for pre_hook in handle._optimizer_state_dict_pre_hooks.values():
                pre_hook(handle)
        state_dict = {
            "state": dict(self.iter_states(only_rank_0=only_rank_0)),
            "param_groups": self.packed_param_groups(),
            "loss_scaler": self.loss_scaler.state_dict(),
        }
        for handle in self._handles:
            for post_hook in handle._optimizer_state_dict_post_hooks.values():
                changed = post_hook(handle, state_dict)
                state_dict = state_dict if changed is None else changed
        return state_dict

    def iter_states(self, *, only_rank_0: bool = True) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield what ``state_dict()["state"]`` holds, one parameter at a time. Collective: exhaust it on every rank.

        Args:
            only_rank_0: other ranks send their part and yield nothing.
        """
        self.check_finished()
        self._check_members()
        self._memory.follow(self._pieces, self._optim.param_groups)
        return gather_states(self._pieces, self._params(), self._model.process_group, only_rank_0=only_rank_0)

    def packed_param_groups(self) -> list[dict[str, Any]]:
        """Return ``state_dict()["param_groups"]``: hyper-parameters, and parameters by number. Not collective."""
        packed = []
        first = 0
        for group in self._optim.param_groups:
            options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            packed.append({**options, "params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state in torch's format, saved by any number of ranks or by ``optim``'s own class.

        Collective: every rank gives the whole dict. The loss scaler stays as it is if the dict has none. Nothing
        changes if an error is raised.

        Raises:
            ValueError: groups, parameters or shapes differ from those of this optimizer, or between ranks.
        """
        self.check_finished()
        self._check_members()
        given = dict(state_dict)
        for handle in self._handles:
            for pre_hook in handle._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(handle, given)
                given = given if changed is None else changed
        self._load(given)
        for handle in self._handles:
            for post_hook in handle._optimizer_load_state_dict_post_hooks.values():
                post_hook(handle)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        groups = self._optim.param_groups
        saved_groups = copy.deepcopy(list(state_dict["param_groups"]))
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved_groups]:
            raise ValueError(
                f"The saved groups have {[len(group['params']) for group in saved_groups]} parameters, this "
                f"optimizer's have {[len(group['params']) for group in groups]}."
            )
        numbers = [number for group in saved_groups for number in group["params"]]
        # Other writers may number parameters differently, as torch allows.
        position = {number: index for index, number in enumerate(numbers)}
        states = {position.get(number, number): state for number, state in state_dict["state"].items()}
        counts = _collectives.all_gather_objects(len(states), self._model.process_group)
        if len(set(counts)) > 1:
            raise ValueError(
                f"The ranks were given the states of {counts} parameters. Give every rank the whole state dict, as "
                "by state_dict(only_rank_0=False) or by loading the file on each rank."
            )
        saved = self._check_states(states)
        if (scaler := state_dict.get("loss_scaler")) is not None:
            self.loss_scaler.load_state_dict(scaler)
        for group, saved_group in zip(groups, saved_groups, strict=True):
            group.update((key, value) for key, value in saved_group.items() if key != "params")
        self._install_states(saved)

    def clip_grad_norm(self, *args: object) -> NoReturn:
        """Refuse: gradients are clipped inside of ``step``, by ``max_norm``."""
        self._refuse_clipping(*args)

    def clip_grad_by_norm(self, *args: object) -> NoReturn:
        """Refuse: gradients are clipped inside of ``step``, by ``max_norm``."""
        self._refuse_clipping(*args)

    def clip_grad_by_value(self, *args: object) -> NoReturn:
        """Refuse: gradients are clipped inside of ``step``, by ``max_norm``."""
        self._refuse_clipping(*args)

    def _refuse_clipping(self, *_: object) -> NoReturn:
        raise NotImplementedError(
            "Sharded gradients are clipped by their total norm inside of step(). Set max_norm, in the constructor or "
            "as an attribute, instead."
        )

    @property
    def _handles(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """The two on which a user may have registered hooks."""
        return self._optim, self

    def _params(self) -> list[Tensor]:
        return [param for group in self._optim.param_groups for param in group["params"]]

    def _lay_out(self) -> None:
        """Number the parameters, find their slices in the shards and cut pieces. Collective."""
        params = self._params()
        owners = [index for index, group in enumerate(self._optim.param_groups) for _ in group["params"]]
        places = {param: (owners[index], index) for index, param in enumerate(params)}
        segments = list_segments(self._model.shards, places.get)
        self._check_coverage(params, [(part.param_index, part.numel) for part in segments])
        self._segments = segments
        self._members = [list(group["params"]) for group in self._optim.param_groups]
        self._memory = StateMemory(self._model.shards, segments)
        self._pieces = cut_pieces(segments, self._block_numel)
        self._blocks = BlockUpdate(self._optim, self._memory, self._block_numel)
        self._adopt_users_changes()

    def _check_coverage(self, params: list[Tensor], held: Iterable[tuple[int, int]]) -> None:
        """Compare what all ranks hold of each parameter with its size."""
        local = [0.0] * len(params)
        for index, numel in held:
            local[index] += numel
        covered = _collectives.all_reduce_numbers(local, "sum", self._model.process_group)
        # A frozen parameter may well be managed without a shard that could be updated.
        missing = [i for i, p in enumerate(params) if p.requires_grad and p.numel() and not covered[i]]
        if missing:
            raise ValueError(
                f"{len(missing)} of the optimizer's {len(params)} parameters are not managed by the model, such as "
                f"number {missing[0]} of shape {tuple(params[missing[0]].shape)}. Build the optimizer on the "
                "parameters of the model that is passed beside it."
            )
        for index, param in enumerate(params):
            if covered[index] not in (0, param.numel()):
                raise ShardLayoutError(
                    f"The shards of all ranks hold {covered[index]:.0f} elements of parameter {index}, which has "
                    f"{param.numel()}."
                )

    def _adopt_users_changes(self) -> None:
        """Follow what the user did to their own handle: a state loaded there, or groups replaced by that.

        Raises:
            ValueError: see `_check_members`.
        """
        self._check_members()
        self.param_groups = self._optim.param_groups
        if not self._optim.state:
            return
        numbers = {param: index for index, param in enumerate(self._params())}
        loaded = [param for param in self._optim.state if param in numbers]
        if loaded:
            states = {numbers[param]: self._optim.state.pop(param) for param in loaded}
            self._install_states(self._check_states(states))

    def _check_members(self) -> None:
        """Raise if the groups do not hold the parameters that they held when those were laid out.

        Raises:
            ValueError: a parameter was added, removed or moved to another group by hand.
        """
        now = [list(map(id, group["params"])) for group in self._optim.param_groups]
        if now != [list(map(id, params)) for params in self._members]:
            raise ValueError(
                f"The parameter groups had {[len(params) for params in self._members]} parameters when the optimizer "
                f"was built, and have {[len(params) for params in now]} now, or others, or in another order. Their "
                "states lie in shards by group: change groups before ZeroOptimizer is built, or add one by its "
                "add_param_group(); hyper-parameters may change at any time."
            )

    def _check_states(self, states: Mapping[int, Mapping[str, object]]) -> SavedStates:
        ours = isinstance(self._optim, torch.optim.Adam) or type(self._optim).__module__.startswith("torch.optim")
        return SavedStates(states, self._params(), steps_are_tensors=ours)

    def _install_states(self, saved: SavedStates) -> None:
        self._stepped = True
        self._pieces = pieces_with_states(
            self._segments, self._block_numel, saved, self._memory, self._optim.param_groups
        )

    def _skip(self) -> None:
        for shard in self._model.shards:
            shard.discard()
        if self._model.scales_loss:
            if self.verbose:
                logger.warning("Gradient overflow: step skipped, loss scale is now %g.", self.loss_scale)
        elif self.verbose or not self._warned:
            self._warned = True
            logger.warning("A gradient is not finite: step skipped on every rank.")


def _what_is_left(step: BegunStep) -> str:
    return (
        f"The step has failed and is not finished. {step.failure} Nothing is lost. Remove the cause, such as a full "
        "tier, and call step() again on every rank: it goes on where it failed, from the same gradients. Until then "
        "some weights are older than others, and nothing else may be done with them."
    )
