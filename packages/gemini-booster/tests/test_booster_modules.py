"""Modules named by settings: what stays in fp32, and what is gathered as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemini_booster import GeminiPlugin
from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from gemini_search import ChunkConfiguration, search_chunk_configuration
from ranks import run_ranks

SMALL = {"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 4}


class Net(nn.Module):
    """Two layers with a norm between them, and a block that holds a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.seen["first"] = x.dtype
        x = self.norm(x)
        self.seen["norm"] = x.dtype
        x = self.block(x)
        self.seen["block"] = x.dtype
        return x


def mixed(plain: Net, x: Tensor) -> Tensor:
    """What keep_fp32=["block"] stands for, written out; parameters of ``first`` and ``norm`` are in bf16."""
    x = F.linear(x.bfloat16(), plain.first.weight.bfloat16(), plain.first.bias.bfloat16())
    x = F.layer_norm(x, (8,), plain.norm.weight.bfloat16(), plain.norm.bias.bfloat16())
    return plain.block(x.float()).bfloat16()


def test_modules_kept_in_fp32_are_not_rounded_and_get_fp32() -> None:
    torch.manual_seed(0)
    plain = Net()
    module = copy.deepcopy(plain)
    module.block[1].register_forward_hook(lambda block, args, output: module.seen.update(inner=output.dtype))
    model = GeminiDDP(module, precision="bf16", keep_fp32=["block", "block.1"], **SMALL)  # type: ignore[arg-type]
    dtypes = {info.name: chunk.dtype for chunk in model.chunk_manager.chunks for info in chunk.tensors}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {"block.0.weight", "block.0.bias", "block.1.weight", "block.1.bias"}
    x = torch.randn(3, 4)
    output = model(x)
    assert module.seen == {
        "first": torch.bfloat16, "norm": torch.bfloat16, "inner": torch.float32, "block": torch.bfloat16
    }  # fmt: skip
    wanted = mixed(plain, x)
    assert torch.equal(output, wanted)
    wanted.float().square().sum().backward()
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    optimizer.backward(output.float().square().sum())
    optimizer.step()
    state = dict(model.named_master_values(torch.float32))
    for name, param in plain.named_parameters():
        assert param.grad is not None
        # The gradient of a bf16 parameter is in bf16, and the oracle's passed through the same rounding.
        torch.testing.assert_close(state[name], param.detach() - 0.5 * param.grad, rtol=0, atol=1e-6, msg=name)


def test_copy_of_a_model_with_modules_in_fp32_is_in_fp32_and_casts_nothing() -> None:
    torch.manual_seed(0)
    plain = Net()
    model = GeminiDDP(copy.deepcopy(plain), precision="bf16", keep_fp32=["block"], **SMALL)  # type: ignore[arg-type]
    copied = copy.deepcopy(model)
    assert {param.dtype for param in copied.parameters()} == {torch.float32}
    assert torch.equal(copied.block[0].weight, plain.block[0].weight)
    assert torch.equal(copied.first.weight, plain.first.weight.bfloat16().float())
    x = torch.randn(3, 4)
    copied(x).sum().backward()
    assert set(copied.seen.values()) == {torch.float32}
    assert copied.double()(x.double()).dtype == torch.float64
    assert model(x).dtype == torch.bfloat16


def test_kept_by_class_and_nothing_to_keep_in_fp32() -> None:
    model = GeminiDDP(Net(), precision="bf16", keep_fp32=[nn.LayerNorm], **SMALL)  # type: ignore[arg-type]
    kept = {info.name for c in model.chunk_manager.chunks for info in c.tensors if c.dtype == torch.float32}
    assert kept == {"norm.weight", "norm.bias", "block.1.weight", "block.1.bias"}
    plain = Net()
    exact = GeminiDDP(copy.deepcopy(plain), precision="fp32", keep_fp32=["*"], **SMALL)  # type: ignore[arg-type]
    x = torch.randn(2, 4)
    assert torch.equal(exact(x), plain(x))


@pytest.mark.parametrize("setting", ["keep_fp32", "leaf_modules"])
@pytest.mark.parametrize("wrong", ["nothing.like.this", nn.Conv2d])
def test_module_that_is_not_there_is_an_error_before_anything_is_wrapped(setting: str, wrong: object) -> None:
    module = Net()
    with pytest.raises(ValueError, match=rf"{setting} names '(nothing.like.this|Conv2d)'"):
        GeminiDDP(module, precision="fp32", **{setting: [wrong]})  # type: ignore[arg-type]
    GeminiDDP(module, precision="fp32")


def test_container_that_nobody_calls_is_no_leaf_but_may_be_within_one() -> None:
    module = Mixture()
    with pytest.raises(ValueError, match=r"leaf_modules names 'moe.experts', a ModuleList, which nobody calls"):
        GeminiDDP(module, precision="fp32", leaf_modules=["*.experts"])
    model = GeminiDDP(module, precision="fp32", leaf_modules=["moe*"])
    model(torch.ones(1, 4), 0).sum().backward()


class Experts(nn.Module):
    """Uses the experts that the data choose, here by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](x)


class Mixture(nn.Module):
    """A layer, then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.moe = Experts()

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.moe(self.layer(x).tanh(), which)


def check_experts(rank: int, world_size: int) -> None:
    plain = Mixture()
    for param in plain.parameters():
        nn.init.normal_(param, generator=torch.Generator().manual_seed(param.numel()))
    module = copy.deepcopy(plain)
    plugin = GeminiPlugin(precision="fp32", leaf_modules=[Experts], **SMALL)  # type: ignore[arg-type]
    model = plugin.wrap_model(module)
    optimizer = plugin.wrap_optimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), model)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for other in range(world_size):
            x = torch.full((2, 4), 1.0 + other + step)
            (plain(x, (other + step) % 2).square().mean() / world_size).backward()
        oracle.step()
        oracle.zero_grad()
        optimizer.backward(model(torch.full((2, 4), 1.0 + rank + step), (rank + step) % 2).square().mean())
        optimizer.step()
    trained = model.state_dict()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(trained[name], wanted, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_may_use_different_experts_of_a_leaf(world_size: int) -> None:
    run_ranks(check_experts, world_size)


def test_inference_may_leave_the_model_gathered() -> None:
    for scatter in (True, False):
        model = GeminiDDP(Net(), precision="bf16", offload_optim_frac=1.0, offload_param_frac=1.0,
                          scatter_after_inference=scatter, **SMALL)  # type: ignore[arg-type]  # fmt: skip
        with torch.no_grad():
            model(torch.ones(1, 4))
            before = [chunk.gathers for chunk in model.chunk_manager.chunks]
            model(torch.ones(1, 4))
        again = [chunk.gathers for chunk in model.chunk_manager.chunks] != before
        assert again is scatter
        assert any(chunk.is_gathered for chunk in model.chunk_manager.chunks) is not scatter
        model(torch.ones(1, 4)).sum().backward()
        assert not any(chunk.is_gathered for chunk in model.chunk_manager.chunks)


def test_dtype_of_the_sum_over_ranks_is_checked() -> None:
    with pytest.raises(ValueError, match="reduce_dtype must be a floating dtype"):
        GeminiDDP(Net(), precision="bf16", reduce_dtype=torch.int32)
    model = GeminiDDP(Net(), precision="bf16", reduce_dtype=torch.float32)
    assert {chunk.reduce_dtype for chunk in model.chunk_manager.chunks} == {torch.float32}
    model = GeminiDDP(Net(), precision="bf16")
    assert {chunk.reduce_dtype for chunk in model.chunk_manager.chunks} == {torch.bfloat16}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("halved", [False, True])
def test_batch_norms_compute_in_fp32_without_being_named(precision: str, halved: bool) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    if halved:  # its running statistics as well
        plain = plain.to(dtype).float()
    module = copy.deepcopy(plain)
    if halved:
        module.to(dtype)
    model = GeminiDDP(module, precision=precision, keep_fp32=["4"])  # type: ignore[arg-type] # one of the three
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, initial_scale=1.0)
    rounded = copy.deepcopy(plain[0]).to(dtype)
    for step in range(2):
        x = torch.randn(2, 3, 8, 8)
        model.train(step == 0)
        plain.train(step == 0)
        output = model(x)
        assert output.dtype == dtype
        normed = plain[1](rounded(x.to(dtype)).float()).to(dtype)
        wanted = plain[4](plain[3](plain[2](normed)).float()).to(dtype)
        assert torch.equal(output, wanted)
        state = model.state_dict()
        for name, buffer in plain.named_buffers():
            assert state[name].dtype == buffer.dtype
            assert torch.equal(state[name], buffer), name
        if step == 0:
            optimizer.backward(output.float().square().sum())
            optimizer.step()
            wanted.float().square().sum().backward()
            masters = dict(model.named_master_values(torch.float32))
            with torch.no_grad():
                for name, param in plain.named_parameters():
                    gradient = rounded.get_parameter(name[2:]).grad if name[0] == "0" else param.grad
                    assert gradient is not None
                    torch.testing.assert_close(masters[name], param - 0.5 * gradient.float(), rtol=0, atol=1e-6)
                    param.copy_(masters[name])
            rounded.load_state_dict(plain[0].state_dict())


def test_a_chunk_configuration_is_for_one_dtype_or_has_chunks_for_each() -> None:
    names = [name for name, _ in Net().named_parameters()]
    kept = [name for name in names if name.startswith("block")]
    rounded = [name for name in names if name not in kept]

    def search(chosen: list[str]) -> ChunkConfiguration:
        sizes = {name: Net().get_parameter(name).numel() for name in chosen}
        return search_chunk_configuration(sizes, 1, min_chunk_size_m=0, search_range_m=0, hidden_dim=128)

    def wrap(configuration: ChunkConfiguration) -> list[tuple[int, int]]:
        settings: dict[str, Any] = {**SMALL, "chunk_configuration": configuration}
        model = GeminiDDP(Net(), precision="bf16", keep_fp32=["block"], **settings)
        return [(chunk.numel, chunk.dtype.itemsize) for chunk in model.chunk_manager.chunks]

    low, high = search(rounded), search(kept)
    both = ChunkConfiguration(chunks=(*high.chunks, *low.chunks), chunk_numel=128, world_size=1)
    given = [(spec.numel, 2) for spec in low.chunks], [(spec.numel, 4) for spec in high.chunks]
    assert wrap(both) == [*given[0], *given[1]]
    assert wrap(low)[: len(given[0])] == given[0]
    assert wrap(low) != wrap(both)
    assert wrap(high)[-len(given[1]) :] == given[1]
    assert wrap(high) != wrap(both)
    with pytest.raises(ValueError, match=r"into one chunk\. Give each dtype chunks of its own, or none"):
        wrap(search(names))
    with pytest.raises(ValueError, match=r"it lacks \['block\.1\.bias'\] and has \[\] too many"):
        wrap(search(kept[:-1]))
