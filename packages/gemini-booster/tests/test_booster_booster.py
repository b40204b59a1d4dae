"""Booster: what it returns, what it refuses, and a checkpoint there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from gemini_booster import Booster, GeminiPlugin
from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def loss_of(model: nn.Module) -> Tensor:
    loss = model(torch.ones(3, 4)).float().square().mean()
    assert isinstance(loss, Tensor)
    return loss


def test_boost_returns_the_five() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    criterion, loader, scheduler = nn.MSELoss(), DataLoader(TensorDataset(torch.ones(4, 4))), StepLR(optimizer, 1)
    booster = Booster(plugin=GeminiPlugin(precision="fp32"))
    model, boosted, *rest = booster.boost(module, optimizer, criterion, loader, scheduler)
    assert isinstance(model, GeminiDDP)
    assert model.unwrap() is module
    assert isinstance(boosted, GeminiOptimizer)
    assert boosted.optim is optimizer
    assert boosted.module is model
    assert all(ours is theirs for ours, theirs in zip(rest, (criterion, loader, scheduler), strict=True))
    booster.backward(loss_of(model), boosted)
    boosted.step()
    scheduler.step()
    assert boosted.param_groups[0]["lr"] == pytest.approx(0.01)


def test_boost_of_a_model_alone_returns_none_for_the_others() -> None:
    model, *rest = Booster().boost(net())
    assert isinstance(model, GeminiDDP)
    assert rest == [None] * 4


def test_settings_of_the_plugin_reach_model_and_optimizer() -> None:
    plugin = GeminiPlugin(precision="fp16", initial_scale=2**4, max_norm=0.5, offload_optim_frac=1.0, max_prefetch=1)
    module = net()
    model, optimizer, *_ = Booster(plugin=plugin).boost(module, torch.optim.Adam(module.parameters()))
    assert optimizer is not None
    assert model.precision == "fp16"
    assert (optimizer.loss_scale, optimizer.max_norm) == (2**4, 0.5)
    assert model.memory_usage()["host"]["used"]


def test_others_objects_are_refused_by_type(tmp_path: Path) -> None:
    booster, module = Booster(), net()
    plain = torch.optim.SGD(module.parameters())
    with pytest.raises(TypeError, match="plugin must be a GeminiPlugin, got str"):
        Booster(plugin="gemini")  # type: ignore[arg-type] # that is the test
    message = "optimizer must be the one that boost returned, got SGD"
    with pytest.raises(TypeError, match=message):
        booster.backward(loss_of(module), plain)
    with pytest.raises(TypeError, match=message):
        booster.save_optimizer(plain, tmp_path / "file")
    with pytest.raises(TypeError, match=message):
        booster.load_optimizer(plain, tmp_path / "file")
    message = "model must be the one that boost returned, got Sequential"
    with pytest.raises(TypeError, match=message):
        booster.save_model(module, tmp_path / "file")
    with pytest.raises(TypeError, match=message):
        booster.load_model(module, tmp_path / "file")
    with pytest.raises(TypeError, match=r"module must be a GeminiDDP, got Sequential\. Wrap the model first"):
        GeminiOptimizer(plain, module)  # type: ignore[arg-type] # that is the test
    with pytest.raises(NotImplementedError, match="no pipeline parallelism"):
        booster.execute_pipeline()
    assert not list(tmp_path.iterdir())


def test_adam_over_shards_equals_torchs() -> None:
    ours, theirs = net(), net()
    model = GeminiDDP(ours, precision="fp32")
    optimizer = GeminiAdamOptimizer(model, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, adamw_mode=False)
    oracle = torch.optim.Adam(theirs.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(3):
        optimizer.backward(loss_of(model))
        optimizer.step()
        oracle.zero_grad()
        loss_of(theirs).backward()
        oracle.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plain_loss_backward_does_the_same_where_no_scale_is_needed(precision: str) -> None:
    states = []
    for plain in (False, True):
        module = net()
        booster = Booster(plugin=GeminiPlugin(precision=precision))  # type: ignore[arg-type] # one of the three
        model, optimizer, *_ = booster.boost(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        assert optimizer is not None
        for _ in range(2):
            loss = loss_of(model)
            if plain:
                loss.backward()
            else:
                booster.backward(loss, optimizer)
            optimizer.step()
        states.append(model.state_dict())
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
    assert not torch.equal(states[0]["0.weight"].float(), net().state_dict()["0.weight"])


@pytest.mark.parametrize("use_safetensors", [False, True])
@pytest.mark.parametrize("shard", [False, True])
def test_a_checkpoint_goes_there_and_back(shard: bool, use_safetensors: bool, tmp_path: Path) -> None:
    booster = Booster(plugin=GeminiPlugin(precision="fp32"))
    model, *_ = booster.boost(net(1))
    place = tmp_path / "deep" / "checkpoint"
    booster.save_model(model, place, shard=shard, use_safetensors=use_safetensors, prefix="run" if shard else None)
    if shard:
        stem, suffix = ("model", "safetensors") if use_safetensors else ("pytorch_model", "bin")
        names = {path.name for path in place.iterdir()}
        assert names == {f"{stem}.run-00001.{suffix}", f"{stem}.run.{suffix}.index.json"}
    if not use_safetensors and not shard:
        place = place.rename(place.with_suffix(".bin"))
    elif not shard:
        place = place.rename(place.with_suffix(".safetensors"))
    other, *_ = booster.boost(net(2))
    booster.load_model(other, place)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in net(1).state_dict().items())
    with pytest.raises(ValueError, match="size_per_shard must be a positive number of MiB, got 0"):
        booster.save_model(model, tmp_path / "x", size_per_shard=0)


def test_formats_are_told_by_content(tmp_path: Path) -> None:
    booster = Booster(plugin=GeminiPlugin(precision="fp32"))
    model, *_ = booster.boost(net(1))
    with pytest.raises(ValueError, match=r"'a\.safetensors' would hold what torch\.save writes: give use_safetensors"):
        booster.save_model(model, tmp_path / "a.safetensors")
    state = net(2).state_dict()
    torch.save(state, tmp_path / "old.safetensors", _use_new_zipfile_serialization=False)
    torch.save(state, tmp_path / "new.safetensors.old")
    save_file(state, tmp_path / "safe.bin")
    for path in sorted(tmp_path.iterdir()):
        other, *_ = booster.boost(net(3))
        booster.load_model(other, path)
        assert all(torch.equal(other.state_dict()[name], value) for name, value in state.items()), path
    (tmp_path / "pointer.bin").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"pointer\.bin' is neither in safetensors nor written by torch\.save"):
        booster.load_model(model, tmp_path / "pointer.bin")


def test_learning_rates_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=np.float32(0.5))
    scheduler = LambdaLR(optimizer, lambda step: np.cos(step / 10))
    booster = Booster(plugin=GeminiPlugin(precision="fp32"))
    model, boosted, *_ = booster.boost(module, optimizer)
    assert boosted is not None
    booster.backward(loss_of(model), boosted)
    boosted.step()
    scheduler.step()
    booster.save_optimizer(boosted, tmp_path / "optimizer")
    booster.save_lr_scheduler(scheduler, tmp_path / "scheduler")
    booster.load_optimizer(boosted, tmp_path / "optimizer")
    booster.load_lr_scheduler(scheduler, tmp_path / "scheduler")
    assert boosted.param_groups[0]["lr"] == 0.1 * np.cos(0.1) == scheduler.get_last_lr()[0]
    assert boosted.param_groups[0]["momentum"] == 0.5
    assert type(boosted.param_groups[0]["lr"]) is float
