"""A model built without its memory and wrapped is the model built eagerly and wrapped, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gemini_booster import Booster, GeminiPlugin
from gemini_booster.zero import GeminiDDP
from gemini_lazy import LazyInitContext, is_lazy, load_pretrained
from gemini_optim import HybridAdam
from models import build_model, inputs_of
from ranks import run_ranks

SMALL_CHUNKS: dict[str, Any] = {"min_chunk_size_m": 0.004, "search_range_m": 0.004, "hidden_dim": 32}
KINDS = ["gpt2", "llama", "bert", "t5", "mixtral", "vit"]


def build(kind: str, seed: int, *, lazy: bool) -> PreTrainedModel:
    torch.manual_seed(seed)
    if not lazy:
        return build_model(kind)
    with LazyInitContext():
        module = build_model(kind)
    assert all(is_lazy(param) for param in module.parameters())
    return module


def boost_and_train(kind: str, rank: int, module: nn.Module, plugin: GeminiPlugin) -> tuple[Any, ...]:
    """Return the state after boosting, the loss of a step, and the state after it."""
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(module, HybridAdam(module.parameters(), lr=1e-2))
    assert optimizer is not None
    assert not any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))
    before = model.state_dict()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = model(**inputs_of(kind, rank, 0)).loss
    optimizer.backward(loss)
    optimizer.step()
    return before, buffers, loss.item(), model.state_dict()


def assert_same(ours: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    for found, other in zip(ours, wanted, strict=True):
        if isinstance(found, dict):
            assert found.keys() == other.keys()
            assert all(torch.equal(found[name], value) for name, value in other.items())
        else:
            assert found == other


def check_equal(rank: int, world_size: int) -> None:
    for kind in KINDS:
        for settings in ({"precision": "fp32"}, {"precision": "bf16", "offload_optim_frac": 1.0}):
            plugin = GeminiPlugin(**settings, **SMALL_CHUNKS)
            wanted = boost_and_train(kind, rank, build(kind, 7, lazy=False), plugin)
            # Each rank has a seed of its own: rank 0's values are given to all.
            assert_same(boost_and_train(kind, rank, build(kind, 7 + rank, lazy=True), plugin), wanted)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lazy_and_boosted_equals_eager_and_boosted(world_size: int) -> None:
    run_ranks(check_equal, world_size, timeout_s=120)


def check_pretrained(rank: int, world_size: int, folder: str) -> None:
    for kind in KINDS:
        if kind in ("mixtral", "vit"):
            continue  # transformers saves these under other names than their modules have
        source = Path(folder, kind)
        if rank == 0:
            build(kind, 3, lazy=False).save_pretrained(source, max_shard_size="50KB")
        torch.distributed.barrier()
        for precision in ("fp32", "bf16"):
            plugin = GeminiPlugin(precision=precision, **SMALL_CHUNKS)
            eager = type(build(kind, 0, lazy=True)).from_pretrained(source).train()
            lazy = build(kind, 50 + rank, lazy=True)
            report = load_pretrained(lazy, source)
            assert not report.missing
            assert not report.unexpected
            assert all(is_lazy(param) for param in lazy.parameters())
            wanted = boost_and_train(kind, rank, eager, plugin)
            assert_same(boost_and_train(kind, rank, lazy, plugin), wanted)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_lazy_weights_of_files_equal_from_pretrained(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_pretrained, world_size, str(tmp_path), timeout_s=120)


def check_tied_and_frozen(rank: int, world_size: int) -> None:
    """A tie made after the context, a frozen part and a buffer that is a lazy tensor."""

    def make() -> nn.Module:
        module = nn.ModuleDict({"embed": nn.Embedding(50, 12), "mix": nn.Linear(12, 12), "head": nn.Linear(12, 50)})
        module["mix"].requires_grad_(False)
        module.register_buffer("noise", torch.randn(5))
        return module

    states: list[dict[str, Tensor]] = []
    for lazy in (False, True):
        torch.manual_seed(5 + rank * lazy)
        if lazy:
            with LazyInitContext():
                module = make()
        else:
            module = make()
        module["head"].weight = module["embed"].weight  # type: ignore[index]
        model = GeminiDDP(module, precision="fp32", min_chunk_size_m=0.0001, search_range_m=0.0001, hidden_dim=4)
        assert model.unwrap()["head"].weight is model.unwrap()["embed"].weight  # type: ignore[index]
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_ties_frozen_parts_and_buffers_may_be_lazy(world_size: int) -> None:
    run_ranks(check_tied_and_frozen, world_size)


class Tables(nn.Module):
    """Tensors that are neither parameters nor buffers, as Llama's own ``freqs_cis``; an unmanaged module in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = torch.arange(4.0)
        self.steps = [torch.ones(4, dtype=torch.long) * 3, self.layer.weight]
        self.teacher = [nn.Linear(4, 4, bias=False)]
        self.scaled = self.layer.weight.detach() * 2

    def forward(self, x: Tensor) -> Tensor:
        tables = self.table + self.steps[0] + self.scaled.sum()
        output: Tensor = self.layer(x) * tables + self.teacher[0](x)
        return output


def check_plain_attributes(rank: int, world_size: int) -> None:
    outputs = []
    for lazy in (False, True):
        torch.manual_seed(3)
        if lazy:
            with LazyInitContext():
                module = Tables()
        else:
            module = Tables()
        model = GeminiDDP(module, precision="fp32", min_chunk_size_m=0, search_range_m=0, hidden_dim=4)
        assert not any(map(is_lazy, (module.table, *module.steps, module.scaled)))
        assert module.steps[1] is module.layer.weight
        outputs.append(model(torch.ones(1, 4)))
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(*outputs)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_tensors_in_plain_attributes_may_be_lazy(world_size: int) -> None:
    run_ranks(check_plain_attributes, world_size)


def status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def check_memory(rank: int, world_size: int) -> tuple[int, int, int]:
    """Return the growth of this process at its peak while it wraps a lazy model, and the model's bytes."""
    chunks: dict[str, Any] = {"min_chunk_size_m": 2, "search_range_m": 1}
    GeminiDDP(build("gpt2", 0, lazy=True), precision="fp32", **SMALL_CHUNKS)  # loads what the first use loads
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    before = status("VmRSS")
    with LazyInitContext():
        module = build_model("gpt2", layers=8, width=768)
    built = status("VmHWM") - before
    model = GeminiDDP(module, precision="fp32", **chunks)
    peak = status("VmHWM") - before
    del model
    return built, peak, sum(4 * param.numel() for param in module.parameters())


@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_three_ranks_together_never_hold_the_model_more_than_once() -> None:
    found = run_ranks(check_memory, 3, timeout_s=120)
    model_bytes = found[0][2]
    assert model_bytes > 200 * 2**20
    assert max(built for built, _, _ in found) < 0.1 * model_bytes
    assert sum(peak for _, peak, _ in found) < 1.3 * model_bytes, found
