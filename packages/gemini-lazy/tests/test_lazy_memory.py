"""Bytes: a lazy model takes none, and streaming it into shards takes the shards and one parameter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lazy_checks import SEED, peak_bytes
from torch import Tensor, nn

from gemini_lazy import LazyInitContext, forget, materialize_value
from ranks import run_ranks

WIDTH, DEPTH = 256, 12
WEIGHT_BYTES = 4 * WIDTH * WIDTH
# The tape keeps the state of the generator for each draw that still counts: a weight's last and a bias's.
TAPE_BYTES = 2 * DEPTH * torch.get_rng_state().numel()
# Placeholders, biases, and the default generator's state while another one is in force.
SMALL_BYTES = 2**14


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)


def stream(module: nn.Module, *, rank: int, world_size: int) -> list[Tensor]:
    shards = []
    for parameter in module.parameters():
        value = materialize_value(parameter)
        shards.append(value.flatten().tensor_split(world_size)[rank].clone())
        forget(parameter)
    return shards


def test_construction_takes_one_parameter_for_its_draws() -> None:
    held: list[nn.Module] = []

    def build() -> None:
        with LazyInitContext():
            held.append(Deep())

    peak = peak_bytes(build)
    assert WEIGHT_BYTES <= peak <= WEIGHT_BYTES + TAPE_BYTES + SMALL_BYTES
    assert sum(parameter.untyped_storage().nbytes() for parameter in held[0].parameters()) == 4 * 2 * DEPTH


def test_streaming_into_shards_peaks_at_the_shards_and_one_parameter() -> None:
    with LazyInitContext():
        module = Deep()
    world_size = 4
    shard_bytes = sum(4 * parameter.numel() // world_size for parameter in module.parameters())
    peak = peak_bytes(lambda: stream(module, rank=1, world_size=world_size))
    assert shard_bytes <= peak <= shard_bytes + WEIGHT_BYTES + SMALL_BYTES


def test_whole_module_peaks_at_its_own_size() -> None:
    with LazyInitContext():
        module = Deep()
    model_bytes = sum(4 * parameter.numel() for parameter in module.parameters())
    peak = peak_bytes(lambda: LazyInitContext.materialize(module))
    assert model_bytes <= peak <= model_bytes + SMALL_BYTES


def test_overwritten_initialisation_is_never_computed() -> None:
    with LazyInitContext():
        weight = torch.randn(WIDTH, WIDTH)
        for _ in range(5):
            weight = weight @ weight
        weight.fill_(1)
        like = torch.zeros_like(torch.randn(WIDTH, WIDTH) * 2)
    for tensor in (weight, like):
        assert peak_bytes(lambda tensor=tensor: materialize_value(tensor)) <= WEIGHT_BYTES + 64


def check_shards(rank: int, world_size: int) -> None:
    torch.manual_seed(SEED)
    with LazyInitContext():
        module = Deep()
    shards = stream(module, rank=rank, world_size=world_size)
    torch.manual_seed(SEED)
    for shard, wanted in zip(shards, Deep().parameters(), strict=True):
        gathered: list[Tensor | None] = [None] * world_size
        dist.all_gather_object(gathered, shard)
        assert torch.equal(torch.cat([part for part in gathered if part is not None]), wanted.flatten())


@pytest.mark.distributed
def test_shards_of_three_ranks_make_up_the_eager_model() -> None:
    run_ranks(check_shards, 3)
