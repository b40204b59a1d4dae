"""Scopes: the modules that own managed parameters, and what a call of one leaves for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(slots=True, eq=False)
class Scope:
    """One module whose calls need parameters.

    Attributes:
        name: its path in the model; "" is the model itself.
        is_root: whether it is the model itself.
        params: the managed parameters that it owns, then those it was seen to use of other modules.
        value_in_backward: whether backward reads the parameters' values; an embedding's does not.
        ends_with_inputs: whether its backward is over once gradients of its inputs exist. Otherwise it is over once
            every trainable parameter has its gradient.
        needs_inputs: whether both must have come: it has frozen parameters beside trainable ones.
    """

    name: str
    is_root: bool
    params: tuple[nn.Parameter, ...]
    value_in_backward: bool
    ends_with_inputs: bool
    needs_inputs: bool
    waiting: set[Tensor] = field(default_factory=set)
    calls: set[Call] = field(default_factory=set)
    in_backward: bool = False

    def add(self, param: nn.Parameter) -> None:
        """Take in a parameter of another module that a call was seen to use."""
        self.params += (param,)
        self.ends_with_inputs = False
        self.needs_inputs = self.needs_inputs or not param.requires_grad

    @property
    def watches_inputs(self) -> bool:
        """Whether calls must report the gradients of their inputs."""
        return self.ends_with_inputs or self.needs_inputs

    @property
    def is_over(self) -> bool:
        """Whether nothing of its backward is left to come."""
        if self.ends_with_inputs:
            return not self.calls
        return not self.waiting and not (self.needs_inputs and self.calls)


@dataclass(slots=True, eq=False)
class Call:
    """One call of a scope that watches its inputs, until their gradients exist."""

    scope: Scope
    inputs_left: int = 0


def find_scopes(module: nn.Module, manages: Callable[[object], bool]) -> dict[nn.Module, Scope]:
    """Return a scope for the model itself and for every module that owns a managed parameter."""
    owners = Counter(param for child in module.modules() for param in _owned(child, manages))
    scopes = {}
    for name, child in module.named_modules():
        params = tuple(dict.fromkeys(_owned(child, manages)))
        if not params and child is not module:
            continue
        trainable = [param for param in params if param.requires_grad]
        shared = any(owners[param] > 1 for param in trainable)
        frozen_only = bool(params) and not trainable
        scopes[child] = Scope(
            name=name,
            is_root=child is module,
            params=params,
            value_in_backward=not _is_plain_embedding(child),
            # A shared parameter's gradient comes after the last of its uses. Only of a plain linear layer is it sure
            # that nothing of its backward is left when the gradient of its input exists.
            ends_with_inputs=frozen_only or (shared and _is_plain(child, nn.Linear)),
            needs_inputs=bool(trainable) and len(trainable) < len(params),
        )
    return scopes


def _owned(module: nn.Module, manages: Callable[[object], bool]) -> Iterable[nn.Parameter]:
    return (param for param in module._parameters.values() if param is not None and manages(param))


def _is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    return isinstance(module, cls) and type(module).forward is cls.forward


def _is_plain_embedding(module: nn.Module) -> bool:
    return _is_plain(module, nn.Embedding) and getattr(module, "max_norm", None) is None
