"""Debug mode, and what inference leaves gathered."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from ddp_checks import OneAhead, assert_at_rest, default_loss, same_bits
from test_ddp_lost_ranks import Chain
from test_ddp_models import ZOO

from gemini_ddp import ZeroDDP, ZeroDDPError
from gemini_ddp.testing import PoisonStore
from ranks import run_ranks


def test_log_tells_what_is_gathered_where_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEMINI_DEBUG", "1")
    torch.manual_seed(0)
    plain = ZOO["Stack"]()
    module = copy.deepcopy(plain)
    store = PoisonStore(module.parameters(), params_per_chunk=2)
    model = ZeroDDP(module, store, OneAhead())
    for step in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="gemini_ddp"):
            default_loss(model, step).backward()
        default_loss(plain, step).backward()
    lines = [record.getMessage() for record in caplog.records]
    for what in ("gather", "release", "reduce"):
        assert any(f": {what} PlainChunk(" in line for line in lines)
    assert any(line.startswith("rank 0, forward of ") for line in lines)
    assert any(line.startswith("rank 0, backward of ") for line in lines)
    for (name, param), mine in zip(plain.named_parameters(), module.parameters(), strict=True):
        same_bits(store.gradient(mine), param.grad, name)


def check_named_at_once(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = Chain()
    store = PoisonStore(module.parameters(), params_per_chunk=2, process_group=dist.group.WORLD)
    model = ZeroDDP(module, store, OneAhead(), process_group=dist.group.WORLD, debug=True)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ZeroDDPError, match=r"'layers.2' in forward.*'layers.3' in forward"):
        model(torch.ones(2, 3), "skip" if rank == 1 else "")
    model(torch.ones(2, 3)).sum().backward()
    assert_at_rest(store)


@pytest.mark.distributed
def test_ranks_that_leave_the_plan_apart_are_named_at_once() -> None:
    run_ranks(check_named_at_once, 2, timeout_s=30)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("max_gathered", [None, 2])
def test_inference_may_leave_gathered_what_there_is_room_for(planned: bool, max_gathered: int | None) -> None:
    torch.manual_seed(0)
    plain = ZOO["Stack"]()
    module = copy.deepcopy(plain)
    store = PoisonStore(module.parameters(), params_per_chunk=2, max_gathered=max_gathered)
    model = ZeroDDP(module, store, OneAhead() if planned else None, scatter_after_inference=False)
    x = plain.batch(0)
    for _ in range(3):
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
            gathered = sum(chunk.is_gathered for chunk in store.chunks)
            assert gathered == (len(store.chunks) if max_gathered is None else 2)
        before = [chunk.gathers for chunk in store.chunks]
        with torch.no_grad():
            model(x)
        assert max_gathered is not None or before == [chunk.gathers for chunk in store.chunks]
        default_loss(model, 0).backward()
        assert_at_rest(store)
