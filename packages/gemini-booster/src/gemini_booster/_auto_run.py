"""Automatic placement over a run: room for activations before they are known, when they are, and when they grow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from gemini_booster._first_step import FirstStep
from gemini_booster._shards import ChunkShard
from gemini_chunk import Chunk, ChunkManager, TierFullError, TierName
from gemini_placement import AutoPlacementPolicy, ChunkPlacement, MemStats, Placement, PlacementError, Plan
from gemini_placement.interfaces import Trace

logger = logging.getLogger("gemini_booster")

# What a step takes beyond resting bytes may be foretold too low by this share.
_INACCURACY = 0.05

# In how many steps model states are given more of the device before anything was measured, or less once that is.
_BUDGETS = 20

Exchange = Callable[[Sequence[int]], list[list[int]]]


def device_total(asked: int | None) -> int | None:
    """Return the bytes of the device that a run may take: as asked, or all of an accelerator's; None for no limit."""
    if asked is None and torch.accelerator.is_available():
        return int(torch.accelerator.get_memory_info()[1])
    return asked


class AutoRun:
    """Divides the device between model states and activations.

    Of the device's bytes, model states get at first what ``warmup_non_model_data_ratio`` leaves, or the least that they
    need. The first training step shows what everything else takes, on the rank where that is most; then they get the
    rest, and come to the device as far as there is room. A step whose inputs are larger is taken to need more in the
    same measure: optimizer states and parameters leave the device for good as far as that takes, and less stays
    gathered.

    [Note: Gradients that stay]
    A step of one backward has its reduced gradients in the place of the parameters. Where gradients of several are
    summed, that takes memory beside the optimizer states; backwards under ``no_sync`` keep gradients of full size on
    the device. Neither is foretold, unless by the setting for the former, so a forward that finds them, or is called
    under ``no_sync``, lets them be counted from then on. At once optimizer states can make room, for only parameters
    have gradients in their place; those follow between steps.

    Args:
        policy: places the chunks.
        manager: has the chunks; the capacity of its device tier is set to what model states may take.
        total: bytes of the device, None without a limit.
        memstats: a record of a step; None lets the first step be recorded.

    Attributes:
        memstats: the record, once there is one.
        placement: where chunks rest, or will from the next forward that begins a step.
        first_step: records the first training step; None once that is done, or where nothing is to be recorded.
    """

    def __init__(
        self, policy: AutoPlacementPolicy, manager: ChunkManager, total: int | None, memstats: MemStats | None
    ) -> None:
        self.memstats = memstats
        self._policy = policy
        self._manager = manager
        self._device = manager.tier("device")
        self._total = total
        self._shards: Sequence[ChunkShard] = ()
        self._exchange: Exchange = lambda numbers: [list(numbers)]
        self.first_step: FirstStep | None = None
        self._is_moving = self._has_warned = False
        self._elements = self._budget = self._slack = self._local_bytes = 0
        self.placement = self._place()

    def start(self, module: nn.Module, shards: Sequence[ChunkShard], exchange: Exchange) -> None:
        """Be ready for the first step.

        Args:
            module: the model.
            shards: of its trainable chunks, in order.
            exchange: returns every rank's numbers.
        """
        self._shards = shards
        self._exchange = exchange
        if self.memstats is None:
            self.first_step = FirstStep(module, self._device)

    def _place(self) -> Placement[Chunk]:
        if self._total is None:
            return self._try(None)
        if self.memstats is not None:
            self._budget = self._policy.model_bytes(self._total, self.memstats)
            try:
                return self._try(self._budget)
            except PlacementError as error:
                raise self._refusal(error.needed, "A step takes") from None
        budget = max(1, self._policy.model_bytes(self._total))
        while budget < self._total:
            try:
                placement = self._try(budget)
            except PlacementError:
                budget += max(1, self._total // _BUDGETS)
            else:
                # A step that nothing was foretold of may take more than its placement says.
                self._device.capacity = self._total
                return placement
        return self._try(self._total)

    def _try(self, budget: int | None) -> Placement[Chunk]:
        """Place the chunks with a capacity of the device that stays, if they fit."""
        self._device.capacity = budget
        return self._policy.place(
            self._manager.chunks, capacities=self._capacities, world_size=self._manager.world_size
        )

    @property
    def _capacities(self) -> dict[TierName, int | None]:
        return {name: tier.capacity for name, tier in self._manager.tiers.items()}

    def begin_forward(self, inputs: object, *, trains: bool, keeps_local: bool) -> None:
        """Hear of a forward that is about to be called with these inputs.

        Args:
            inputs: what the model is called with.
            trains: whether a backward may follow.
            keeps_local: whether that keeps its gradients on this rank.

        Raises:
            PlacementError: gradients that stay from one backward to the next do not fit; see [Note: Gradients that
                stay]. Every rank raises.
        """
        self.end_recording()
        self._move()
        if self._total is not None:
            self._hear(inputs if trains else (), trains=trains, keeps_local=keeps_local)
        if trains and self.first_step is not None:
            self.first_step.enter()

    def end_forward(self, *, failed: bool) -> None:
        """Hear that the forward is over."""
        if self.first_step is not None:
            if failed:
                self.first_step.cancel()
            else:
                self.first_step.leave()

    def end_recording(self) -> None:
        """Leave nothing of a recorded step behind, if it is over."""
        if self.first_step is not None and not self.first_step.is_recording:
            self.first_step.leave_mode()
            if self.memstats is not None:
                self.first_step = None

    def forget_step(self) -> None:
        """Begin the record anew: the step that it was of has failed."""
        if self.first_step is not None:
            self.first_step.cancel()

    def _hear(self, inputs: object, *, trains: bool, keeps_local: bool) -> None:
        """Take from model states what a forward, and the backward after it, need more than those before."""
        chunks = [shard.chunk for shard in self._shards]
        elements = sum(leaf.numel() for leaf in tree_iter(inputs) if isinstance(leaf, Tensor))
        sums = any(chunk.gradient is not None for chunk in chunks)
        local = trains and (keeps_local or any(chunk.has_local_gradient for chunk in chunks))
        if trains:
            numbers = self._exchange([elements, int(sums), int(local)])
            elements, sums, local = (max(column) for column in zip(*numbers, strict=True))
            if self.memstats is None:
                self._elements = max(self._elements, elements)
            self._elements = self._elements or elements
        is_new = False
        if sums and not all(chunk.sums_gradients for chunk in chunks):
            is_new = True
            for chunk in chunks:
                chunk.sums_gradients = True
        if local and not self._local_bytes:
            is_new = True
            self._local_bytes = sum(chunk.numel * chunk.reduce_dtype.itemsize for chunk in chunks)
        if trains or is_new:
            self._leave_room(elements, is_new=is_new)

    def _leave_room(self, elements: int, *, is_new: bool) -> None:
        """Leave room on the device for inputs of so many elements, and for gradients that stay.

        Args:
            elements: of the inputs.
            is_new: whether more gradients stay than were counted before.
        """
        assert self._total is not None
        whole = room = self._total
        if self.memstats is not None:
            whole, room = int(self._total * self._policy.steady_cuda_cap_ratio), self._budget
            # What else a step takes is taken to grow with its inputs.
            room = whole - (whole - room) * max(self._elements, elements) // max(1, self._elements)
        if is_new or room < self._needed(self.placement):
            self._evict(room)
        if self._needed(self.placement) > (self._total if self.memstats is None else self._budget):
            raise self._gradients_refused()
        least = self._needed(self._resting() if self._is_moving else self.placement)
        if room < least and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A step with these inputs takes about %d bytes of the device beside model states, which cannot take "
                "less than %d of the %d for both: chunks in use, fp32 parameters, and what the other tiers have no "
                "room for, stay there.",
                whole - room,
                least,
                whole,
            )
        self._device.capacity = max(room, least)

    def _evict(self, room: int) -> None:
        """Let model states take no more than ``room`` bytes of the device, as far as they can leave it.

        Parameters whose place a gradient has do so when the next step begins.
        """
        beside = self._slack + self._local_bytes
        capacities = self._capacities | {"device": max(0, room - beside)}
        self.placement = self._policy.evict(self.placement, capacities=capacities)
        self._is_moving = True
        self._move()
        if self._is_moving:
            now = self._policy.evict(self._resting(), capacities=capacities, moves_params=False)
            _carry(self._moves_of_states(now))

    def _needed(self, placement: Placement[Chunk]) -> int:
        """Return the bytes of the device that a step takes at least where chunks are placed so."""
        return placement.needed_bytes["device"] + self._slack + self._local_bytes

    def _resting(self) -> Placement[Chunk]:
        """Return where chunks rest now, which may not be where they are to rest."""
        chunks, states = self._manager.chunks, {shard.chunk: shard.states_tier for shard in self._shards}
        places = [
            ChunkPlacement(
                keep_gathered=chunk.keeps_gathered, param_tier=chunk.tier, optim_tier=states.get(chunk, "device")
            )
            for chunk in chunks
        ]
        return Placement(
            chunks,
            places,
            max_prefetch=self._policy.max_prefetch,
            max_fetch=self._policy.max_fetch,
            world_size=self._manager.world_size,
            device_capacity=self.placement.device_capacity,
        )

    def learn(self, trace: Trace[Chunk]) -> Plan[Chunk] | None:
        """Use what the first step has shown; every rank calls it at the end of that step's backward.

        Returns:
            The plan of later steps, or None where there is nothing to learn.

        Raises:
            PlacementError: model states and activations do not fit together.
        """
        if self.first_step is None or not self.first_step.is_recording:
            return None
        self.memstats = self.first_step.finish()
        if self._total is None:
            return None
        self._budget = -self._most(-self._policy.model_bytes(self._total, self.memstats))
        self.placement, plan, peak = self._fit(trace)
        self._slack = max(0, peak - self.placement.needed_bytes["device"])
        self._is_moving = True
        return plan

    def _fit(self, trace: Trace[Chunk]) -> tuple[Placement[Chunk], Plan[Chunk], int]:
        """Return a placement whose plan fits, with as much on the device as may be, the plan, and its peak there."""
        away = self._policy.evict(self.placement, capacities=self._capacities | {"device": 0})
        floor, tried, budget = away.needed_bytes["device"], "", self._budget - self._local_bytes
        tight: tuple[Placement[Chunk], Plan[Chunk], int] | None = None
        for number in range(_BUDGETS + 1) if floor <= budget else ():
            # The plan may take more than is known of chunks without an order of use: then they are given less.
            limit = budget - number * (budget - floor) // _BUDGETS
            try:
                placement = self._policy.place_again(self.placement, capacities=self._capacities | {"device": limit})
            except PlacementError:
                break
            if placement.digest == tried:
                continue
            tried = placement.digest
            plan = self._policy.schedule(trace, placement)
            peak = self._most(plan.peak_bytes["device"])
            if peak <= budget and tight is None:
                tight = placement, plan, peak
            peak += int(_INACCURACY * self._most(plan.peak_bytes["device"] - placement.resting_bytes["device"]))
            if peak <= budget:
                return placement, plan, peak
        if tight is not None:
            return tight
        needed = self._policy.schedule(trace, away).peak_bytes
        least = max(self._most(needed["device"]), floor) + self._local_bytes
        raise self._refusal({**needed, "device": least}, "The first step took")

    def _most(self, amount: int) -> int:
        return max(numbers[0] for numbers in self._exchange([amount]))

    def _gradients_refused(self) -> PlacementError:
        """Return an error for gradients that stay from one backward to the next and have no room."""
        roomy = self._policy.evict(self.placement, capacities=self._capacities | {"host": None, "device": 0})
        needed = {**self.placement.needed_bytes, "device": self._needed(self.placement)}
        advice = ""
        if self._needed(roomy) <= self._budget and (host := roomy.needed_bytes["host"]) > needed["host"]:
            advice = f" So would {host:,} bytes of the host."
        return self._refusal(needed, "A step takes", advice)

    def _refusal(self, needed: Mapping[TierName, int], who: str, advice: str = "") -> PlacementError:
        """Return an error that says what activations have to do with it."""
        assert self._total is not None
        share, others, available = 1.0, 0, self._total
        if self.memstats is not None:
            share, others = self._policy.steady_cuda_cap_ratio, self._most(self.memstats.max_non_model_bytes)
            available = self._budget
        enough = int((needed["device"] + others) / share) + 1
        local = (
            f" Backwards under no_sync keep {self._local_bytes:,} bytes of whole gradients on the device; without it "
            "gradients lie in shards."
        )
        return PlacementError(
            f"{who} {others:,} bytes beside them, so this is what is left of the device's {self._total:,}. Use "
            f"activation checkpoints, a smaller batch or smaller chunks, or give the device {enough:,} bytes.{advice}"
            f"{local if self._local_bytes else ''}",
            needed=needed,
            available=self._capacities | {"device": available},
        )

    def _move(self) -> None:
        """Carry model states to where they rest from now on, once the optimizer has used the gradients in the way."""
        if not self._is_moving or any(self._is_busy(chunk) for chunk in self._manager.chunks):
            return
        stay = self._manager.world_size > 1  # a single rank's chunks are gathered as long as they rest on the device
        tiers = {chunk: self.placement.of(chunk).param_tier for chunk in self._manager.chunks}
        moves = self._moves_of_states(self.placement) + [
            _Move(tier, partial(self._manager.move, chunk, tier))
            for chunk, tier in tiers.items()
            if not (stay and chunk.keeps_gathered)
        ]
        if not _carry(moves):
            self.placement = self._resting()
        self._is_moving = False

    def _moves_of_states(self, placement: Placement[Chunk]) -> list[_Move]:
        tiers = {shard: placement.of(shard.chunk).optim_tier for shard in self._shards}
        return [_Move(tier, partial(shard.move_states, self._manager.tier(tier))) for shard, tier in tiers.items()]

    def _is_busy(self, chunk: Chunk) -> bool:
        return chunk.users > 0 or chunk.gradient is not None


@dataclass(frozen=True, slots=True)
class _Move:
    """What carries a part of a chunk to a tier, unless it is there."""

    tier: TierName
    carry: Callable[[], None]


def _carry(moves: Sequence[_Move]) -> bool:
    """Make the moves for which there is room or gets room, those off the device first; return whether all were made."""
    waiting = sorted(moves, key=lambda move: move.tier == "device")
    while waiting:
        left = [move for move in waiting if not _has_carried(move)]
        if len(left) == len(waiting):
            return False  # two would have to change places, and neither tier has room for both
        waiting = left
    return True


def _has_carried(move: _Move) -> bool:
    try:
        move.carry()
    except TierFullError:
        return False
    return True
