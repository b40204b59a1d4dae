"""What the training examples share: bytes of text as data, the loss, its exact mean over ranks, and sampling.

Nothing here knows of Gemini: it is what any training script over ``torch.distributed`` has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config

VOCABULARY = 256  # one token for each value of a byte
VALIDATION_WINDOWS = 128


class Windows(Dataset[Tensor]):
    """Windows of equal length over a text, each an int64 tensor of shape ``(length,)``.

    Args:
        text: the bytes.
        length: bytes in a window.
        stride: bytes from the start of one window to the start of the next.
    """

    def __init__(self, text: bytes, length: int, stride: int) -> None:
        if len(text) < length:
            raise ValueError(
                f"The text has {len(text)} bytes, a window {length}. Give more text or a smaller --seq-len."
            )
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length
        self.stride = stride

    def __len__(self) -> int:
        """Return the number of whole windows."""
        return (self.text.numel() - self.length) // self.stride + 1

    def __getitem__(self, index: int) -> Tensor:
        """Return one window."""
        return self.text[index * self.stride : index * self.stride + self.length].long()


def read_text(path: Path | None) -> tuple[bytes, bytes]:
    """Return the first nine tenths of a text for training and the last tenth for validation.

    Args:
        path: a file, or None for the help texts that come with Python.
    """
    text = "\n".join(topics[name] for name in sorted(topics)).encode() if path is None else path.read_bytes()
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def gpt2_config(*, width: int, layers: int, heads: int, length: int) -> GPT2Config:
    """Return the configuration of a byte-level GPT-2 without dropout."""
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,  # the byte 0 does not occur in text
        eos_token_id=0,
        pad_token_id=0,
    )


def next_byte_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of each next byte, in nats.

    Args:
        logits: shape ``(windows, length, 256)``.
        batch: shape ``(windows, length)``.
    """
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())


def learning_rate_factor(step: int, *, steps: int) -> float:
    """Rise linearly over the first tenth of the steps, then fall along a cosine to a tenth."""
    warmup = max(1, steps // 10)
    return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


def endless(dataloader: DataLoader[Tensor]) -> Iterator[Tensor]:
    """Yield batches for ever, in another order in each epoch."""
    for epoch in itertools.count():
        if isinstance(dataloader.sampler, DistributedSampler):
            dataloader.sampler.set_epoch(epoch)
        yield from dataloader


@torch.no_grad()
def validation_loss(
    model: nn.Module, windows: Windows, *, batch_size: int, device: torch.device, rank: int, world_size: int
) -> float:
    """Return the loss per byte over fixed windows; every window counts once, whatever the world size.

    All ranks call it together. A rank that runs out of windows repeats the last one and gives it no weight: a
    sharded model needs every rank in every forward.

    Args:
        model: maps ``(windows, length)`` to an output with ``logits``.
        windows: the validation text; of a long one, its first windows.
        batch_size: windows in a forward.
        device: where the model computes.
        rank: which part of the windows is this rank's.
        world_size: number of parts.
    """
    count = min(len(windows), VALIDATION_WINDOWS)
    share = math.ceil(count / world_size)
    total = torch.zeros((), dtype=torch.float64)
    model.eval()
    for start in range(0, share, batch_size):
        indices = [rank * share + i for i in range(start, min(start + batch_size, share))]
        batch = torch.stack([windows[min(index, count - 1)] for index in indices]).to(device)
        logits = model(input_ids=batch, use_cache=False).logits
        for index, row, window in zip(indices, logits, batch, strict=True):
            if index < count:
                total += next_byte_loss(row[None], window[None]).cpu()
    model.train()
    if world_size > 1:
        total = total.to(device)
        dist.all_reduce(total)
    return total.item() / count


def decode(tokens: Tensor) -> str:
    """Return generated tokens, shape ``(length,)``, as text."""
    return bytes(tokens.tolist()).decode(errors="replace")
