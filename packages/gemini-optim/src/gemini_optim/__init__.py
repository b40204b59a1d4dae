"""Optimizers over flat fp32 shards: HybridAdam, dynamic loss scaling, exact clipping, ZeroOptimizer.

``HybridAdam``, ``CPUAdam`` and ``FusedAdam`` are ``torch.optim.Optimizer`` for any module. ``ZeroOptimizer`` runs any
element-wise optimizer over a model that is sharded over ranks; ``gemini_optim.interfaces`` says what it asks of that
model, and ``gemini_optim.testing`` has a small one.
"""

from importlib.metadata import version

from gemini_optim._adam import CPUAdam, FusedAdam, HybridAdam
from gemini_optim._errors import ShardLayoutError, UnfinishedStepError
from gemini_optim._scaler import DynamicLossScaler
from gemini_optim._zero import ZeroOptimizer

__all__ = [
    "CPUAdam",
    "DynamicLossScaler",
    "FusedAdam",
    "HybridAdam",
    "ShardLayoutError",
    "UnfinishedStepError",
    "ZeroOptimizer",
    "__version__",
]

__version__ = version("gemini-optim")
