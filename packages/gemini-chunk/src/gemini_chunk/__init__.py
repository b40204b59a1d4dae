"""Chunk-based parameter memory: contiguous shards in device, host and disk tiers, gathered on demand.

`ChunkManager` packs tensors into chunks, shards each over a process group and re-points the tensors while their chunk
is gathered or released. `Tier` is a place for bytes with an account and a capacity.
"""

from importlib.metadata import version

from gemini_chunk._chunk import Chunk
from gemini_chunk._collectives import Collectives, Handle, LocalCollectives, ProcessGroupCollectives
from gemini_chunk._copying import BackgroundCopier, Copier
from gemini_chunk._errors import ChunkError, ChunkFullError, TensorStateError, TierFullError
from gemini_chunk._layout import ShardSlice
from gemini_chunk._manager import ChunkManager
from gemini_chunk._reduction import BufferPool
from gemini_chunk._states import TensorInfo, TensorState
from gemini_chunk._synchronise import Synchronise
from gemini_chunk._tiers import Tier, TierName, device_tier, disk_tier, host_tier

__all__ = [
    "BackgroundCopier",
    "BufferPool",
    "Chunk",
    "ChunkError",
    "ChunkFullError",
    "ChunkManager",
    "Collectives",
    "Copier",
    "Handle",
    "LocalCollectives",
    "ProcessGroupCollectives",
    "ShardSlice",
    "Synchronise",
    "TensorInfo",
    "TensorState",
    "TensorStateError",
    "Tier",
    "TierFullError",
    "TierName",
    "__version__",
    "device_tier",
    "disk_tier",
    "host_tier",
]

__version__ = version("gemini-chunk")
