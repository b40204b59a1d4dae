"""The parts that a `Booster` assembles, for a training loop of one's own."""

from gemini_booster._gemini_ddp import GeminiDDP
from gemini_booster._optimizer import GeminiAdamOptimizer, GeminiOptimizer

__all__ = ["GeminiAdamOptimizer", "GeminiDDP", "GeminiOptimizer"]
