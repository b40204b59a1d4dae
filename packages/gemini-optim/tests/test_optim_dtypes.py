"""Weights that are their own master weights are updated in their own dtype, as plain torch updates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gemini_optim import HybridAdam, ZeroOptimizer
from gemini_optim.testing import PlainModel, check_sharded_model

SHAPES = [(5, 7), (13,), (), (40,)]
MAKERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "hybrid": lambda p: HybridAdam(p, 1e-2, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}
# One unit in the last place of a weight: torch's kernels round the last elements of a tensor in their own way. Of fp64
# more is lost, for the coefficient that clips is fp32.
UNITS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float64: 2.0**-24, torch.complex64: 2.0**-21}


def make_params(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=wide).to(dtype)) for shape in SHAPES]


def loss_of(params: Sequence[Tensor], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    values = [torch.view_as_real(p) if p.is_complex() else p for p in params]
    return torch.stack([(v.float() * torch.randn(v.shape, generator=generator)).sum() for v in values]).sum()


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_weights_of_any_dtype_follow_plain_torch(dtype: torch.dtype, name: str, max_norm: float) -> None:
    ours, theirs = make_params(dtype), make_params(dtype)
    model = PlainModel(ours, chunk_numel=30, master_weights=False)
    check_sharded_model(model, lambda: loss_of(ours, 0))
    zero = ZeroOptimizer(MAKERS[name](ours), model, block_numel=16, max_norm=max_norm, initial_scale=2.0**5)
    plain = MAKERS[name](theirs)
    for step in range(3):
        zero.backward(loss_of(ours, step))
        zero.step()
        loss_of(theirs, step).backward()
        norm = torch.nn.utils.get_total_norm([p.grad.to(torch.promote_types(dtype, torch.float32)) for p in theirs])
        assert zero.get_grad_norm() == pytest.approx(float(norm), rel=1e-3)
        if max_norm:
            for param in theirs:
                param.grad *= max_norm / (norm + 1e-6)
        plain.step()
        plain.zero_grad()
    assert {shard.master().dtype for shard in model.shards} == {dtype}
    tolerance = 4 * UNITS[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for index, state in zero.state_dict()["state"].items():
        for key, value in state.items():
            wanted = plain.state[theirs[index]][key]
            assert value.dtype == wanted.dtype, key
            torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", UNITS)
def test_states_of_any_dtype_are_saved_and_loaded_bit_for_bit(dtype: torch.dtype) -> None:
    params, others = make_params(dtype), make_params(dtype)
    one = ZeroOptimizer(MAKERS["hybrid"](params), PlainModel(params, chunk_numel=30, master_weights=False))
    one.backward(loss_of(params, 0))
    one.step()
    saved = one.state_dict()
    other = ZeroOptimizer(MAKERS["hybrid"](others), PlainModel(others, chunk_numel=70, master_weights=False))
    other.load_state_dict(saved)
    torch.testing.assert_close(other.state_dict()["state"], saved["state"], rtol=0.0, atol=0.0)
