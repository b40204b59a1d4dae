"""Gemini: ZeRO data parallelism with chunk-based, heterogeneous memory management for PyTorch.

`Booster` with a `GeminiPlugin` wraps an unmodified model and its optimizer; `gemini_booster.zero` has the parts that it
assembles, for a training loop of one's own.
"""

from importlib.metadata import version

from gemini_booster._booster import Booster
from gemini_booster._launch import launch_from_torch
from gemini_booster._plugin import GeminiPlugin

__all__ = ["Booster", "GeminiPlugin", "__version__", "launch_from_torch"]

__version__ = version("gemini-booster")
