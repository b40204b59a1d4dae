"""A write to a tensor of a chunk lasts, or it is refused: none is lost in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gemini_chunk import Chunk, ChunkError, ChunkManager, TierName, device_tier
from ranks import run_ranks

LOST = r"\['b'\] of chunk 0 were written to"


def two_params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.arange(3.0))]


def registered(
    params: list[nn.Parameter], rest: TierName = "device", *, debug: bool = False, trainable: bool = True
) -> tuple[ChunkManager, Chunk]:
    manager = ChunkManager(device=device_tier("cpu"), debug=debug)
    (chunk,) = manager.register([("a", params[0]), ("b", params[1])], 8, rest=rest, trainable=trainable)
    return manager, chunk


def use(manager: ChunkManager, params: list[nn.Parameter], write: Callable[[nn.Parameter], object]) -> None:
    """Write to the second parameter in the middle of a use."""
    manager.begin_use(params)
    with torch.no_grad():
        write(params[1])
    manager.end_use(params, in_backward=False)


def assign(param: nn.Parameter) -> None:
    param.data = torch.ones_like(param)


IN_PLACE: dict[str, Callable[[nn.Parameter], object]] = {
    "add_": lambda param: param.add_(1),
    "of a view": lambda param: param[:2].mul_(2),
    "of an alias": lambda param: param.detach().clamp_(0, 1),
    "max_norm": lambda param: torch.embedding_renorm_(param[:, None], torch.tensor([1, 2]), 0.5, 2.0),
}
WRITES = {**IN_PLACE, "data =": assign}


@pytest.mark.parametrize("kind", WRITES)
def test_write_in_a_use_is_refused_where_the_next_gather_would_undo_it(kind: str) -> None:
    params = two_params()
    manager, chunk = registered(params, "host")
    with pytest.raises(ChunkError, match=LOST):
        use(manager, params, WRITES[kind])
    assert chunk.users == 0
    manager.rest()
    use(manager, params, lambda param: None)  # told once
    manager.gather(chunk)
    assert torch.equal(params[1], torch.arange(3.0))


@pytest.mark.parametrize("kind", IN_PLACE)
def test_write_in_place_to_a_single_ranks_chunk_on_the_device_lasts(kind: str) -> None:
    params, plain = two_params(), two_params()[1]
    manager, chunk = registered(params)
    use(manager, params, IN_PLACE[kind])
    with torch.no_grad():
        IN_PLACE[kind](plain)
        params[0].add_(1)  # between uses, too
    use(manager, params, lambda param: None)
    chunk.commit()
    manager.move(chunk, "host")
    manager.gather(chunk)
    assert torch.equal(params[0], torch.arange(4.0) + 1)
    assert torch.equal(params[1], plain)


def test_data_that_is_assigned_to_a_tensor_that_stays_gathered_is_refused_at_its_next_use() -> None:
    params = two_params()
    manager, _ = registered(params)
    assign(params[1])
    with pytest.raises(ChunkError, match=LOST):
        use(manager, params, lambda param: None)
    use(manager, params, lambda param: None)
    assert torch.equal(params[1], torch.arange(3.0))


@pytest.mark.parametrize("rest", ["device", "host"])
def test_tensor_that_is_moved_with_its_values_is_no_fault(rest: TierName) -> None:
    params = two_params()
    manager, _ = registered(params, rest)

    def flatten(param: nn.Parameter) -> None:
        param.set_(param.clone())  # type: ignore[call-overload] # as RNN.flatten_parameters does on an accelerator

    use(manager, params, flatten)
    use(manager, params, lambda param: None)
    manager.rest()
    manager.gather(params[0])
    assert torch.equal(params[1], torch.arange(3.0))


def test_write_is_refused_where_master_weights_would_undo_it_and_is_undone_at_once() -> None:
    params = [nn.Parameter(value.bfloat16()) for value in two_params()]
    manager = ChunkManager(device=device_tier("cpu"))
    (chunk,) = manager.register([("a", params[0]), ("b", params[1])], 8, master="device")
    assert chunk.keeps_gathered
    for write_between in (False, True):
        if write_between:
            with torch.no_grad():
                params[1].zero_()
        with pytest.raises(ChunkError, match=LOST):
            use(manager, params, (lambda param: None) if write_between else (lambda param: param.zero_()))
        assert torch.equal(params[1].float(), torch.arange(3.0))


def test_write_outside_of_a_use_is_refused_at_the_next_gather() -> None:
    params = two_params()
    manager, chunk = registered(params, "host")
    for write in (*IN_PLACE.values(), assign):
        manager.gather(chunk)
        with torch.no_grad():
            write(params[1])
        manager.release(chunk)
        with pytest.raises(ChunkError, match=LOST):
            manager.gather(chunk)
        manager.gather(chunk)
        assert torch.equal(params[1], torch.arange(3.0))
        manager.release(chunk)


@pytest.mark.parametrize("write", [lambda p: p.zero_(), lambda p: p.fill_(1.0), nn.init.ones_, assign])
def test_write_to_a_released_tensor_that_torch_lets_through_is_refused_at_the_next_gather(
    write: Callable[[Tensor], object],
) -> None:
    params = two_params()
    manager, chunk = registered(params, "host")
    with torch.no_grad():
        write(params[1])
    with pytest.raises(ChunkError, match=LOST):
        manager.gather(chunk)
    assert params[0].isnan().all()
    assert params[1].isnan().all()
    manager.gather(chunk)
    assert torch.equal(params[0], torch.arange(4.0))
    assert torch.equal(params[1], torch.arange(3.0))


@pytest.mark.parametrize("rest", ["device", "host"])
def test_debug_mode_sees_a_write_by_way_of_data(rest: TierName) -> None:
    for debug in (False, True):
        params = two_params()
        manager, _ = registered(params, rest, debug=debug)
        if debug and rest == "host":
            with pytest.raises(ChunkError, match=LOST):
                use(manager, params, lambda param: param.data.add_(1))
        else:
            use(manager, params, lambda param: param.data.add_(1))
        assert torch.equal(params[1], torch.arange(3.0) + 1)  # of a chunk that is gathered still


def check_write_of_one_rank(rank: int, world_size: int) -> None:
    for keep, trainable in [(False, True), (False, False), (True, True), (True, False)]:
        params = two_params()
        manager = ChunkManager(device=device_tier("cpu"))
        manager.register([("a", params[0]), ("b", params[1])], 8, keep_gathered=keep, trainable=trainable)
        if rank > 0:
            use(manager, params, lambda param: None)
        elif keep and not trainable:  # nothing changes it ever after
            use(manager, params, lambda param: param.add_(1))
            assert torch.equal(params[1], torch.arange(3.0) + 1)
        else:
            with pytest.raises(ChunkError, match=LOST):
                use(manager, params, lambda param: param.add_(1))
        manager.rest()


@pytest.mark.distributed
def test_only_the_rank_that_wrote_is_told() -> None:
    run_ranks(check_write_of_one_rank, 2)
