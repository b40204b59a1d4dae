"""Scopes: the modules that own managed parameters, and what a call of one leaves for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from gemini_ddp._errors import ZeroDDPError


@dataclass(slots=True, eq=False)
class Scope:
    """One module whose calls need parameters.

    [Note: Covers]
    A chunk that is gathered for one module serves the next one, too, but each entry has its cost. Where all parameters
    within a module lie in one chunk, a call of it uses them all, and calls of the modules within are passed over. One
    of those that is called from elsewhere, outside of the cover's calls, is a scope like any other.

    Attributes:
        index: its place among the model's scopes.
        name: its path in the model; "" is the model itself.
        is_root: whether it is the model itself.
        params: the managed parameters that it owns, then those it was seen to use of other modules.
        value_in_backward: whether backward reads the parameters' values; an embedding's does not.
        shares: whether it is a plain linear layer with a parameter that another module owns, too.
        borrows: whether it was seen to use a parameter of another module.
        cover: the scope of a module around it that has all of its parameters. [Note: Covers].
        depth: calls of it that are under way in forward or recompute.
        is_simple: whether there is no module within it.
        is_leaf: whether it stands for all modules within it, of which a call may use any.
        expects: ids of the parameters that get a gradient.
        waiting: ids of those whose gradient has not come in this backward.
        in_backward: whether its parameters are in use for its backward.
        is_done: whether nothing of that backward is left to come on this rank.
        num_calls: how often forward called it in this step.
        last_call: when the last of its calls in this step's forward ended, counted in ends; 0 if none did. That of
            a module around others ends after theirs, and its backward comes first.
        reaches_backward: whether backward may enter a call of this step.
        hides_outputs: whether backward was seen to reach its operations other than through what it returns.
    """

    index: int
    name: str
    is_root: bool
    params: tuple[nn.Parameter, ...]
    value_in_backward: bool
    shares: bool
    is_leaf: bool = False
    is_simple: bool = False
    cover: Scope | None = None
    depth: int = 0
    borrows: bool = False
    hides_outputs: bool = False
    ends_with_inputs: bool = field(init=False)
    watches_inputs: bool = field(init=False)
    needs_inputs: bool = field(init=False)
    trains: list[bool] = field(init=False)
    expects: frozenset[int] = field(init=False)
    waiting: set[int] = field(default_factory=set)
    calls: set[Call] = field(default_factory=set)
    in_backward: bool = False
    is_done: bool = False
    num_calls: int = 0
    last_call: int = 0
    reaches_backward: bool = False

    def __post_init__(self) -> None:
        self.settle_end()

    def add(self, param: nn.Parameter) -> None:
        """Take in a parameter of another module that a call was seen to use."""
        self.params += (param,)
        self.borrows = True
        self.settle_end()

    def take_in(self, inner: Sequence[Scope]) -> None:
        """Become the cover of scopes within the module: have their parameters, too."""
        self.params = tuple(dict.fromkeys(param for scope in (self, *inner) for param in scope.params))
        for scope in inner:
            scope.cover = self
            self.value_in_backward = self.value_in_backward or scope.value_in_backward
        self.shares = False
        self.settle_end()

    @property
    def is_covered(self) -> bool:
        """Whether its parameters are in use now, by a call of the cover or by the cover's backward."""
        return self.cover is not None and (self.cover.depth > 0 or self.cover.in_backward)

    def settle_end(self) -> None:
        """Decide what ends the scope's backward, which depends on the parameters that require gradients now.

        ``ends_with_inputs``: it is over once gradients of its inputs exist. Otherwise every trainable parameter must
        have its gradient, and if it ``needs_inputs``, for it has frozen parameters as well, both must have come.
        ``watches_inputs``: calls must report the gradients of their inputs.
        """
        self.trains = [param.requires_grad for param in self.params]
        self.expects = frozenset(id(param) for param in self.params if param.requires_grad)
        self.needs_inputs = not all(self.trains)
        # A shared parameter's gradient comes after the last of its uses. Only of a plain linear layer is it sure
        # that nothing of its backward is left when the gradient of its input exists.
        # Of a leaf it is not known which parameters get gradients, but when its inputs have theirs, all have come:
        # autograd runs what was recorded later first.
        frozen_only = bool(self.params) and not any(self.trains)
        self.ends_with_inputs = not self.borrows and (frozen_only or self.shares or self.is_leaf)
        self.watches_inputs = self.ends_with_inputs or self.needs_inputs

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


def find_scopes(
    module: nn.Module,
    manages: Callable[[object], bool],
    chunk_of: Callable[[nn.Parameter], Hashable],
    leaf_modules: Collection[type[nn.Module] | str] = (),
) -> dict[nn.Module, Scope]:
    """Return a scope for the model itself, every leaf, every cover, and every other module that owns a parameter.

    Args:
        module: the model.
        manages: whether a tensor is a managed parameter.
        chunk_of: the chunk of a managed parameter.
        leaf_modules: classes, or paths in the model, of modules that are one scope with all modules within them.

    Raises:
        ValueError: the model has no such leaf, or it is a container that is not called.
    """
    named = dict(module.named_modules())
    leaves = _find_leaves(named, leaf_modules)
    params: dict[str, list[nn.Parameter]] = {}
    for name, child in named.items():
        owner = next((leaf for leaf in leaves if name == leaf or name.startswith(f"{leaf}." if leaf else "")), name)
        params.setdefault(owner, []).extend(_owned(child, manages))
    owners = Counter(param for owned in params.values() for param in dict.fromkeys(owned))
    scopes: dict[nn.Module, Scope] = {}
    for name, owned in params.items():
        if not owned and name:
            continue
        child = named[name]
        shared = any(owners[param] > 1 for param in owned if param.requires_grad)
        scopes[child] = Scope(
            index=len(scopes),
            name=name,
            is_root=child is module,
            params=tuple(dict.fromkeys(owned)),
            value_in_backward=not _is_plain_embedding(child),
            shares=shared and _is_plain(child, nn.Linear),
            is_leaf=name in leaves,
            is_simple=next(child.children(), None) is None,
        )
    _add_covers(module, scopes, chunk_of)
    return scopes


def _add_covers(
    module: nn.Module, scopes: dict[nn.Module, Scope], chunk_of: Callable[[nn.Parameter], Hashable]
) -> None:
    """Let the outermost modules whose parameters all lie in one chunk be scopes of all of them. [Note: Covers]."""
    within: dict[nn.Module, tuple[list[Scope], set[Hashable]]] = {}

    def look(child: nn.Module) -> tuple[list[Scope], set[Hashable]]:
        if child not in within:
            own = scopes.get(child)
            found = [] if own is None or not own.params else [own]
            chunks = {chunk_of(param) for scope in found for param in scope.params}
            for part in () if own is not None and own.is_leaf else child.children():
                inner, others = look(part)
                found += inner
                chunks |= others
            within[child] = (found, chunks)
        return within[child]

    def cover(child: nn.Module, name: str) -> None:
        members, chunks = look(child)
        own = scopes.get(child)
        if own is not None and own.is_leaf:
            return
        if len(chunks) > 1 or len(members) < 2 or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            for key, part in child.named_children():
                cover(part, f"{name}.{key}" if name else key)
            return
        if own is None:
            own = scopes[child] = Scope(len(scopes), name, False, (), value_in_backward=False, shares=False)
        own.take_in([scope for scope in members if scope is not own])

    cover(module, "")


def _find_leaves(named: Mapping[str, nn.Module], leaf_modules: Collection[type[nn.Module] | str]) -> list[str]:
    """Return the paths of the leaves, outer ones first."""
    paths = [path for path in leaf_modules if isinstance(path, str)]
    classes = tuple(cls for cls in leaf_modules if not isinstance(cls, str))
    found = [name for name, child in named.items() if name in paths or isinstance(child, classes)]
    missing = [path for path in paths if path not in named]
    missing += [cls.__name__ for cls in classes if not any(isinstance(child, cls) for child in named.values())]
    if missing:
        raise ValueError(f"leaf_modules names {missing}, but the model has no such modules.")
    for name in found:
        inner = any(name != other and name.startswith(f"{other}." if other else "") for other in found)
        if isinstance(named[name], (nn.ModuleList, nn.ModuleDict)) and not inner:
            raise ValueError(
                f"leaf_modules names {name!r}, a {type(named[name]).__name__}, which nobody calls. Name the module "
                "that calls what is in it."
            )
    return found


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
        self._scopes = tuple(scopes.values())
        names = {child: name for name, child in module.named_modules()}
        self._owners = [
            (child, name, [*map(id, child._parameters.values())])
            for child, name in names.items()
            if child in scopes or next(iter(_owned(child, manages)), None) is not None
        ]
        owners = {child for child, _, _ in self._owners}
        self._places = [
            (parent, key, child, names[child])
            for parent in module.modules()
            for key, child in parent._modules.items()
            if child is not None and child in owners
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
        for child, name, ids in self._owners:
            if [*map(id, child._parameters.values())] != ids:
                self._check_replaced(child, name, ids)
        for scope in self._scopes:
            for param, trains in zip(scope.params, scope.trains, strict=True):
                if param.requires_grad != trains:
                    self._check_thawed()
                    scope.settle_end()
                    break

    def _check_replaced(self, child: nn.Module, name: str, ids: Sequence[int]) -> None:
        for key, param in child._parameters.items():
            # Tensors that torch.func.functional_call puts there for one call are no parameters.
            if isinstance(param, nn.Parameter) and id(param) not in ids:
                raise ZeroDDPError(
                    f"Parameter {_join(name, key)!r} was replaced, or tied to another, after the model was wrapped. "
                    "Overwrite values with load_state_dict; change the model first, then wrap it."
                )

    def _check_thawed(self) -> None:
        for child, name, _ in self._owners:
            for key, param in child._parameters.items():
                if param is None or not param.requires_grad or param in self._trainable or not self._manages(param):
                    continue
                raise ZeroDDPError(
                    f"Parameter {_join(name, key)!r} was frozen when the model was wrapped, so nothing takes its "
                    "gradient. Wrap the model with it trainable; it may be frozen later, and thawed again."
                )


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
