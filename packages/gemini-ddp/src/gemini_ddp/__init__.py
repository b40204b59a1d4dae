"""ZeRO data parallelism for unmodified PyTorch modules over any chunk store."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("gemini-ddp")
