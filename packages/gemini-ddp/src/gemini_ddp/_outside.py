"""Finding parameters that are used outside the module that owns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

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


class OutsideUses(TorchFunctionMode):
    """Reports managed parameters that a torch function is about to read.

    Args:
        manages: whether a tensor is a managed parameter.
        use: called with each one; makes it valid if it is not.
    """

    def __init__(self, manages: Callable[[object], bool], use: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._manages = manages
        self._use = use

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _reads_values(func):
            for value in (*args, *(kwargs or {}).values()):
                for tensor in _tensors(value):
                    if self._manages(tensor):
                        self._use(tensor)
        return func(*args, **(kwargs or {}))


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
