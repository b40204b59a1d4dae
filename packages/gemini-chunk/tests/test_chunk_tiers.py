"""Tiers: every byte is counted, a capacity is kept, disk memory has no name, pinning falls back."""

import errno
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import gemini_chunk._tiers as tiers
from gemini_chunk import Tier, TierFullError, device_tier, disk_tier, host_tier


@pytest.fixture(params=["device", "host", "disk", "pinned"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
    if request.param == "pinned":
        monkeypatch.setattr(tiers, "_register", lambda *_: None)
        monkeypatch.setattr(tiers, "_unregister", lambda *_: None)
        return host_tier(1000, pin_memory=True)
    made = {"device": lambda: device_tier("cpu", 1000), "host": lambda: host_tier(1000)}
    return made.get(request.param, lambda: disk_tier(tmp_path, 1000))()


def test_allocations_are_counted_until_they_are_freed(tier: Tier) -> None:
    first = tier.allocate(100, torch.float32, "a")
    second = tier.allocate(50, torch.bfloat16, "b")
    assert (tier.used, tier.peak, tier.holders) == (500, 500, {"a": 400, "b": 100})
    first.fill_(1.0)
    second.fill_(2.0)
    assert first.sum() == 100
    assert second.dtype == torch.bfloat16
    tier.free(first)
    assert (tier.used, tier.peak, tier.holders) == (100, 500, {"b": 100})
    tier.reset_peak()
    tier.free(second)
    assert (tier.used, tier.peak, tier.holders) == (0, 100, {})


def test_a_full_tier_refuses_and_says_who_holds_it(tier: Tier) -> None:
    for holder, numel in [("b", 5), ("a", 180), ("c", 7), ("d", 8)]:
        tier.allocate(numel, torch.float32, holder)
    with pytest.raises(
        TierFullError,
        match=r"cannot hold 204 more bytes for late.*800 of 1,000.*holders: a \(720\), d \(32\), c \(28\)\.",
    ) as caught:
        tier.allocate(51, torch.float32, "late")
    error = caught.value
    assert (error.tier, error.holder) == (tier.name, "late")
    assert (error.asked_bytes, error.used_bytes, error.capacity_bytes) == (204, 800, 1000)
    assert list(error.largest_holders.items()) == [("a", 720), ("d", 32), ("c", 28)]
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), vars(copied)) == (str(error), vars(error))
    assert tier.used == 800
    tier.allocate(50, torch.float32, "exactly what is left")


def test_empty_memory_costs_nothing(tier: Tier) -> None:
    nothing = tier.allocate(0, torch.float32, "nobody")
    tier.free(nothing)
    assert (nothing.numel(), tier.used, tier.peak) == (0, 0, 0)


def test_disk_memory_has_no_name_in_its_folder(tmp_path: Path) -> None:
    memory = disk_tier(tmp_path).allocate(1000, torch.float32, "a").fill_(3.0)
    assert list(tmp_path.iterdir()) == []
    assert memory.sum() == 3000


def test_a_disk_tier_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="existing folder"):
        disk_tier(tmp_path / "absent")


def test_a_disk_that_cannot_give_the_blocks_is_an_error_at_once(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    free = shutil.disk_usage(tmp_path).free
    says = r"cannot take 36,028,797,018,963,968 bytes for much: .*(too large|space|big).* bytes free.*" + tmp_path.name
    with pytest.raises(OSError, match=says) as caught:
        tier.allocate(2**55, torch.uint8, "much")
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert (tier.used, tier.peak) == (0, 0)
    assert shutil.disk_usage(tmp_path).free > 0.9 * free, "what was taken on the way is given back"


def test_where_pinning_fails_there_is_one_warning_and_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pointer: int, num_bytes: int) -> None:
        raise RuntimeError("no more pages may be locked.")

    monkeypatch.setattr(tiers, "_register", refuse)
    tier = host_tier(pin_memory=True)
    with pytest.warns(UserWarning, match=r"not pinned: no more pages may be locked\.") as warned:
        memory = [tier.allocate(64, torch.float32, "a").fill_(i) for i in range(3)]
    assert len(warned) == 1
    assert [int(m.sum()) for m in memory] == [0, 64, 128]
    assert tier.used == 3 * 256


def test_pinned_memory_is_unlocked_when_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: set[int] = set()
    monkeypatch.setattr(tiers, "_register", lambda pointer, _: locked.add(pointer))
    monkeypatch.setattr(tiers, "_unregister", locked.remove)
    tier = host_tier(pin_memory=True)
    memory = tier.allocate(64, torch.float32, "a")
    assert locked == {memory.data_ptr()}
    tier.free(memory)
    assert not locked


@pytest.mark.parametrize(
    ("capacity", "error"), [(-1, ValueError), (1.5, TypeError), ("1GiB", TypeError), (True, TypeError)]
)
def test_a_capacity_is_a_number_of_bytes(capacity: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="capacity of the host tier"):
        host_tier(capacity)  # type: ignore[arg-type] # what the test is about


def test_pages_of_the_disk_tier_alone_leave_the_process(tier: Tier) -> None:
    assert tier.has_pages == (tier.name == "disk")
