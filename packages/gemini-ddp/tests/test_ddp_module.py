"""The wrapper looks like its module, keeps and loads state, refuses misuse, and frees everything."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from ddp_checks import SETUPS, OneAhead, Setup, assert_at_rest, default_loss, same_bits
from test_ddp_models import DIM, ZOO, Model, mlp
from torch import Tensor, nn

import gemini_ddp
import gemini_ddp.testing
from gemini_ddp import ZeroDDP, ZeroDDPError
from gemini_ddp.interfaces import ChunkStore, Planner
from gemini_ddp.testing import PlainChunk, PlainStore, PoisonStore


def wrapped(name: str = "Stack") -> tuple[nn.Module, ZeroDDP[PlainChunk], PoisonStore]:
    torch.manual_seed(0)
    plain = ZOO[name]()
    module = copy.deepcopy(plain)
    store = PoisonStore(module.parameters())
    return plain, ZeroDDP(module, store, OneAhead()), store


# -- face -----------------------------------------------------------------------------------------------------------


def test_public_names_are_as_stated() -> None:
    assert gemini_ddp.__all__ == ["ZeroDDP", "ZeroDDPError", "__version__"]
    assert gemini_ddp.testing.__all__ == ["ChunkStoreContract", "PlainChunk", "PlainStore", "PoisonStore"]
    assert str(inspect.signature(ZeroDDP)) == (
        "(module: 'nn.Module', store: 'ChunkStore[ChunkT]', planner: 'Planner[ChunkT] | None' = None, *, "
        "process_group: 'dist.ProcessGroup | None' = None, leaf_modules: 'Collection[type[nn.Module] | str]' = (), "
        "scatter_after_inference: 'bool' = True, debug: 'bool | None' = None, "
        "input_dtype: 'torch.dtype | None' = None, scales_loss: 'bool' = False, force_outputs_fp32: 'bool' = False)"
        " -> 'None'"
    )


def test_stores_and_planner_satisfy_the_protocols() -> None:
    store: ChunkStore[PlainChunk] = PlainStore([])
    planner: Planner[PlainChunk] = OneAhead()  # mypy is the test, where it is run over tests
    assert callable(store.begin_use)
    assert callable(planner.schedule)


def test_parameters_buffers_and_attributes_have_the_modules_own_names() -> None:
    plain, model, _ = wrapped("Convolutions")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert model.unwrap() is model.module
    assert model.conv is model.unwrap().conv
    assert torch.equal(model.batch(1), plain.batch(1))
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = model.nonesuch


def test_train_and_eval_reach_the_module() -> None:
    _, model, _ = wrapped()
    assert model.training
    model.eval()
    assert not model.unwrap().training
    assert not any(child.training for child in model.modules())
    model.train()
    assert model.unwrap().training


def test_wrapping_keeps_the_mode_of_the_module() -> None:
    module = mlp().eval()
    assert not ZeroDDP(module, PlainStore(module.parameters())).training


def test_inputs_are_cast_and_outputs_come_back_in_fp32_where_asked() -> None:
    seen: list[torch.dtype] = []

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM, dtype=torch.bfloat16)

        def forward(self, x: dict[str, Any], *, ids: Tensor) -> dict[str, Any]:
            seen.extend([x["x"][0].dtype, ids.dtype])
            return {"out": self.linear(x["x"][0]), "ids": ids}

    for force in (False, True):
        module = Half()
        store = PoisonStore(module.parameters())
        model = ZeroDDP(module, store, input_dtype=torch.bfloat16, force_outputs_fp32=force)
        out = model({"x": [torch.ones(2, DIM)]}, ids=torch.arange(2))
        assert out["out"].dtype == (torch.float32 if force else torch.bfloat16)
        assert out["ids"].dtype == torch.int64
        out["out"].sum().backward()
        assert_at_rest(store)
    assert seen == [torch.bfloat16, torch.int64] * 2


def test_memory_usage_is_the_stores() -> None:
    _, model, store = wrapped()
    assert model.memory_usage() == store.memory_usage()


# -- misuse ---------------------------------------------------------------------------------------------------------


def test_wrapping_twice_is_an_error_and_detach_undoes_it() -> None:
    _, model, store = wrapped()
    for twice in (model, model.unwrap()):
        with pytest.raises(ValueError, match="wrapped already"):
            ZeroDDP(twice, store)
    module = model.detach()
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    again = ZeroDDP(module, store)
    default_loss(again, 0).backward()
    assert all(weight.grad is not None for weight in store.weights)


@pytest.mark.parametrize("move", ["half", "float", "bfloat16", "cpu", "to", "share_memory"])
def test_moving_or_casting_a_wrapped_model_is_an_error(move: str) -> None:
    _, model, _ = wrapped()
    with pytest.raises(ZeroDDPError, match="cannot be moved or cast"):
        getattr(model, move)(*(["cpu"] if move == "to" else []))


def test_plain_backward_of_a_scaled_loss_is_an_error_and_the_announced_one_works() -> None:
    torch.manual_seed(0)
    module = ZOO["Stack"]()
    store = PoisonStore(module.parameters())
    model = ZeroDDP(module, store, scales_loss=True)
    for _ in range(2):
        with pytest.raises(ZeroDDPError, match=r"optimizer\.backward\(loss\)"):
            default_loss(model, 0).backward()
        assert all(weight.grad is None for weight in store.weights)
        model.backward(default_loss(model, 0))
        assert all(weight.grad is not None for weight in store.weights)
        assert_at_rest(store)
        for weight in store.weights:
            weight.grad = None


@pytest.mark.parametrize("what", ["parameter", "module", "assign"])
def test_replacing_a_part_of_a_wrapped_model_is_an_error_that_names_it(what: str) -> None:
    _, model, _ = wrapped()
    default_loss(model, 0).backward()
    inner = model.unwrap()
    if what == "parameter":
        inner.layers[1][0].weight = nn.Parameter(torch.ones(DIM, DIM))
        pattern = r"Parameter 'layers\.1\.0\.weight' was replaced"
    elif what == "module":
        inner.layers[1][0] = nn.Linear(DIM, DIM)
        pattern = r"Module 'layers\.1\.0' was replaced"
    else:
        inner.load_state_dict(ZOO["Stack"]().state_dict(), assign=True)
        pattern = r"Parameter 'layers\.0\.0\.weight' was replaced"
    with pytest.raises(ZeroDDPError, match=pattern):
        default_loss(model, 1)


def test_functional_call_with_values_of_its_own_and_with_the_parameters() -> None:
    plain, model, store = wrapped()
    values = {name: torch.randn_like(param) for name, param in plain.named_parameters()}
    x = plain.batch(0)
    wanted = torch.func.functional_call(plain, values, x)
    assert torch.equal(torch.func.functional_call(model.unwrap(), values, x), wanted)
    same = torch.func.functional_call(model.unwrap(), dict(model.named_parameters()), x)
    assert torch.equal(same, plain(x))
    same.square().mean().backward()
    plain(x).square().mean().backward()
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        same_bits(store.gradient(other), param.grad, "functional_call")
    assert_at_rest(store)


def test_parts_of_a_wrapped_model_can_be_called_on_their_own() -> None:
    plain, model, store = wrapped("TiedHead")
    ids = plain.batch(0)
    with torch.no_grad():
        assert torch.equal(model.embed(ids), plain.embed(ids))
        assert torch.equal(model.body(plain.embed(ids)), plain.body(plain.embed(ids)))
    for each in (plain, model):
        each.body(each.embed(ids)).sum().backward()
    for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        same_bits(store.gradient(other), param.grad, name)
    assert_at_rest(store)


def test_unmanaged_parameters_keep_their_own_gradients() -> None:
    torch.manual_seed(0)
    plain = ZOO["Stack"]()
    module = copy.deepcopy(plain)
    store = PoisonStore(list(module.parameters())[2:])
    model = ZeroDDP(module, store)
    for each in (plain, model):
        default_loss(each, 0).backward()
    for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        same_bits(store.gradient(other) if other in store else other.grad, param.grad, name)


# -- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["TiedHead", "Convolutions", "Parametrized", "OddShapes", "SharedModuleObject"])
def test_state_goes_to_plain_pytorch_and_back(name: str) -> None:
    plain, model, store = wrapped(name)
    default_loss(model, 0).backward()
    torch.optim.SGD(store.weights, lr=0.1).step()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    other = wrapped(name)[1]
    result = other.load_state_dict(plain.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for key, value in other.state_dict().items():
        same_bits(value, state[key], key)
    assert_at_rest(store)
    assert [key for key, _ in model.named_full_values()] == list(state)


def test_state_is_a_copy_and_ties_are_kept_in_it() -> None:
    _, model, _ = wrapped("Convolutions")
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    default_loss(model, 0)
    assert not torch.equal(model.state_dict()["norm.running_mean"], before["norm.running_mean"])
    for name, value in state.items():
        same_bits(value, before[name], name)
    tied = wrapped("TiedHead")[1].state_dict()
    assert tied["embed.weight"] is tied["head.weight"]


def test_state_that_does_not_fit_is_told_in_one_message_and_not_loaded() -> None:
    _, model, _ = wrapped()
    before = model.state_dict()
    state = {name: value + 1 for name, value in before.items()}
    del state["layers.0.0.bias"]
    state["layers.0.0.weight"] = torch.zeros(2, 2)
    state["stranger"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    for part in (
        "missing: layers.0.0.bias",
        "unexpected: stranger",
        f"layers.0.0.weight: (2, 2) given, ({DIM}, {DIM}) wanted",
    ):
        assert part in str(error.value)
    with pytest.raises(RuntimeError, match=r"layers\.0\.0\.weight: \(2, 2\) given"):
        model.load_state_dict(state, strict=False)
    for name, value in model.state_dict().items():
        same_bits(value, before[name], name)
    del state["layers.0.0.weight"]
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["layers.0.0.weight", "layers.0.0.bias"]
    assert result.unexpected_keys == ["stranger"]
    same_bits(model.state_dict()["layers.1.0.weight"], before["layers.1.0.weight"] + 1, "loaded")


def test_state_takes_a_prefix_and_a_destination_but_not_keep_vars() -> None:
    _, model, _ = wrapped()
    target: dict[str, Any] = {"other": 1}
    assert model.state_dict(destination=target, prefix="net.") is target
    assert list(target)[:2] == ["other", "net.layers.0.0.weight"]
    with pytest.raises(ValueError, match="keep_vars"):
        model.state_dict(keep_vars=True)


class _Extra(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(depth=1)
        self.note = "first"

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def test_extra_state_of_a_module_is_kept_and_loaded() -> None:
    model, _ = Setup().wrap(_Extra())
    state = model.state_dict()
    assert state["_extra_state"] == {"note": "first"}
    state["_extra_state"] = {"note": "second"}
    model.load_state_dict(state)
    assert model.note == "second"


# -- life -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ["Stack", "FunctionalTie", "Checkpointed", "OutputsThatCannotBeWalked"])
def test_deleting_the_model_frees_everything(name: str, steps: int) -> None:
    _, model, store = wrapped(name)
    for step in range(steps):
        default_loss(model, step).backward()
    default_loss(model, 5)
    watched = [weakref.ref(thing) for thing in (model, model.unwrap(), model._engine, store, *store.chunks)]
    watched += [weakref.ref(param) for param in model.parameters()]
    del model, store
    gc.collect()
    assert [reference() for reference in watched if reference() is not None] == []


def test_deleting_the_wrapper_does_not_wait_for_the_garbage_collector() -> None:
    _, model, _ = wrapped()
    default_loss(model, 0).backward()
    engine = weakref.ref(model._engine)
    gc.disable()
    try:
        del model
        assert engine() is None
    finally:
        gc.enable()


def test_two_wrapped_models_in_one_process_do_not_meet() -> None:
    plain_a, a, store_a = wrapped("Stack")
    plain_b, b, store_b = wrapped("OwnParametersAndChildren")
    for step in range(3):
        x = plain_a.batch(step)
        for first, second in ((plain_a, plain_b), (a, b)):
            second(first(x)).square().mean().backward()
        for plain, model, store in ((plain_a, a, store_a), (plain_b, b, store_b)):
            for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
                same_bits(store.gradient(other), param.grad, name)
            assert_at_rest(store)


def test_released_model_can_be_copied_and_printed() -> None:
    _, model, _ = wrapped()
    assert "Linear" in repr(model)
    for param in copy.deepcopy(model.unwrap()).parameters():
        assert param.isnan().all()


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_model_wrapped_and_first_called_in_inference_mode_trains(setup: Setup) -> None:
    torch.manual_seed(0)
    plain = ZOO["Stack"]()
    module = copy.deepcopy(plain)
    with torch.inference_mode():
        store = setup.store_type(module.parameters())
        model = ZeroDDP(module, store)
        assert torch.equal(model(plain.batch(0)), plain(plain.batch(0)))
    for each in (plain, model):
        default_loss(each, 1).backward()
    for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        same_bits(store.gradient(other), param.grad, name)
