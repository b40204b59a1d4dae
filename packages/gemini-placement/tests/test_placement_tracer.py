"""A step run on paper tells what a real one uses, and takes no memory."""

from __future__ import annotations

import pytest

from gemini_placement import StaticPlacementPolicy
from gemini_placement.testing import UNLIMITED, check_plan, paper_chunks

torch = pytest.importorskip("torch")
nn = torch.nn
tracer = pytest.importorskip("gemini_placement.tracer")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def chain(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def test_accesses_come_in_the_order_of_the_step() -> None:
    stats = tracer.trace_model(chain(), [torch.ones(8, 64)])
    names = [(access.phase, access.params[0].split(".")[0]) for access in stats.accesses]
    assert names == [
        *[("forward", number) for number in "024"],
        *[("backward", number) for number in "420"],
    ]
    assert stats.param_order == ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")


def test_activations_are_counted_by_access() -> None:
    stats = tracer.trace_model(chain(), [torch.ones(8, 64)])
    activation = 8 * 64 * 4
    # Until the next layer: the layer's output and tanh's, which backward needs; the layer's own is given back then. The
    # batch, which the caller has, is not counted.
    assert stats.non_model_bytes[:2] == (2 * activation, 3 * activation)
    assert stats.max_non_model_bytes >= 3 * activation


def test_longer_batches_take_more_and_recompute_takes_less() -> None:
    short, long = (tracer.trace_model(chain(), [torch.ones(n, 64)]).max_non_model_bytes for n in (8, 80))
    assert long > 3 * short  # a gradient of the largest weight is in both

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 32)) for _ in range(6)
            )
            self.saves = False

        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
            return x

    model = Recomputed()
    batch = {"x": torch.ones(64, 32, requires_grad=True)}
    plain = tracer.trace_model(model, batch)
    model.saves = True
    saving = tracer.trace_model(model, batch)
    assert saving.max_non_model_bytes < 0.5 * plain.max_non_model_bytes
    for stats in (plain, saving):
        assert [access.params[0] for access in stats.accesses[12:14]] == ["blocks.5.2.weight", "blocks.5.0.weight"]
    assert plain.accesses[13].within == ()
    assert saving.accesses[13].within == ("blocks.5.2.weight", "blocks.5.2.bias"), "recompute comes in between"


def test_a_model_without_memory_is_traced_and_keeps_what_it_has() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**20, 2**20), nn.Linear(2**20, 1))  # 4 TiB
    stats = tracer.trace_model(model, [torch.empty(2, 2**20, device="meta")], dtype=torch.bfloat16)
    assert [access.phase for access in stats.accesses] == ["forward"] * 2 + ["backward"] * 2
    assert all(param.is_meta and param.grad is None for param in model.parameters())
    assert not model[0]._forward_pre_hooks
    assert not model[0]._forward_hooks


def test_values_of_the_model_and_the_generator_are_untouched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    tracer.trace_model(model, [torch.ones(8, 4)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


def test_what_looks_at_values_is_refused_and_so_is_an_output_without_a_loss() -> None:
    with pytest.raises(ValueError, match="Branching looks at values"):
        tracer.trace_model(Branching(), [torch.ones(2, 4)])

    class Listing(nn.Linear):
        def forward(self, x):
            return [super().forward(x)]

    with pytest.raises(ValueError, match="The output is a list without a loss; give loss="):
        tracer.trace_model(Listing(2, 2), [torch.ones(2, 2)])
    stats = tracer.trace_model(Listing(2, 2), [torch.ones(2, 2)], loss=lambda output: output[0].sum())
    assert len(stats.accesses) == 2


def test_a_policy_plans_from_the_record() -> None:
    stats = tracer.trace_model(chain(), [torch.ones(8, 64)])
    chunks = paper_chunks(2)
    trace = stats.trace({"0.weight": chunks[0], "0.bias": chunks[0], "2.weight": chunks[0], "4.weight": chunks[1]})
    policy = StaticPlacementPolicy()
    placement = policy.place(chunks, capacities=UNLIMITED, world_size=2)
    plan = policy.schedule(trace, placement)
    check_plan(plan, trace, placement, max_prefetch=0)
    assert plan.gathers == 3
