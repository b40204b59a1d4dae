"""Chunk-based parameter memory for PyTorch: contiguous shards in device, host and disk tiers, gathered on demand."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("gemini-chunk")
