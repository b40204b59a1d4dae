"""Placement policies for chunked training: which chunk rests where, what to prefetch and what to release."""

from importlib.metadata import version

from gemini_placement._auto import AutoPlacementPolicy
from gemini_placement._chunk_trace import ChunkAccess, ChunkTrace
from gemini_placement._placement import ChunkPlacement, Placement, PlacementError
from gemini_placement._plan import Plan, PlanStep
from gemini_placement._static import StaticPlacementPolicy
from gemini_placement._stats import AccessStats, MemStats
from gemini_placement.interfaces import Access, ChunkFacts, Phase, PlacementPolicy, TierName, Trace

__all__ = [
    "Access",
    "AccessStats",
    "AutoPlacementPolicy",
    "ChunkAccess",
    "ChunkFacts",
    "ChunkPlacement",
    "ChunkTrace",
    "MemStats",
    "Phase",
    "Placement",
    "PlacementError",
    "PlacementPolicy",
    "Plan",
    "PlanStep",
    "StaticPlacementPolicy",
    "TierName",
    "Trace",
    "__version__",
]

__version__ = version("gemini-placement")
