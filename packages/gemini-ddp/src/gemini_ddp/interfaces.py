"""What `ZeroDDP` asks of its collaborators: a store that holds the parameters, a planner that orders their movement."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Literal, Protocol, TypeVar

from torch import Tensor

ChunkT = TypeVar("ChunkT", bound=Hashable)
ChunkT_co = TypeVar("ChunkT_co", covariant=True)

Phase = Literal["forward", "backward"]


class ChunkStore(Protocol[ChunkT]):
    """Holds parameters in chunks that are valid on the compute device only while gathered.

    Every rank makes the same calls that may communicate (`start_gather`, `begin_use`, `start_reduce`,
    `finish_backward`, `full_value`) in the same order, and those only: `take_gradients` may come in any order, on any
    rank or on none. `gemini_ddp.testing.ChunkStoreContract` tests what is said here.
    """

    def __contains__(self, tensor: object) -> bool:
        """Whether the store manages this parameter."""

    def chunk_of(self, tensor: Tensor) -> ChunkT:
        """Return the chunk of a managed parameter; raise KeyError for any other tensor."""

    def has_room(self, chunks: Iterable[ChunkT]) -> bool:
        """Whether all of these chunks can be gathered now; the same on every rank."""

    def start_fetch(self, chunk: ChunkT) -> object:
        """Start to bring this rank's part of a chunk from where it rests, so that a later gather finds it at hand.

        Only a hint, without the other ranks: what it brings may be given back, and `has_room` does not depend on it.
        """

    def start_gather(self, chunk: ChunkT) -> object:
        """Start to make a chunk valid; does nothing for one that is, or is on its way."""

    def release(self, chunk: ChunkT) -> None:
        """Give a gathered chunk's memory back, unless a parameter of it is in use or the store keeps it gathered."""

    def begin_use(self, tensors: Iterable[Tensor]) -> None:
        """Make these parameters valid, waiting for their chunks, and keep them so until `end_use`; calls nest.

        Views that were taken of a parameter in an earlier use become valid again, too: autograd saves them. Raise
        KeyError for a tensor that is not managed.
        """

    def end_use(self, tensors: Iterable[Tensor], *, in_backward: bool) -> None:
        """Undo one `begin_use`; ``in_backward`` tells that the parameters' gradients follow.

        Raise RuntimeError where no use was begun. A store may raise as well where it sees that a parameter was written
        to, which would be lost; the use has ended then.
        """

    def take_gradients(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take this rank's gradients of some parameters: pairs of a parameter and a gradient of its shape.

        A gradient may come in parts, within one call as well, and several backwards may come before the gradients are
        used: all of them add up.
        """

    def start_reduce(self, chunk: ChunkT) -> object:
        """Start to average a chunk's gradients over the ranks, and add them to those of earlier reductions.

        A parameter that has no gradient on this rank counts as zero.
        """

    def finish_backward(self, unused: Set[Tensor] = frozenset(), *, keep_local: bool = False) -> None:
        """Reduce each chunk that has not been reduced in this backward, wait, end all uses, and release.

        Args:
            unused: parameters without a gradient on any rank since the last backward that was reduced, the same on
                every rank; it is as if they had taken no part. A chunk of such parameters only is not reduced.
            keep_local: reduce nothing: this rank's gradients stay with it until the next backward adds to them.
        """

    def rest(self) -> None:
        """Release every chunk that nobody uses."""

    def reset(self) -> None:
        """Return to rest after an interrupted step; its gradients are dropped."""

    def full_value(self, tensor: Tensor) -> Tensor:
        """Return a copy of a parameter's full value, shape of the parameter, on the compute device."""

    def load_value(self, tensor: Tensor, value: Tensor) -> None:
        """Overwrite a parameter from its full value, the same on every rank; raise ValueError for another shape.

        The parameter's chunk may be released by it.
        """

    def memory_usage(self) -> Mapping[str, Mapping[str, int | None]]:
        """Return bytes ``used``, ``peak`` and ``capacity`` of each tier."""


class Access(Protocol[ChunkT_co]):
    """One entry of a module that needs chunks."""

    @property
    def phase(self) -> Phase:
        """Whether forward or backward entered it."""

    @property
    def chunks(self) -> Sequence[ChunkT_co]:
        """The chunks that must be gathered while it runs: its own, and those of modules that are in use around it."""

    @property
    def gradients(self) -> Sequence[ChunkT_co]:
        """The chunks that have gradients before the next access, and are not reduced when it begins."""

    @property
    def held(self) -> Sequence[ChunkT_co]:
        """Of ``chunks``, those still in use when the first of a chunk's gradients comes; others are over before."""


class Trace(Protocol[ChunkT_co]):
    """The order in which one step entered modules."""

    @property
    def accesses(self) -> Sequence[Access[ChunkT_co]]:
        """All entries, first to last."""


class Step(Protocol[ChunkT_co]):
    """What to do at one access of a trace."""

    @property
    def prefetch(self) -> Sequence[ChunkT_co]:
        """Chunks to start gathering when the access begins, after its own."""

    @property
    def fetch(self) -> Sequence[ChunkT_co]:
        """Chunks to start fetching then, for a gather that starts later; nobody waits for that."""

    @property
    def release(self) -> Sequence[ChunkT_co]:
        """Chunks to release once the access is over."""


class Plan(Protocol[ChunkT_co]):
    """One step for each access of a trace."""

    @property
    def steps(self) -> Sequence[Step[ChunkT_co]]:
        """Steps, by index of the access."""


class Planner(Protocol[ChunkT]):
    """Turns a trace into a plan."""

    def schedule(self, trace: Trace[ChunkT]) -> Plan[ChunkT]:
        """Return a plan with as many steps as ``trace`` has accesses; the same on every rank for the same trace."""
