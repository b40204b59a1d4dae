"""Run a transformers model whose weights do not fit on the device: torch, transformers and gemini_chunk, no more.

One rank:   python examples/chunk_manager_alone.py
Two ranks:  torchrun --standalone --nproc-per-node 2 examples/chunk_manager_alone.py

The weights rest on disk, each rank's part of them in its own memory-mapped file. Every module with parameters of its
own gathers their chunks before it runs and releases them afterwards; the first pass notes the order of use, and the
second has the next chunk on its way while a module computes. The device tier enforces its limit by its own account, so
this runs the same on a machine without an accelerator. The output is that of the plain model, bit for bit.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from gemini_chunk import Chunk, ChunkManager, TierFullError, device_tier, disk_tier

WIDTH = 128
LAYERS = 16
CHUNK_NUMEL = 4 * WIDTH * WIDTH + 4 * WIDTH  # the largest linear layer of a block, with its bias
RESIDENT = 2  # chunks on the device at a time: what computes, and what comes next


class Streamer:
    """Keeps the chunks of the modules that run, and one ahead, on the device.

    Args:
        module: its parameters are managed already.
        manager: holds them.
    """

    def __init__(self, module: nn.Module, manager: ChunkManager) -> None:
        self._manager = manager
        self._order: list[Chunk] = []
        self._position = 0
        self._records = True
        for child in module.modules():
            params = [param for param in child.parameters(recurse=False) if param in manager]
            if params:
                child.register_forward_pre_hook(lambda _, __, params=params: self._enter(params))
                child.register_forward_hook(lambda _, __, ___, params=params: self._leave(params), always_call=True)

    def _enter(self, params: list[nn.Parameter]) -> None:
        self._manager.begin_use(params)
        for chunk in dict.fromkeys(self._manager.chunk_of(param) for param in params):
            if self._records:
                self._order.append(chunk)
            self._position += 1
        following = self._order[self._position : self._position + 1]
        if self._manager.has_room(following):
            for chunk in following:
                self._manager.start_gather(chunk)

    def _leave(self, params: list[nn.Parameter]) -> None:
        self._manager.end_use(params, in_backward=False)
        following = self._order[self._position : self._position + 1]
        for chunk in dict.fromkeys(self._manager.chunk_of(param) for param in params):
            if chunk not in following:
                self._manager.release(chunk)

    def end_pass(self) -> None:
        """Start over; from now on the order of use is known."""
        self._records = False
        self._position = 0
        self._manager.rest()


def main() -> None:
    """Compare the result with and without chunks, and the bytes that each needs."""
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=CHUNK_NUMEL // WIDTH,
        n_positions=64,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        bos_token_id=0,  # GPT-2's own tokens lie outside this small vocabulary
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(config.vocab_size, (2, 48))

    with torch.no_grad():
        expected: Tensor = model(tokens).logits

    with tempfile.TemporaryDirectory() as folder:
        chunk_bytes = CHUNK_NUMEL * torch.float32.itemsize
        manager = ChunkManager(device=device_tier("cpu", capacity=RESIDENT * chunk_bytes), disk=disk_tier(folder))
        # A tied parameter (the head is the token embedding) is listed once and belongs to both modules.
        manager.register(list(model.named_parameters()), CHUNK_NUMEL, rest="disk", trainable=False)
        weights_bytes = sum(chunk.used_numel * torch.float32.itemsize for chunk in manager)
        assert weights_bytes >= 8 * RESIDENT * chunk_bytes

        streamer = Streamer(model, manager)
        with torch.no_grad():
            for _ in range(2):
                result: Tensor = model(tokens).logits
                streamer.end_pass()
                assert torch.equal(result, expected)

        usage = manager.memory_usage()
        if rank == 0:
            print(manager.describe())
            print(f"all weights:        {weights_bytes:>10,} bytes")
            print(f"device, at most:    {usage['device']['peak']:>10,} bytes of {usage['device']['capacity']:,}")
            print(f"disk, on this rank: {usage['disk']['used']:>10,} bytes")

        try:
            for chunk in manager.chunks:
                manager.gather(chunk)  # on every rank alike: each tier refuses before anything is sent
        except TierFullError as error:
            if rank == 0:
                print(f"a third chunk at once: {error}")
        manager.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
