"""A step recorded by the names of parameters, as one over chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from gemini_placement.interfaces import ChunkT, Phase

if TYPE_CHECKING:
    from gemini_placement._stats import AccessStats


@dataclass(frozen=True, slots=True)
class ChunkAccess(Generic[ChunkT]):
    """One access of a record, over chunks; what is not in `interfaces.Access` is in `AccessStats`."""

    phase: Phase
    chunks: tuple[ChunkT, ...]
    gradients: tuple[ChunkT, ...] = ()
    held: tuple[ChunkT, ...] = ()
    non_model_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkTrace(Generic[ChunkT]):
    """A record over chunks: what a policy plans from."""

    accesses: tuple[ChunkAccess[ChunkT], ...]


def make_trace(accesses: Sequence[AccessStats], chunks: Mapping[str, ChunkT], *, world_size: int) -> ChunkTrace[ChunkT]:
    """See `MemStats.trace`."""
    missing: dict[ChunkT, set[str]] = {}
    for name, chunk in chunks.items():
        missing.setdefault(chunk, set()).add(name)
    uses = _Uses(accesses, chunks, world_size)
    waiting: tuple[ChunkT, ...] = ()
    made = []
    for index, access in enumerate(accesses):
        gradients = [name for name in access.gradients if name in chunks]
        in_use = uses.begin(access)
        first = next((number for number, name in enumerate(gradients) if chunks[name] not in waiting), len(gradients))
        # With several ranks the uses of the last access are over when all are at the end.
        is_last = index + 1 == len(accesses) and world_size > 1
        over = set() if is_last else uses.over(access, gradients[: first + 1])
        waiting = tuple(dict.fromkeys((*waiting, *(chunks[name] for name in gradients))))
        made.append(
            ChunkAccess(
                access.phase,
                tuple(dict.fromkeys(chunks[name] for name in in_use)),
                waiting,
                tuple(dict.fromkeys(chunks[name] for name in in_use if name not in over)),
                access.non_model_bytes,
            )
        )
        for name in gradients:
            missing[chunks[name]].discard(name)
        uses.finish(gradients)
        waiting = tuple(chunk for chunk in waiting if missing[chunk])
    return ChunkTrace(tuple(made))


class _Uses(Generic[ChunkT]):
    """Which parameters are in use beyond what a record says, for that depends on ranks and chunks.

    With several ranks, what a module uses that forward called more than once stays in use to the end of backward, for
    other ranks may enter the backward of another call. A module whose parameters lie in one chunk is entered as a
    whole, and its backward is over when all of them have gradients.
    """

    def __init__(self, accesses: Sequence[AccessStats], chunks: Mapping[str, ChunkT], world_size: int) -> None:
        entered = Counter(access.module for access in accesses if access.phase == "forward")
        self._several = {module for module, count in entered.items() if count > 1 and world_size > 1}
        self._names = chunks.keys()
        self._covers = {name: cover for cover in _covers("", list(chunks), chunks) for name in cover}
        self._lasting: dict[str, None] = {}
        self._open: dict[tuple[str, ...], set[str]] = {}

    def begin(self, access: AccessStats) -> Collection[str]:
        """Begin an access, and return what is in use during it."""
        if access.phase == "backward":
            if access.module in self._several:
                self._lasting.update(dict.fromkeys(access.params))
            for name in access.params:
                if name in self._covers:
                    self._open.setdefault(self._covers[name], set(self._covers[name]))
        in_use = (*access.params, *access.within, *self._lasting, *(cover[0] for cover in self._open))
        return [name for name in in_use if name in self._names]

    def over(self, access: AccessStats, gradients: Sequence[str]) -> set[str]:
        """Return what is not in use any more when the last of these gradients comes."""
        over = {name for name, number in access.ends if number < len(gradients)} - self._lasting.keys()
        for cover, left in self._open.items():
            over.difference_update(cover)
            if left <= set(gradients):
                over.update(cover)
        return over - self._lasting.keys()

    def finish(self, gradients: Sequence[str]) -> None:
        """End an access."""
        for cover, left in list(self._open.items()):
            left.difference_update(gradients)
            if not left:
                del self._open[cover]


def _covers(prefix: str, names: Sequence[str], chunks: Mapping[str, ChunkT]) -> Iterator[tuple[str, ...]]:
    """Yield the parameters of each outermost module of several that all lie in one chunk."""
    if len({chunks[name] for name in names}) == 1 and len({name.rpartition(".")[0] for name in names}) > 1:
        yield tuple(names)
        return
    children: dict[str, list[str]] = {}
    for name in names:
        child, dot, _ = name.removeprefix(prefix).partition(".")
        if dot:
            children.setdefault(f"{prefix}{child}.", []).append(name)
    for child, inner in children.items():
        yield from _covers(child, inner, chunks)
