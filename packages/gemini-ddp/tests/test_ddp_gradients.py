"""In which order reductions are started, whatever each rank has of the gradients; two ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence, Set

import pytest
import torch
from torch import Tensor, nn

from gemini_ddp._gradients import Gradients
from gemini_ddp.testing import PlainChunk, PlainStore


class Recorder(PlainStore):
    """Notes what is reduced; at the end of backward a store may reduce what is left in an order of its own."""

    def __init__(self, params: Sequence[nn.Parameter], params_per_chunk: int) -> None:
        super().__init__(params, params_per_chunk=params_per_chunk)
        self.reduced: list[int] = []
        self.left: set[int] = set()

    def start_reduce(self, chunk: PlainChunk) -> None:
        self.reduced.append(chunk.index)

    def finish_backward(self, unused: Set[Tensor] = frozenset(), *, keep_local: bool = False) -> None:
        assert not keep_local
        used = {chunk.index for chunk in self.chunks if not unused.issuperset(chunk.params)}
        self.left = used.difference(self.reduced)


def gradients_of(count: int, params_per_chunk: int = 1) -> tuple[Gradients[PlainChunk], Recorder]:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
    store = Recorder(params, params_per_chunk)
    gradients = Gradients(store, params)
    gradients.start(reduces=True)
    return gradients, store


@pytest.mark.parametrize(
    ("first", "second"),
    [({0, 1, 2, 3}, {0, 1, 2, 3}), ({0, 1, 2, 3}, {0}), ({1, 3}, {0, 1}), ({3}, {2}), ({0}, set()), (set(), set())],
)
def test_all_that_is_left_at_the_end_is_reduced_in_one_order(first: set[int], second: set[int]) -> None:
    ranks = [gradients_of(4) for _ in range(2)]
    begun = []
    for (gradients, store), came in zip(ranks, (first, second), strict=True):
        for index in came:
            gradients.take(gradients.slots[index], torch.ones(2))
        gradients.begin_to_finish()
        begun.append(list(store.reduced))
    everyones = [gradients.remains for gradients, _ in ranks]
    for gradients, _ in ranks:
        assert not gradients.finish(everyones)
    (_, one), (_, other) = ranks
    assert one.reduced == other.reduced == sorted(first | second, reverse=True)
    assert not one.left
    assert not other.left
    # A rank begins with what all reduce first, and with no more: its next reduction may wait for this one.
    assert begun == [[3] if 3 in came else [] for came in (first, second)]


def test_gradients_are_given_to_the_store_before_their_chunk_is_reduced() -> None:
    gradients, store = gradients_of(6, params_per_chunk=3)
    slots = gradients.slots
    for slot in slots[:3]:
        gradients.take(slot, torch.ones(2))
    assert list(store._gradients) == [slots[0].param], "The first of a chunk is given, and small ones wait for others."
    gradients.reduce(store.chunks[:1])
    assert list(store._gradients) == [slot.param for slot in slots[:3]]
    for slot in slots[3:5]:
        gradients.take(slot, torch.ones(2))
    gradients.forget()
    gradients.reduce(store.chunks[1:])
    assert list(store._gradients) == [slot.param for slot in slots[:4]], "What was forgotten is not given."


def test_many_bytes_of_gradients_do_not_wait() -> None:
    params = [nn.Parameter(torch.zeros(2**19)) for _ in range(3)]
    store = PlainStore(params)
    gradients = Gradients(store, params)
    gradients.start(reduces=True)
    given = []
    for slot in gradients.slots:
        gradients.take(slot, torch.ones(2**19))
        given.append(len(store._gradients))
    assert given == [1, 2, 3], "Each has two MiB."
