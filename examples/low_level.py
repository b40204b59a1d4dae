"""The training of train_gpt.py without Booster and plugin: wrap the model and the optimizer yourself.

One rank:   python examples/low_level.py
Two ranks:  torchrun --standalone --nproc-per-node 2 examples/low_level.py
"""

from __future__ import annotations

import argparse
import functools
import itertools

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2LMHeadModel

from _text import (
    Windows,
    decode,
    endless,
    gpt2_config,
    learning_rate_factor,
    next_byte_loss,
    read_text,
    validation_loss,
)
from gemini_booster import launch_from_torch
from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_lazy import LazyInitContext

LENGTH = 128
BATCH_SIZE = 16


def main() -> None:
    """Train a small GPT-2 and let it write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    args = parser.parse_args()

    launch_from_torch(seed=1024)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    train_text, validation_text = read_text(None)
    windows = Windows(train_text, LENGTH, stride=LENGTH // 2)
    sampler = DistributedSampler[torch.Tensor](windows, shuffle=True, seed=1024)  # other windows on every rank
    dataloader = DataLoader(windows, BATCH_SIZE, sampler=sampler, drop_last=True)

    with LazyInitContext():
        plain = GPT2LMHeadModel(gpt2_config(width=128, layers=2, heads=4, length=LENGTH))
    model = GeminiDDP(plain, hidden_dim=128, min_chunk_size_m=0.0625, search_range_m=0.0625, precision=args.precision)
    optimizer = GeminiAdamOptimizer(model, lr=3e-3, max_norm=1.0, initial_scale=2**5)

    validation_windows = Windows(validation_text, LENGTH, stride=LENGTH)
    validate = functools.partial(
        validation_loss,
        windows=validation_windows,
        batch_size=BATCH_SIZE,
        device=device,
        rank=rank,
        world_size=world_size,
    )
    before = validate(model)
    for step, batch in enumerate(itertools.islice(endless(dataloader), args.steps)):
        for parameters in optimizer.param_groups:
            parameters["lr"] = 3e-3 * learning_rate_factor(step, steps=args.steps)
        batch = batch.to(device)
        loss = next_byte_loss(model(input_ids=batch, use_cache=False).logits, batch)
        optimizer.backward(loss)  # scales the loss in fp16, where loss.backward() would lose small gradients
        optimizer.step()
        optimizer.zero_grad()
    after = validate(model)

    prompt = torch.tensor([list(b"The ")], device=device)
    torch.manual_seed(1024)  # every rank draws the same bytes: a sharded model runs on all ranks together
    model.eval()
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=20, max_length=LENGTH)
    if rank == 0:
        print(f"validation loss: {before:.4f} nats per byte before, {after:.4f} after")
        print("generated text:", decode(tokens[0]), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
