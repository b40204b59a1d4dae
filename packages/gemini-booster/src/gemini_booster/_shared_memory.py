"""Tensors of a model that share memory, which chunks would tear apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gemini_lazy import is_lazy


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of a model lies.

    Attributes:
        device: of its memory.
        start: address of its first byte.
        end: address one past its last byte.
        name: its path in the model.
        tensor: itself.
        is_param: whether it is a parameter of the model.
    """

    device: str
    start: int
    end: int
    name: str
    tensor: Tensor
    is_param: bool

    @property
    def trains(self) -> bool:
        """Whether its values change."""
        return self.is_param and self.tensor.requires_grad

    def overlaps(self, other: _Place) -> bool:
        """Whether there is an element of both; columns of one matrix lie among each other and share none."""
        if self.device != other.device or self.end <= other.start or other.end <= self.start:
            return False
        size = self.tensor.element_size()
        if size != other.tensor.element_size() or (self.start - other.start) % size:
            return True
        first = min(self.start, other.start)
        taken = torch.zeros((max(self.end, other.end) - first) // size, dtype=torch.bool)
        self._elements(taken, first).fill_(True)
        return bool(other._elements(taken, first).any())

    def _elements(self, memory: Tensor, first: int) -> Tensor:
        offset = (self.start - first) // self.tensor.element_size()
        return memory.as_strided(self.tensor.shape, self.tensor.stride(), offset)


def check_memory(module: nn.Module) -> None:
    """Refuse trainable parameters that share memory with another tensor of the model: a parameter, buffer or attribute.

    Each parameter moves into a chunk, so what shares its memory would keep the old values without a word. A tied
    parameter, which is one object in several places, is right, and what is frozen keeps its values.

    Raises:
        ValueError: there are such; the message names both.
    """
    open_places: list[_Place] = []
    for place in sorted(_places(module), key=lambda place: (place.device, place.start)):
        open_places = [other for other in open_places if other.device == place.device and other.end > place.start]
        for other in open_places:
            if (place.trains or other.trains) and place.overlaps(other):
                _refuse(place, other)
        open_places.append(place)


def _refuse(place: _Place, other: _Place) -> None:
    first, second = sorted((place, other), key=lambda each: (not each.trains, each.name))
    if second.is_param:
        advice = "Tie them as one object (head.weight = embedding.weight), or give one its own copy (clone())"
    else:
        advice = f"Compute with {first.name!r} itself in forward, or let {second.name!r} be a copy (clone())"
    raise ValueError(
        f"Parameter {first.name!r} shares memory with {'parameter ' * second.is_param}{second.name!r}, another tensor: "
        f"in chunks they would come apart. {advice} before the model is wrapped."
    )


def _places(module: nn.Module) -> Iterator[_Place]:
    params = {param: name for name, param in module.named_parameters()}
    for param, name in params.items():
        yield from _place_of(name, param, is_param=True)
    for path, child in module.named_modules():
        attributes = {key: value for key, value in vars(child).items() if key not in ("_parameters", "_buffers")}
        for key, value in (attributes | child._buffers).items():
            # The older spectral_norm has a view of weight_orig as its weight, which each forward computes anew.
            computed = child._parameters.get(f"{key}_orig") is not None
            for tensor in () if computed else _tensors(value):
                if tensor not in params:
                    yield from _place_of(f"{path}.{key}" if path else key, tensor, is_param=False)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, Tensor))
    elif isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, Tensor))


def _place_of(name: str, tensor: Tensor, *, is_param: bool) -> Iterator[_Place]:
    """Yield where a tensor lies, if it has memory of its own that somebody may write to."""
    if is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided or not tensor.numel():
        return
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return  # expanded: nothing can be written to it
    try:
        start = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor of another kind, around others or without memory
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if start:
        yield _Place(str(tensor.device), start, start + (last + 1) * tensor.element_size(), name, tensor, is_param)
