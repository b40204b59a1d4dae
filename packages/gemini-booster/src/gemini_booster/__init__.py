"""Gemini: ZeRO data parallelism with chunk-based heterogeneous memory for PyTorch, assembled."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("gemini-booster")
