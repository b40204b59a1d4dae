"""What all seven packages promise of their public names."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ["booster", "chunk", "ddp", "lazy", "optim", "placement", "search"]


def public_modules(package: ModuleType) -> list[str]:
    """Return a package and its modules whose names are not private."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name[0] != "_"]
    return [package.__name__, *(f"{package.__name__}.{name}" for name in names)]


MODULES = [name for each in PACKAGES for name in public_modules(importlib.import_module(f"gemini_{each}"))]
# Names that other people's scripts rely on.
RELIED_ON = {
    "gemini_booster": "Booster GeminiPlugin launch_from_torch",
    "gemini_booster.zero": "GeminiDDP GeminiOptimizer GeminiAdamOptimizer",
    "gemini_optim": "HybridAdam CPUAdam FusedAdam DynamicLossScaler ZeroOptimizer",
    "gemini_lazy": "LazyInitContext",
    "gemini_ddp": "ZeroDDP",
    "gemini_chunk": (
        "Chunk ChunkManager TensorState TensorInfo Tier device_tier host_tier disk_tier ChunkFullError "
        "TensorStateError TierFullError"
    ),
    "gemini_search": "search_chunk_configuration ChunkConfiguration",
    "gemini_placement": "StaticPlacementPolicy AutoPlacementPolicy MemStats",
}
# Signatures that were decided before us: by torch's modules and optimizers, and by the optimizers that users know.
DECIDED_BEFORE = {
    "CPUAdam.__init__",
    "FusedAdam.__init__",
    "HybridAdam.__init__",
    "ZeroDDP.named_buffers",
    "ZeroDDP.named_parameters",
    "GeminiDDP.zero_grad",
    "GeminiOptimizer.zero_grad",
    "ZeroDDP.zero_grad",
    "ZeroOptimizer.zero_grad",
    "GeminiDDP.forward",
    "ZeroDDP.forward",
    "ZeroDDP.state_dict",
    "GeminiDDP.load_state_dict",
    "ZeroDDP.load_state_dict",
    "ZeroOptimizer.add_param_group",
    "ZeroOptimizer.state_dict",
    "ZeroOptimizer.load_state_dict",
    "ZeroOptimizer.packed_param_groups",
}


def public_names(module: ModuleType) -> list[str]:
    names: list[str] = getattr(module, "__all__", [])
    return names or [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", "") == module.__name__
    ]


def public_functions(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions of a module, and the constructors and methods that its classes define themselves."""
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value) and value.__module__.startswith("gemini_"):
            protocol = bool(getattr(value, "_is_protocol", False))  # Python gives these a constructor
            for method, function in vars(value).items():
                function = getattr(function, "__func__", function)
                if isinstance(function, property):
                    assert function.fget is not None
                    function = function.fget
                if inspect.isfunction(function) and (method[0] != "_" or (method == "__init__" and not protocol)):
                    yield f"{name}.{method}", function


@pytest.mark.parametrize("name", RELIED_ON)
def test_names_that_others_rely_on_exist(name: str) -> None:
    assert set(RELIED_ON[name].split()) <= set(importlib.import_module(name).__all__)


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_everything_in_it_says_what_it_is(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    names = public_names(module)
    assert names
    if hasattr(module, "__all__"):
        assert names == sorted(names)
    for each in names:
        value = getattr(module, each)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, each
            assert not value.__doc__.startswith(f"{each}("), f"{each} has the docstring that dataclass made"
    assert [
        each for each, function in public_functions(module) if each[-8:] != "__init__" and not function.__doc__
    ] == []


@pytest.mark.parametrize("name", MODULES)
def test_no_public_signature_swallows_keywords_or_says_any(name: str) -> None:
    for each, function in public_functions(importlib.import_module(name)):
        if each in DECIDED_BEFORE:
            continue
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            assert parameter.kind is not parameter.VAR_KEYWORD, f"{each} takes **{parameter.name}"
            assert "Any" not in str(parameter.annotation), f"{each}: {parameter}"
            if parameter.name not in ("self", "cls"):
                assert parameter.annotation is not parameter.empty, f"{each}: {parameter.name} has no type"
        assert "Any" not in str(signature.return_annotation), f"{each} -> {signature.return_annotation}"


@pytest.mark.parametrize("name", MODULES)
def test_flags_are_keyword_only(name: str) -> None:
    for each, function in public_functions(importlib.import_module(name)):
        for parameter in inspect.signature(function).parameters.values():
            if isinstance(parameter.default, bool) and each not in DECIDED_BEFORE:
                assert parameter.kind is parameter.KEYWORD_ONLY, f"{each}: {parameter}"
