"""Wrong use is a clear error on every rank within seconds, and leaves what was right usable."""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_booster import Booster, GeminiPlugin, launch_from_torch
from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer
from gemini_ddp import ZeroDDPError
from gemini_lazy import LazyInitContext
from gemini_optim import HybridAdam
from gemini_placement import PlacementError
from ranks import run_ranks

SECONDS = 5.0


def small_model(width: int = 8) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = model(inputs).float().square().mean()
    assert isinstance(loss, Tensor)
    return loss


def refused(kind: type[Exception], message: str, call: Callable[..., object], *args: object, **named: object) -> None:
    """Check that a call raises soon, and that the ranks are still in step afterwards."""
    started = time.monotonic()
    with pytest.raises(kind, match=message):
        call(*args, **named)
    assert time.monotonic() - started < SECONDS, message
    if dist.is_initialized():
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == dist.get_world_size()


SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"precision": "fp8"}, ValueError, r"precision must be one of \['bf16', 'fp16', 'fp32'\], got 'fp8'"),
    ({"placement_policy": "cuda"}, ValueError, "placement_policy must be 'static' or 'auto', got 'cuda'"),
    ({"shard_param_frac": 1.5}, ValueError, r"shard_param_frac must be a number in \[0, 1\], got 1.5"),
    ({"offload_optim_frac": -0.1}, ValueError, r"offload_optim_frac must be a number in \[0, 1\], got -0.1"),
    ({"offload_param_frac": float("nan")}, ValueError, r"offload_param_frac must be a number in \[0, 1\], got nan"),
    (
        {"placement_policy": "auto", "steady_cuda_cap_ratio": 2},
        ValueError,
        r"steady_cuda_cap_ratio must be a number in \[0, 1\], got 2",
    ),
    ({"max_prefetch": -1}, ValueError, "max_prefetch must not be negative, got -1"),
    ({"max_prefetch": 1.5}, TypeError, "max_prefetch must be an int"),
    ({"max_fetch": -1}, ValueError, "max_fetch must not be negative, got -1"),
    ({"max_held": 2, "placement_policy": "auto"}, ValueError, "max_held=2 is of the static policy"),
    ({"device_capacity": "a lot"}, ValueError, "device_capacity must be a number of bytes, or text such as '2GiB'"),
    ({"host_capacity": "-1GB"}, ValueError, "host_capacity must be a number of bytes, or text such as '2GiB'"),
    ({"device_capacity": True}, ValueError, "device_capacity must be a number of bytes"),
]


def check_settings(rank: int, world_size: int) -> None:
    for settings, kind, message in SETTINGS:
        refused(kind, message, GeminiDDP, small_model(), **settings)
        refused(kind, message, GeminiPlugin, **settings)
    refused(ValueError, "backoff_factor must lie between 0 and 1, got 2", GeminiPlugin, backoff_factor=2)
    refused(ValueError, "max_norm must be positive", GeminiPlugin, max_norm=-1.0)
    refused(ValueError, "norm_type must be 2.0 or math.inf", GeminiPlugin, norm_type=1.0)
    refused(ValueError, "hidden_dim must be at least 1, got 0", GeminiDDP, small_model(), hidden_dim=0)
    refused(ValueError, "min_chunk_size_m must be finite", GeminiDDP, small_model(), min_chunk_size_m=-1)
    chunk_of_8_kb = {"precision": "fp32", "min_chunk_size_m": 0.001, "search_range_m": 0.001, "hidden_dim": 64}
    for policy in ("static", "auto"):
        settings = {**chunk_of_8_kb, "placement_policy": policy, "device_capacity": 1000}
        message = "The model states do not fit: device needs [0-9,]+ bytes and has 1,000"
        refused(PlacementError, message, GeminiDDP, small_model(width=512), **settings)
    message = "host needs [0-9,]+ bytes and has 10. .* The nearest that fits: "
    refused(PlacementError, message, GeminiDDP, small_model(), offload_optim_frac=1.0, host_capacity=10)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_settings_out_of_range_are_refused_on_every_rank(world_size: int) -> None:
    run_ranks(check_settings, world_size)


def check_keywords(rank: int, world_size: int) -> None:
    model, booster = GeminiDDP(small_model()), Booster()
    calls: list[Callable[..., object]] = [
        lambda **wrong: Booster(**wrong),
        lambda **wrong: GeminiPlugin(**wrong),
        lambda **wrong: GeminiDDP(small_model(), **wrong),
        lambda **wrong: GeminiAdamOptimizer(model, **wrong),
        lambda **wrong: GeminiOptimizer(torch.optim.SGD(model.parameters()), model, **wrong),
        lambda **wrong: HybridAdam(model.parameters(), **wrong),
        lambda **wrong: booster.boost(small_model(), **wrong),
        lambda **wrong: booster.save_model(model, "nowhere", **wrong),
        lambda **wrong: booster.load_model(model, "nowhere", **wrong),
        lambda **wrong: booster.plugin.prepare_dataloader(range(4), 2, **wrong),  # type: ignore[arg-type]
        lambda **wrong: launch_from_torch(**wrong),
        lambda **wrong: LazyInitContext(**wrong),
    ]
    for call in calls:
        refused(TypeError, "unexpected keyword argument 'clipping_norm'", call, clipping_norm=1.0)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_unknown_keywords_are_refused_everywhere(world_size: int) -> None:
    run_ranks(check_keywords, world_size)


def losses_in_fp16(rank: int, *, wrong_at: int | None) -> list[float]:
    model = GeminiDDP(small_model(512), precision="fp16", min_chunk_size_m=0.0005, search_range_m=0.001, hidden_dim=64)
    optimizer = GeminiAdamOptimizer(model, lr=1e-2, initial_scale=2**5)
    losses = []
    for step in range(4):
        if step == wrong_at:
            refused(ZeroDDPError, r"optimizer\.backward\(loss", loss_of(model, rank, step).backward)
        loss = loss_of(model, rank, step)
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    assert model.memory_usage()["device"]["used"]
    return losses


def check_backward_in_fp16(rank: int, world_size: int) -> None:
    wanted = losses_in_fp16(rank, wrong_at=None)
    assert len(set(wanted)) == len(wanted)
    for step in (0, 1, 2):  # while recording, in the first planned step, later
        assert losses_in_fp16(rank, wrong_at=step) == wanted


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_backward_under_fp16_is_refused_and_training_goes_on(world_size: int) -> None:
    run_ranks(check_backward_in_fp16, world_size)


def check_world_sizes(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world_size + 1))
        message = rf"announced WORLD_SIZE={world_size + 1}, but the process group has {world_size} rank"
        refused(RuntimeError, message, GeminiDDP, small_model())
        refused(RuntimeError, message, Booster().boost, small_model())
        refused(RuntimeError, message, launch_from_torch)
        group = dist.new_group(list(range(world_size)))
        assert loss_of(GeminiDDP(small_model(), process_group=group), rank).isfinite()  # the group that was meant
        patch.setenv("WORLD_SIZE", str(world_size))
        launch_from_torch()


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_world_unlike_the_launchers_is_refused(world_size: int) -> None:
    run_ranks(check_world_sizes, world_size)


def test_a_world_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    refused(RuntimeError, "announced WORLD_SIZE=2, but the process group has 1 rank", GeminiDDP, small_model())
    refused(RuntimeError, "WORLD_SIZE is 2, but RANK is not set", launch_from_torch)


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child
        self.head = nn.Linear(1, 1)


def check_models(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        meta = small_model()
    refused(ValueError, r"4 parameters are on the meta device .*LazyInitContext", GeminiDDP, meta)
    refused(ValueError, "This Tanh has no parameters", GeminiDDP, nn.Tanh())

    module = small_model()
    wrapped = GeminiDDP(module, precision="fp32")
    before = loss_of(wrapped, rank).item()
    for again in (wrapped, module, nn.Sequential(module), Parent(wrapped), next(module.children())):
        refused(ValueError, "is wrapped already; wrap a module once", GeminiDDP, again)
    assert loss_of(wrapped, rank).item() == before
    refused(ValueError, "is wrapped already", GeminiDDP, wrapped.detach())  # its parameters lie in chunks


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_models_without_values_or_wrapped_already_are_refused(world_size: int) -> None:
    run_ranks(check_models, world_size)


def check_optimizers(rank: int, world_size: int) -> None:
    module = small_model()
    model, others = GeminiDDP(module), list(small_model().parameters())
    foreign = torch.optim.AdamW([*model.parameters(), others[0]])
    message = "1 of the optimizer's 5 parameters are not managed by the model, such as number 4"
    refused(ValueError, message, GeminiOptimizer, foreign, model)
    refused(ValueError, "4 of the optimizer's 4 parameters", GeminiOptimizer, torch.optim.SGD(others), model)
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam):
        refused(ValueError, "looks at whole parameters", GeminiOptimizer, kind(list(model.parameters())), model)
    plain = torch.optim.SGD(model.parameters())
    refused(TypeError, "must be a GeminiDDP, got Sequential", GeminiOptimizer, plain, small_model())
    refused(ValueError, "max_norm must be positive", GeminiOptimizer, plain, model, max_norm=-1.0)
    refused(ValueError, "norm_type must be 2.0 or math.inf", GeminiOptimizer, plain, model, norm_type=1.0)
    once = GeminiOptimizer(plain, model)
    refused(ValueError, "optim is a ZeroOptimizer already", GeminiOptimizer, once, model)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_that_cannot_serve_are_refused(world_size: int) -> None:
    run_ranks(check_optimizers, world_size)


def check_kept_models(rank: int, world_size: int) -> None:
    module = small_model()
    before = [param.clone() for param in module.parameters()]
    booster = Booster(plugin=GeminiPlugin(precision="fp32"))
    refused(ValueError, "looks at whole parameters", booster.boost, module, torch.optim.LBFGS(module.parameters()))
    foreign = torch.optim.SGD([*module.parameters(), *small_model().parameters()])
    message = "4 of the optimizer's 8 parameters are not the model's, such as number 4"
    refused(ValueError, message, booster.boost, module, foreign)
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    if world_size > 1:  # one rank that refuses lets the others hear of it
        kind, text = (ValueError, message) if rank else (RuntimeError, f"Rank 1 could not wrap the model: .*{message}")
        refused(kind, text, booster.boost, module, foreign if rank else plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", refuse_files)
        on_disk = Booster(plugin=GeminiPlugin(precision="fp32", offload_directory="/", disk_optim_frac=1.0))
        message = "offload_directory must be an existing folder that can be written to: no: '/'"
        refused(PermissionError, message, on_disk.boost, module, plain)
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True))
    model, optimizer, *_ = booster.boost(module, plain)
    assert optimizer is not None
    booster.backward(loss_of(model, rank), optimizer)
    optimizer.step()


def refuse_files(**_: object) -> None:
    raise OSError(errno.EACCES, "no")


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_is_as_it_was_after_a_refusal(world_size: int) -> None:
    run_ranks(check_kept_models, world_size)


def check_unlike_ranks(rank: int, world_size: int) -> None:
    # Each of these gives as many chunks on all ranks, placed alike.
    unlike = r"Ranks \[1\] have chunks unlike those of rank 0"
    refused(RuntimeError, unlike, GeminiDDP, small_model(width=8 + rank))
    refused(RuntimeError, unlike, GeminiDDP, small_model(), precision=("fp16", "bf16")[rank])
    refused(RuntimeError, unlike, GeminiDDP, small_model(), enable_gradient_accumulation=bool(rank))
    GeminiDDP(nn.Sequential(*small_model(), *[nn.Tanh()] * rank))  # modules without parameters may differ
    counted = small_model()
    counted.register_buffer("counts", torch.zeros(2 + rank))
    refused(RuntimeError, unlike, GeminiDDP, counted)
    # What goes wrong on one rank only.
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"precision": "fp8"}, ValueError, "precision must be one of"),
        ({"device_capacity": 10}, PlacementError, "The model states do not fit"),
    ]
    for settings, kind, message in wrong:
        if rank:
            refused(kind, message, GeminiDDP, small_model(), **settings)
        else:
            refused(
                RuntimeError, f"Rank 1 could not wrap the model: {kind.__name__}: {message}", GeminiDDP, small_model()
            )


@pytest.mark.distributed
def test_ranks_that_wrap_unlike_models_all_hear_of_it() -> None:
    run_ranks(check_unlike_ranks, 2)
