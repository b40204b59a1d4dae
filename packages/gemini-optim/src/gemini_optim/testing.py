"""A plain sharded model in the memory of one process per rank, and a check of any other one's promises."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gemini_optim import _collectives
from gemini_optim.interfaces import OptimShard, ShardedModel

__all__ = ["PlainModel", "PlainShard", "PlainSlice", "check_sharded_model"]


@dataclass(frozen=True, slots=True, eq=False)
class PlainSlice:
    """A run of one parameter's elements inside a shard; see ``gemini_optim.interfaces.ParamSlice``."""

    param: nn.Parameter
    start: int
    numel: int
    param_offset: int


class PlainShard:
    """One rank's part of one chunk of a ``PlainModel``.

    Args:
        name: for messages.
        slices: what of which parameter it holds.
        working: this rank's elements of the chunk, shape ``(shard_numel,)``.
        master_weights: whether 16-bit elements have fp32 master weights.
    """

    def __init__(
        self, name: str, slices: Sequence[PlainSlice], working: Tensor, *, master_weights: bool = True
    ) -> None:
        self.name = name
        self.slices = tuple(slices)
        self.state_bytes: dict[str, int] = {}
        self.gradient: Tensor | None = None
        self.unused: set[nn.Parameter] = set()
        self._working = working
        is_own_master = not master_weights or working.is_complex() or working.dtype.itemsize >= 4
        self._master = working if is_own_master else working.float()

    def grad(self) -> Tensor | None:
        """Return the averaged gradient, shape ``(shard_numel,)``, or None."""
        return self.gradient

    def without_gradient(self) -> Collection[nn.Parameter]:
        """Return the parameters of which no rank has a gradient."""
        return self.unused

    def master(self) -> Tensor:
        """Return the master weights, shape ``(shard_numel,)``, or what stands for them: the working shard."""
        return self._master

    def new_state(self, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """Return zeros of shape ``(numel,)``, counted in ``state_bytes``."""
        state = torch.zeros(numel, dtype=dtype, device=self._master.device)
        self.state_bytes[label] = self.state_bytes.get(label, 0) + state.numel() * state.element_size()
        return state

    def commit(self) -> None:
        """Cast the master weights into the working parameters, and drop the gradient."""
        self._working.copy_(self._master)
        self.gradient = None

    def wait_commit(self) -> None:
        """Return at once: ``commit`` leaves nothing to be done."""

    def discard(self) -> None:
        """Drop the gradient."""
        self.gradient = None


class PlainModel:
    """Parameters packed into chunks, each rank updating its equal part of every chunk.

    Every rank keeps all working parameters, so it saves only optimizer memory; what it is for is to show and to test
    the contract. Gradients are summed in fp32 and rounded to the working dtype once.

    Attributes:
        is_resident: see ``gemini_optim.interfaces.ShardedModel``; set it to False to try out failures.

    Args:
        params: trainable parameters, on the CPU and of one dtype, equal on all ranks. They become views of chunks.
        chunk_numel: elements of a chunk at most, but for a parameter that is larger.
        master_weights: whether 16-bit parameters have fp32 master weights.
        process_group: the ranks; None for one.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        chunk_numel: int = 2**20,
        master_weights: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self.process_group = process_group
        self.shards: list[PlainShard] = []
        self._chunks: list[tuple[list[nn.Parameter], Tensor]] = []
        self._master_weights = master_weights
        self._world_size = _collectives.group_size(process_group)
        self._rank = _collectives.group_rank(process_group)
        group: list[nn.Parameter] = []
        for param in params:
            if group and sum(p.numel() for p in group) + param.numel() > chunk_numel:
                self._close(group)
                group = []
            group.append(param)
        if group:
            self._close(group)
        self.scales_loss = self._chunks[0][1].dtype == torch.float16
        self.is_resident = True

    def backward(self, loss: Tensor) -> None:
        """Run backward, and average the gradients over ranks into the shards; calls add up until the next step."""
        loss.backward()
        for (params, full), shard in zip(self._chunks, self.shards, strict=True):
            present = [param.grad is not None for param in params]
            used = _collectives.all_reduce_numbers(present, "max", self.process_group)
            if not any(used):
                continue
            unused = {param for param, one in zip(params, used, strict=True) if not one}
            shard.unused = unused if shard.gradient is None else shard.unused & unused
            total = torch.zeros(full.numel(), dtype=torch.promote_types(full.dtype, torch.float32))
            offset = 0
            for param in params:
                if param.grad is not None:
                    total[offset:][: param.numel()].copy_(param.grad.reshape(-1))
                    param.grad = None
                offset += param.numel()
            _collectives.sum_(total, self.process_group)
            mine = self._mine(total.div_(self._world_size), self._rank).to(full.dtype)
            shard.gradient = mine if shard.gradient is None else shard.gradient + mine

    def gather(self) -> None:
        """Bring every rank's updated working parameters to every rank. Call it before forward."""
        for _, full in self._chunks:
            for rank in range(self._world_size):
                _collectives.broadcast(self._mine(full, rank), rank, self.process_group)

    def _close(self, params: list[nn.Parameter]) -> None:
        numel = sum(param.numel() for param in params)
        padded = -(-numel // self._world_size) * self._world_size
        full = torch.zeros(padded, dtype=params[0].dtype)
        first = padded // self._world_size * self._rank
        last = first + padded // self._world_size
        slices = []
        offset = 0
        for param in params:
            full[offset:][: param.numel()].copy_(param.detach().reshape(-1))
            param.data = full[offset:][: param.numel()].view(param.shape)
            low, high = max(first, offset), min(last, offset + param.numel())
            if low < high:
                slices.append(PlainSlice(param, low - first, high - low, low - offset))
            offset += param.numel()
        self._chunks.append((params, full))
        name, working = f"chunk {len(self.shards)}", self._mine(full, self._rank)
        self.shards.append(PlainShard(name, slices, working, master_weights=self._master_weights))

    def _mine(self, full: Tensor, rank: int) -> Tensor:
        numel = full.numel() // self._world_size
        return full[rank * numel :][:numel]


def check_sharded_model(model: ShardedModel, make_loss: Callable[[], Tensor]) -> None:
    """Check that ``model`` keeps the promises of ``gemini_optim.interfaces``. Run it on every rank.

    It leaves the weights as they were and gradients dropped, but it takes a little state memory from every shard.

    Args:
        model: what would be given to ``ZeroOptimizer``.
        make_loss: runs forward and returns a finite scalar loss that reaches at least one parameter.

    Raises:
        AssertionError: a promise is broken; the message says which, and by which shard.
    """
    shards = list(model.shards)
    names = [shard.name for shard in shards]
    everyones = _collectives.all_gather_objects(names, model.process_group)
    _require(all(other == names for other in everyones), "ranks disagree on the shards and their order")
    _require(len(set(names)) == len(names), "two shards have the same name")
    for shard in shards:
        _check_at_rest(shard)
    before = [shard.master().clone() for shard in shards]

    model.backward(make_loss())
    used = [shard for shard in shards if shard.grad() is not None]
    _require(bool(used), "backward left no gradient in any shard")
    everyones = _collectives.all_gather_objects([shard.name for shard in used], model.process_group)
    _require(all(other == everyones[0] for other in everyones), "ranks disagree on which shards have a gradient")
    for shard in used:
        gradient = shard.grad()
        assert gradient is not None  # narrows the type; `used` has only such shards
        _require(gradient.shape == shard.master().shape, f"{shard.name}: grad and master differ in shape")
        _require(_can_train(gradient), f"{shard.name}: grad is neither floating-point nor complex")
    for shard in shards:
        shard.discard()
        _require(shard.grad() is None, f"{shard.name}: discard kept the gradient")
    _require_masters(shards, before, "backward or discard changed the master weights")

    model.backward(make_loss())
    for shard in used:
        shard.master().add_(1.0)
        shard.commit()
        shard.wait_commit()
        _require(shard.grad() is None, f"{shard.name}: commit kept the gradient")
    for shard, saved in zip(shards, before, strict=True):
        expected = saved + 1.0 if shard in used else saved
        _require(torch.equal(shard.master(), expected), f"{shard.name}: commit changed the master weights")
    # Back to where it was; commit needs no gradient of its own to drop.
    for shard, saved in zip(shards, before, strict=True):
        shard.master().copy_(saved)
        shard.commit()


def _check_at_rest(shard: OptimShard) -> None:
    master = shard.master()
    _require(master.dim() == 1 and master.is_contiguous(), f"{shard.name}: master is not flat and contiguous")
    _require(_can_train(master), f"{shard.name}: master is {master.dtype}, neither floating-point nor complex")
    _require(shard.grad() is None, f"{shard.name}: there is a gradient before the first backward")
    end = 0
    for part in shard.slices:
        _require(part.numel > 0, f"{shard.name}: a slice is empty")
        _require(part.start >= end, f"{shard.name}: slices overlap or are out of order")
        end = part.start + part.numel
        inside = 0 <= part.param_offset <= part.param.numel() - part.numel
        _require(inside, f"{shard.name}: a slice reaches out of its parameter")
    _require(end <= master.numel(), f"{shard.name}: a slice reaches out of the shard")
    state = shard.new_state(3, torch.float32, "check")
    _require(state.shape == (3,) and state.dtype == torch.float32, f"{shard.name}: new_state has the wrong form")
    _require(state.is_contiguous() and not state.any(), f"{shard.name}: new_state is not zeroed and contiguous")
    _require(state.device == master.device, f"{shard.name}: new_state and master rest on different devices")


def _can_train(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _require_masters(shards: Sequence[OptimShard], expected: Sequence[Tensor], problem: str) -> None:
    for shard, saved in zip(shards, expected, strict=True):
        _require(torch.equal(shard.master(), saved), f"{shard.name}: {problem}")


def _require(kept: bool, problem: str) -> None:
    if not kept:
        raise AssertionError(problem)
