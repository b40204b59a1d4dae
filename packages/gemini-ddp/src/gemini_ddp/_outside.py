"""Finding parameters that are used outside the module that owns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from gemini_ddp._compiler import not_compiled

ReaderT = TypeVar("ReaderT")

# Property getters that read the values; all others (shape, dtype, device, ...) are facts that a placeholder knows, too.
_VALUE_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_FACTS = frozenset(
    {
        "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset", "get_device",
        "data_ptr", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned",
        "is_shared", "is_same_size", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
        "untyped_storage", "type", "__hash__", "__len__", "__repr__", "__set__", "__delete__", "__dir__",
        "result_type", "has_torch_function", "is_nonzero_static", "is_distributed",
    }
)  # fmt: skip


class ParameterReads(TorchFunctionMode):
    """Reports tensors whose values a torch function is about to read, and what it made of them.

    Args:
        before: called with each tensor; returns the reader who must know what was made of it, or None.
        after: called with the reader and the function's result.
    """

    def __init__(self, before: Callable[[Tensor], ReaderT | None], after: Callable[[ReaderT, object], None]) -> None:
        super().__init__()
        self._before = before
        self._after = after
        self._call = not_compiled(_call)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._call(self._before, self._after, func, args, kwargs or {})


def _call(
    before: Callable[[Tensor], ReaderT | None],
    after: Callable[[ReaderT, object], None],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    if not _reads_values(func):
        return func(*args, **kwargs)
    tensors = [tensor for value in (*args, *kwargs.values()) for tensor in _tensors(value)]
    readers = [reader for tensor in tensors if (reader := before(tensor)) is not None]
    result = func(*args, **kwargs)
    for reader in readers:
        after(reader, result)
    return result


def _reads_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", "") in _VALUE_PROPERTIES
    return name not in _FACTS


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield tensors as torch functions take them: bare, or in lists and tuples of any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
