"""What this package asks of others: facts about chunks, a recorded order of use, and what a policy must do."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from gemini_placement._placement import Placement
    from gemini_placement._plan import Plan

TierName = Literal["device", "host", "disk"]
"""Where bytes rest: on the accelerator, in the machine's memory, or in a memory-mapped file."""

Phase = Literal["forward", "backward"]


class ChunkFacts(Hashable, Protocol):
    """What a placement policy may know of a chunk; its hash and equality serve for lookup only, never for order."""

    @property
    def name(self) -> str:
        """A name, unique among the chunks placed together and alike on every rank: "chunk 3"."""

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer, held by every rank while the chunk is gathered."""

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard of the working parameters."""

    @property
    def optim_bytes(self) -> int:
        """Bytes that rest with the optimizer on one rank: master weights and moments; 0 when frozen."""

    @property
    def padding_bytes(self) -> int:
        """Of ``optim_bytes``, what this rank's padding would take but never does: ranks may differ in this alone.

        Predictions leave it out; decisions must not look at it.
        """

    @property
    def sum_bytes(self) -> int:
        """Of ``optim_bytes``, what the fp32 sum of several backwards' gradients takes; 0 where there is none.

        The sum rests with separate master weights, or with the parameters where those are their own; there from the
        first backward of a step to the optimizer.
        """

    @property
    def trainable(self) -> bool:
        """Whether the chunk gets gradients, and so needs a gradient buffer in backward."""

    @property
    def is_own_master(self) -> bool:
        """Whether the optimizer updates the working parameters themselves where both rest on one tier.

        The gradient then has memory of its own there, as large as master weights would be; else the gradient takes the
        place of the parameters, unless it is summed.
        """

    @property
    def stages_gradient(self) -> bool:
        """Whether the shard of the gradient is on the device first when the parameters rest on another tier."""


ChunkT = TypeVar("ChunkT", bound=ChunkFacts)
ChunkT_co = TypeVar("ChunkT_co", bound=ChunkFacts, covariant=True)


class Access(Protocol[ChunkT_co]):
    """One use of chunks: a scope of the model in forward, or its return in backward."""

    @property
    def phase(self) -> Phase:
        """Which half of the training step the access belongs to."""

    @property
    def chunks(self) -> Sequence[ChunkT_co]:
        """The chunks that must be gathered at the same time during this access."""

    @property
    def gradients(self) -> Sequence[ChunkT_co]:
        """The chunks that have gradients before the next access, and are not reduced when it begins."""

    @property
    def held(self) -> Sequence[ChunkT_co]:
        """Of ``chunks``, those still in use when the first of a chunk's gradients comes; others are over before."""


class Trace(Protocol[ChunkT_co]):
    """The order in which one step uses chunks."""

    @property
    def accesses(self) -> Sequence[Access[ChunkT_co]]:
        """All accesses of one step, first to last."""


class PlacementPolicy(Protocol):
    """What decides where chunks rest and when they are gathered. It moves nothing itself.

    Call order: `place` once the chunks are known, on every rank with equal facts; `schedule` once a trace exists,
    and again for each other trace. Both are pure: equal arguments give equal results.
    """

    def place(
        self, chunks: Sequence[ChunkT], *, capacities: Mapping[TierName, int | None], world_size: int
    ) -> Placement[ChunkT]:
        """Decide where each chunk rests.

        Args:
            chunks: distinct chunks in the order of forward, the first used first.
            capacities: bytes for model states per tier on this rank, None without a limit; a tier that is missing
                does not exist. "device" must be there.
            world_size: ranks that share the chunks.

        Raises:
            PlacementError: the chunks do not fit.
        """

    def schedule(self, trace: Trace[ChunkT], placement: Placement[ChunkT]) -> Plan[ChunkT]:
        """Plan one step: what to gather, prefetch and release at each access of the trace."""
