"""Deferred initialisation for PyTorch: build a model without its memory, materialise it bit for bit."""

from importlib.metadata import version

from gemini_lazy._context import LazyInitContext
from gemini_lazy._placeholders import forget, is_lazy, materialize, materialize_value
from gemini_lazy._pretrained import LoadReport, load_pretrained, read_slice
from gemini_lazy._tape import LazyError

__all__ = [
    "LazyError",
    "LazyInitContext",
    "LoadReport",
    "__version__",
    "forget",
    "is_lazy",
    "load_pretrained",
    "materialize",
    "materialize_value",
    "read_slice",
]

__version__ = version("gemini-lazy")
