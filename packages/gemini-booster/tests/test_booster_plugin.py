"""Data for ranks: each takes its own samples, and its workers their own random numbers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from gemini_booster import GeminiPlugin
from ranks import run_ranks


class Numbers(Dataset[int]):
    """The numbers below a limit."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Dataset[Tensor]):
    """Random numbers in place of an augmentation: from torch and from Python."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()).item(), random.random()])


def take_numbers(rank: int, world_size: int, count: int, shuffle: bool, drop_last: bool) -> list[list[list[int]]]:
    """Return this rank's batches of two epochs."""
    loader = GeminiPlugin().prepare_dataloader(Numbers(count), 4, shuffle=shuffle, drop_last=drop_last)
    epochs = []
    for epoch in range(2):
        assert isinstance(loader.sampler, DistributedSampler)
        loader.sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    return epochs


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_samples_without_overlap(world_size: int) -> None:
    for shuffle in (False, True):
        found = run_ranks(take_numbers, world_size, 24, shuffle, False)
        for epoch in range(2):
            taken = [number for batches in found for batch in batches[epoch] for number in batch]
            assert sorted(taken) == list(range(24))
        orders = [found[0][epoch] for epoch in range(2)]
        assert (orders[0] != orders[1]) == shuffle


@pytest.mark.distributed
def test_samples_that_fill_no_batch_are_padded_or_left_out() -> None:
    padded = run_ranks(take_numbers, 2, 19, False, False)
    assert {number for batches in padded for batch in batches[0] for number in batch} == set(range(19))
    assert [len(batches[0]) for batches in padded] == [3, 3]  # as many steps on every rank, or one would hang
    dropped = run_ranks(take_numbers, 2, 15, False, True)  # 7 for each rank, and none is taken twice to make it 8
    assert [[len(batch) for batch in batches[0]] for batches in dropped] == [[4], [4]]


def draw(rank: int, world_size: int) -> dict[str, list[list[float]]]:
    """Return the random numbers of epochs, drawn in two workers."""

    def epochs(seed: int, count: int) -> list[list[float]]:
        torch.rand(rank + 1)  # whatever else was drawn must not matter
        loader = GeminiPlugin().prepare_dataloader(Augmented(), 2, seed=seed, num_workers=2)
        return [[number for batch in loader for number in batch.flatten().tolist()] for _ in range(count)]

    return {"two epochs": epochs(7, 2), "again": epochs(7, 1), "other seed": epochs(8, 1)}


@pytest.mark.distributed
def test_workers_of_all_ranks_and_epochs_draw_different_numbers_and_draw_them_again() -> None:
    found = run_ranks(draw, 2)
    numbers = [number for rank in found for epoch in rank["two epochs"] for number in epoch]
    assert len(numbers) == 2 * 2 * 8 * 2
    assert len(set(numbers)) == len(numbers)
    for rank in found:
        assert rank["again"] == rank["two epochs"][:1]
        assert rank["other seed"] != rank["again"]


def test_batches_are_made_by_collate_fn() -> None:
    loader = GeminiPlugin().prepare_dataloader(Numbers(6), 3, collate_fn=lambda samples: sum(samples))
    assert list(loader) == [3, 12]
