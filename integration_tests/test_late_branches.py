"""A branch that a later step takes first, and that uses a weight outside the module that owns it: one step is lost."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from ranks import run_ranks

DIM = 8
FIRST_LATE_STEP = 2


class LateBorrower(nn.Module):
    """Calls its layers in every step; late, it applies the first one's weight once more, by itself."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.recomputes = recomputes
        self.is_late = False

    def _end(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return linear(x, self.first.weight) if self.is_late else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return checkpoint(self._end, x, use_reentrant=False) if self.recomputes else self._end(x)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(100 * step + rank))


def check_late_branch(rank: int, world_size: int, recomputes: bool) -> int:
    """Compare with plain PyTorch, which leaves out the steps that are skipped; return how many those are."""
    torch.manual_seed(0)
    plain = LateBorrower(recomputes)
    module = copy.deepcopy(plain)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = GeminiDDP(module, precision="fp32", min_chunk_size_m=0, search_range_m=0, hidden_dim=DIM)
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    skipped = 0
    for step in range(6):
        plain.is_late = module.is_late = step >= FIRST_LATE_STEP
        optimizer.backward(model(data(rank, step)).square().mean())
        optimizer.step()
        if optimizer.get_grad_norm() == math.inf:
            assert step == FIRST_LATE_STEP
            skipped += 1
            continue
        plain.zero_grad()
        torch.cat([plain(data(other, step)) for other in range(world_size)]).square().mean().backward()
        oracle.step()
    trained = model.state_dict()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(trained[name], wanted, rtol=1e-5, atol=1e-7)
    return skipped


@pytest.mark.distributed
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_step_after_a_skipped_one_finds_the_weight(world_size: int, recomputes: bool) -> None:
    skipped = run_ranks(check_late_branch, world_size, recomputes, timeout_s=60)
    assert set(skipped) == {0 if world_size == 1 else 1}  # a single rank's weights on the device are always there
