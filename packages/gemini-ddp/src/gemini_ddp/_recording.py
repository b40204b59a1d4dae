"""What the first step of a mode leaves behind: its accesses, and which chunks have memory at each of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gemini_ddp._schedule import RecordedAccess, RecordedTrace
from gemini_ddp._scopes import Scope
from gemini_ddp.interfaces import Phase

ChunkT = TypeVar("ChunkT", bound=Hashable)


@dataclass(slots=True)
class Recorded(Generic[ChunkT]):
    """An access of a step that is being recorded.

    Attributes:
        key: the scope that is entered.
        due: chunks to be reduced at its beginning.
        ended: scopes whose backward is over then.
        within: what is in use beside it.
        gradients: chunks of which a gradient came before the next access, each with the scopes of which nothing was
            left to come at the first.
    """

    key: tuple[Scope, Phase]
    due: tuple[ChunkT, ...] = ()
    ended: tuple[Scope, ...] = ()
    within: tuple[tuple[Scope, Phase], ...] = ()
    gradients: dict[ChunkT, frozenset[Scope]] = field(default_factory=dict)

    def note_gradient(self, chunk: ChunkT) -> None:
        """Note that a gradient of a chunk has come."""
        if chunk not in self.gradients:
            backwards = (scope for scope, phase in (self.key, *self.within) if phase == "backward")
            self.gradients[chunk] = frozenset(scope for scope in backwards if scope.is_done or not scope.in_backward)


def make_trace(
    recording: Sequence[Recorded[ChunkT]],
    needs: Mapping[Phase, Sequence[tuple[ChunkT, ...]]],
    late: Collection[ChunkT],
    *,
    alone: bool,
) -> RecordedTrace[ChunkT]:
    """Return the trace of a recorded step, as a later step that follows it will go.

    Args:
        recording: its accesses.
        needs: the chunks of each scope by phase, by the scope's index.
        late: chunks that are reduced at the end of backward, wherever they were due.
        alone: whether there is one rank, where uses end as soon as nothing of a backward is left.
    """
    filling: dict[ChunkT, None] = {}
    lasting: dict[Scope, None] = {}
    accesses = []
    for index, recorded in enumerate(recording):
        following = recording[index + 1] if index + 1 < len(recording) else None
        scope, phase = recorded.key
        keys = dict.fromkeys((recorded.key, *recorded.within, *((other, "backward") for other in lasting)))
        first_comers = [over for chunk, over in recorded.gradients.items() if chunk not in filling]
        over = frozenset.intersection(*first_comers) if first_comers else frozenset()
        held = [key for key in keys if not (key[0] in over and (alone or (following and key[0] in following.ended)))]
        filling.update(dict.fromkeys(recorded.gradients))
        accesses.append(RecordedAccess(phase, _chunks(keys, needs), tuple(filling), _chunks(held, needs)))
        for chunk in () if following is None else following.due:
            if chunk not in late:
                filling.pop(chunk, None)
        if phase == "backward" and not alone and scope.num_calls > 1:
            lasting[scope] = None  # see `Course._prepare_for_other_losses`
    return RecordedTrace(tuple(accesses))


def _chunks(
    keys: Collection[tuple[Scope, Phase]], needs: Mapping[Phase, Sequence[tuple[ChunkT, ...]]]
) -> tuple[ChunkT, ...]:
    return tuple(dict.fromkeys(chunk for scope, phase in keys for chunk in needs[phase][scope.index]))
