"""Parameters without separate master weights: 16-bit ones where the user wants none, and complex ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from gemini_optim import HybridAdam
from models import SMALL_CHUNKS, batch, lm_loss, seeded_model
from ranks import run_ranks

STEPS = 4
PLACEMENTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicated": {"shard_param_frac": 0.0},
    "states on the host": {"offload_optim_frac": 1.0},
    "all on the host": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    "accumulating": {"enable_gradient_accumulation": True},
}


def make_optim(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "hybrid":
        return HybridAdam(params, lr=2e-2)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def check_16_bit(rank: int, world_size: int, precision: str, optim: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    plain = seeded_model("gpt2").to(dtype)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    oracle = make_optim(optim, list(plain.parameters()))
    for step in range(STEPS):
        sums: dict[nn.Parameter, Tensor] = {}
        for other in range(world_size):
            lm_loss(plain, batch(other, step)).backward()
            for param in plain.parameters():
                assert param.grad is not None
                sums[param] = sums.get(param, torch.zeros_like(param)) + param.grad / world_size
            plain.zero_grad()
        for param, total in sums.items():
            param.grad = total
        oracle.step()
        oracle.zero_grad()
    unit = torch.finfo(dtype).eps
    for placement, settings in PLACEMENTS.items():
        model = GeminiDDP(
            seeded_model("gpt2"),
            precision=precision,  # type: ignore[arg-type]  # one of the two
            master_weights=False,
            **{**SMALL_CHUNKS, **settings},
        )
        optimizer = GeminiOptimizer(make_optim(optim, list(model.parameters())), model, initial_scale=2.0**5)
        for step in range(STEPS):
            optimizer.backward(lm_loss(model, batch(rank, step)))
            optimizer.step()
        trained = model.state_dict()
        for name, wanted in plain.state_dict().items():
            assert trained[name].dtype == wanted.dtype
            # Gradients that are added up in another order, or scaled, are rounded in other places.
            error = (trained[name].float() - wanted.float()).abs().max()
            moved = (wanted.float() - before[name].float()).abs().max()
            assert error <= 0.1 * moved + 4 * unit * wanted.float().abs().max(), (placement, name, error, moved)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
# Adam's second moments vanish in fp16, by torch alone as well, and what is left to compare is noise.
@pytest.mark.parametrize(("precision", "optim"), [("bf16", "hybrid"), ("bf16", "momentum"), ("fp16", "momentum")])
def test_16_bit_weights_without_masters_train_as_by_torch_alone(precision: str, optim: str, world_size: int) -> None:
    run_ranks(check_16_bit, world_size, precision, optim, timeout_s=120)


class Spectral(nn.Module):
    """A layer with complex weights, as spectral ones have, between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.last = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(inputs)) * self.weight
        output: Tensor = self.last(torch.fft.irfft(spectrum, n=6))
        return output


def check_complex(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    source = Spectral()
    for optim in ("hybrid", "momentum"):
        plain = copy.deepcopy(source)
        oracle = make_optim(optim, list(plain.parameters()))
        model = GeminiDDP(copy.deepcopy(source), precision="fp32", **SMALL_CHUNKS)
        optimizer = GeminiOptimizer(make_optim(optim, list(model.parameters())), model, max_norm=0.5)
        inputs = [torch.randn(5, 6, generator=torch.Generator().manual_seed(other)) for other in range(world_size)]
        for _ in range(STEPS):
            optimizer.backward(model(inputs[rank]).square().mean())
            optimizer.step()
            plain(torch.cat(inputs)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            oracle.step()
            oracle.zero_grad()
        trained = model.state_dict()
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(trained[name], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_complex_parameters_follow_plain_torch(world_size: int) -> None:
    run_ranks(check_complex, world_size)
