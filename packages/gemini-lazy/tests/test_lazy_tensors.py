"""What a lazy tensor is, and operations on it: views, writes, reads, random numbers."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from lazy_checks import check_tensors, eager_and_lazy
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from gemini_lazy import LazyError, LazyInitContext, forget, is_lazy, materialize, materialize_value


def test_placeholder_is_a_plain_tensor_of_one_element() -> None:
    with LazyInitContext():
        weight = nn.Parameter(torch.randn(1000, 1000, dtype=torch.bfloat16))
    assert type(weight) is nn.Parameter
    assert weight.requires_grad
    assert (weight.shape, weight.dtype, weight.device.type) == ((1000, 1000), torch.bfloat16, "cpu")
    assert weight.untyped_storage().nbytes() == 2
    assert "nan" in repr(weight)


def test_missed_materialisation_poisons_and_in_place_writes_raise() -> None:
    with LazyInitContext():
        linear = nn.Linear(3, 2)
    assert linear(torch.ones(1, 3)).isnan().all()
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        linear.weight.add_(1)
    with pytest.raises(RuntimeError):
        linear.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool])
def test_write_that_torch_lets_through_outside_the_context_is_an_error(dtype: torch.dtype) -> None:
    with LazyInitContext():
        tensor = torch.zeros(4, dtype=dtype)
    untouched = materialize_value(tensor)
    assert torch.equal(untouched, torch.zeros(4, dtype=dtype))
    tensor.fill_(1)  # torch allows this on expanded memory
    with pytest.raises(LazyError, match=r"shape \(4,\) was written to outside"):
        materialize_value(tensor)


def test_state_dict_and_copies_of_a_lazy_module_keep_shapes() -> None:
    with LazyInitContext():
        linear = nn.Linear(3, 2)
    assert {name: value.shape for name, value in linear.state_dict().items()} == {"weight": (2, 3), "bias": (2,)}
    assert all(is_lazy(value) for value in linear.state_dict().values())
    assert copy.deepcopy(linear).weight.isnan().all()


def test_ordinary_tensor_is_refused_with_a_reason() -> None:
    assert not is_lazy(torch.zeros(3))
    assert not is_lazy(torch.zeros(3).to_sparse())
    with pytest.raises(LazyError, match=r"shape \(3,\) is not lazy"):
        materialize_value(torch.zeros(3))
    with pytest.raises(LazyError, match="materialised already"):
        materialize(materialize(_lazy_ones()))


def _lazy_ones() -> Tensor:
    with LazyInitContext():
        return torch.ones(3)


def test_values_are_new_memory_every_time() -> None:
    tensor = _lazy_ones()
    first = materialize_value(tensor)
    first.zero_()
    assert torch.equal(materialize_value(tensor), torch.ones(3))
    materialize(tensor).add_(1)
    assert torch.equal(tensor, torch.full((3,), 2.0))


def test_forgotten_tensor_is_no_longer_lazy() -> None:
    tensor = _lazy_ones()
    forget(tensor)
    forget(torch.ones(3))
    assert not is_lazy(tensor)
    assert tensor.isnan().all()


def test_assigning_data_drops_the_record() -> None:
    with LazyInitContext():
        parameter = nn.Parameter(torch.ones(3))
    parameter.data = torch.zeros(3)
    assert not is_lazy(parameter)


def test_record_dies_with_the_last_tensor_that_needs_it() -> None:
    held = torch.zeros(2**20)  # large enough to be held rather than copied
    alive = weakref.ref(held.untyped_storage())
    with LazyInitContext():
        first = torch.empty(2**20)
        first.copy_(held)
        second = nn.Parameter(first * 2)
    del held, first
    gc.collect()
    assert alive() is not None
    assert torch.equal(materialize_value(second), torch.zeros(2**20))
    del second
    gc.collect()
    assert alive() is None


def test_tensors_over_the_same_memory_share_it_again() -> None:
    with LazyInitContext():
        base = torch.zeros(4, 3)
        parameter, row, twin = nn.Parameter(base), base[1], base.data
    materialize(row)
    assert is_lazy(parameter)
    row.fill_(5)
    materialize(parameter)
    materialize(twin)
    assert torch.equal(parameter.detach()[1], torch.full((3,), 5.0))
    assert twin.data_ptr() == parameter.data_ptr()
    assert torch.equal(materialize_value(base), parameter)


def test_writes_under_a_later_context_reach_memory_that_is_real_by_then() -> None:
    with LazyInitContext():
        base = torch.zeros(3)
        alias = nn.Parameter(base)
    materialize(base)
    with LazyInitContext(), torch.no_grad():
        alias.add_(1)
    assert torch.equal(base, torch.ones(3))


def writes_through_views() -> Sequence[Tensor]:
    base = torch.zeros(4, 6)
    left, right = base.chunk(2)
    left.fill_(1)
    right[1:].data.normal_()
    early = base.clone()
    base.view(-1)[3] = 7
    base.t()[1, 1:3] += 2
    base.t().reshape(-1).zero_()  # a copy
    base.reshape(-1)[2] = 9  # no copy
    for part in base.split([1, 3]):
        part.mul_(2)
    base.diagonal().sub_(1)
    base.unfold(1, 2, 2)[0, 0].fill_(-3)
    base[base == 4] = 8
    base[torch.tensor([0, 2]), 1] = 6
    return base, left, right, early


def copies_and_identities() -> Sequence[Tensor]:
    base = torch.randn(3, 4)
    clone = base.clone().clone().clone()
    clone.add_(1)
    same = base.contiguous()
    same[0, 0] = -1
    copied = base.t().contiguous()
    copied.fill_(3)
    unchanged = base.float()
    unchanged[1] = 5
    double = base.double()
    double[2] = 6
    transposed = torch.empty(4, 3).t()
    transposed.copy_(base)
    transposed[0].uniform_()
    assert transposed.stride() == (1, 3)
    assert not transposed.is_contiguous()
    assert base.is_contiguous()
    return base, clone, copied, double, transposed, base.expand(2, 3, 4), torch.empty_like(transposed).fill_(2)


def results_that_kernels_lay_out_in_their_own_way() -> Sequence[Tensor]:
    left, values, right = torch.linalg.svd(torch.randn(5, 7))
    product = left @ (values[:, None] * right[:5])
    row = right[1].clone()
    right[2].fill_(3)
    spectrum = torch.fft.rfft2(torch.randn(6, 6))
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    convolved = nn.functional.conv2d(images, torch.randn(4, 3, 3, 3))
    return product, row, right, right.contiguous(), spectrum, spectrum.abs() @ spectrum.abs().t(), convolved + 1


def changes_of_the_object() -> Sequence[Tensor]:
    flat = torch.arange(6.0)
    matrix = torch.randn(3, 4)
    alias = matrix.data
    matrix.t_()
    matrix[0] = 5
    column = torch.rand(3, 1).data
    column.squeeze_(1)
    wide = torch.ones(3).unsqueeze_(0)
    parameter = nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        parameter.set_(torch.ones(3))
        parameter.add_(1)
    other = nn.Parameter(torch.zeros(2))
    other.data = flat
    other.data.mul_(3)
    flat.add_(1)
    return flat, matrix, alias, column, wide, parameter, other


def assorted_operations() -> Sequence[Tensor]:
    grid = torch.arange(12, dtype=torch.float32).view(3, 4)
    polar = torch.polar(grid + 1, grid)
    total = torch.zeros(3, 4)
    torch.add(total, grid, out=total)
    torch.mul(grid, 2, out=total[:, :])
    values, places = grid.sort(descending=True)
    counts = torch.zeros(4)
    counts.index_add_(0, torch.tensor([1, 1, 3]), torch.ones(3))
    lists = [torch.zeros(2), torch.ones(2)]
    torch._foreach_add_(lists, 1.5)
    legacy = torch.FloatTensor(2, 3).fill_(1)
    big = torch.where(grid > 5, grid, -grid)
    return (
        *(grid, polar, torch.view_as_real(polar), polar.real, total, values, places, counts, *lists, legacy, big),
        *(torch.linalg.qr(grid)), torch.einsum("ij,kj->ik", grid, grid), torch.stack([grid, grid]).transpose(0, 1),
        *(grid.masked_fill(grid > 3, 0), grid.half() / 3, torch.ones(3).to(torch.int8), torch.eye(3, 2)),
        torch.triu(torch.full((3, 3), float("-inf")), diagonal=1),
    )  # fmt: skip


def layouts_of_a_scalar() -> Sequence[Tensor]:
    scale = nn.Parameter(torch.ones(()))
    average = torch.zeros_like(scale)
    like = [torch.ones_like(scale), torch.full_like(scale, 3), scale.new_zeros(2), scale.new_ones(()), average + 1]
    return scale, average, *like


@pytest.mark.parametrize(
    "make",
    [
        layouts_of_a_scalar,
        writes_through_views,
        copies_and_identities,
        results_that_kernels_lay_out_in_their_own_way,
        changes_of_the_object,
        assorted_operations,
    ],
)
def test_operations_give_what_they_give_without_the_context(make: object) -> None:
    assert callable(make)
    assert all(check_tensors(make))


@torch.library.custom_op("gemini_lazy_tests::twice", mutates_args=())
def twice(tensor: Tensor) -> Tensor:
    return (tensor.t() * 2).contiguous().t()


@torch.library.custom_op("gemini_lazy_tests::longer", mutates_args=())
def longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


twice.register_fake(torch.empty_like)
longer.register_fake(torch.empty_like)


def test_operation_whose_meta_version_has_other_strides_gives_the_right_values() -> None:
    def make() -> Sequence[Tensor]:
        doubled = twice(torch.arange(12.0).view(3, 4))
        doubled[1].sub_(1)
        return doubled.clone(), doubled[2].clone(), doubled

    eager, lazy = eager_and_lazy(make)
    for wanted, tensor in zip(eager, lazy, strict=True):
        assert torch.equal(wanted, materialize_value(tensor))
        assert torch.equal(wanted, materialize(tensor))


def test_operation_whose_meta_version_has_another_shape_is_refused() -> None:
    with LazyInitContext():
        tensor = longer(torch.ones(3))
    with pytest.raises(LazyError, match=r"shape \(6,\) where torch.float32 of shape \(3,\) was foretold"):
        materialize(tensor)


def test_tensor_subclasses_keep_their_own_dispatch() -> None:
    pair = TwoTensor(torch.ones(2), torch.zeros(2))
    with LazyInitContext():
        moved = pair + 1
    assert type(moved) is TwoTensor
    assert (moved.a.tolist(), moved.b.tolist()) == ([2.0, 2.0], [1.0, 1.0])


def random_draws() -> Sequence[Tensor]:
    own = torch.Generator().manual_seed(3)
    first = torch.empty(30).normal_(generator=own)
    second = torch.rand(4, generator=own)
    third = torch.randint(9, (5,)).float()
    drawn = torch.bernoulli(first.abs().clamp(0, 1))
    picked = torch.multinomial(first.abs(), 3)
    counted = torch.poisson(first.abs() * 50)
    dropped = nn.functional.dropout(first)
    transposed = torch.zeros_like(torch.empty(5, 20).t()).uniform_()
    part = torch.zeros(6, 6)
    part[:, 2].exponential_()
    first.normal_(generator=own)  # replaces what others have read
    return (
        *(first, second, third, drawn, picked, counted, dropped, transposed, part, torch.randperm(9)),
        *(torch.rand_like(transposed), torch.normal(0.0, 2.0, (3, 3)), torch.empty(3, dtype=torch.float64).normal_()),
    )


def test_random_draws_are_the_same_in_any_order_of_materialisation() -> None:
    assert all(check_tensors(random_draws))


def test_draws_on_ordinary_tensors_lie_between_the_deferred_ones() -> None:
    before = torch.zeros(5)

    def make() -> Sequence[Tensor]:
        first = torch.randn(7)
        before.normal_()
        return first, before.clone(), torch.randn(7)

    assert check_tensors(make) == [True, False, True]


def test_own_generator_is_left_where_eager_construction_leaves_it() -> None:
    states = []
    for lazy in (False, True):
        own = torch.Generator().manual_seed(5)
        if lazy:
            with LazyInitContext():
                drawn = torch.randn(100, generator=own)
            state = own.get_state()
            materialize(drawn)
            assert torch.equal(own.get_state(), state)
        else:
            torch.randn(100, generator=own)
            state = own.get_state()
        states.append(state)
    assert torch.equal(*states)


def test_materialising_leaves_the_default_generator_alone() -> None:
    with LazyInitContext():
        drawn = torch.randn(100)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    materialize(drawn)
    assert torch.equal(torch.get_rng_state(), state)


def test_reads_see_exact_values() -> None:
    with LazyInitContext():
        numbers = torch.arange(5)
        assert numbers[4].item() == 4
        assert bool((numbers > 3).any())
        assert not (numbers > 4).any()
        assert torch.linspace(0, 1, 5).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
        assert torch.equal(numbers, torch.tensor([0, 1, 2, 3, 4]))
        assert torch.allclose(numbers.float(), torch.arange(5.0))
        assert [int(number) for number in numbers] == [0, 1, 2, 3, 4]
        assert torch.tensor([numbers[1], 7]).tolist() == [1, 7]
        assert numbers[numbers > 2].tolist() == [3, 4]
        assert numbers.nonzero().flatten().tolist() == [1, 2, 3, 4]
        assert "[0, 1, 2, 3, 4]" in repr(numbers)
        assert numbers.to_sparse().values().tolist() == [1, 2, 3, 4]
        assert torch.view_as_real(torch.polar(torch.ones(1), torch.ones(1)).conj().resolve_conj())[0, 1] < -0.8
        assert torch.as_tensor(numbers) is numbers
        total = torch.zeros(())
        while total < 10:
            total += 3
        assert total.item() == 12


def tagged(tensor: Tensor) -> Tensor:
    tensor.tag = "an attribute"  # type: ignore[attr-defined] # that is the point
    return tensor


@pytest.mark.parametrize("wrap", [torch.Tensor.detach, nn.Parameter, tagged])
@pytest.mark.parametrize("copy_of", [pickle.dumps, copy.copy, lambda tensor: torch.save([tensor], io.BytesIO())])
def test_copying_a_lazy_tensor_byte_by_byte_is_an_error(
    copy_of: Callable[[Tensor], object], wrap: Callable[[Tensor], Tensor]
) -> None:
    with LazyInitContext():
        tensor = wrap(torch.zeros(3, 4))
        if copy_of is copy.copy and wrap is nn.Parameter:
            assert is_lazy(copy.copy(tensor))  # it is a new parameter over the same memory
            return
        with pytest.raises(LazyError, match=r"of shape \(3, 4\) has no memory to be pickled, saved or copied"):
            copy_of(tensor)
        materialize(tensor)
    copy_of(tensor.detach())


def test_array_shares_memory_with_the_tensor() -> None:
    pytest.importorskip("numpy")

    def make() -> Sequence[Tensor]:
        parameter = nn.Parameter(torch.zeros(3))
        parameter.data.numpy()[1] = 4
        return (parameter,)

    check_tensors(make)


def test_ordinary_tensors_are_written_to_at_once() -> None:
    ordinary = torch.zeros(3)
    with LazyInitContext():
        ordinary.add_(torch.ones(3))
        ordinary[1:] = torch.arange(2)
        assert not is_lazy(ordinary + 1)
        sized = torch.zeros(2)
        sized.resize_(3).fill_(1)
        grown = torch.empty(0)
        torch.add(torch.arange(3.0), 1, out=grown)
    assert grown.tolist() == [1.0, 2.0, 3.0]
    assert ordinary.tolist() == [1.0, 0.0, 1.0]
    assert sized.tolist() == [1.0, 1.0, 1.0]


def test_what_was_read_of_an_ordinary_tensor_is_what_it_held_then() -> None:
    small, large = torch.ones(3), torch.ones(2**19)
    with LazyInitContext():
        first, second = torch.zeros(3).copy_(small), torch.zeros(2**19).copy_(large)
    small.zero_()
    assert torch.equal(materialize_value(first), torch.ones(3))
    assert torch.equal(materialize_value(second), torch.ones(2**19))
    large.zero_()
    with pytest.raises(LazyError, match="was changed in place after"):
        materialize_value(second)


def test_errors_are_raised_where_eager_construction_raises_them() -> None:
    with LazyInitContext():
        with pytest.raises(RuntimeError, match="shape"):
            torch.zeros(3, 4).view(5)
        with pytest.raises(RuntimeError):
            torch.zeros(3).add_(torch.zeros(4))
        with pytest.raises(RuntimeError, match="std"):
            torch.zeros(3).normal_(0, -1)
        with pytest.raises(RuntimeError, match="leaf"):
            nn.Parameter(torch.zeros(3)).add_(1)
        with pytest.raises(IndexError):
            torch.zeros(3)[5]


def test_exception_leaves_torch_clean_and_contexts_nest() -> None:
    def fail() -> None:
        with LazyInitContext(), LazyInitContext(default_device="cpu"):
            torch.zeros(3)
            raise KeyError("own")

    with pytest.raises(KeyError):
        fail()
    assert not is_lazy(torch.zeros(3))
    context = LazyInitContext()
    with context:
        with context, LazyInitContext(default_device="meta"):
            assert torch.zeros(3).device.type == "meta"
        assert is_lazy(torch.zeros(3))
    assert not is_lazy(torch.zeros(3))


def test_values_can_be_materialised_inside_the_context() -> None:
    with LazyInitContext():
        tensor = torch.ones(3)
        value = materialize_value(tensor)
        assert not is_lazy(materialize(tensor))
    assert torch.equal(value, tensor)


def test_ten_thousand_in_place_operations_materialise() -> None:
    def make() -> Sequence[Tensor]:
        tensor = torch.zeros(4)
        chained = tensor
        for _ in range(10_000):
            tensor.add_(1)
        for _ in range(2_000):
            chained = chained.data + 1
        return tensor, chained

    check_tensors(make)


def test_module_imported_under_the_context_keeps_real_globals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_while_lazy.py").write_text("import torch\nTABLE = torch.arange(4) * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with LazyInitContext():
        imported = importlib.import_module("imported_while_lazy")
        assert is_lazy(torch.arange(4))
    assert imported.TABLE.tolist() == [0, 2, 4, 6]
    del sys.modules["imported_while_lazy"]


def test_forward_under_the_context_is_exact_and_differentiable_in_shape() -> None:
    def make() -> Sequence[Tensor]:
        linear = nn.Linear(3, 2)
        return (linear(torch.ones(1, 3)).detach(),)

    assert check_tensors(make) == [True]
    _, lazy = eager_and_lazy(lambda: nn.Linear(3, 2)(torch.ones(1, 3)))
    assert lazy.requires_grad
