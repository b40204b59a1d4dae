"""How many Python calls a chunk takes: between a model's kernels, each costs microseconds and not nanoseconds."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import nn

import gemini_chunk
from gemini_chunk import Chunk, ChunkManager, TierName, device_tier, host_tier

PACKAGE = gemini_chunk.__name__


def calls_of(work: Callable[[], object]) -> list[str]:
    """Return the functions of the package that ``work`` calls, once for each call."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith(PACKAGE):
            called.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return called


def chunk_of(num_tensors: int, rest: TierName) -> tuple[ChunkManager, Chunk]:
    manager = ChunkManager(device=device_tier("cpu"), host=host_tier(), debug=False)
    tensors = [(f"weight {index}", nn.Parameter(torch.ones(3))) for index in range(num_tensors)]
    (chunk,) = manager.register(tensors, 3 * num_tensors, rest=rest, keep_gathered=rest == "device")
    return manager, chunk


def test_gather_and_release_make_as_many_calls_for_many_tensors_as_for_few() -> None:
    def calls(num_tensors: int) -> list[str]:
        manager, chunk = chunk_of(num_tensors, "host")

        def use() -> None:
            manager.start_gather(chunk)
            manager.gather(chunk)
            manager.release(chunk)

        use()
        return calls_of(use)

    assert calls(40) == calls(2)


@pytest.mark.parametrize("rest", ["device", "host"])
def test_what_is_gathered_is_gathered_again_by_one_call(rest: TierName) -> None:
    manager, chunk = chunk_of(2, rest)
    manager.gather(chunk)
    assert calls_of(lambda: manager.start_gather(chunk)) == ["ChunkManager.start_gather"]
    assert calls_of(lambda: manager.gather(chunk)) == ["ChunkManager.gather"]


def test_room_without_a_capacity_is_one_call() -> None:
    manager, chunk = chunk_of(2, "host")
    assert calls_of(lambda: manager.has_room([chunk])) == ["ChunkManager.has_room"]


def test_a_use_is_one_call_of_the_manager_and_one_of_each_chunk() -> None:
    manager, chunk = chunk_of(40, "host")
    other = nn.Parameter(torch.ones(3))
    manager.register([("other", other)], 3, rest="host")
    params = (*(info.tensor for info in chunk.tensors), other)
    manager.begin_use(params)
    assert calls_of(lambda: manager.begin_use(params)) == ["ChunkManager.begin_use", *["UsedLayout.begin_use"] * 2]
    assert calls_of(lambda: manager.end_use(params, in_backward=False)) == [
        "ChunkManager.end_use",
        *["UsedLayout.end_use"] * 2,
    ]


def test_a_backward_makes_as_many_calls_for_many_small_gradients_as_for_few() -> None:
    def calls(num_tensors: int) -> list[str]:
        manager, chunk = chunk_of(num_tensors, "device")
        gradients = [(info.tensor, torch.ones(3)) for info in reversed(chunk.tensors)]

        def backward() -> None:
            manager.take_gradients(gradients)
            manager.start_reduce(chunk)
            manager.finish_backward()

        return calls_of(backward)

    assert calls(40) == calls(2)


def test_no_more_than_some_groups_of_tensors_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemini_chunk._manager._MOST_REMEMBERED", 8)
    manager, chunk = chunk_of(6, "host")
    tensors = [info.tensor for info in chunk.tensors]
    for first in tensors:
        for second in tensors:
            used = [first] if first is second else [first, second]
            manager.begin_use(used)
            manager.end_use(used, in_backward=False)
            assert len(manager._by_chunk) <= 8
    assert chunk.users == 0
