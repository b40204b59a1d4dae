from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gemini_optim import CPUAdam, FusedAdam, HybridAdam

ADAMS = [HybridAdam, CPUAdam, FusedAdam]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def steps(optim: torch.optim.Optimizer, params: list[nn.Parameter], count: int = 3, seed: int = 1) -> list[Tensor]:
    """Take steps with the gradients that the parameters, laid end to end, have in every cut."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        flat = torch.randn(sum(p.numel() for p in params), generator=generator)
        for param, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
            param.grad = grad.view(param.shape).to(param.dtype)
        optim.step()
    return [param.detach() for param in params]


def values(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 400),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    adamw_mode=st.booleans(),
    amsgrad=st.booleans(),
    bias_correction=st.booleans(),
)
def test_any_cut_of_a_tensor_gives_the_bits_of_torch_fused_adam(
    numel: int, cuts: list[int], adamw_mode: bool, amsgrad: bool, bias_correction: bool
) -> None:
    padded = -(-numel // 16) * 16
    ends = sorted({min(cut, numel) for cut in cuts} | {0, numel})
    params = [nn.Parameter(values(numel)[a:b].clone()) for a, b in itertools.pairwise(ends)]
    optim = FusedAdam(params, 1e-2, bias_correction, weight_decay=0.1, adamw_mode=adamw_mode, amsgrad=amsgrad)
    cut = torch.cat(steps(optim, params))
    whole = nn.Parameter(values(numel).clone())
    uncut = FusedAdam([whole], 1e-2, bias_correction, weight_decay=0.1, adamw_mode=adamw_mode, amsgrad=amsgrad)
    assert torch.equal(cut, steps(uncut, [whole])[0])
    if bias_correction and padded == numel:
        torchs = torch.optim.AdamW if adamw_mode else torch.optim.Adam
        oracle = nn.Parameter(values(numel).clone())
        plain = torchs([oracle], 1e-2, weight_decay=0.1, amsgrad=amsgrad, fused=True)
        assert torch.equal(cut, steps(plain, [oracle])[0])


def test_moments_do_not_depend_on_the_cut() -> None:
    whole, head, tail = (nn.Parameter(part.clone()) for part in (values(100), values(100)[:37], values(100)[37:]))
    one, two = HybridAdam([whole]), HybridAdam([head, tail])
    steps(one, [whole])
    steps(two, [head, tail])
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(one.state[whole][name], torch.cat([two.state[p][name] for p in (head, tail)]))


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_narrower_vectors_are_cut_invariant_too(capability: str) -> None:
    # Nothing is built for one processor: torch picks the kernel at run time, and none may show the cut.
    code = (
        "import torch; from gemini_optim import HybridAdam\n"
        "g = torch.linspace(-1, 1, 2000); a = torch.zeros(2000); b = [torch.zeros(819), torch.zeros(1181)]\n"
        "for ps, gs in (([a], [g]), (b, g.split([819, 1181]))):\n"
        "    for p, q in zip(ps, gs): p.grad = q.clone()\n"
        "    optim = HybridAdam(ps)\n"
        "    for _ in range(3): optim.step()\n"
        "assert torch.equal(a, torch.cat(b)) and a.abs().sum() > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "ATEN_CPU_CAPABILITY": capability})


@pytest.mark.parametrize("adam", ADAMS)
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_without_bias_correction_the_moments_are_used_as_they_are(adam: type[HybridAdam], adamw_mode: bool) -> None:
    param = nn.Parameter(values(48).clone())
    optim = adam([param], lr=0.1, bias_correction=False, weight_decay=0.1, adamw_mode=adamw_mode)
    value, m, v = param.detach().double(), torch.zeros(48).double(), torch.zeros(48).double()
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        grad = torch.randn(48, generator=generator).double()
        if adamw_mode:
            value = value * (1 - 0.1 * 0.1)
        else:
            grad = grad + 0.1 * value
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        value = value - 0.1 * m / (v.sqrt() + 1e-8)
    steps(optim, [param])
    torch.testing.assert_close(param.detach().double(), value, rtol=1e-5, atol=1e-6)  # fp32 against fp64
    assert float(optim.state[param]["step"]) == 3  # the counter stays true


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adam", ADAMS)
def test_parameters_of_any_width_alone_follow_torch(adam: type[HybridAdam], dtype: torch.dtype) -> None:
    ours, theirs = (nn.Parameter(values(64).to(dtype)) for _ in range(2))
    steps(adam([ours], 1e-2, weight_decay=0.01), [ours])
    steps(torch.optim.AdamW([theirs], 1e-2, fused=True), [theirs])
    assert torch.equal(ours, theirs)
    assert ours.dtype == dtype


def test_gradient_in_another_memory_layout_lands_on_its_own_element() -> None:
    ours, theirs = (nn.Parameter(values(35).view(5, 7).clone()) for _ in range(2))
    ours.grad = values(36)[:35].view(7, 5).t()
    theirs.grad = ours.grad.contiguous()
    HybridAdam([ours], 1e-2).step()
    torch.optim.AdamW([theirs], 1e-2, weight_decay=0.0, foreach=False).step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # two kernels, one formula


@pytest.mark.parametrize("bias_correction", [True, False])
def test_strided_parameters_take_the_general_path(bias_correction: bool) -> None:
    strided = nn.Parameter(values(40).view(20, 2)[:, 0])
    plain = nn.Parameter(strided.detach().clone())
    assert not strided.is_contiguous()
    grads = [values(20) * scale for scale in (1.0, -2.0)]
    for param in (strided, plain):
        optim = HybridAdam([param], 1e-2, bias_correction, weight_decay=0.1)
        for grad in grads:
            param.grad = grad.clone()
            optim.step()
        assert float(optim.state[param]["step"]) == 2
    torch.testing.assert_close(strided, plain, rtol=1e-6, atol=1e-7)  # two kernels, one formula


def test_parameters_without_gradient_are_left_alone() -> None:
    used, unused, empty = nn.Parameter(values(5)), nn.Parameter(values(6)), nn.Parameter(torch.empty(0))
    before = unused.detach().clone()
    optim = HybridAdam([used, unused, empty], weight_decay=0.5)
    used.grad, empty.grad = torch.ones(5), torch.empty(0)
    optim.step()
    assert torch.equal(unused, before)
    assert unused not in optim.state


def test_sparse_gradients_are_refused() -> None:
    param = nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (3, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match="SparseAdam"):
        HybridAdam([param]).step()


def test_groups_and_schedulers_act_as_with_torch() -> None:
    ours, theirs = (nn.Linear(8, 16) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    groups = [
        [{"params": [m.weight], "weight_decay": 0.3}, {"params": [m.bias], "lr": 0.5, "betas": (0.5, 0.6)}]
        for m in (ours, theirs)
    ]
    optims = [HybridAdam(groups[0], lr=0.1), torch.optim.AdamW(groups[1], lr=0.1, weight_decay=0.0, fused=True)]
    for optim, module in zip(optims, (ours, theirs), strict=True):
        schedule = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
        for seed in range(3):
            steps(optim, list(module.parameters()), 1, seed)
            schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_named_parameters_and_tensor_learning_rates_work() -> None:
    module = nn.Linear(4, 4)
    optim = HybridAdam(module.named_parameters(), lr=torch.tensor(0.1))
    steps(optim, list(module.parameters()))
    assert optim.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("source", ["ours", "torch"])
def test_state_travels_between_ours_and_torch(source: str) -> None:
    first = nn.Parameter(values(32).clone())
    makers = {
        "ours": lambda p: HybridAdam([p], 1e-2, weight_decay=0.1),
        "torch": lambda p: torch.optim.AdamW([p], 1e-2, weight_decay=0.1, fused=True),
    }
    optim = makers[source](first)
    steps(optim, [first])
    second = nn.Parameter(first.detach().clone())
    other = makers["torch" if source == "ours" else "ours"](second)
    other.load_state_dict(copy.deepcopy(optim.state_dict()))
    if source == "ours":  # ours does not ask for the fused kernel by name
        other.param_groups[0]["fused"] = True
    steps(optim, [first], seed=2)
    steps(other, [second], seed=2)
    assert torch.equal(first, second)


def test_a_pickled_optimizer_goes_on() -> None:
    param = nn.Parameter(values(10).clone())
    optim = HybridAdam([param], bias_correction=False)
    steps(optim, [param])
    copied = pickle.loads(pickle.dumps(optim))
    twin = copied.param_groups[0]["params"][0]
    steps(optim, [param])
    steps(copied, [twin])
    assert torch.equal(param, twin)


def test_closure_is_evaluated_with_gradients() -> None:
    param = nn.Parameter(torch.ones(4))
    optim = HybridAdam([param], lr=0.5)

    def closure() -> float:
        loss = (param**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optim.step(closure) == 4.0
    assert not torch.equal(param, torch.ones(4))


def test_set_grad_none_decides_what_zero_grad_leaves() -> None:
    for keep in (True, False):
        param = nn.Parameter(torch.ones(2))
        optim = FusedAdam([param], set_grad_none=not keep)
        param.grad = torch.ones(2)
        optim.zero_grad()
        assert (param.grad is not None) == keep
        optim.zero_grad(set_to_none=True)
        assert param.grad is None


@pytest.mark.parametrize("adam", ADAMS)
def test_unknown_keywords_and_bad_values_are_refused(adam: type[HybridAdam]) -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError):
        adam([param], nvme_offload_fraction=1.0)  # type: ignore[call-arg]  # the point of the test
    for bad in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -math.inf}):
        with pytest.raises(ValueError, match="Invalid"):
            adam([param], **bad)  # type: ignore[arg-type]  # one keyword of several types
