"""ZeroOptimizer on one rank."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gemini_optim import FusedAdam, HybridAdam, ShardLayoutError, ZeroOptimizer
from gemini_optim.testing import PlainModel, PlainSlice, check_sharded_model

# Sizes around the padding of the kernel, and a parameter that is one number.
SHAPES = [(5, 7), (13,), (3, 3, 3), (), (1,), (40,), (64,)]

MAKERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "hybrid": lambda p: HybridAdam(p, 1e-2, weight_decay=0.1),
    "amsgrad": lambda p: FusedAdam(p, 1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "capturable": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2, t0=1),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2),
    "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, maximize=True),
}


def make_params(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def make_loss(params: Sequence[Tensor], step: int, scale: float = 1.0) -> Tensor:
    """A loss whose gradients are a known tensor per parameter, whatever the parameter's value."""
    generator = torch.Generator().manual_seed(100 + step)
    weights = [torch.randn(p.shape, generator=generator) * scale for p in params]
    return torch.stack([(p.float() * w).sum() for p, w in zip(params, weights, strict=True)]).sum()


def train_plain(optim: torch.optim.Optimizer, params: Sequence[nn.Parameter], steps: Sequence[int]) -> None:
    for step in steps:
        optim.zero_grad()
        make_loss(params, step).backward()
        optim.step()


def train(optim: ZeroOptimizer, params: Sequence[nn.Parameter], steps: Sequence[int]) -> None:
    for step in steps:
        optim.backward(make_loss(params, step))
        optim.step()


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"parameter {index} differs by {(a - b).abs().max()}"


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("block_numel", [17, 2**20])
def test_any_elementwise_optimizer_follows_plain_torch(name: str, block_numel: int) -> None:
    ours, theirs = make_params(), make_params()
    plain = MAKERS[name](theirs)
    zero = ZeroOptimizer(MAKERS[name](ours), PlainModel(ours, chunk_numel=60), block_numel=block_numel)
    train(zero, ours, range(4))
    train_plain(plain, theirs, range(4))
    if name in ("hybrid", "amsgrad"):
        assert_equal(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        # torch's other kernels round the last elements of a tensor in their own way.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk_numel", [1, 50, 70, 1000])
@pytest.mark.parametrize("block_numel", [1, 16, 33])
def test_chunks_and_blocks_of_any_size_give_the_same_bits(chunk_numel: int, block_numel: int) -> None:
    ours, theirs = make_params(), make_params()
    zero = ZeroOptimizer(
        MAKERS["hybrid"](ours), PlainModel(ours, chunk_numel=chunk_numel), block_numel=block_numel, max_norm=0.7
    )
    other = ZeroOptimizer(MAKERS["hybrid"](theirs), PlainModel(theirs), max_norm=0.7)
    train(zero, ours, range(3))
    train(other, theirs, range(3))
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("stays", "dtype", "max_norm", "calls"),
    [
        (True, torch.float32, 0.0, [5, 1, 1]),
        (False, torch.float32, 0.0, [5, 5, 5]),
        (True, torch.float32, 0.7, [5, 5, 5]),  # the product with the clip coefficient stays in cache
        (True, torch.bfloat16, 0.0, [5, 5, 5]),  # gradients are cast into memory of one block
    ],
)
def test_what_stays_and_takes_no_memory_is_updated_in_one_call(
    stays: bool, dtype: torch.dtype, max_norm: float, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make_params(dtype), make_params(dtype)
    model = PlainModel(ours, chunk_numel=50)
    model.is_resident = stays
    zero = ZeroOptimizer(MAKERS["hybrid"](ours), model, block_numel=48, max_norm=max_norm)
    numbers: list[int] = []
    kernel = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *a, **k: (numbers.append(len(a[0])), kernel(*a, **k))[1])
    counts = []
    for step in range(3):
        train(zero, ours, [step])
        counts.append(len(numbers))
        numbers.clear()
    assert counts == calls
    other = ZeroOptimizer(MAKERS["hybrid"](theirs), PlainModel(theirs), max_norm=max_norm)
    train(other, theirs, range(3))
    assert_equal(ours, theirs)


def test_loaded_states_are_updated_in_blocks_once_whatever_the_dtype_of_the_weights() -> None:
    params, others = make_params(torch.bfloat16), make_params(torch.bfloat16)
    zero = ZeroOptimizer(MAKERS["hybrid"](params), PlainModel(params, chunk_numel=50), block_numel=20)
    train(zero, params, range(2))
    saved = zero.state_dict()
    other = ZeroOptimizer(MAKERS["hybrid"](others), PlainModel(others, chunk_numel=50), block_numel=20)
    train(other, others, range(2))
    other.load_state_dict(saved)
    train(zero, params, range(2, 4))
    train(other, others, range(2, 4))
    assert_equal(params, others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_update_fp32_master_weights(dtype: torch.dtype) -> None:
    ours = make_params(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in ours]
    model = PlainModel(ours, chunk_numel=60)
    zero = ZeroOptimizer(MAKERS["hybrid"](ours), model, block_numel=20, initial_scale=2**7)
    plain = MAKERS["hybrid"](masters)
    assert zero.loss_scale == (2**7 if dtype == torch.float16 else 1.0)
    for step in range(3):
        zero.backward(make_loss(ours, step))
        make_loss(masters, step).backward()
        for master in masters:  # what the 16-bit backward gives: a scale of 2**7 neither overflows nor rounds
            master.grad = master.grad.to(dtype).float()
        zero.step()
        plain.step()
        plain.zero_grad()
    assert_equal(ours, [master.to(dtype) for master in masters])
    flat = torch.cat([master.detach().reshape(-1) for master in masters])
    assert torch.equal(torch.cat([shard.master() for shard in model.shards]), flat)
    assert not torch.equal(flat, flat.to(dtype).float())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_clipping_is_torchs_on_unscaled_gradients(dtype: torch.dtype, norm_type: float) -> None:
    ours = make_params(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in ours]
    zero = ZeroOptimizer(
        torch.optim.SGD(ours, 0.1),
        PlainModel(ours, chunk_numel=60),
        max_norm=0.5,
        norm_type=norm_type,
        initial_scale=64,
    )
    for step, scale in enumerate([1.0, 1e-3]):  # the second is too small to be clipped
        make_loss(masters, step, scale).backward()
        for master in masters:
            master.grad = master.grad.to(dtype).float()
        norm = torch.nn.utils.clip_grad_norm_(masters, 0.5, norm_type)
        assert (float(norm) > 0.5) == (step == 0)
        for master in masters:
            master.data.sub_(0.1 * master.grad)
            master.grad = None
        zero.backward(make_loss(ours, step, scale))
        zero.step()
        # fp16 loses bits of gradients that are small and not scaled, which ours are.
        assert zero.get_grad_norm() == pytest.approx(float(norm), rel=1e-6 if dtype == torch.float32 else 1e-3)
    for a, b in zip(ours, masters, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=1e-6)


def test_norm_is_exact_where_fp32_squares_overflow_or_vanish() -> None:
    params = [nn.Parameter(torch.zeros(100))]
    model = PlainModel(params)
    zero = ZeroOptimizer(torch.optim.SGD(params, 0.0), model)
    for magnitude in (1e30, 1e-30):
        model.shards[0].gradient = torch.full((100,), magnitude)
        zero.step()
        assert zero.get_grad_norm() == pytest.approx(10 * magnitude, rel=1e-6)


def test_gradient_reaches_the_optimizer_unchanged_when_nothing_multiplies_it() -> None:
    params = [nn.Parameter(torch.zeros(3))]
    model = PlainModel(params)
    gradient = torch.tensor([-0.0, 1e-45, 3.4e38])
    model.shards[0].gradient = gradient.clone()
    optim = torch.optim.SGD(params, 1.0, momentum=1.0)  # its first buffer is the gradient itself
    zero = ZeroOptimizer(optim, model, max_norm=math.inf)
    zero.step()
    [state] = [state for _, state in zero.iter_states()]
    assert torch.equal(state["momentum_buffer"].view(torch.int32), gradient.view(torch.int32))


def test_optimizer_keeps_its_identity_and_shows_the_users_parameters() -> None:
    params = make_params()
    optim = MAKERS["adamw"](params)
    groups, group = optim.param_groups, optim.param_groups[0]
    zero = ZeroOptimizer(optim, PlainModel(params, chunk_numel=60))
    assert isinstance(zero, torch.optim.Optimizer)
    train(zero, params, range(2))
    assert zero.optim is optim
    assert zero.param_groups is optim.param_groups is groups
    assert groups[0] is group
    assert all(a is b for a, b in zip(group["params"], params, strict=True))
    assert not optim.state
    assert optim.state_dict()["param_groups"] == zero.state_dict()["param_groups"]


@pytest.mark.parametrize("on", ["zero", "optim"])
def test_schedulers_on_either_handle_act_at_the_next_step(on: str) -> None:
    ours, theirs = make_params(), make_params()
    optim, plain = MAKERS["hybrid"](ours), MAKERS["hybrid"](theirs)
    zero = ZeroOptimizer(optim, PlainModel(ours, chunk_numel=60))
    schedule = torch.optim.lr_scheduler.StepLR(zero if on == "zero" else optim, 1, 0.1)
    plain_schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.1)
    for step in range(3):
        train(zero, ours, [step])
        schedule.step()
        train_plain(plain, theirs, [step])
        plain_schedule.step()
    assert_equal(ours, theirs)
    assert optim.param_groups[0]["lr"] == pytest.approx(1e-5)


def test_groups_keep_their_own_hyperparameters() -> None:
    results = []
    for wrap in (True, False):
        params = make_params()
        groups = [{"params": params[::2], "weight_decay": 0.5}, {"params": params[1::2], "lr": 0.3}]
        optim = HybridAdam(groups, 1e-2)
        if wrap:
            train(ZeroOptimizer(optim, PlainModel(params, chunk_numel=60), block_numel=30), params, range(3))
        else:
            train_plain(optim, params, range(3))
        results.append(params)
    assert_equal(*results)


@pytest.mark.parametrize("change", ["moved", "removed", "added", "swapped"])
@pytest.mark.parametrize("use", ["step", "state_dict", "load_state_dict"])
def test_members_of_groups_that_were_changed_by_hand_are_refused(change: str, use: str) -> None:
    params = make_params()
    optim = torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:6], "lr": 0.1}], 1e-2)
    zero = ZeroOptimizer(optim, PlainModel(params))
    train(zero, params, [0])
    saved = zero.state_dict()
    first, second = (group["params"] for group in optim.param_groups)
    if change == "moved":
        second.append(first.pop())
    elif change == "removed":
        first.pop()
    elif change == "added":
        optim.add_param_group({"params": params[6:]})
    else:
        first[0], second[0] = second[0], first[0]
    zero.backward(make_loss(params, 1))
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"had \[3, 3\] parameters"):
        zero.load_state_dict(saved) if use == "load_state_dict" else getattr(zero, use)()
    assert_equal(params, before)


def test_hooks_of_the_optimizer_run_once_per_step() -> None:
    params = make_params()
    optim = MAKERS["adamw"](params)
    zero = ZeroOptimizer(optim, PlainModel(params, chunk_numel=30), block_numel=10)
    calls = []
    for kind, handle in (("optim", optim), ("zero", zero)):
        handle.register_step_pre_hook(lambda *_, kind=kind: calls.append(f"{kind} before"))
        handle.register_step_post_hook(lambda *_, kind=kind: calls.append(f"{kind} after"))
    everyone = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
    try:
        train(zero, params, [0])
    finally:
        everyone.remove()
    assert sorted(calls) == ["global", "optim after", "optim before", "zero after", "zero before"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_overflow_changes_nothing_but_the_scale(
    dtype: torch.dtype, bad: float, norm_type: float, caplog: pytest.LogCaptureFixture
) -> None:
    params = make_params(dtype)
    model = PlainModel(params, chunk_numel=60)
    zero = ZeroOptimizer(
        MAKERS["hybrid"](params), model, max_norm=1.0, norm_type=norm_type, initial_scale=64, hysteresis=1
    )
    train(zero, params, [0])
    before = [p.detach().clone() for p in params] + [shard.master().clone() for shard in model.shards]
    saved = zero.state_dict()
    for _ in range(2):
        zero.backward(make_loss(params, 1))
        model.shards[1].gradient[3] = bad
        assert zero.step() is None
    assert_equal([*params, *(shard.master() for shard in model.shards)], before)
    for index, state in zero.state_dict()["state"].items():
        assert all(torch.equal(value, saved["state"][index][name]) for name, value in state.items())
    assert all(shard.grad() is None for shard in model.shards)
    assert zero.get_grad_norm() == math.inf
    assert zero.loss_scale == (16 if dtype == torch.float16 else 1)
    assert len(caplog.records) == (0 if dtype == torch.float16 else 1)  # said once, not at each step
    train(zero, params, [2])
    assert not torch.equal(params[0], before[0])


def test_verbose_logs_every_skipped_step(caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(torch.float16)
    model = PlainModel(params)
    zero = ZeroOptimizer(MAKERS["sgd"](params), model, verbose=True, hysteresis=1, initial_scale=8)
    with caplog.at_level(logging.WARNING, "gemini_optim"):
        for _ in range(2):
            model.shards[0].gradient = torch.full_like(model.shards[0].master(), math.nan).half()
            zero.step()
    assert ["loss scale is now 4" in caplog.text, "loss scale is now 2" in caplog.text] == [True, True]


def test_scale_grows_after_clean_steps_and_gradients_are_unscaled_by_the_scale_they_had() -> None:
    ours, theirs = make_params(torch.float16), make_params(torch.float16)
    optim = ZeroOptimizer(torch.optim.SGD(ours, 0.1), PlainModel(ours), initial_scale=2, growth_interval=2)
    other = ZeroOptimizer(torch.optim.SGD(theirs, 0.1), PlainModel(theirs), initial_scale=1, growth_interval=1000)
    scales = []
    for step in range(5):
        train(optim, ours, [step])
        train(other, theirs, [step])
        scales.append(optim.loss_scale)
    assert scales == [2, 4, 4, 8, 8]
    for a, b in zip(ours, theirs, strict=True):  # gradients that are subnormal in fp16 gain bits from the scale
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_loss_in_fp16_trains_once_its_gradient_is_in_range() -> None:
    params = make_params(torch.float16)
    zero = ZeroOptimizer(MAKERS["sgd"](params), PlainModel(params))
    norms = []
    for _ in range(4):
        zero.backward((torch.stack([p.sum() for p in params]).sum() * 0 + 100).half())
        zero.step()
        norms.append(zero.get_grad_norm())
    assert norms == [math.inf, math.inf, 0.0, 0.0]  # two overflows let the scale back off, from 2**16 to 2**15
    assert zero.loss_scale == 2**15


def test_backward_takes_only_scalar_tensors() -> None:
    params = make_params()
    zero = ZeroOptimizer(MAKERS["sgd"](params), PlainModel(params))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        zero.backward(torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match="float"):
        zero.backward(1.0)  # type: ignore[arg-type]  # the point of the test


def test_gradients_of_several_backwards_add_up_before_one_step() -> None:
    ours, theirs = make_params(), make_params()
    zero = ZeroOptimizer(MAKERS["hybrid"](ours), PlainModel(ours, chunk_numel=60), max_norm=1.0)
    other = ZeroOptimizer(MAKERS["hybrid"](theirs), PlainModel(theirs, chunk_numel=60), max_norm=1.0)
    for step in range(2):
        zero.backward(make_loss(ours, 2 * step))
        zero.backward(make_loss(ours, 2 * step + 1))
        zero.step()
        other.backward(make_loss(theirs, 2 * step) + make_loss(theirs, 2 * step + 1))
        other.step()
    assert_equal(ours, theirs)


def test_zero_grad_drops_gradients_not_yet_used() -> None:
    params = make_params()
    model = PlainModel(params, chunk_numel=60)
    zero = ZeroOptimizer(MAKERS["hybrid"](params), model)
    before = [p.detach().clone() for p in params]
    zero.backward(make_loss(params, 0))
    zero.zero_grad()
    assert all(shard.grad() is None for shard in model.shards)
    zero.step()
    assert zero.get_grad_norm() == 0.0
    assert_equal(params, before)


def test_chunks_without_gradient_are_left_alone() -> None:
    ours, theirs = make_params(), make_params()
    zero = ZeroOptimizer(MAKERS["hybrid"](ours), PlainModel(ours, chunk_numel=1))
    plain = MAKERS["hybrid"](theirs)
    for step in range(3):
        used = slice(step, step + 3)  # with a chunk for each parameter, as torch with a gradient of None
        zero.backward(make_loss(ours[used], step))
        zero.step()
        make_loss(theirs[used], step).backward()
        plain.step()
        plain.zero_grad()
    assert_equal(ours, theirs)
    assert sorted(index for index, _ in zero.iter_states()) == [0, 1, 2, 3, 4]


def test_parameters_outside_of_the_optimizer_are_neither_updated_nor_counted() -> None:
    params = make_params()
    model = PlainModel(params, chunk_numel=60)
    zero = ZeroOptimizer(torch.optim.SGD(params[1:3], 0.1), model)
    before = [p.detach().clone() for p in params]
    zero.backward(make_loss(params, 0))
    zero.step()
    weights = torch.autograd.grad(make_loss(params, 0), params[1:3])
    assert zero.get_grad_norm() == pytest.approx(float(torch.cat([w.reshape(-1) for w in weights]).norm()))
    changed = [not torch.equal(a, b) for a, b in zip(params, before, strict=True)]
    assert changed == [False, True, True, False, False, False, False]
    assert all(shard.grad() is None for shard in model.shards)


def test_parameters_that_the_model_does_not_manage_are_refused_with_their_number() -> None:
    params = make_params()
    with pytest.raises(ValueError, match="2 of the optimizer's 7 parameters"):
        ZeroOptimizer(MAKERS["sgd"](params), PlainModel(params[:5]))


def test_frozen_parameters_in_the_optimizer_are_left_alone() -> None:
    params = make_params()
    params[2].requires_grad_(False)
    model = PlainModel([p for p in params if p.requires_grad], chunk_numel=60)
    zero = ZeroOptimizer(MAKERS["hybrid"](params), model)
    frozen = params[2].detach().clone()
    train(zero, params, range(2))
    assert torch.equal(params[2], frozen)
    assert sorted(zero.state_dict()["state"]) == [0, 1, 3, 4, 5, 6]


def test_group_added_before_the_first_step_is_trained() -> None:
    ours, theirs = make_params(), make_params()
    optim = HybridAdam(ours[:4], 1e-2)
    zero = ZeroOptimizer(optim, PlainModel(ours, chunk_numel=60))
    zero.add_param_group({"params": ours[4:], "lr": 0.5})
    plain = HybridAdam([{"params": theirs[:4]}, {"params": theirs[4:], "lr": 0.5}], 1e-2)
    train(zero, ours, range(2))
    train_plain(plain, theirs, range(2))
    assert_equal(ours, theirs)
    with pytest.raises(RuntimeError, match="before the first step"):
        zero.add_param_group({"params": make_params()})


def test_group_that_the_model_does_not_manage_is_refused_and_forgotten() -> None:
    params = make_params()
    optim = MAKERS["sgd"](params)
    zero = ZeroOptimizer(optim, PlainModel(params))
    with pytest.raises(ValueError, match="not managed"):
        zero.add_param_group({"params": make_params()})
    assert len(optim.param_groups) == 1
    train(zero, params, [0])


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.LBFGS,
        torch.optim.Adafactor,
        torch.optim.SparseAdam,
        lambda params: torch.optim.Muon(params[:1]),
    ],
)
def test_optimizers_that_look_at_whole_parameters_are_refused(
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    params = make_params()
    optim = make(params)
    with pytest.raises(ValueError, match=type(optim).__name__):
        ZeroOptimizer(optim, PlainModel(params))


class RowStates(torch.optim.SGD):
    """Keeps a state that is neither one number nor one per element."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["row"] = torch.zeros(3)


def test_states_of_another_shape_are_found_out_and_the_users_parameters_come_back() -> None:
    params = make_params()
    optim = RowStates(params)
    zero = ZeroOptimizer(optim, PlainModel(params))
    with pytest.raises(ValueError, match=r"'row'.*element-wise"):
        train(zero, params, [0])
    assert all(a is b for a, b in zip(optim.param_groups[0]["params"], params, strict=True))


class Failing(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        raise OSError("no")


def test_users_parameters_come_back_after_an_exception() -> None:
    params = make_params()
    optim = Failing(params)
    zero = ZeroOptimizer(optim, PlainModel(params))
    with pytest.raises(OSError, match="no"):
        train(zero, params, [0])
    assert all(a is b for a, b in zip(optim.param_groups[0]["params"], params, strict=True))
    assert not optim.state


def test_every_byte_of_state_is_accounted_by_the_shards() -> None:
    params = make_params()
    numel = sum(p.numel() for p in params)
    for name, count in (("hybrid", 2), ("amsgrad", 3), ("adamw", 2), ("momentum", 1), ("rmsprop", 3), ("sgd", 0)):
        model = PlainModel(params, chunk_numel=60)
        zero = ZeroOptimizer(MAKERS[name](params), model, block_numel=20)
        train(zero, params, range(2))
        assert sum(sum(shard.state_bytes.values()) for shard in model.shards) == 4 * count * numel
        zero.load_state_dict(zero.state_dict())  # into the same memory
        train(zero, params, range(2))
        assert sum(sum(shard.state_bytes.values()) for shard in model.shards) == 4 * count * numel


def test_states_stay_in_the_memory_of_the_shard() -> None:
    params = make_params()
    model = PlainModel(params)
    taken = []
    new_state = model.shards[0].new_state

    def remember(numel: int, dtype: torch.dtype, label: str) -> Tensor:
        taken.append((label, new_state(numel, dtype, label)))
        return taken[-1][1]

    model.shards[0].new_state = remember  # type: ignore[method-assign]  # to look inside
    zero = ZeroOptimizer(MAKERS["momentum"](params), model, block_numel=20)
    train(zero, params, range(3))
    [(label, buffer)] = taken
    states = torch.cat([state[label].reshape(-1) for _, state in zero.iter_states()])
    assert torch.equal(buffer, states)
    assert buffer.any()


def test_closure_runs_forward_and_backward() -> None:
    params = make_params()
    zero = ZeroOptimizer(MAKERS["sgd"](params), PlainModel(params))
    before = params[0].detach().clone()

    def closure() -> float:
        loss = make_loss(params, 0)
        zero.backward(loss)
        return float(loss.detach())

    expected = float(make_loss(params, 0).detach())
    assert zero.step(closure) == expected
    assert not torch.equal(params[0], before)


def test_clipping_by_call_points_to_max_norm() -> None:
    params = make_params()
    zero = ZeroOptimizer(MAKERS["sgd"](params), PlainModel(params))
    for call in (zero.clip_grad_norm, zero.clip_grad_by_norm, zero.clip_grad_by_value):
        with pytest.raises(NotImplementedError, match="max_norm"):
            call(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": -1.0}, "max_norm"),
        ({"max_norm": math.nan}, "max_norm"),
        ({"norm_type": 1.0}, "norm_type"),
        ({"block_numel": 0}, "block_numel"),
        ({"initial_scale": 0.5}, "min_scale"),
        ({"growth_interval": 0}, "growth_interval"),
    ],
)
def test_arguments_out_of_bounds_are_refused_by_name(arguments: dict[str, float], message: str) -> None:
    params = make_params()
    with pytest.raises(ValueError, match=message):
        ZeroOptimizer(MAKERS["sgd"](params), PlainModel(params), **arguments)  # type: ignore[arg-type]  # floats for ints


def test_unknown_keywords_and_double_wrapping_are_refused() -> None:
    params = make_params()
    model = PlainModel(params)
    with pytest.raises(TypeError, match="clipping_norm"):
        ZeroOptimizer(MAKERS["sgd"](params), model, clipping_norm=1.0)  # type: ignore[call-arg]  # the point
    with pytest.raises(ValueError, match="already"):
        ZeroOptimizer(ZeroOptimizer(MAKERS["sgd"](params), model), model)


def test_shards_that_hold_an_element_twice_or_not_at_all_are_refused() -> None:
    params = make_params(shapes=[(6,)])
    for slices in ([(0, 3, 0)], [(0, 4, 0), (4, 4, 2)], [(0, 4, 0), (2, 2, 4)], [(0, 6, 1)]):
        model = PlainModel(params)
        model.shards[0].slices = tuple(PlainSlice(params[0], *part) for part in slices)
        with pytest.raises(ShardLayoutError, match=r"6|overlap"):
            ZeroOptimizer(MAKERS["sgd"](params), model)


def test_optimizer_is_freed_with_its_last_reference() -> None:
    params = make_params()
    zero = ZeroOptimizer(MAKERS["hybrid"](params), PlainModel(params))
    train(zero, params, [0])
    alive = weakref.ref(zero)
    del zero
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_model_keeps_the_contract(dtype: torch.dtype) -> None:
    params = make_params(dtype)
    before = [p.detach().clone() for p in params]
    check_sharded_model(PlainModel(params, chunk_numel=60), lambda: make_loss(params, 0))
    assert_equal(params, before)


def test_contract_check_names_the_broken_promise() -> None:
    params = make_params()
    model = PlainModel(params, chunk_numel=60)
    model.shards[1].discard = lambda: None  # type: ignore[method-assign]  # breaks it
    with pytest.raises(AssertionError, match="chunk 1: discard kept the gradient"):
        check_sharded_model(model, lambda: make_loss(params, 0))
