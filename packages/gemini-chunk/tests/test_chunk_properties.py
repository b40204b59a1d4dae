"""Any sequence of events on chunks of one to four ranks, legal or not, against the oracle of plain tensors.

The ranks live in one process and meet on a board: what they start together is done when one of them waits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest
import torch
from chunk_board import Board
from chunk_model import Account, Full, Illegal, ModelChunk
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor

from gemini_chunk import Chunk, ChunkError, Tier, TierFullError, TierName, device_tier, disk_tier, host_tier
from gemini_chunk.testing import LateCopier

SEQUENCES = int(os.environ.get("GEMINI_CHUNK_SEQUENCES", "2000"))
TIERS: list[TierName] = ["device", "host", "disk"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
OTHERS = [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]
SHAPES = [(), (1,), (2, 3), (5,), (0, 3), (3, 1, 2), (7,)]
# What a training loop does often is here more than once.
EVENTS = [
    *["start_fetch", "start_gather", "gather", "begin_use", "end_use", "take_gradients", "start_reduce"] * 3,
    *["release", "move", "take_gradient", "wait_reduce", "update", "set_gradient_aside"] * 2,
    *["commit", "discard", "reset", "load", "settle_states", "call_wrongly"],
]


class Pool:
    """Lends new buffers and frees what comes back."""

    def __init__(self, device: Tier) -> None:
        self._device = device

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._device.allocate(numel, dtype, "buffers")

    def give_back(self, buffer: Tensor) -> None:
        self._device.free(buffer)

    def make_room(self, is_enough: Callable[[], bool]) -> None:
        pass


def new_tier(name: TierName, capacity: int | None) -> Tier:
    if name == "disk":
        return disk_tier(tempfile.gettempdir(), capacity)
    return host_tier(capacity) if name == "host" else device_tier("cpu", capacity)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def exact(gradient: Tensor, world_size: int) -> Tensor:
    """Return the whole numbers that a mean over ranks stands for; only a third is not exact."""
    if world_size != 3:
        return gradient
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    whole = real.round()
    assert (whole - real).abs().max() < 1e-2 if real.numel() else True
    return torch.view_as_complex(whole) if gradient.is_complex() else whole


def random_value(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype is torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2 if dtype is torch.bool else 200, shape, generator=generator).to(dtype)
    value = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    special = torch.randint(0, 12, shape, generator=generator)
    value[special == 0] = -0.0
    if dtype is not torch.float8_e4m3fn:
        value[special == 1] = float("inf")
    return value.to(dtype)


def small_numbers(shape: tuple[int, ...], world_size: int, generator: torch.Generator) -> Tensor:
    """Gradients whose mean over the ranks is a small whole number."""
    return torch.randint(-3, 4, shape, generator=generator).float() * world_size


@st.composite
def configurations(draw: st.DrawFn, world_size: int) -> dict[str, object]:
    trainable = draw(st.booleans()) or draw(st.booleans())
    keep = draw(st.sampled_from([False, False, True]))
    return {
        "dtype": draw(st.sampled_from(FLOATS if trainable else FLOATS + OTHERS)),
        "shapes": draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4)),
        "spare": draw(st.integers(0, 5)),
        "rest": "device" if keep else draw(st.sampled_from(TIERS)),
        "keep": keep,
        "master": draw(st.sampled_from(["host", "device", "disk", None])),
        "trainable": trainable,
        "accumulates": draw(st.booleans()),
    }


class ChunkMachine(RuleBasedStateMachine):
    @initialize(world_size=st.integers(1, 4), data=st.data())
    def build(self, world_size: int, data: st.DataObject) -> None:
        self.world_size = world_size
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
        capacities = {
            name: data.draw(st.one_of(st.none(), st.none(), st.integers(40, 700)), label=name) for name in TIERS
        }
        self.account = Account(capacities)
        self.board = Board(world_size)
        computes = data.draw(st.sampled_from(TIERS), label="what the tier that computes is")
        self.tiers: list[dict[TierName, Tier]] = [
            {
                "device": new_tier(computes, capacities["device"]),
                "host": new_tier("host", capacities["host"]),
                "disk": new_tier("disk", capacities["disk"]),
            }
            for _ in range(world_size)
        ]
        for rank in range(world_size):
            for tier in self.tiers[rank].values():
                tier.poisons = True
                tier.incoming, tier.outgoing = LateCopier(), LateCopier()
        self.models: list[ModelChunk] = []
        self.chunks: list[list[Chunk]] = []
        self.pools = [Pool(tiers["device"]) for tiers in self.tiers]
        for index in range(data.draw(st.integers(1, 2))):
            self.add(index, data.draw(configurations(world_size)))

    def add(self, index: int, given: dict[str, object]) -> None:
        dtype, shapes = given["dtype"], given["shapes"]
        values = [random_value(shape, dtype, self.generator) for shape in shapes]  # type: ignore[attr-defined,arg-type]
        used = sum(value.numel() for value in values) + given["spare"]  # type: ignore[operator]
        numel = max(1, -(-used // self.world_size)) * self.world_size
        options = {name: given[name] for name in ("rest", "keep", "master", "trainable", "accumulates")}
        model: ModelChunk | None = None
        try:
            model = ModelChunk(
                self.account, [value.clone() for value in values], numel=numel, world_size=self.world_size, **options
            )  # type: ignore[arg-type]
        except Full:
            model = None
        chunks = []
        for rank in range(self.world_size):
            chunk = Chunk(
                numel,
                dtype,  # type: ignore[arg-type]
                device=self.tiers[rank]["device"],
                collectives=self.board.ranks[rank],
                name=f"chunk {index}",
                trainable=given["trainable"],  # type: ignore[arg-type]
                accumulates=given["accumulates"],  # type: ignore[arg-type]
            )
            tensors = [value.clone() for value in values]
            for tensor in tensors:
                chunk.append(tensor)

            def close(chunk: Chunk = chunk, rank: int = rank) -> None:
                tiers, master = self.tiers[rank], given["master"]
                chunk.close(
                    tiers[given["rest"]],  # type: ignore[index]
                    keep_gathered=given["keep"],  # type: ignore[arg-type]
                    master=None if master is None else tiers[master],  # type: ignore[index]
                    synchronise=None,
                )

            if model is None:
                with pytest.raises(TierFullError):
                    close()
                assert not chunk.is_closed
                assert all(same(tensor, value) for tensor, value in zip(tensors, values, strict=True))
            else:
                close()
            chunks.append(chunk)
        if model is not None:
            self.models.append(model)
            self.chunks.append(chunks)

    # -- events -------------------------------------------------------------------------------------------------------

    def happen(
        self, expected: Callable[[], None], *events: Callable[[Chunk, int], object], chunk: int
    ) -> type[Exception] | None:
        """Let the oracle and then every rank have the event; all must agree on whether it is refused."""
        verdict: type[Exception] | None = None
        try:
            expected()
        except Full:
            verdict = TierFullError
        except Illegal:
            verdict = ChunkError
        for event in events:
            outcomes = []
            for rank, real in enumerate(self.chunks[chunk]):
                try:
                    event(real, rank)
                except (TierFullError, ChunkError) as error:
                    outcomes.append(type(error))
                else:
                    outcomes.append(None)
            assert len(set(outcomes)) == 1, f"ranks disagree: {outcomes}"
            if outcomes[0] is not None:
                break
        assert outcomes[0] is verdict
        return verdict

    @rule(
        events=st.lists(
            st.tuples(st.sampled_from(EVENTS), st.integers(0, 1), st.integers(0, 3), st.integers(0, 5)),
            min_size=12,
            max_size=16,
        )
    )
    def happens(self, events: list[tuple[str, int, int, int]]) -> None:
        for name, which, tensor, choice in events:
            if self.models:
                chunk = which % len(self.models)
                getattr(self, name)(chunk, tensor % len(self.models[chunk].values), choice)
                self.every_byte_is_accounted_for()
                self.every_value_is_right()

    def start_fetch(self, at: int, _: int, choice: int) -> None:
        fetch = Chunk.start_fetch if choice < 4 else lambda chunk: chunk.start_fetch().wait()
        self.happen(self.models[at].start_fetch, lambda chunk, _: fetch(chunk), chunk=at)

    def start_gather(self, at: int, _: int, __: int) -> None:
        self.happen(self.models[at].start_gather, lambda chunk, _: chunk.start_gather(), chunk=at)

    def gather(self, at: int, _: int, __: int) -> None:
        start = lambda chunk, _: chunk.start_gather()  # noqa: E731
        self.happen(self.models[at].gather, start, lambda chunk, _: chunk.gather(), chunk=at)

    def release(self, at: int, _: int, __: int) -> None:
        self.happen(self.models[at].release, lambda chunk, _: chunk.release(), chunk=at)

    def settle_states(self, at: int, _: int, __: int) -> None:
        self.happen(self.models[at].settle_states, lambda chunk, _: chunk.settle_states(), chunk=at)

    def move(self, at: int, _: int, choice: int) -> None:
        tier = TIERS[choice % 3]
        move = Chunk.start_move if choice < 3 else Chunk.move
        self.happen(
            lambda: self.models[at].move(tier), lambda chunk, rank: move(chunk, self.tiers[rank][tier]), chunk=at
        )
        for chunk in self.chunks[at]:
            assert chunk.shard.numel() == chunk.shard_numel  # finishes the move

    def begin_use(self, at: int, tensor: int, _: int) -> None:
        self.happen(
            lambda: self.models[at].begin(tensor), lambda chunk, _: chunk.begin_use([chunk.tensors[tensor]]), chunk=at
        )

    def end_use(self, at: int, tensor: int, choice: int) -> None:
        in_backward = choice < 3
        self.happen(
            lambda: self.models[at].end(tensor, in_backward),
            lambda chunk, _: chunk.end_use([chunk.tensors[tensor]], in_backward=in_backward),
            chunk=at,
        )

    def take_gradient(self, at: int, tensor: int, _: int) -> None:
        model = self.models[at]
        shape = tuple(model.values[tensor].shape)
        grads = [small_numbers(shape, self.world_size, self.generator) for _ in range(self.world_size)]
        mean = torch.stack(grads).sum(0) / self.world_size
        self.happen(
            lambda: model.take(tensor, mean),
            lambda chunk, rank: chunk.take_gradients(
                [(chunk.tensors[tensor], grads[rank].to(chunk.dtype))], self.pools[rank]
            ),
            chunk=at,
        )

    def take_gradients(self, at: int, _: int, choice: int) -> None:
        for tensor in range(len(self.models[at].values)):
            self.take_gradient(at, tensor, choice)

    def set_gradient_aside(self, at: int, _: int, choice: int) -> None:
        tier = TIERS[choice % 3]
        self.happen(
            lambda: self.models[at].set_aside(tier),
            lambda chunk, rank: chunk.set_gradient_aside(self.tiers[rank][tier]),
            chunk=at,
        )

    def start_reduce(self, at: int, _: int, __: int) -> None:
        start = lambda chunk, rank: chunk.start_reduce(self.pools[rank])  # noqa: E731
        self.happen(self.models[at].start_reduce, start, chunk=at)

    def wait_reduce(self, at: int, _: int, __: int) -> None:
        self.happen(self.models[at].finish_reduce, lambda chunk, _: chunk.wait_reduce(), chunk=at)

    def update(self, at: int, _: int, __: int) -> None:
        model = self.models[at]
        if model.gradient is None or model.in_use or model.gathering or model.reducing:
            return
        step = model.gradient.split([value.numel() for value in model.values])
        updated = model.values if model.masters is None else model.masters
        updated[:] = [old - part.view(old.shape).to(old.dtype) for old, part in zip(updated, step, strict=True)]
        for chunk in self.chunks[at]:
            assert chunk.master is not None
            assert chunk.gradient is not None
            chunk.master.sub_(exact(chunk.gradient, self.world_size).to(chunk.master.dtype))
        self.commit(at, 0, 0)

    def commit(self, at: int, _: int, __: int) -> None:
        self.happen(self.models[at].commit, lambda chunk, _: chunk.commit(), chunk=at)

    def discard(self, at: int, _: int, __: int) -> None:
        self.happen(self.models[at].discard, lambda chunk, _: chunk.discard(), chunk=at)

    def reset(self, at: int, _: int, __: int) -> None:
        self.happen(self.models[at].reset, lambda chunk, _: chunk.reset(), chunk=at)

    def load(self, at: int, tensor: int, _: int) -> None:
        model = self.models[at]
        value = random_value(tuple(model.values[tensor].shape), model.dtype, self.generator)
        self.happen(
            lambda: model.load(tensor, value.clone()),
            lambda chunk, _: chunk.load(chunk.tensors[tensor], value),
            chunk=at,
        )

    def call_wrongly(self, at: int, _: int, __: int) -> None:
        for rank, chunk in enumerate(self.chunks[at]):
            info = chunk.tensors[0]
            with pytest.raises(ValueError, match="has shape"):
                chunk.load(info, torch.zeros(11))
            with pytest.raises(ChunkError, match="closed"):
                chunk.append(torch.zeros(1, dtype=chunk.dtype))
            with pytest.raises(ChunkError, match="closed already"):
                chunk.close()
            if chunk.trainable:
                with pytest.raises(ValueError, match="its gradient has"):
                    chunk.take_gradients([(info, torch.zeros(11))], self.pools[rank])

    # -- what holds after each event ----------------------------------------------------------------------------------

    def every_byte_is_accounted_for(self) -> None:
        for chunk in (chunk for chunks in getattr(self, "chunks", []) for chunk in chunks):
            chunk.wait_gradient()
        for tiers in getattr(self, "tiers", []):
            assert {name: tier.used for name, tier in tiers.items()} == self.account.used
            for tier in tiers.values():
                assert sum(tier.holders.values()) == tier.used
                assert tier.incoming.faults == tier.outgoing.faults == []

    def every_value_is_right(self) -> None:
        for model, chunks in zip(getattr(self, "models", []), getattr(self, "chunks", []), strict=True):
            for chunk, tiers in zip(chunks, self.tiers, strict=True):
                assert [info.state.name for info in chunk.tensors] == model.states
                assert [info.users for info in chunk.tensors] == model.users
                facts = (chunk.is_gathered, chunk.is_fetched, chunk.has_local_gradient, chunk.keeps_gathered)
                assert facts == (model.visible, model.fetched, model.filling, model.aliased)
                assert chunk.tier == tiers[model.rest].name
                for info, value in zip(chunk.tensors, model.values, strict=True):
                    if model.visible:
                        assert same(info.tensor, value)
                    else:
                        assert info.tensor.data_ptr() == info.placeholder.data_ptr() or not info.numel
            if not (model.gathering or model.reducing):
                self.check_shards(model, chunks)

    def check_shards(self, model: ModelChunk, chunks: list[Chunk]) -> None:
        def whole(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts)[: model.used_numel]

        if model.where != "place":
            assert same(whole([chunk.shard for chunk in chunks]), torch.cat([v.flatten() for v in model.values]))
        if model.masters is not None:
            masters = [chunk.master for chunk in chunks if chunk.master is not None]
            assert same(whole(masters), torch.cat([v.flatten() for v in model.masters]))
        gradients = [chunk.gradient for chunk in chunks if chunk.gradient is not None]
        assert len(gradients) == (0 if model.gradient is None else model.world_size)
        if model.gradient is not None:
            found = exact(whole(gradients), model.world_size)
            assert torch.equal(found.to(torch.complex128), model.gradient.to(torch.complex128))
        if model.world_size == 1 and not model.visible:
            for info, value in zip(chunks[0].tensors, model.values, strict=True):
                read = chunks[0].local_value(info)
                assert read is not None
                assert same(read, value)

    def teardown(self) -> None:
        for chunks in getattr(self, "chunks", []):
            for chunk in chunks:
                chunk.free()
        for tiers in getattr(self, "tiers", []):
            assert all(tier.used == 0 for tier in tiers.values())


@pytest.mark.timeout(900)
def test_any_sequence_of_events_keeps_every_value_and_every_byte() -> None:
    run_state_machine_as_test(
        ChunkMachine,
        settings=settings(
            max_examples=SEQUENCES,
            stateful_step_count=2,
            deadline=None,
            database=None,
            derandomize="GEMINI_CHUNK_SEQUENCES" not in os.environ,
            suppress_health_check=list(HealthCheck),
        ),
    )
