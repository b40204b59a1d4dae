"""What the optimizer sees of a chunk: a flat shard with a gradient, master weights and memory for states."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gemini_chunk import Chunk, ChunkError, Handle, Tier, TierName


@dataclass(frozen=True, slots=True)
class ParamRun:
    """A run of one parameter's elements in a shard."""

    param: nn.Parameter
    start: int
    numel: int
    param_offset: int


class WriteBehind:
    """The one update that may be under way: new weights are written back while the next shard is updated, and no more.

    Attributes:
        last: what was started last, until it has been waited for.
    """

    def __init__(self) -> None:
        self.last: Handle | None = None

    def wait(self) -> None:
        """Wait for it; where it has failed, the next one must not begin, and another wait tries again."""
        if self.last is not None:
            self.last.wait()
            self.last = None


class ChunkShard:
    """This rank's part of one trainable chunk.

    Args:
        chunk: the chunk.
        states: tier where its optimizer states rest.
        host: main memory, where the optimizer computes if the states rest off the device.
        following: the shard that an optimizer updates next, which the disk reads while this one is updated.
        behind: shared by all shards of an optimizer.
    """

    def __init__(
        self, chunk: Chunk, states: Tier, host: Tier, following: ChunkShard | None, behind: WriteBehind
    ) -> None:
        self.chunk = chunk
        self._states = states
        self._host = host
        self._following = following
        self._behind = behind
        self._reads_ahead = following is not None
        self._memories: list[tuple[Tensor, str]] = []

    @property
    def name(self) -> str:
        """The chunk's name."""
        return self.chunk.name

    @cached_property
    def slices(self) -> Sequence[ParamRun]:
        """The parameters' elements in this shard, in order."""
        runs = []
        for part in self.chunk.slices:
            assert isinstance(part.info.tensor, nn.Parameter)
            runs.append(ParamRun(part.info.tensor, part.start, part.numel, part.param_offset))
        return runs

    @property
    def states_tier(self) -> TierName:
        """Where master weights and optimizer states rest."""
        return self._states.name

    @property
    def states_bytes(self) -> int:
        """Bytes that `move_states` would carry now."""
        shard, master, gradient = self.chunk.shard, self.chunk.master, self.chunk.gradient
        num_bytes = sum(memory.nbytes for memory, _ in self._memories)
        if master is not None and master is not shard:
            num_bytes += master.nbytes
            if gradient is not None and gradient is not shard:
                num_bytes += gradient.nbytes
        return num_bytes

    def move_states(self, tier: Tier) -> None:
        """Carry master weights and optimizer states to another tier, and a sum of gradients that lies beside them.

        Raises:
            TierFullError: the other tier has no room for all; they stay where they are.
        """
        if tier is self._states:
            return
        targets: list[Tensor] = []
        try:
            for memory, label in self._memories:
                targets.append(tier.allocate(memory.numel(), memory.dtype, f"{self.name} {label}"))
            self.chunk.move_master(tier)
        except BaseException:
            for target in targets:
                tier.free(target)
            raise
        for (memory, _), target in zip(self._memories, targets, strict=True):
            old = memory.data
            memory.data = target.copy_(old)  # the optimizer's own tensor: it finds its states there
            tier.receive(self._states, old.nbytes)
            self._states.free(old)
            tier.page_out(target)
        self._states = tier

    def grad(self) -> Tensor | None:
        """The averaged gradient, shape ``(shard_numel,)``.

        Raises:
            ChunkError: this rank has gradients of backwards under ``no_sync`` that have not been averaged.
        """
        if self.chunk.has_local_gradient:
            raise ChunkError(
                f"{self.name} has gradients that were not averaged over the ranks: the last backward before "
                "optimizer.step() must run outside of no_sync."
            )
        return self.chunk.gradient

    def master(self) -> Tensor:
        """The weights to update, shape ``(shard_numel,)``."""
        master = self.chunk.master
        assert master is not None, "only trainable chunks are given to an optimizer"
        if self._reads_ahead and self._following is not None:
            self._reads_ahead = False  # once in a step is enough
            self._following.page_in()
        return master

    def page_in(self) -> None:
        """Tell that gradient, master weights and states are needed soon: from the disk they are read ahead."""
        if "disk" in (self._states.name, self.chunk.rest.name):
            self.chunk.page_in(master=True)
            for memory, _ in self._memories:
                self._states.page_in(memory)

    def new_state(self, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """Return zeroed memory, accounted for in the tier where the chunk's states rest."""
        memory = self._states.allocate(numel, dtype, f"{self.name} {label}").zero_()
        self._memories.append((memory, label))
        return memory

    def without_gradient(self) -> Collection[nn.Parameter]:
        """The parameters of which no rank has a gradient."""
        unused = self.chunk.without_gradient
        return [info.tensor for info in unused if isinstance(info.tensor, nn.Parameter)] if unused else ()

    def commit(self) -> None:
        """Take the updated weights into the working parameters, in the background; the states are not needed soon."""
        self._behind.wait()
        self._count_update()  # it looks at the master weights, for which it would have to wait afterwards
        self._behind.last = self.chunk.start_commit()
        self._reads_ahead = self._following is not None
        if self._states.name == "disk":
            for memory, _ in self._memories:
                self._states.page_out(memory)

    def wait_commit(self) -> None:
        """Return when the working parameters have the updated weights; those of earlier shards have been waited for."""
        self._behind.wait()

    def _count_update(self) -> None:
        """Count what the update has moved: the gradient and the new weights, and states on the disk there and back."""
        rest = self.chunk.rest
        computes = self._host if self._states.name == "disk" else self._states
        if computes is self._states is rest:
            return  # everything is where it is updated
        shard, master, gradient = self.chunk.shard, self.chunk.master, self.chunk.gradient
        in_place = gradient is shard or master is shard
        if gradient is not None:
            computes.receive(rest if in_place else self._states, gradient.nbytes)
        if master is not None:
            if master is not shard:
                rest.receive(computes, self.chunk.shard_bytes)
            state_bytes = master.nbytes + sum(memory.nbytes for memory, _ in self._memories)
            computes.receive(self._states, state_bytes)
            self._states.receive(computes, state_bytes)

    def discard(self) -> None:
        """Drop the gradient."""
        self.chunk.discard()
