"""Scopes: the modules that own managed parameters, and what a call of one leaves for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from gemini_ddp._errors import ZeroDDPError


@dataclass(slots=True, eq=False)
class Scope:
    """One module whose calls need parameters.

    Attributes:
        name: its path in the model; "" is the model itself.
        is_root: whether it is the model itself.
        params: the managed parameters that it owns, then those it was seen to use of other modules.
        value_in_backward: whether backward reads the parameters' values; an embedding's does not.
        shares: whether it is a plain linear layer with a parameter that another module owns, too.
        borrows: whether it was seen to use a parameter of another module.
        hides_outputs: whether backward was seen to reach its operations other than through what it returns.
    """

    name: str
    is_root: bool
    params: tuple[nn.Parameter, ...]
    value_in_backward: bool
    shares: bool
    borrows: bool = False
    hides_outputs: bool = False
    ends_with_inputs: bool = field(init=False)
    needs_inputs: bool = field(init=False)
    trains: list[bool] = field(init=False)
    waiting: set[Tensor] = field(default_factory=set)
    calls: set[Call] = field(default_factory=set)
    in_backward: bool = False

    def __post_init__(self) -> None:
        self.settle_end()

    def add(self, param: nn.Parameter) -> None:
        """Take in a parameter of another module that a call was seen to use."""
        self.params += (param,)
        self.borrows = True
        self.settle_end()

    def settle_end(self) -> None:
        """Decide what ends the scope's backward, which depends on the parameters that require gradients now.

        ``ends_with_inputs``: it is over once gradients of its inputs exist. Otherwise every trainable parameter must
        have its gradient, and if it ``needs_inputs``, for it has frozen parameters as well, both must have come.
        """
        self.trains = [param.requires_grad for param in self.params]
        self.needs_inputs = not all(self.trains)
        # A shared parameter's gradient comes after the last of its uses. Only of a plain linear layer is it sure
        # that nothing of its backward is left when the gradient of its input exists.
        frozen_only = bool(self.params) and not any(self.trains)
        self.ends_with_inputs = not self.borrows and (frozen_only or self.shares)

    def path_of(self, key: str) -> str:
        """Return the path in the model of a parameter by its name in the module."""
        return f"{self.name}.{key}" if self.name else key

    @property
    def watches_inputs(self) -> bool:
        """Whether calls must report the gradients of their inputs."""
        return self.ends_with_inputs or self.needs_inputs

    @property
    def is_over(self) -> bool:
        """Whether nothing of its backward is left to come."""
        if self.hides_outputs or (self.is_root and self.borrows):
            # Recomputed functions that are no modules read what the model borrowed, and re-entrant ones bring a
            # parameter's gradient in parts: only the end of backward is sure.
            return False
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
        shared = any(owners[param] > 1 for param in params if param.requires_grad)
        scopes[child] = Scope(
            name=name,
            is_root=child is module,
            params=params,
            value_in_backward=not _is_plain_embedding(child),
            shares=shared and _is_plain(child, nn.Linear),
        )
    return scopes


def _owned(module: nn.Module, manages: Callable[[object], bool]) -> Iterable[nn.Parameter]:
    return (param for param in module._parameters.values() if param is not None and manages(param))


def _is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    return isinstance(module, cls) and type(module).forward is cls.forward


def _is_plain_embedding(module: nn.Module) -> bool:
    return _is_plain(module, nn.Embedding) and getattr(module, "max_norm", None) is None


class Layout:
    """The modules and parameters that a model was wrapped with.

    Args:
        module: the model.
        scopes: its scopes.
        manages: whether a tensor is a managed parameter.
    """

    def __init__(self, module: nn.Module, scopes: Mapping[nn.Module, Scope], manages: Callable[[object], bool]) -> None:
        self._manages = manages
        self._trainable = {param for scope in scopes.values() for param in scope.params if param.requires_grad}
        self._scopes = [(child, scope, [*map(id, child._parameters.values())]) for child, scope in scopes.items()]
        self._places = [
            (parent, key, child, scopes[child].name)
            for parent in module.modules()
            for key, child in parent._modules.items()
            if child is not None and child in scopes
        ]

    def check(self) -> None:
        """Follow parameters that were frozen since, or thawed again.

        Raises:
            ZeroDDPError: a parameter or a module was replaced, or a parameter trains that was frozen at first.
        """
        for parent, key, child, name in self._places:
            if parent._modules.get(key) is not child:
                raise ZeroDDPError(
                    f"Module {name!r} was replaced after the model was wrapped, so its parameters are not in the "
                    "store. Change the model first, then wrap it."
                )
        for child, scope, ids in self._scopes:
            if [*map(id, child._parameters.values())] != ids:
                self._check_replaced(child, scope)
            if [param.requires_grad for param in scope.params] != scope.trains:
                self._check_thawed(child, scope)
                scope.settle_end()

    def _check_replaced(self, child: nn.Module, scope: Scope) -> None:
        for key, param in child._parameters.items():
            # Tensors that torch.func.functional_call puts there for one call are no parameters.
            if isinstance(param, nn.Parameter) and not self._manages(param):
                raise ZeroDDPError(
                    f"Parameter {scope.path_of(key)!r} was replaced after the model was wrapped, so it is not in the "
                    "store. Overwrite values with load_state_dict; change the model first, then wrap it."
                )

    def _check_thawed(self, child: nn.Module, scope: Scope) -> None:
        for key, param in child._parameters.items():
            if param is not None and param.requires_grad and self._manages(param) and param not in self._trainable:
                raise ZeroDDPError(
                    f"Parameter {scope.path_of(key)!r} was frozen when the model was wrapped, so nothing takes its "
                    "gradient. Wrap the model with it trainable; it may be frozen later, and thawed again."
                )
