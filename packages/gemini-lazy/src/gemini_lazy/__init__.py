"""Deferred initialisation for PyTorch: build a model without its memory, materialise it bit for bit."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("gemini-lazy")
