"""Both stores of the package keep the contract that any chunk store must keep, alone and over ranks."""

from __future__ import annotations

from collections.abc import Sequence, Set

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_ddp.interfaces import ChunkStore
from gemini_ddp.testing import ChunkStoreContract, PlainChunk, PlainStore, PoisonStore
from ranks import run_ranks


class _Contract(ChunkStoreContract[PlainChunk]):
    store_type: type[PlainStore] = PlainStore
    params_per_chunk = 1

    def make_store(self, params: Sequence[nn.Parameter]) -> ChunkStore[PlainChunk]:
        group = dist.group.WORLD if self.world_size > 1 else None
        return self.store_type(params, params_per_chunk=self.params_per_chunk, process_group=group)

    def gradient_of(self, store: ChunkStore[PlainChunk], param: nn.Parameter) -> Tensor | None:
        assert isinstance(store, PlainStore)
        return store.gradient(param)


class TestPlainStore(_Contract):
    pass


class TestPoisonStore(_Contract):
    store_type = PoisonStore


class TestPoisonStoreWithSeveralParametersToAChunk(_Contract):
    store_type = PoisonStore
    params_per_chunk = 4


def check_contract(rank: int, world_size: int) -> None:
    for kind in (TestPlainStore, TestPoisonStoreWithSeveralParametersToAChunk):
        contract = kind()
        contract.rank, contract.world_size = rank, world_size
        contract.check_all()


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_stores_keep_the_contract_over_ranks(world_size: int) -> None:
    run_ranks(check_contract, world_size)


class _Forgetful(PoisonStore):
    """Drops a backward's gradients where an earlier one left some."""

    def finish_backward(self, unused: Set[Tensor] = frozenset(), *, keep_local: bool = False) -> None:
        for weight in self._weights.values():
            weight.grad = None
        super().finish_backward(unused, keep_local=keep_local)


class _Hasty(PoisonStore):
    """Releases chunks that are in use."""

    def release(self, chunk: PlainChunk) -> None:
        for param in chunk.params:
            self._users[param] = 0
        super().release(chunk)


@pytest.mark.parametrize(
    ("store_type", "test"),
    [(_Forgetful, "test_gradients_of_several_backwards_add_up"), (_Hasty, "test_uses_nest")],
)
def test_contract_finds_a_broken_store(store_type: type[PlainStore], test: str) -> None:
    contract = TestPlainStore()
    contract.store_type = store_type
    with pytest.raises(AssertionError):
        getattr(contract, test)()


def test_released_parameters_are_nan_and_their_memory_is_freed() -> None:
    param = nn.Parameter(torch.ones(3, 2))
    store = PoisonStore([param])
    assert param.isnan().all()
    store.begin_use([param])
    view = param.detach()
    assert view.untyped_storage().nbytes() == 24
    store.end_use([param], in_backward=False)
    store.rest()
    assert view.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError), torch.no_grad():
        param.add_(1)
