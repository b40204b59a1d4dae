"""Chunk configuration search: tensor sizes in, an even packing with little waste out. Standard library only."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("gemini-search")
