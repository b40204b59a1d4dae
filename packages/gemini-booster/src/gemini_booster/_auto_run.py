"""Automatic placement over a run: room for activations before they are known, when they are, and when they grow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from gemini_booster._first_step import FirstStep
from gemini_booster._shards import ChunkShard
from gemini_chunk import Chunk, ChunkManager, TierFullError, TierName
from gemini_placement import AutoPlacementPolicy, MemStats, Placement, PlacementError, Plan
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
    same measure: parameters leave the device for good as far as that takes, and less stays gathered.

    Args:
        policy: places the chunks.
        manager: has the chunks; the capacity of its device tier is set to what model states may take.
        total: bytes of the device, None without a limit.
        memstats: a record of a step; None lets the first step be recorded.

    Attributes:
        memstats: the record, once there is one.
        placement: where chunks rest, or will once no gradient is in the way.
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
        self._elements = self._budget = self._slack = 0
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
            return self._place_within(None)
        if self.memstats is not None:
            self._budget = self._device.capacity = self._policy.model_bytes(self._total, self.memstats)
            try:
                return self._place_within(self._budget)
            except PlacementError as error:
                if error.needed["device"] <= self._budget:
                    raise  # another tier is too small
                others = self._most(self.memstats.max_non_model_bytes)
                enough = self._total_for(error.needed["device"] + others)
                raise self._refusal(error.needed, "A step takes", others, enough) from None
        # A step that nothing was foretold of may take more than its placement says.
        self._device.capacity = self._total
        return self._first_placement(self._total)

    def _first_placement(self, total: int) -> Placement[Chunk]:
        """Place the chunks for a first step of which nothing is known, on a device of so many bytes."""
        budget = max(1, self._policy.model_bytes(total))
        while budget < total:
            try:
                return self._place_within(budget)
            except PlacementError:
                budget += max(1, total // _BUDGETS)
        return self._place_within(total)

    def _place_within(self, budget: int | None) -> Placement[Chunk]:
        capacities = self._capacities | {"device": budget}
        return self._policy.place(self._manager.chunks, capacities=capacities, world_size=self._manager.world_size)

    @property
    def _capacities(self) -> dict[TierName, int | None]:
        return {name: tier.capacity for name, tier in self._manager.tiers.items()}

    def begin_forward(self, inputs: object, *, trains: bool) -> None:
        """Hear of a forward that is about to be called with these inputs."""
        self.end_recording()
        self._move()
        if trains and self._total is not None:
            self._leave_room(sum(leaf.numel() for leaf in tree_iter(inputs) if isinstance(leaf, Tensor)))
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

    def _leave_room(self, elements: int) -> None:
        """Take from model states what a step needs whose inputs have more elements than those that were measured."""
        elements = self._most(elements)
        if self.memstats is None:
            self._elements = max(self._elements, elements)
            return
        self._elements = self._elements or elements
        assert self._total is not None
        whole = int(self._total * self._policy.steady_cuda_cap_ratio)
        others = (whole - self._budget) * max(self._elements, elements) // max(1, self._elements)
        if whole - others < self._least:
            capacities = self._capacities | {"device": max(0, whole - others - self._slack)}
            self.placement = self._policy.evict(self.placement, capacities=capacities)
            self._is_moving = True
            self._move()
        if whole - others < self._least and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A step with these inputs takes about %d bytes of the device beside model states, which cannot take "
                "less than %d of the %d for both: fp32 parameters, and optimizer states on the device, stay there.",
                others,
                self._least,
                whole,
            )
        self._device.capacity = max(whole - others, self._least)

    @property
    def _least(self) -> int:
        """Bytes of the device that a step takes at least, as chunks are placed now."""
        return self.placement.needed_bytes["device"] + self._slack

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
        placement, plan, peak = self._fit(trace)
        self.placement = placement
        self._slack = max(0, peak - placement.needed_bytes["device"])
        self._device.capacity = self._budget
        for shard in self._shards:
            shard.move_states(self._manager.tier(self.placement.of(shard.chunk).optim_tier))
        self._is_moving = True
        return plan

    def _fit(self, trace: Trace[Chunk]) -> tuple[Placement[Chunk], Plan[Chunk], int]:
        """Return a placement whose plan fits, with as much on the device as may be, the plan, and its peak there."""
        assert self.memstats is not None
        away = self._all_away(self.placement)
        tight: tuple[Placement[Chunk], Plan[Chunk], int] | None = None
        for placement in self._candidates(away):
            plan = self._policy.schedule(trace, placement)
            peak = max(self._most(plan.peak_bytes["device"]), placement.needed_bytes["device"])
            if peak <= self._budget and tight is None:
                tight = placement, plan, peak
            peak += int(_INACCURACY * self._most(plan.peak_bytes["device"] - placement.resting_bytes["device"]))
            if peak <= self._budget:
                return placement, plan, peak
        if tight is not None:
            return tight
        others = self._most(self.memstats.max_non_model_bytes)
        needed = {**self._policy.schedule(trace, away).peak_bytes, "device": self._least_peak(trace, away)}
        raise self._refusal(needed, "The first step took", others, self._enough(trace, others))

    def _candidates(self, away: Placement[Chunk]) -> Iterator[Placement[Chunk]]:
        """Yield placements, the best first, the last with as little on the device as may be.

        A plan may take more than its placement says, which knows no order of use. With less given to it, chunks leave
        the device, or stay gathered for a shorter time.
        """
        floor = away.needed_bytes["device"]
        for number in range(_BUDGETS + 1) if floor <= self._budget else ():
            limit = self._budget - number * (self._budget - floor) // _BUDGETS
            try:
                yield self._policy.place_again(self.placement, capacities=self._capacities | {"device": limit})
            except PlacementError:
                break
        yield away

    def _all_away(self, placement: Placement[Chunk]) -> Placement[Chunk]:
        return self._policy.evict(placement, capacities=self._capacities | {"device": 0})

    def _least_peak(self, trace: Trace[Chunk], away: Placement[Chunk]) -> int:
        """Return the bytes of model states that a step takes of the device with as much off it as may be."""
        peak = self._most(self._policy.schedule(trace, away).peak_bytes["device"])
        return max(peak, away.needed_bytes["device"])

    def _enough(self, trace: Trace[Chunk], others: int) -> int:
        """Return bytes of the device that would do for such a step.

        On a larger device the first placement may bring there what cannot leave it, and so need more.
        """
        assert self._total is not None
        total, enough = self._total, self._total + 1
        while enough > total:
            total = max(enough, total)
            away = self._all_away(self._first_placement(total))
            enough = self._total_for(self._least_peak(trace, away) + others)
        return total

    def _total_for(self, num_bytes: int) -> int:
        """Return the least bytes of the device of which a step may take so many."""
        share = self._policy.steady_cuda_cap_ratio
        total = int(num_bytes / share)
        while int(total * share) < num_bytes:
            total += 1
        return total

    def _most(self, amount: int) -> int:
        return max(numbers[0] for numbers in self._exchange([amount]))

    def _refusal(self, needed: Mapping[TierName, int], who: str, others: int, enough: int) -> PlacementError:
        """Return an error that says what activations have to do with it, and how many bytes of the device would do."""
        return PlacementError(
            f"{who} {others:,} bytes beside them, so this is what is left of the device's {self._total:,}. Use "
            f"activation checkpoints, a smaller batch or smaller chunks, or give the device {enough:,} bytes.",
            needed=needed,
            available=self._capacities | {"device": self._budget},
        )

    def _move(self) -> None:
        """Carry parameters to where they rest from now on, once the optimizer has used the gradients in their place."""
        if not self._is_moving or any(self._is_busy(chunk) for chunk in self._manager.chunks):
            return
        stay = self._manager.world_size > 1  # a single rank's chunks are gathered as long as they rest on the device
        waiting = [chunk for chunk in self._manager.chunks if not (stay and chunk.keeps_gathered)]
        while waiting:
            left = [chunk for chunk in waiting if not self._moved(chunk)]
            if len(left) == len(waiting):
                break  # they stay: two would have to change places, and neither tier has room for both
            waiting = left
        self._is_moving = False

    def _is_busy(self, chunk: Chunk) -> bool:
        return chunk.users > 0 or chunk.gradient is not None or chunk.has_local_gradient

    def _moved(self, chunk: Chunk) -> bool:
        """Carry a chunk's parameters to where they are to rest, if there is room now."""
        try:
            self._manager.move(chunk, self.placement.of(chunk).param_tier)
        except TierFullError:
            return False
        return True
