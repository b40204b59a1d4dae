"""What an optimizer keeps beside the states of parameters, such as a count of steps in its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SharedValues"]

_PLAIN = (int, float, complex, str, tuple, type(None), Tensor)
_ABSENT = object()


class SharedValues:
    """The values in the groups of an optimizer, and on itself, that its step changes.

    [Note: Values that parameters share]
    Many optimizers count their steps in the group, some on themselves. Called once for each block they would count
    blocks, of which ranks have unlike numbers. So each block finds those values as they were before the step, and in
    the end they are what one call has made of them that was given a parameter of one element for every group: the same
    on every rank, those that hold nothing of a group included. A value that comes out otherwise for a block depends on
    what is in the parameters. Then the optimizer is not element-wise.

    Args:
        optim: the optimizer. Values are plain ones and tensors; what containers hold is left alone.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim = optim
        self._before: list[dict[str, object]] = []
        self._after: list[dict[str, object]] = []

    def learn(self, call: Callable[[], None]) -> None:
        """Take note of what a step changes, and take it back.

        Args:
            call: calls the optimizer on its stand-ins.
        """
        self._before = self._read()
        try:
            call()
            self._after = self._read()
        finally:
            self._write(self._before, self._read())

    def undo(self, group_indices: Iterable[int]) -> None:
        """Take back what the call for one block has changed.

        Args:
            group_indices: the groups that were in the block.

        Raises:
            RuntimeError: that is not what a step changes.
        """
        found = self._read()
        self._write(self._before, found)
        for index in sorted({0, *(1 + group_index for group_index in group_indices)}):
            for name in _differing(found[index], self._after[index]):
                place = f"param_groups[{index - 1}][{name!r}]" if index else f"the attribute {name!r}"
                raise RuntimeError(
                    f"{type(self._optim).__name__} changes {place} by what it finds in the parameters: to "
                    f"{found[index].get(name)} for one block of elements, to {self._after[index].get(name)} for "
                    "another. ZeroOptimizer shards parameters, so it takes only element-wise optimizers."
                )

    def finish(self) -> None:
        """Let the values be as a step leaves them."""
        self._write(self._after, self._before)

    def _owners(self) -> list[dict[str, Any]]:
        return [vars(self._optim), *self._optim.param_groups]

    def _read(self) -> list[dict[str, object]]:
        return [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in owner.items()
                if isinstance(value, _PLAIN)
            }
            for owner in self._owners()
        ]

    def _write(self, wanted: list[dict[str, object]], present: list[dict[str, object]]) -> None:
        """Change what differs from the present, and nothing else: the user may have changed other values."""
        for owner, new, old in zip(self._owners(), wanted, present, strict=True):
            for name in _differing(new, old):
                value, held = new.get(name, _ABSENT), owner.get(name)
                if value is _ABSENT:
                    del owner[name]
                elif isinstance(value, Tensor) and isinstance(held, Tensor) and value.shape == held.shape:
                    held.copy_(value)  # whoever else has this tensor goes on seeing its value
                else:
                    owner[name] = value.clone() if isinstance(value, Tensor) else value


def _differing(some: dict[str, object], others: dict[str, object]) -> list[str]:
    names = dict.fromkeys([*some, *others])
    return [name for name in names if not _same(some.get(name, _ABSENT), others.get(name, _ABSENT))]


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return one is other or one == other or (one != one and other != other)  # a NaN is like another
