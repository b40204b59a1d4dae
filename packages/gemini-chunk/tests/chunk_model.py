"""What a chunk should do, told with plain tensors: the oracle of the property tests.

Everything is counted for one rank; all ranks are alike. Gradients are small whole numbers, which every dtype holds
exactly, so that the oracle need not know in which dtype they are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gemini_chunk import TierName

State = Literal["FREE", "COMPUTE", "HOLD", "HOLD_AFTER_BWD", "READY_FOR_REDUCE"]


class Full(Exception):  # noqa: N818 # a verdict, not an error
    """A tier has no room."""


class Illegal(Exception):  # noqa: N818 # a verdict, not an error
    """The event must be refused."""


@dataclass
class Account:
    """Bytes of one rank's tiers."""

    capacity: dict[TierName, int | None]
    used: dict[TierName, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})

    def take(self, tier: TierName, num_bytes: int) -> None:
        limit = self.capacity[tier]
        if limit is not None and self.used[tier] + num_bytes > limit:
            raise Full(tier)
        self.used[tier] += num_bytes

    def free(self, tier: TierName, num_bytes: int) -> None:
        self.used[tier] -= num_bytes


class ModelChunk:
    """One chunk."""

    def __init__(
        self,
        account: Account,
        values: list[Tensor],
        *,
        numel: int,
        world_size: int,
        rest: TierName,
        keep: bool,
        master: TierName | None,
        trainable: bool,
        accumulates: bool,
    ) -> None:
        self.account = account
        self.values = values
        self.dtype = values[0].dtype
        self.world_size = world_size
        self.rest, self.keep = rest, keep
        self.trainable, self.accumulates = trainable, accumulates
        self.used_numel = sum(value.numel() for value in values)
        self.shard_numel = -(-self.used_numel // world_size)
        wide = self.dtype in (torch.float64, torch.complex64, torch.complex128)
        self.master_dtype = self.dtype if wide else torch.float32
        self.full_bytes = numel * self.dtype.itemsize
        self.shard_bytes = self.shard_numel * self.dtype.itemsize
        self.wide_bytes = self.shard_numel * self.master_dtype.itemsize
        separate = trainable and master is not None and (self.dtype != self.master_dtype or master != rest)
        self.master_tier = master if separate else None
        self.masters = [value.to(self.master_dtype) for value in values] if separate else None
        self.users = [0] * len(values)
        self.local: list[Tensor | None] = [None] * len(values)  # summed over ranks, waiting for a reduction
        self.sent: Tensor | None = None  # under way
        self.gradient: Tensor | None = None
        self.where: Literal["place", "own", "device"] | None = None
        self.into_place = False
        self.buffer = self.fetched = self.gathering = self.reducing = False
        self.aside: TierName | None = None
        self.full_valid = self.visible = self.aliased
        self.states: list[State] = ["HOLD" if self.visible else "FREE"] * len(values)
        if self.aliased:
            account.take("device", self.full_bytes)
        else:
            account.take(rest, self.shard_bytes)
        if self.master_tier is not None:
            try:
                account.take(self.master_tier, self.wide_bytes)
            except Full:
                account.free("device" if self.aliased else rest, self.full_bytes if self.aliased else self.shard_bytes)
                raise

    @property
    def aliased(self) -> bool:
        return self.keep or (self.world_size == 1 and self.rest == "device")

    @property
    def own_tier(self) -> TierName:
        return self.master_tier or self.rest

    @property
    def in_use(self) -> bool:
        return any(self.users)

    @property
    def filling(self) -> bool:
        return (self.buffer or self.aside is not None) and not self.reducing

    @property
    def result_bytes(self) -> int:
        if self.where == "device" and self.used_numel:
            return self.full_bytes if self.world_size == 1 else self.shard_bytes
        return self.wide_bytes if self.where == "own" else 0

    # -- parts of events ----------------------------------------------------------------------------------------------

    def show(self) -> None:
        self.visible = True
        self.states = ["HOLD" if state == "FREE" else state for state in self.states]

    def hide(self) -> None:
        self.visible = False
        self.states = ["FREE" if state == "HOLD" else state for state in self.states]

    def drop_full(self) -> None:
        self.full_valid = False
        if not self.aliased:
            self.account.free("device", self.full_bytes)

    @property
    def fetched_bytes(self) -> int:
        return self.full_bytes if self.world_size == 1 else self.shard_bytes

    def forget_fetched(self) -> None:
        if self.fetched:
            self.fetched = False
            self.account.free("device", self.fetched_bytes)

    def finish_transfers(self) -> None:
        self.finish_gather()
        self.forget_fetched()

    def finish_gather(self) -> None:
        if self.gathering:
            self.gathering = False
            self.full_valid = True
            self.show()

    def finish_states(self) -> None:
        rest: State = "HOLD" if self.visible else "FREE"
        for index, state in enumerate(self.states):
            if state in ("HOLD_AFTER_BWD", "READY_FOR_REDUCE"):
                self.states[index] = "COMPUTE" if self.users[index] else rest

    def may_replace(self) -> bool:
        free = self.gradient is None and not (self.aliased and self.in_use)
        return self.masters is not None and not self.accumulates and free

    def take_place(self) -> None:
        if self.aliased and self.visible:
            self.hide()

    def take_own(self) -> None:
        self.account.take(self.own_tier, self.wide_bytes)
        self.where = "own"

    def give_place_back(self) -> None:
        if self.where == "place":
            self.take_own()

    def settle(self, reduced: Tensor) -> bool:
        self.give_place_back()
        if self.gradient is not None:
            self.gradient = self.gradient + reduced
            return True
        if self.may_replace():
            self.take_place()
            self.where = "place"
        elif self.rest == "device" and not self.accumulates:
            self.where = "device"
        else:
            self.take_own()
        self.gradient = reduced
        return self.where != "device"

    def return_buffer(self) -> None:
        if self.buffer:
            self.buffer = False
            self.account.free("device", self.full_bytes)
        if self.aside is not None:
            self.account.free(self.aside, self.full_bytes)
            self.aside = None

    def finish_reduce(self) -> None:
        if not self.reducing:
            return
        self.return_buffer()
        assert self.sent is not None
        if self.into_place:
            self.where, self.gradient = "place", self.sent
        elif self.settle(self.sent):
            self.account.free("device", self.shard_bytes)
        self.reducing = self.into_place = False
        self.sent = None
        self.finish_states()

    def drop_gradient(self) -> None:
        if self.where is not None:
            self.account.free("device" if self.where == "device" else self.own_tier, self.result_bytes)
        self.gradient = self.where = None

    def show_again(self) -> None:
        if self.aliased and self.full_valid and not self.visible:
            self.show()

    # -- events -------------------------------------------------------------------------------------------------------

    def start_fetch(self) -> None:
        there = self.full_valid or self.gathering or self.fetched
        if there or self.rest == "device" or self.reducing or self.where == "place":
            return
        self.account.take("device", self.fetched_bytes)
        self.fetched = True

    def start_gather(self) -> None:
        if self.visible or self.gathering:
            return
        self.finish_reduce()
        self.give_place_back()
        if self.full_valid:
            self.show()
            return
        if not self.aliased and not (self.fetched and self.world_size == 1):
            self.account.take("device", self.full_bytes)
        if self.fetched and self.world_size > 1:
            self.account.free("device", self.shard_bytes)
        self.fetched = False
        self.gathering = True

    def gather(self) -> None:
        self.start_gather()
        self.finish_gather()

    def release(self) -> None:
        if self.aliased:
            return
        if self.in_use:
            raise Illegal
        self.finish_transfers()
        if self.visible:
            self.hide()
            self.drop_full()

    def move(self, tier: TierName) -> None:
        if tier == self.rest:
            return
        if self.keep or self.in_use:
            raise Illegal
        self.finish_reduce()
        if self.gradient is not None:
            raise Illegal
        self.finish_transfers()
        if self.world_size == 1 and tier == "device":
            self.gather()
            self.account.free(self.rest, self.shard_bytes)
            self.rest = tier
            return
        self.account.take(tier, self.shard_bytes)
        if self.aliased:
            self.hide()
            self.rest = tier
            self.drop_full()
        else:
            self.account.free(self.rest, self.shard_bytes)
            self.rest = tier

    def begin(self, index: int) -> None:
        if not self.visible:
            raise Illegal
        if self.users[index] == 0 and self.states[index] != "READY_FOR_REDUCE":
            self.states[index] = "COMPUTE"
        self.users[index] += 1

    def end(self, index: int, in_backward: bool) -> None:
        if self.users[index] == 0:
            raise Illegal
        self.users[index] -= 1
        if self.users[index] == 0 and self.states[index] == "COMPUTE":
            self.states[index] = "HOLD_AFTER_BWD" if in_backward and self.trainable else "HOLD"

    def settle_states(self) -> None:
        rest: State = "HOLD" if self.visible else "FREE"
        self.states = [rest if state == "HOLD_AFTER_BWD" else state for state in self.states]

    def take_buffer(self) -> None:
        self.finish_reduce()
        if not self.buffer:
            self.account.take("device", self.full_bytes)
            self.return_buffer()
            self.buffer = True

    def set_aside(self, tier: TierName) -> None:
        if self.buffer and not self.reducing:
            try:
                self.account.take(tier, self.full_bytes)
            except Full:
                return
            self.return_buffer()
            self.aside = tier

    def take(self, index: int, gradient: Tensor) -> None:
        if not self.trainable:
            raise Illegal
        self.take_buffer()
        before = self.local[index] if self.states[index] == "READY_FOR_REDUCE" else None
        self.local[index] = gradient if before is None else before + gradient
        self.states[index] = "READY_FOR_REDUCE"

    def start_reduce(self) -> None:
        if not self.trainable:
            raise Illegal
        self.finish_transfers()
        self.take_buffer()
        parts = [
            torch.zeros(value.numel()) if grad is None or state != "READY_FOR_REDUCE" else grad.flatten()
            for value, grad, state in zip(self.values, self.local, self.states, strict=True)
        ]
        if self.world_size == 1:
            if self.settle(torch.cat(parts)) or not self.used_numel:
                self.return_buffer()
            self.buffer = False
            self.local = [None] * len(self.values)
            self.finish_states()
            return
        if self.may_replace():
            self.take_place()
            self.into_place = True
        else:
            self.account.take("device", self.shard_bytes)
        self.reducing = True
        self.sent = torch.cat(parts)
        self.local = [None] * len(self.values)

    def commit(self) -> None:
        if self.in_use:
            raise Illegal
        self.finish_transfers()
        self.finish_reduce()
        if self.masters is not None:
            self.values = [master.to(self.dtype) for master in self.masters]
        self.drop_gradient()
        if not self.aliased:
            self.release()
        elif self.world_size > 1:
            self.full_valid = False
            if self.visible:
                self.hide()
        self.show_again()

    def discard(self) -> None:
        self.finish_transfers()
        self.finish_reduce()
        if self.filling:
            self.return_buffer()
            self.finish_states()
        self.drop_gradient()
        self.show_again()

    def reset(self) -> None:
        if self.gathering:
            self.gathering = False
            self.drop_full()
        self.forget_fetched()
        if self.reducing and not self.into_place:
            self.account.free("device", self.shard_bytes)
        self.return_buffer()
        self.reducing = self.into_place = False
        self.sent = None
        self.local = [None] * len(self.values)
        self.users = [0] * len(self.values)
        self.states = ["HOLD" if self.visible else "FREE"] * len(self.values)
        self.release()
        self.drop_gradient()
        self.show_again()

    def load(self, index: int, value: Tensor) -> None:
        self.finish_reduce()
        if self.in_use or self.filling or self.gradient is not None:
            raise Illegal
        self.finish_gather()
        self.release()
        self.values[index] = value.to(self.dtype)
        if self.masters is not None:
            self.masters[index] = value.to(self.master_dtype)
