"""The public surface: a change to it must be made here too."""

from __future__ import annotations

import inspect

import gemini_lazy

SIGNATURES = {
    "LazyInitContext": "(*, default_device: 'torch.device | str | None' = None) -> 'None'",
    "LazyInitContext.materialize": (
        "(module: 'nn.Module', *, skip: 'Iterable[Tensor]' = (), verbose: 'bool' = False) -> 'nn.Module'"
    ),
    "LoadReport": "(missing: 'tuple[str, ...]', unexpected: 'tuple[str, ...]') -> None",
    "forget": "(tensor: 'Tensor') -> 'None'",
    "is_lazy": "(tensor: 'Tensor') -> 'bool'",
    "load_pretrained": (
        "(module: 'nn.Module', source: 'str | os.PathLike[str]', *, strict: 'bool' = True) -> 'LoadReport'"
    ),
    "materialize": "(tensor: 'Tensor') -> 'Tensor'",
    "materialize_value": "(tensor: 'Tensor') -> 'Tensor'",
    "read_slice": "(tensor: 'Tensor', start: 'int', stop: 'int') -> 'Tensor'",
}


def test_public_names_and_signatures_are_as_stated() -> None:
    names = {name.partition(".")[0] for name in SIGNATURES} | {"LazyError", "__version__"}
    assert set(gemini_lazy.__all__) == names
    assert gemini_lazy.__all__ == sorted(gemini_lazy.__all__)
    assert issubclass(gemini_lazy.LazyError, RuntimeError)
    for path, signature in SIGNATURES.items():
        value: object = gemini_lazy
        for part in path.split("."):
            value = getattr(value, part)
        assert callable(value)
        assert str(inspect.signature(value)) == signature, path
