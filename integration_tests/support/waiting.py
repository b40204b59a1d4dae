"""A model whose compute takes a known time and leaves the processor alone, one chunk to a layer."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from gemini_booster.zero import GeminiDDP
from gemini_search import ChunkConfiguration, ChunkSpec, TensorSlot


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        time.sleep(wait_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.wait_s)
        return grads[0], None


class WaitingLayer(nn.Module):
    """Scales its input, and takes ``wait_s`` in forward and again in backward."""

    def __init__(self, numel: int, wait_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.9, 1.1, numel))
        self.wait_s = wait_s

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Waits.apply(x * self.weight, self.wait_s)  # type: ignore[no-untyped-call] # torch's is untyped
        return output


def waiting_chain(layers: int, numel: int, wait_s: float) -> nn.Sequential:
    """Return layers of ``numel`` elements."""
    return nn.Sequential(*(WaitingLayer(numel, wait_s) for _ in range(layers)))


def wrapped_chain(layers: int, numel: int, wait_s: float, world_size: int, **settings: Any) -> GeminiDDP:
    """Return the wrapped chain, one chunk to a layer."""
    padded = -(-numel // world_size) * world_size
    specs = tuple(ChunkSpec(numel=padded, tensors=(TensorSlot(f"{i}.weight", 0, numel),)) for i in range(layers))
    return GeminiDDP(
        waiting_chain(layers, numel, wait_s),
        precision="fp32",
        chunk_configuration=ChunkConfiguration(chunks=specs, chunk_numel=padded, world_size=world_size),
        **settings,
    )
