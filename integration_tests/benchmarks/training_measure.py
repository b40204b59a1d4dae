"""How the systems are measured in one case: times in turns, bytes alone, losses beside one process in fp32."""

from __future__ import annotations

import functools
import gc
import importlib.util
import math
import resource
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ranks import run_ranks
from training_cases import LEARNING_RATE, QUICK, WORKLOADS, Case, loss_of
from training_systems import SYSTEMS, Trainer

_WARM_UP = 3  # the first step plans, the second still allocates
_COUNTED_WARM_UP = 2
_CHECKED_STEPS = 5
_FEWEST_ROUNDS = 5
_IN_ALL_CASES = ("DDP", "FSDP2", "ours ZeRO-2", "ours ZeRO-3", "ours, all offloaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one rank held and sent, in a run of one system alone.

    Attributes:
        peak_bytes: most bytes that the process's allocators held during a step, activations included.
        model_peak_bytes: most bytes during a step on one sequence of two tokens, which leaves next to nothing of
            activations: model states, and what the system needs in order to work with them.
        rest_bytes: bytes held between steps.
        collectives: started in a step; transfers to every other rank count as one.
        sent_bytes: sent by this rank in a step.
        param_bytes: of the model's parameters in fp32.
        chunks: chunks of ours, 0 for others.
        working_set_bytes: of the chunks in use and prefetched and one chunk of gradients, 0 for others.
    """

    peak_bytes: int
    model_peak_bytes: int
    rest_bytes: int
    collectives: float
    sent_bytes: float
    param_bytes: int
    chunks: int
    working_set_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one system did in one case; of rank 0, and of the steps after the warm-up.

    Attributes:
        case: name of the case.
        system: name of the system.
        step_s: median time of a step.
        ratio: median over rounds of the time over DDP's in the same round.
        spread: half the distance between the quartiles of that.
        host_s: processor time of a step, of all threads of the process.
        page_faults: pages that a step touched first.
        start_s: time to build the model and wrap it.
        loss_difference: largest over the first steps, to one process in fp32 that has all ranks' batches.
        counted: None in cases other than the workloads.
    """

    case: str
    system: str
    step_s: float
    ratio: float
    spread: float
    host_s: float
    page_faults: float
    start_s: float
    loss_difference: float
    counted: Counted | None


@functools.cache
def why_missing(system: str, case: Case) -> str | None:
    """Return why a system does not take part in a case, or None if it does."""
    if system.startswith("DeepSpeed") and (reason := _why_not_deepspeed(system)) is not None:
        return reason
    return None if has_all(case) or system in _IN_ALL_CASES else "in the workloads only"


def has_all(case: Case) -> bool:
    """Tell whether a case has every system and counts their bytes; the others would take too long."""
    return case in (*WORKLOADS, *QUICK)


@functools.cache
def _why_not_deepspeed(system: str) -> str | None:
    """Try a few steps of the smallest case."""
    if importlib.util.find_spec("deepspeed") is None:
        return "the package deepspeed is not installed"
    try:
        run_ranks(_take_times, 2, replace(QUICK[0], rounds=1), [system], timeout_s=120.0)
    except Exception as error:  # whatever it is, the other systems can be measured
        return f"it does not run here: {str(error).strip().splitlines()[-1]}"
    return None


@dataclass(slots=True)
class _Times:
    step_s: list[float]
    host_s: list[float]
    faults: list[int]
    losses: list[float]
    start_s: float


def _take_times(rank: int, world_size: int, case: Case, systems: Sequence[str]) -> dict[str, _Times]:
    """Step all systems in turns; runs on every rank."""
    warnings.simplefilter("ignore")
    trainers: dict[str, Trainer] = {}
    times: dict[str, _Times] = {}
    for name in systems:
        start = time.perf_counter()
        trainers[name] = SYSTEMS[name](case)
        times[name] = _Times([], [], [], [], time.perf_counter() - start)
    index, rounds = 0, _WARM_UP + case.rounds
    begin = time.perf_counter()
    while index < rounds:
        ids = case.batch(rank, index)
        # Every round starts with another system: each has its turn behind the one that leaves most in the caches.
        turn = index % len(systems)
        for name in (*systems[turn:], *systems[:turn]):
            dist.barrier()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start, host = time.perf_counter(), time.process_time()
            loss = trainers[name].step(ids)
            dist.barrier()
            taken = times[name]
            taken.step_s.append(time.perf_counter() - start)
            taken.host_s.append(time.process_time() - host)
            taken.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
            if index < _CHECKED_STEPS:
                mean = loss.clone()
                dist.all_reduce(mean)
                taken.losses.append(float(mean) / world_size)
        index += 1
        if index == _WARM_UP:
            begin = time.perf_counter()
        elif index == _WARM_UP + 2:
            rounds = _WARM_UP + _rounds_within(case, (time.perf_counter() - begin) / 2)
    return times


def _rounds_within(case: Case, round_s: float) -> int:
    """Return how many rounds fit the time of a case, as rank 0 sees it."""
    seen = torch.tensor(round_s, dtype=torch.float64)
    dist.broadcast(seen, 0)
    return max(_FEWEST_ROUNDS, min(case.rounds, int(case.limit_s / seen.item())))


def _reference_losses(rank: int, world_size: int, case: Case) -> list[float]:
    """Train in one process in fp32 on the batches of all ranks; runs on one rank."""
    del rank, world_size
    warnings.simplefilter("ignore")
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    losses = []
    for index in range(_CHECKED_STEPS):
        loss = loss_of(model, torch.cat([case.batch(rank, index) for rank in range(case.world_size)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _count(rank: int, world_size: int, case: Case, system: str) -> Counted:
    """Run one system alone, with every allocation recorded; runs on every rank."""
    warnings.simplefilter("ignore")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as building:
        trainer = SYSTEMS[system](case)
        for index in range(_COUNTED_WARM_UP):
            trainer.step(case.batch(rank, index))
        gc.collect()  # what is freed after the profile would be taken for held
    ids = case.batch(rank, _COUNTED_WARM_UP)
    rest, peak, stepping = _profiled_step(trainer, ids, sum(_allocations(building)))
    _, model_peak, _ = _profiled_step(trainer, ids[:1, :2], rest)
    sent = [_sent(event, world_size) for event in _events(stepping) if event.name().startswith("gloo:")]
    return Counted(
        peak_bytes=peak,
        model_peak_bytes=model_peak,
        rest_bytes=rest,
        collectives=sum(count for count, _ in sent),
        sent_bytes=sum(num_bytes for _, num_bytes in sent),
        param_bytes=case.param_bytes,
        chunks=trainer.chunks,
        working_set_bytes=trainer.working_set_bytes,
    )


def _profiled_step(trainer: Trainer, ids: Tensor, held: int) -> tuple[int, int, profile]:
    """Return the bytes held after a step and at its peak, of ``held`` bytes before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiled:
        trainer.step(ids)
    peak = held
    for num_bytes in _allocations(profiled):
        held += num_bytes
        peak = max(peak, held)
    return held, peak, profiled


def _events(profiled: profile) -> list[torch._C._autograd._KinetoEvent]:
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    return profiled.profiler.kineto_results.events()


def _allocations(profiled: profile) -> list[int]:
    # torch's stubs do not know of nbytes.
    return [int(getattr(event, "nbytes")()) for event in _events(profiled) if event.name() == "[memory]"]  # noqa: B009


def _sent(event: torch._C._autograd._KinetoEvent, world_size: int) -> tuple[float, float]:
    """Return how many collectives an operation of gloo is, and the bytes that this rank must send for it."""
    operation = event.name().removeprefix("gloo:")
    itemsize = {"double": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2}
    sizes = zip(event.shapes(), event.dtypes(), strict=True)
    num_bytes = sum(math.prod(shape) * itemsize.get(str(dtype), 1) for shape, dtype in sizes)
    others = world_size - 1
    if operation == "send":
        return 1 / others, num_bytes
    if operation in ("recv", "barrier"):
        return 0.0, 0.0
    share = {"all_reduce": 2 * others / world_size, "all_gather": others}
    return 1.0, num_bytes * share.get(operation, others / world_size)


def measure(case: Case, systems: Sequence[str]) -> list[Measured]:
    """Return what each system did in one case."""
    present = [name for name in systems if why_missing(name, case) is None]
    times: dict[str, _Times] = run_ranks(_take_times, case.world_size, case, present, timeout_s=900.0)[0]
    losses: list[float] = run_ranks(_reference_losses, 1, case, timeout_s=300.0)[0]
    results = []
    for name in present:
        taken = times[name]
        rounds = zip(taken.step_s[_WARM_UP:], times["DDP"].step_s[_WARM_UP:], strict=True)
        ratios = sorted(own / ddp for own, ddp in rounds)
        quartiles = statistics.quantiles(ratios, n=4)
        counted = run_ranks(_count, case.world_size, case, name, timeout_s=300.0)[0] if has_all(case) else None
        results.append(
            Measured(
                case=case.name,
                system=name,
                step_s=statistics.median(taken.step_s[_WARM_UP:]),
                ratio=statistics.median(ratios),
                spread=(quartiles[2] - quartiles[0]) / 2,
                host_s=statistics.median(taken.host_s[_WARM_UP:]),
                page_faults=statistics.median(taken.faults[_WARM_UP:]),
                start_s=taken.start_s,
                loss_difference=max(abs(own - wanted) for own, wanted in zip(taken.losses, losses, strict=True)),
                counted=counted,
            )
        )
    return results


def read_row(row: Mapping[str, Any]) -> Measured:
    """Return what `dataclasses.asdict` and JSON have made of a `Measured`."""
    counted = row["counted"]
    return Measured(**{**row, "counted": None if counted is None else Counted(**counted)})
