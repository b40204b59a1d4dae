"""Two small chunk stores, and a contract kit that any chunk store must pass.

`PlainStore` keeps every parameter whole on every rank: it saves no memory and shows what `ZeroDDP` asks of a store.
`PoisonStore` really frees what is not gathered and leaves NaN in its place, so that a use without a gather shows.

For a store of your own, subclass `ChunkStoreContract` in a test module, name the subclass ``Test...`` and implement
its two methods. Plain asserts; no test framework is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Generic

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_ddp.interfaces import ChunkStore, ChunkT

__all__ = ["ChunkStoreContract", "PlainChunk", "PlainStore", "PoisonStore"]


class PlainChunk:
    """Consecutive parameters that a `PlainStore` gathers and releases together.

    Attributes:
        index: its place in the store.
        params: its parameters.
        gathers: how often it was gathered so far.
        is_gathered: whether its parameters may be read.
    """

    def __init__(self, index: int, params: Sequence[nn.Parameter]) -> None:
        self.index = index
        self.params = tuple(params)
        self.gathers = 0
        self.is_gathered = False

    def __repr__(self) -> str:
        return f"PlainChunk({self.index}, {len(self.params)} parameters)"


class PlainStore:
    """Keeps every parameter whole on every rank and averages gradients by all-reduce; satisfies `ChunkStore`.

    Give `weights` to any ``torch.optim`` optimizer: after backward their ``.grad`` holds the averaged gradients.

    Args:
        params: all parameters of the model, each once, with rank 0's values on every rank.
        params_per_chunk: parameters of one chunk.
        max_gathered: chunks that may be gathered at a time; None for no limit.
        process_group: ranks that average gradients; None for a single rank.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        params_per_chunk: int = 1,
        max_gathered: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = process_group
        self._max_gathered = max_gathered
        self._weights = {param: param.detach() for param in params}
        self._users = dict.fromkeys(self._weights, 0)
        self._gradients: dict[Tensor, Tensor] = {}
        listed = list(self._weights)
        self.chunks: list[PlainChunk] = []
        for first in range(0, len(listed), params_per_chunk):
            self.chunks.append(PlainChunk(len(self.chunks), listed[first : first + params_per_chunk]))
        self._chunk_of: dict[Tensor, PlainChunk] = {param: chunk for chunk in self.chunks for param in chunk.params}

    @property
    def weights(self) -> list[Tensor]:
        """What an optimizer updates: the values of all trainable parameters, in order, shapes of the parameters."""
        return [weight for param, weight in self._weights.items() if param.requires_grad]

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return the averaged gradient of a parameter, summed over backwards, or None where none came."""
        return self._weights[param].grad

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._chunk_of

    def chunk_of(self, tensor: Tensor) -> PlainChunk:
        """Return the chunk of a managed parameter; raise KeyError for any other tensor."""
        return self._chunk_of[tensor]

    def has_room(self, chunks: Iterable[PlainChunk]) -> bool:
        """Whether all of these chunks can be gathered now."""
        if self._max_gathered is None:
            return True
        return len({chunk for chunk in self.chunks if chunk.is_gathered} | {*chunks}) <= self._max_gathered

    def start_fetch(self, chunk: PlainChunk) -> None:
        """Do nothing: no part of a chunk rests elsewhere."""

    def start_gather(self, chunk: PlainChunk) -> None:
        """Make a chunk valid; raise RuntimeError where the limit is reached."""
        if not chunk.is_gathered:
            if not self.has_room([chunk]):
                raise RuntimeError(f"There is no room for {chunk}: {self._max_gathered} chunks are gathered.")
            chunk.is_gathered = True
            chunk.gathers += 1
            self._show(chunk)

    def release(self, chunk: PlainChunk) -> None:
        """Count a chunk as released, unless a parameter of it is in use."""
        if chunk.is_gathered and not any(self._users[param] for param in chunk.params):
            chunk.is_gathered = False
            self._hide(chunk)

    def begin_use(self, tensors: Iterable[Tensor]) -> None:
        """Make these parameters valid and keep them so until `end_use`; calls nest."""
        for tensor in tensors:
            self.start_gather(self.chunk_of(tensor))
            self._users[self._param(tensor)] += 1

    def end_use(self, tensors: Iterable[Tensor], *, in_backward: bool) -> None:  # noqa: ARG002
        """Undo one `begin_use`."""
        for tensor in tensors:
            param = self._param(tensor)
            if self._users[param] == 0:
                raise RuntimeError(f"The use of a parameter of {self.chunk_of(param)} ended more often than it began.")
            self._users[param] -= 1

    def take_gradients(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add this rank's gradients of parameters to what came in this backward."""
        for tensor, gradient in gradients:
            gradient = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
            sofar = self._gradients.get(tensor)
            self._gradients[tensor] = gradient.clone() if sofar is None else sofar.add_(gradient)

    def start_reduce(self, chunk: PlainChunk) -> None:
        """Do nothing: `finish_backward` averages all gradients."""

    @torch.no_grad()
    def finish_backward(self, unused: Set[Tensor] = frozenset(), *, keep_local: bool = False) -> None:
        """Average the gradients, zero where none came on a rank, and release everything."""
        world_size = 1 if self._group is None else dist.get_world_size(self._group)
        for param, weight in () if keep_local else self._weights.items():
            if not param.requires_grad or param in unused:
                continue
            gradient = self._gradients.pop(param, None)
            if gradient is None:
                gradient = torch.zeros_like(weight)
            if world_size > 1:
                dist.all_reduce(gradient, group=self._group)
                gradient /= world_size
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        self._end_all_uses()

    def rest(self) -> None:
        """Release every chunk that nobody uses."""
        for chunk in self.chunks:
            self.release(chunk)

    def reset(self) -> None:
        """Return to rest after an interrupted step; its gradients are dropped."""
        self._gradients.clear()
        for weight in self._weights.values():
            weight.grad = None
        self._end_all_uses()

    def _end_all_uses(self) -> None:
        self._users = dict.fromkeys(self._users, 0)
        self.rest()

    def full_value(self, tensor: Tensor) -> Tensor:
        """Return a copy of a parameter's value."""
        return self._weights[self._param(tensor)].clone()

    @torch.no_grad()
    def load_value(self, tensor: Tensor, value: Tensor) -> None:
        """Overwrite a parameter from its full value."""
        weight = self._weights[self._param(tensor)]
        if value.shape != weight.shape:
            raise ValueError(f"The parameter has shape {tuple(weight.shape)}, the value {tuple(value.shape)}.")
        weight.copy_(value)

    def memory_usage(self) -> Mapping[str, Mapping[str, int | None]]:
        """Return the bytes of all parameters: they never leave the device."""
        used = sum(weight.numel() * weight.element_size() for weight in self._weights.values())
        return {"device": {"used": used, "peak": used, "capacity": None}}

    def _param(self, tensor: Tensor) -> nn.Parameter:
        if tensor not in self:
            raise KeyError(f"A tensor of shape {tuple(tensor.shape)} is not managed here.")
        assert isinstance(tensor, nn.Parameter)
        return tensor

    def _show(self, chunk: PlainChunk) -> None:
        """Make the parameters of a chunk that was released valid."""

    def _hide(self, chunk: PlainChunk) -> None:
        """Take the values of a chunk's parameters away."""


class PoisonStore(PlainStore):
    """A `PlainStore` whose released parameters are NaN and whose full buffers are freed, as those of a real store are.

    The values rest in copies. A full buffer's storage object lives as long as the store, so that views of a parameter
    become valid again with the next gather; read in between, their memory is gone.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        params_per_chunk: int = 1,
        max_gathered: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            params, params_per_chunk=params_per_chunk, max_gathered=max_gathered, process_group=process_group
        )
        self._views: dict[nn.Parameter, Tensor] = {}
        self._placeholders: dict[nn.Parameter, Tensor] = {}
        self._storages: dict[PlainChunk, list[tuple[torch.UntypedStorage, int]]] = {}
        for param, weight in self._weights.items():
            self._weights[param] = weight.clone(memory_format=torch.contiguous_format)
            poison = float("nan") if weight.is_floating_point() or weight.is_complex() else 0
            self._placeholders[param] = torch.full((), poison, dtype=weight.dtype, device=weight.device).expand(
                weight.shape
            )
        for chunk in self.chunks:
            buffers = {}
            for dtype, device in dict.fromkeys((param.dtype, param.device) for param in chunk.params):
                alike = [param for param in chunk.params if (param.dtype, param.device) == (dtype, device)]
                # A buffer made in inference mode could not be saved for backward.
                with torch.inference_mode(False):
                    full = torch.empty(sum(param.numel() for param in alike), dtype=dtype, device=device)
                for param, part in zip(alike, full.split([param.numel() for param in alike]), strict=True):
                    self._views[param] = part.view(param.shape)
                buffers[dtype, device] = full.untyped_storage()
            self._storages[chunk] = [(storage, storage.nbytes()) for storage in buffers.values()]
            self._hide(chunk)

    @torch.no_grad()
    def _show(self, chunk: PlainChunk) -> None:
        for storage, nbytes in self._storages[chunk]:
            storage.resize_(nbytes)
        for param in chunk.params:
            param.data = self._views[param]
            self._views[param].copy_(self._weights[param])

    def _hide(self, chunk: PlainChunk) -> None:
        for param in chunk.params:
            param.data = self._placeholders[param]
        for storage, _ in self._storages[chunk]:
            storage.resize_(0)

    def load_value(self, tensor: Tensor, value: Tensor) -> None:
        """Overwrite a parameter from its full value."""
        super().load_value(tensor, value)
        if self.chunk_of(tensor).is_gathered:
            self._show(self.chunk_of(tensor))


class ChunkStoreContract(ABC, Generic[ChunkT]):
    """Tests that any chunk store must pass; see the module's docstring.

    Run on several ranks, every rank calls the same tests in the same order, and `rank` and `world_size` are set.
    """

    rank: int = 0
    world_size: int = 1

    @abstractmethod
    def make_store(self, params: Sequence[nn.Parameter]) -> ChunkStore[ChunkT]:
        """Return a new store, closed and at rest, that manages these parameters in this order."""

    @abstractmethod
    def gradient_of(self, store: ChunkStore[ChunkT], param: nn.Parameter) -> Tensor | None:
        """Return the reduced gradient of a parameter, its shape, or None where none came; every rank calls it."""

    def check_all(self) -> None:
        """Run every test: for ranks, which no test framework enters."""
        for name in sorted(dir(self)):
            if name.startswith("test_"):
                getattr(self, name)()

    # -- what is managed ----------------------------------------------------------------------------------------------

    def test_store_answers_for_its_own_parameters_only(self) -> None:
        """Membership, and one stable, hashable chunk for each parameter."""
        params, _, store = self._new()
        for param in params:
            assert param in store
            assert store.chunk_of(param) == store.chunk_of(param)
            assert hash(store.chunk_of(param)) == hash(store.chunk_of(param))
        other = nn.Parameter(torch.ones(2))
        assert other not in store
        assert _raises(KeyError, lambda: store.chunk_of(other)), "chunk_of must raise KeyError for a stranger."
        assert _raises(KeyError, lambda: store.begin_use([other])), "begin_use must raise KeyError for a stranger."

    def test_parameters_stay_the_objects_they_are(self) -> None:
        """Released or gathered, a parameter keeps its type, shape, dtype and requires_grad, and can be printed."""
        params, values, store = self._new()
        for begun in (False, True):
            if begun:
                store.begin_use(params)
            for param, value in zip(params, values, strict=True):
                assert type(param) is nn.Parameter
                assert (param.shape, param.dtype) == (value.shape, value.dtype)
                assert param.is_leaf
                assert repr(param)
            assert [param.requires_grad for param in params] == [True] * (len(params) - 1) + [False]
        store.end_use(params, in_backward=False)

    # -- gathering ----------------------------------------------------------------------------------------------------

    def test_values_are_right_from_begin_use_to_end_use(self) -> None:
        """Whatever was released or gathered before, and however often."""
        params, values, store = self._new()
        for _ in range(3):
            for param, value in zip(params, values, strict=True):
                store.begin_use([param])
                assert torch.equal(param, value)
                store.end_use([param], in_backward=False)
                store.release(store.chunk_of(param))

    def test_a_fetch_shows_nowhere_but_in_time(self) -> None:
        """Alone or repeated, before a gather, a release, a rest or a reset, on one rank and not on others."""
        params, values, store = self._new()
        chunks = list(dict.fromkeys(map(store.chunk_of, params)))

        def release() -> None:
            for chunk in chunks:
                store.release(chunk)

        for give_back in (None, release, store.rest, store.reset):
            for chunk in chunks if self.rank == 0 else chunks[1:]:
                store.start_fetch(chunk)
                store.start_fetch(chunk)
            if give_back is not None:
                give_back()
            for param, value in zip(params, values, strict=True):
                store.begin_use([param])
                store.start_fetch(store.chunk_of(param))
                assert torch.equal(param, value)
                store.end_use([param], in_backward=False)
                store.release(store.chunk_of(param))

    def test_uses_nest(self) -> None:
        """Only the last end_use lets a chunk go; until then release and rest leave it alone."""
        (param, *_), (value, *_), store = self._new()
        store.begin_use([param])
        store.begin_use([param])
        store.end_use([param], in_backward=False)
        store.release(store.chunk_of(param))
        store.rest()
        assert torch.equal(param, value)
        store.end_use([param], in_backward=False)
        store.rest()
        assert _raises(RuntimeError, lambda: store.end_use([param], in_backward=False)), (
            "end_use must raise RuntimeError when nothing was begun."
        )

    def test_use_of_one_parameter_keeps_its_neighbours_chunk(self) -> None:
        """Parameters of one chunk are begun and ended in any order."""
        params, values, store = self._new()
        store.begin_use(params)
        store.end_use(params[1:], in_backward=False)
        for param in params[1:]:
            store.release(store.chunk_of(param))
        assert torch.equal(params[0], values[0])
        store.end_use(params[:1], in_backward=False)
        store.rest()

    def test_start_gather_may_come_early_twice_or_in_vain(self) -> None:
        """It needs no use to follow, and what follows needs none."""
        params, values, store = self._new()
        for param in params:
            store.start_gather(store.chunk_of(param))
            store.start_gather(store.chunk_of(param))
        for param in params:
            store.release(store.chunk_of(param))
            store.release(store.chunk_of(param))
        store.start_gather(store.chunk_of(params[0]))
        store.begin_use(params)
        for param, value in zip(params, values, strict=True):
            assert torch.equal(param, value)
        store.end_use(params, in_backward=False)
        store.rest()

    def test_what_has_room_can_be_gathered(self) -> None:
        """And nothing is always room enough for nothing more."""
        params, values, store = self._new()
        assert store.has_room([])
        assert store.has_room([store.chunk_of(params[0])])
        store.begin_use(params[:1])
        assert torch.equal(params[0], values[0])
        assert store.has_room([store.chunk_of(params[0])])
        store.end_use(params[:1], in_backward=False)
        store.rest()

    def test_views_taken_in_one_use_are_valid_in_the_next(self) -> None:
        """Autograd saves views of parameters in forward and reads them in backward."""
        (param, *_), (value, *_), store = self._new()
        store.begin_use([param])
        view = param.detach().t()
        store.end_use([param], in_backward=False)
        store.release(store.chunk_of(param))
        store.begin_use([param])
        assert torch.equal(view, value.t())
        store.end_use([param], in_backward=True)
        store.rest()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def test_gradients_are_averaged_over_ranks_in_whatever_order_they_come(self) -> None:
        """Whether a chunk is reduced as soon as it may be, or at the end of backward."""
        params, values, store = self._new()
        trainable = params[:-1]
        for number, order in enumerate((trainable, trainable[::-1], trainable[1:] + trainable[:1])):
            self._backward(store, order, reduce_early=number > 0)
            for param in trainable:
                self._expect(store, param, 1.0)
            store.reset()
        assert self.gradient_of(store, params[-1]) is None, "A frozen parameter has no gradient."
        self._expect_values(store, params, values)

    def test_parameters_without_a_gradient_count_as_zero(self) -> None:
        """An unused branch neither hangs nor takes another's gradient."""
        params, _, store = self._new()
        self._backward(store, params[:2])
        for param in params[:2]:
            self._expect(store, param, 1.0)
        for param in params[2:-1]:
            gradient = self.gradient_of(store, param)
            assert gradient is None or not gradient.any()

    def test_what_no_rank_used_takes_no_part(self) -> None:
        """And a parameter that another rank used counts as zero here."""
        params, values, store = self._new()
        given = params[:2] if self.rank == 0 else params[:1]
        self._backward(store, params[:-1], given=given, unused={*params[2:-1]})
        self._expect(store, params[0], 1.0)
        second = self.gradient_of(store, params[1])
        assert second is not None
        torch.testing.assert_close(second.float(), torch.full(params[1].shape, 1 / self.world_size))
        for param in params[2:-1]:
            gradient = self.gradient_of(store, param)
            assert gradient is None or not gradient.any()
        self._expect_values(store, params, values)

    def test_local_gradients_wait_for_the_next_backward(self) -> None:
        """A parameter may have one in one of the two backwards only."""
        params, values, store = self._new()
        self._backward(store, params[:-1], keep_local=True)
        assert self.gradient_of(store, params[0]) is None, "Nothing was to be reduced."
        self._expect_values(store, params, values)
        self._backward(store, params[:2])
        for param in params[:2]:
            self._expect(store, param, 2.0)
        for param in params[2:-1]:
            self._expect(store, param, 1.0)

    def test_gradients_of_several_backwards_add_up(self) -> None:
        """Accumulation, with and without a gradient in each."""
        params, values, store = self._new()
        self._backward(store, params[:-1])
        self._backward(store, params[:2])
        for param in params[:2]:
            self._expect(store, param, 2.0)
        for param in params[2:-1]:
            self._expect(store, param, 1.0)
        self._expect_values(store, params, values)

    def test_second_gradient_of_a_parameter_in_one_backward_adds_up(self) -> None:
        """Re-entrant recompute delivers the gradient of a shared parameter in parts."""
        params, _, store = self._new()
        self._backward(store, [*params[:-1], params[0]])
        self._expect(store, params[0], 2.0)
        self._expect(store, params[1], 1.0)

    def test_gradients_may_come_together_even_parts_of_one(self) -> None:
        """Of several chunks, and of a frozen parameter's chunk none."""
        params, _, store = self._new()
        trainable = params[:-1]
        store.begin_use(trainable)
        store.end_use(trainable, in_backward=True)
        ones = [(param, torch.full(param.shape, float(2 * self.rank + 1))) for param in trainable]
        store.take_gradients([*ones, ones[0], ones[2]])
        store.take_gradients([ones[2]])
        store.finish_backward()
        for number, param in enumerate(trainable):
            self._expect(store, param, {0: 2.0, 2: 3.0}.get(number, 1.0))

    def test_finish_backward_ends_all_uses(self) -> None:
        """A scope whose gradients never came is still in use then."""
        params, _, store = self._new()
        store.begin_use(params)
        store.begin_use(params[:2])
        self._give(store, params[0])
        store.finish_backward()
        assert _raises(RuntimeError, lambda: store.end_use(params[1:2], in_backward=True))
        self._expect(store, params[0], 1.0)

    # -- life ---------------------------------------------------------------------------------------------------------

    def test_reset_forgets_an_interrupted_step(self) -> None:
        """Uses, gathers under way and gradients; what follows is as if the step had never been."""
        params, values, store = self._new()
        store.begin_use(params)
        self._give(store, params[0])
        store.start_gather(store.chunk_of(params[1]))
        store.reset()
        assert _raises(RuntimeError, lambda: store.end_use(params[:1], in_backward=True))
        self._expect_values(store, params, values)
        self._backward(store, params[:-1])
        for param in params[:-1]:
            self._expect(store, param, 1.0)

    def test_full_value_is_a_copy_and_load_value_overwrites(self) -> None:
        """Both at rest; the next use sees the new value, and a value of another shape is refused."""
        params, values, store = self._new()
        for param, value in zip(params, values, strict=True):
            full = store.full_value(param)
            assert torch.equal(full, value)
            full.add_(1)
            store.load_value(param, full)
            assert torch.equal(store.full_value(param), value + 1)
        self._expect_values(store, params, [value + 1 for value in values])
        wrong = torch.zeros(params[0].numel() + 1)
        assert _raises(ValueError, lambda: store.load_value(params[0], wrong)), "A wrong shape must raise ValueError."
        self._expect_values(store, params, [value + 1 for value in values])

    def test_memory_usage_tells_bytes_by_tier(self) -> None:
        """Used is at most peak, peak at most capacity."""
        _, _, store = self._new()
        for account in store.memory_usage().values():
            used, peak, capacity = account["used"], account["peak"], account["capacity"]
            assert used is not None
            assert peak is not None
            assert 0 <= used <= peak
            assert capacity is None or peak <= capacity

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _new(self) -> tuple[list[nn.Parameter], list[Tensor], ChunkStore[ChunkT]]:
        generator = torch.Generator().manual_seed(7)
        shapes: list[tuple[int, ...]] = [(5, 3), (3,), (), (1,), (4, 2), (3, 3)]
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        params[-1].requires_grad_(False)
        values = [param.detach().clone() for param in params]
        return params, values, self.make_store(params)

    def _give(self, store: ChunkStore[ChunkT], param: nn.Parameter) -> None:
        store.take_gradients([(param, torch.full(param.shape, float(2 * self.rank + 1)))])

    def _backward(
        self,
        store: ChunkStore[ChunkT],
        order: Sequence[nn.Parameter],
        *,
        given: Sequence[nn.Parameter] | None = None,
        reduce_early: bool = False,
        unused: Set[Tensor] = frozenset(),
        keep_local: bool = False,
    ) -> None:
        left = [store.chunk_of(param) for param in order]
        for param in order:
            store.begin_use([param])
            store.end_use([param], in_backward=True)
            if given is None or any(param is other for other in given):
                self._give(store, param)
            chunk = store.chunk_of(param)
            left.remove(chunk)
            if reduce_early and chunk not in left:
                store.start_reduce(chunk)
        store.finish_backward(unused, keep_local=keep_local)

    def _expect(self, store: ChunkStore[ChunkT], param: nn.Parameter, times: float) -> None:
        gradient = self.gradient_of(store, param)
        assert gradient is not None
        # Rank r gives 2r + 1, of which the mean is the world size; dividing by 3 ranks rounds.
        torch.testing.assert_close(gradient.float(), torch.full(param.shape, times * self.world_size))

    def _expect_values(
        self, store: ChunkStore[ChunkT], params: Sequence[nn.Parameter], values: Sequence[Tensor]
    ) -> None:
        store.begin_use(params)
        for param, value in zip(params, values, strict=True):
            assert torch.equal(param, value)
        store.end_use(params, in_backward=False)
        store.rest()


def _raises(error: type[Exception], call: object) -> bool:
    assert callable(call)
    try:
        call()
    except error:
        return True
    return False
