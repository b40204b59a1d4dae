"""Placement policies for chunked training: which chunk rests where, what to prefetch and what to release."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("gemini-placement")
