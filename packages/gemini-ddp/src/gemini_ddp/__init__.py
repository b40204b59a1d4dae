"""ZeRO data parallelism for unmodified PyTorch modules over any chunk store.

`ZeroDDP` wraps a module whose parameters lie in a store that satisfies `gemini_ddp.interfaces.ChunkStore`.
"""

from importlib.metadata import version

from gemini_ddp._errors import ZeroDDPError
from gemini_ddp._zero_ddp import ZeroDDP

__all__ = ["ZeroDDP", "ZeroDDPError", "__version__"]

__version__ = version("gemini-ddp")
