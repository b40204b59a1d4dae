"""Automatic placement over a run: room for activations before they are known, when they are, and when they grow."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from gemini_booster._carrying import Carrier, Exchange
from gemini_booster._first_step import FirstStep
from gemini_booster._shards import ChunkShard
from gemini_chunk import Chunk, ChunkManager, TierName
from gemini_placement import AutoPlacementPolicy, ChunkPlacement, MemStats, Placement, PlacementError, Plan
from gemini_placement.interfaces import Trace

logger = logging.getLogger("gemini_booster")

# What a step takes beyond resting bytes may be foretold too low by this share.
_INACCURACY = 0.05

# In how many steps model states are given more of the device before anything was measured, or less once that is.
_BUDGETS = 20


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
        self._carrier = Carrier(manager, (), self._exchange)
        self.first_step: FirstStep | None = None
        self._is_moving = self._has_warned = self._is_least = False
        self._elements = self._budget = self._local_bytes = 0
        self._trace: Trace[Chunk] | None = None
        self.placement = self._place()
        self._least = self.placement.needed_bytes["device"]

    def start(self, module: nn.Module, shards: Sequence[ChunkShard], exchange: Exchange) -> None:
        """Be ready for the first step.

        Args:
            module: the model.
            shards: of its trainable chunks, in order.
            exchange: returns every rank's numbers.
        """
        self._shards = shards
        self._exchange = exchange
        self._carrier = Carrier(self._manager, shards, exchange)
        if self.memstats is None:
            self.first_step = FirstStep(module, self._device)

    def _place(self) -> Placement[Chunk]:
        # A step that nothing was foretold of may take more than its placement says.
        self._device.capacity = self._total
        if self._total is None:
            return self._place_within(None)
        if self.memstats is not None:
            self._device.capacity = self._budget = self._policy.model_bytes(self._total, self.memstats)
            try:
                return self._place_within(self._budget)
            except PlacementError as error:
                if error.needed["device"] <= self._budget:
                    raise  # another tier is too small
                remedies = self._device_remedy(self._total_for(error.needed["device"]))
                raise self._refusal(error.needed, "A step takes", remedies) from None
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
            self._leave_room(elements, stays=bool(sums or local), is_new=is_new)

    def _leave_room(self, elements: int, *, stays: bool, is_new: bool) -> None:
        """Leave room on the device for inputs of so many elements, and for gradients that stay.

        Args:
            elements: of the inputs.
            stays: whether gradients stay from one backward to the next.
            is_new: whether more of them do than were counted before.
        """
        assert self._total is not None
        whole = room = self._total
        if self.memstats is not None:
            whole, room = int(self._total * self._policy.steady_cuda_cap_ratio), self._budget
            # What else a step takes is taken to grow with its inputs.
            room = whole - (whole - room) * max(self._elements, elements) // max(1, self._elements)
        limit = room - self._local_bytes
        if is_new or (limit < self._least and not self._is_least):
            self._evict(limit)
        here, least = self.placement, self._least
        if self._is_moving:
            here = self._placed(self._carrier.places)
            least = self._needs(here)
        if stays and (self._least > self._firm - self._local_bytes or self._lacks(self.placement)):
            raise self._gradients_refused(self.placement)
        if stays and self._lacks(here):
            raise self._gradients_refused(here)
        least += self._local_bytes
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

    def _evict(self, limit: int) -> None:
        """Let model states take no more than ``limit`` bytes of the device, as far as they can leave it.

        Parameters whose place a gradient has do so when the next step begins.
        """
        self.placement, self._least = self._within(limit, self.placement)
        self._is_least = self._least > limit  # no later step need try to have less there
        self._is_moving = True
        self._move()
        if self._is_moving:
            now, _ = self._within(limit, self._placed(self._carrier.places), moves_params=False)
            self._carrier.carry(now, params=False)

    def _within(
        self,
        limit: int,
        placement: Placement[Chunk],
        *,
        capacities: Mapping[TierName, int | None] | None = None,
        moves_params: bool = True,
    ) -> tuple[Placement[Chunk], int]:
        """Return a placement that is evicted until its steps need ``limit`` bytes of the device, and what they do."""
        given, tried = limit, ""
        capacities = self._capacities if capacities is None else capacities
        while True:
            evicted = self._policy.evict(
                placement, capacities={**capacities, "device": max(0, given)}, moves_params=moves_params
            )
            least = self._needs(evicted)
            if least <= limit or evicted.digest == tried:
                return evicted, least
            # A step may need more than is known of chunks without an order of use.
            given = min(given, evicted.needed_bytes["device"]) - (least - limit)
            tried = evicted.digest

    def _needs(self, placement: Placement[Chunk]) -> int:
        """Return the bytes of the device that a step takes where chunks are placed so, and nothing is held."""
        least = placement.needed_bytes["device"]
        if self._trace is None:
            return least
        bare = self._placed([placement.of(chunk) for chunk in placement.chunks])
        peak = self._policy.schedule(self._trace, bare).peak_bytes["device"]
        peak += int(_INACCURACY * (peak - placement.resting_bytes["device"]))
        return max(least, self._most(peak))

    def _lacks(self, placement: Placement[Chunk]) -> bool:
        """Whether a tier beside the device has no room for a placement."""
        capacities = {name: capacity for name, capacity in self._capacities.items() if name != "device"}
        return any(
            capacity is not None and placement.needed_bytes[name] > capacity for name, capacity in capacities.items()
        )

    def _placed(self, places: Sequence[ChunkPlacement]) -> Placement[Chunk]:
        return Placement(
            self._manager.chunks,
            places,
            max_prefetch=self._policy.max_prefetch,
            max_fetch=self._policy.max_fetch,
            world_size=self._manager.world_size,
            device_capacity=0,  # nothing is held beyond its use
        )

    def learn(self, trace: Trace[Chunk]) -> Plan[Chunk] | None:
        """Use what the first step has shown; every rank calls it at the end of that step's backward.

        Returns:
            The plan of later steps, or None where there is nothing to learn.

        Raises:
            PlacementError: model states and activations do not fit together.
        """
        self._trace = self._trace or trace
        if self.first_step is None or not self.first_step.is_recording:
            return None
        self.memstats = self.first_step.finish()
        if self._total is None:
            return None
        self._budget = -self._most(-self._policy.model_bytes(self._total, self.memstats))
        self.placement, plan, peak = self._fit(trace)
        self._least = max(min(peak, self._needs(self.placement)), self.placement.needed_bytes["device"])
        self._is_least = False
        self._is_moving = True
        return plan

    def _fit(self, trace: Trace[Chunk]) -> tuple[Placement[Chunk], Plan[Chunk], int]:
        """Return a placement whose plan fits, with as much on the device as may be, the plan, and its peak there."""
        assert self.memstats is not None
        away = self._all_away(self.placement)
        budget = self._budget - self._local_bytes
        tight: tuple[Placement[Chunk], Plan[Chunk], int] | None = None
        for placement in self._candidates(away, budget):
            plan = self._policy.schedule(trace, placement)
            peak = max(self._most(plan.peak_bytes["device"]), placement.needed_bytes["device"])
            if peak <= budget and tight is None:
                tight = placement, plan, peak
            peak += int(_INACCURACY * self._most(plan.peak_bytes["device"] - placement.resting_bytes["device"]))
            if peak <= budget:
                return placement, plan, peak
        if tight is not None:
            return tight
        needed = {**self._policy.schedule(trace, away).peak_bytes, "device": self._least_peak(trace, away)}
        needed["device"] += self._local_bytes
        raise self._refusal(needed, "The first step took", self._device_remedy(self._enough(trace)))

    def _candidates(self, away: Placement[Chunk], budget: int) -> Iterator[Placement[Chunk]]:
        """Yield placements, the best first, the last with as little on the device as may be.

        A plan may take more than its placement says, which knows no order of use. With less given to it, chunks leave
        the device, or stay gathered for a shorter time.
        """
        # Where the host is short this is not the least, but a placement may fit yet.
        floor = min(away.needed_bytes["device"], budget)
        for number in range(_BUDGETS + 1) if budget > 0 else ():
            limit = budget - number * (budget - floor) // _BUDGETS
            try:
                yield self._policy.place_again(self.placement, capacities=self._capacities | {"device": limit})
            except PlacementError:
                break
        if not self._lacks(away):
            yield away

    def _all_away(self, placement: Placement[Chunk]) -> Placement[Chunk]:
        return self._policy.evict(placement, capacities=self._capacities | {"device": 0})

    def _least_peak(self, trace: Trace[Chunk], away: Placement[Chunk]) -> int:
        """Return the bytes of model states that a step takes of the device with as much off it as may be."""
        peak = self._most(self._policy.schedule(trace, away).peak_bytes["device"])
        return max(peak, away.needed_bytes["device"])

    def _enough(self, trace: Trace[Chunk]) -> int:
        """Return bytes of the device that would do for such a step.

        On a larger device the first placement may bring there what cannot leave it, and so need more.
        """
        assert self._total is not None
        total, enough = self._total, self._total + 1
        while enough > total:
            total = max(enough, total)
            away = self._all_away(self._first_placement(total))
            enough = self._total_for(self._least_peak(trace, away) + self._local_bytes)
        return total

    def _total_for(self, num_bytes: int) -> int:
        """Return the least bytes of the device that leave so many to model states and gradients."""
        share = 1.0 if self.memstats is None else self._policy.steady_cuda_cap_ratio
        num_bytes += self._others
        total = int(num_bytes / share)
        while int(total * share) < num_bytes:
            total += 1
        return total

    def _most(self, amount: int) -> int:
        return max(numbers[0] for numbers in self._exchange([amount]))

    def _gradients_refused(self, placement: Placement[Chunk]) -> PlacementError:
        """Return an error for gradients that stay from one backward to the next and have no room."""
        needed = {**placement.needed_bytes, "device": self._needs(placement) + self._local_bytes}
        limit = self._firm - self._local_bytes
        roomy, least = self._within(limit, placement, capacities=self._capacities | {"host": None})
        remedies = []
        if needed["device"] > self._firm:
            remedies.append(self._device_remedy(self._total_for(needed["device"])))
        if least <= limit and self._capacities["host"] is not None:
            remedies.append(f"give the host {roomy.needed_bytes['host']:,} bytes")
        if not all(shard.chunk.accumulates for shard in self._shards) and self._fits_anew(limit):
            remedies.append("set enable_gradient_accumulation, which counts sums of gradients from the start")
        remedies = remedies or [self._device_remedy(self._total_for(needed["device"]))]
        return self._refusal(needed, "A step takes", ", or ".join(remedies))

    def _fits_anew(self, limit: int) -> bool:
        try:
            self._place_within(max(0, limit))
        except PlacementError:
            return False
        return True

    def _device_remedy(self, enough: int) -> str:
        return f"use activation checkpoints, a smaller batch or smaller chunks, or give the device {enough:,} bytes"

    @property
    def _firm(self) -> int:
        """Bytes of the device for model states and gradients in a step as it was measured, if any was."""
        assert self._total is not None
        return self._total if self.memstats is None else self._budget

    @property
    def _others(self) -> int:
        """Bytes of the device that a step was measured to take beside them, on the rank where that is most."""
        return 0 if self.memstats is None else self._most(self.memstats.max_non_model_bytes)

    def _refusal(self, needed: Mapping[TierName, int], who: str, remedies: str) -> PlacementError:
        """Return an error that says what activations have to do with it, and what would do."""
        if self._local_bytes:
            remedies += (
                f", or leave out no_sync: the device keeps {self._local_bytes:,} bytes of whole gradients for it"
            )
        return PlacementError(
            f"{who} {self._others:,} bytes beside them, so this is what is left of the device's {self._total:,}. "
            f"{remedies[0].upper()}{remedies[1:]}.",
            needed=needed,
            available=self._capacities | {"device": self._firm},
        )

    def _move(self) -> None:
        """Carry model states to where they rest from now on, once the optimizer has used the gradients in the way."""
        if not self._is_moving or self._carrier.is_blocked:
            return
        if not self._carrier.carry(self.placement):
            self.placement = self._placed(self._carrier.places)
            self._least = self._needs(self.placement)
            self._is_least = False
        self._is_moving = False
