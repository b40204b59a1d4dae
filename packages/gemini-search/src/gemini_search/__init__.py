"""Chunk configuration search: tensor sizes in, an even packing with little waste out. Standard library only."""

from importlib.metadata import version

from gemini_search._configuration import ChunkConfiguration, ChunkSpec, TensorSlot
from gemini_search._search import search_chunk_configuration

__all__ = ["ChunkConfiguration", "ChunkSpec", "TensorSlot", "__version__", "search_chunk_configuration"]

__version__ = version("gemini-search")
