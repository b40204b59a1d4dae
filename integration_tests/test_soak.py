"""A thousand steps with evaluations, generation and errors between them leave nothing behind and change no number."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from models import SEQ_LEN, batch, lm_loss, seeded_model
from ranks import run_ranks
from zoo import configuration

STEPS = 1000
WARM_UP = 200  # every event has come several times, and allocators have the memory that they keep
LR = 0.01


@dataclass(frozen=True)
class Kept:
    """What a process holds between two steps."""

    tensors: int
    objects: int
    hooks: int
    tier_bytes: dict[str, int | None]
    resident_bytes: int


def kept(model: GeminiDDP) -> Kept:
    gc.collect()
    objects = gc.get_objects()
    return Kept(
        tensors=sum(issubclass(type(thing), Tensor) for thing in objects),
        objects=len(objects),
        hooks=_hooks(model.unwrap()),
        tier_bytes={name: account["used"] for name, account in model.memory_usage().items()},
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def _hooks(module: nn.Module) -> int:
    of_modules = sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules())
    of_params = sum(len(param._post_accumulate_grad_hooks or ()) for param in module.parameters())
    return of_modules + of_params


# -- what happens between steps ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def evaluating(model: GeminiDDP) -> Iterator[None]:
    model.eval()
    yield
    model.train()


def evaluate(model: GeminiDDP, ids: Tensor, number: int) -> None:
    with evaluating(model), torch.no_grad():
        model(input_ids=ids[:, : 1 + number % SEQ_LEN])


def evaluate_in_inference_mode(model: GeminiDDP, ids: Tensor, number: int) -> None:
    with evaluating(model), torch.inference_mode():
        model(input_ids=ids[:, : 1 + number % SEQ_LEN])


def generate(model: GeminiDDP, ids: Tensor, number: int) -> None:
    prompt = ids[:, : SEQ_LEN - 3]
    with evaluating(model):
        longer = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=1 + number % 3,
            do_sample=False,
            pad_token_id=0,
        )
    assert longer.shape[1] > prompt.shape[1]


def forward_only(model: GeminiDDP, ids: Tensor, number: int) -> None:
    lm_loss(model, ids)


def interrupt_forward(model: GeminiDDP, ids: Tensor, number: int) -> None:
    _fail(model, ids, number, KeyboardInterrupt, in_backward=False)


def fail_in_forward(model: GeminiDDP, ids: Tensor, number: int) -> None:
    _fail(model, ids, number, torch.OutOfMemoryError, in_backward=False)


def fail_in_backward(model: GeminiDDP, ids: Tensor, number: int) -> None:
    _fail(model, ids, number, RuntimeError, in_backward=True)


def _fail(model: GeminiDDP, ids: Tensor, number: int, error: type[BaseException], *, in_backward: bool) -> None:
    modules = [child for child in model.unwrap().modules() if [*child.parameters(recurse=False)]]

    def fail(*_: object) -> None:
        raise error("on request")  # new each time: autograd keeps the hook, and an error would keep the graph

    def fail_later(_: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(fail)

    handle = modules[number % len(modules)].register_forward_hook(fail_later if in_backward else fail)
    try:
        lm_loss(model, ids).backward()
    except error:
        return
    finally:
        handle.remove()
    raise AssertionError("nothing failed")


EVENTS: list[Callable[[GeminiDDP, Tensor, int], None]] = [
    evaluate,
    evaluate_in_inference_mode,
    generate,
    forward_only,
    interrupt_forward,
    fail_in_forward,
    fail_in_backward,
]


# -- the run ----------------------------------------------------------------------------------------------------------


def check_soak(rank: int, world_size: int) -> tuple[Kept, Kept]:
    module = seeded_model("gpt2", layers=1, width=8)
    plain = copy.deepcopy(module)
    oracle = torch.optim.SGD(plain.parameters(), lr=LR)
    chunks = configuration(module, world_size, whole=False)
    model = GeminiDDP(module, precision="fp32", max_prefetch=1, chunk_configuration=chunks)
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model)
    # The same events on every rank: they gather.
    events = torch.randint(0, 3 * len(EVENTS), (STEPS,), generator=torch.Generator().manual_seed(0)).tolist()
    early = None
    for step, event in enumerate(events):
        if event < len(EVENTS):
            EVENTS[event](model, batch(rank, STEPS + step), step)
        loss = lm_loss(model, batch(rank, step))
        optimizer.backward(loss)
        optimizer.step()
        for other in range(world_size):
            (lm_loss(plain, batch(other, step)) / world_size).backward()
        oracle.step()
        oracle.zero_grad()
        if step == WARM_UP:
            early = kept(model)
    late = kept(model)
    trained = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(trained[name], value), name
    assert early is not None
    return early, late


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_a_thousand_steps_with_events_leave_nothing_behind_and_equal_a_plain_run() -> None:
    for early, late in run_ranks(check_soak, 2, timeout_s=390):
        assert late.tensors == early.tensors
        assert late.hooks == early.hooks
        assert late.tier_bytes == early.tier_bytes
        # Caches may still grow a little, but not by an object at each event, nor by the graph of a step, of 60 KiB.
        assert late.objects - early.objects < (STEPS - WARM_UP) // 10
        assert late.resident_bytes - early.resident_bytes < 12 * 2**20
