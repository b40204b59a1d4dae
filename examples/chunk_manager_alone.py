"""Run a model whose weights do not fit on the device: torch and gemini_chunk, nothing else of ours.

One rank:   python examples/chunk_manager_alone.py
Two ranks:  torchrun --standalone --nproc-per-node 2 examples/chunk_manager_alone.py

Each layer is one chunk. Its shard, this rank's part of it, rests on the host; the whole chunk is on the device
only while its layer computes and while the layer before does, so that its bytes are on their way in time. The
device tier enforces its limit by its own account, so this runs the same on a machine without an accelerator.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_chunk import ChunkManager, TierFullError, device_tier, host_tier

WIDTH = 512
LAYERS = 16


def main() -> None:
    """Compare the result with and without chunks, and the bytes that each needs."""
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group()
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    inputs = torch.randn(8, WIDTH)
    layer_numel = sum(parameter.numel() for parameter in layers[0].parameters())
    layer_bytes = layer_numel * torch.float32.itemsize

    with torch.no_grad():
        expected = inputs
        for layer in layers:
            expected = layer(expected)

    manager = ChunkManager(device=device_tier("cpu", capacity=2 * layer_bytes), host=host_tier())
    for index, layer in enumerate(layers):
        named = [(f"layers.{index}.{name}", parameter) for name, parameter in layer.named_parameters()]
        manager.register(named, layer_numel, rest="host", trainable=False)
    chunks = manager.chunks

    with torch.no_grad():
        result: Tensor = inputs
        for index, (layer, chunk) in enumerate(zip(layers, chunks, strict=True)):
            manager.gather(chunk)
            if index + 1 < LAYERS:
                manager.start_gather(chunks[index + 1])
            result = layer(result)
            manager.release(chunk)
    assert torch.equal(result, expected)

    if rank == 0:
        usage = manager.memory_usage()
        print(manager.describe())
        print(f"all layers:         {LAYERS * layer_bytes:>10,} bytes")
        print(f"device, at most:    {usage['device']['peak']:>10,} bytes of {usage['device']['capacity']:,}")
        print(f"host, on this rank: {usage['host']['used']:>10,} bytes")

    for chunk in chunks[:2]:
        manager.gather(chunk)
    try:
        manager.gather(chunks[2])  # on every rank alike: each tier refuses before anything is sent
    except TierFullError as error:
        if rank == 0:
            print(f"a third chunk at once: {error}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
