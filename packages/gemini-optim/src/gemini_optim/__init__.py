"""Optimizers over flat fp32 shards: HybridAdam, dynamic loss scaling, exact clipping, ZeroOptimizer."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("gemini-optim")
