"""What the optimizer sees of a chunk: a flat shard with a gradient, master weights and memory for states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gemini_chunk import Chunk, Tier


@dataclass(frozen=True, slots=True)
class ParamRun:
    """A run of one parameter's elements in a shard."""

    param: nn.Parameter
    start: int
    numel: int
    param_offset: int


class ChunkShard:
    """This rank's part of one trainable chunk.

    Args:
        chunk: the chunk.
        states: tier where its optimizer states rest.
    """

    def __init__(self, chunk: Chunk, states: Tier) -> None:
        self._chunk = chunk
        self._states = states

    @property
    def name(self) -> str:
        """The chunk's name."""
        return self._chunk.name

    @cached_property
    def slices(self) -> Sequence[ParamRun]:
        """The parameters' elements in this shard, in order."""
        runs = []
        for part in self._chunk.slices:
            assert isinstance(part.info.tensor, nn.Parameter)
            runs.append(ParamRun(part.info.tensor, part.start, part.numel, part.param_offset))
        return runs

    def grad(self) -> Tensor | None:
        """The averaged gradient, shape ``(shard_numel,)``."""
        return self._chunk.gradient

    def master(self) -> Tensor:
        """The weights to update, shape ``(shard_numel,)``."""
        master = self._chunk.master
        assert master is not None, "only trainable chunks are given to an optimizer"
        return master

    def new_state(self, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """Return zeroed memory, accounted for in the tier where the chunk's states rest."""
        return self._states.allocate(numel, dtype, f"{self.name} {label}").zero_()

    def commit(self) -> None:
        """Take the updated weights into the working parameters."""
        self._chunk.commit()

    def discard(self) -> None:
        """Drop the gradient."""
        self._chunk.discard()
