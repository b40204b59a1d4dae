"""Train an unmodified GPT-2 of transformers on the bytes of a text, its model states sharded over all ranks.

One rank:   python examples/train_gpt.py
Two ranks:  torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --offload-optim-frac 1.0

On a machine with accelerators each rank takes one of them (NCCL), elsewhere ranks are processes on the CPU
(gloo). At the end the model writes some text, is saved as a Hugging Face folder, and loaded by transformers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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
from gemini_booster import Booster, GeminiPlugin, launch_from_torch
from gemini_lazy import LazyInitContext
from gemini_optim import HybridAdam
from gemini_placement import PlacementError


@dataclass(frozen=True)
class Size:
    """Shape of a model, a learning rate that suits it, and its least chunk size in 2**20 elements."""

    width: int
    layers: int
    heads: int
    lr: float
    chunk_m: float


SIZES = {
    "tiny": Size(width=128, layers=2, heads=4, lr=3e-3, chunk_m=0.0625),
    "small": Size(width=768, layers=12, heads=12, lr=6e-4, chunk_m=4),
    "medium": Size(width=1024, layers=24, heads=16, lr=3e-4, chunk_m=8),
    "xl": Size(width=1600, layers=48, heads=25, lr=2e-4, chunk_m=16),
}


def parse_arguments() -> tuple[argparse.Namespace, GeminiPlugin]:
    """Read the command line; what does not fit together ends the script with a sentence that says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per rank and step")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes in a window")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: by model)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--placement-policy", choices=["static", "auto"], default="static")
    parser.add_argument("--shard-param-frac", type=float, help="static: 1 (default) is ZeRO-3, 0 is ZeRO-2")
    parser.add_argument("--offload-optim-frac", type=float, help="static: optimizer states that rest on the host")
    parser.add_argument("--offload-param-frac", type=float, help="static: parameters that rest on the host")
    parser.add_argument("--checkpoint-activations", action="store_true", help="recompute activations in backward")
    parser.add_argument("--device-capacity", help="limit for model states on the device, as 800MiB or 12GiB")
    parser.add_argument("--host-capacity", help="limit for model states on the host")
    parser.add_argument("--seed", type=int, default=1024)
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to learn (default: Python's own help)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("out/train_gpt"), help="saved model")
    args = parser.parse_args()
    if args.steps < 1 or args.batch_size < 1 or args.seq_len < 2:
        parser.error("--steps and --batch-size must be at least 1, --seq-len at least 2.")
    if args.text is not None and not args.text.is_file():
        parser.error(f"--text {args.text} is not a file.")
    fractions = {
        "shard_param_frac": args.shard_param_frac,
        "offload_optim_frac": args.offload_optim_frac,
        "offload_param_frac": args.offload_param_frac,
    }
    given = {name: value for name, value in fractions.items() if value is not None}
    if args.placement_policy == "auto" and given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        parser.error(f"{options}: fractions are for --placement-policy static; auto finds its own by the capacities.")
    size = SIZES[args.model]
    args.lr = size.lr if args.lr is None else args.lr
    try:
        plugin = GeminiPlugin(
            precision=args.precision,
            placement_policy=args.placement_policy,
            device_capacity=args.device_capacity,
            host_capacity=args.host_capacity,
            hidden_dim=size.width,
            min_chunk_size_m=size.chunk_m,
            search_range_m=size.chunk_m,
            max_norm=1.0,
            initial_scale=2**5,
            **given,
        )
    except ValueError as error:
        raise SystemExit(f"train_gpt.py: {error}") from None
    return args, plugin


def tiers_in_use(usage: Mapping[str, Mapping[str, int | None]]) -> str:
    """Return the bytes of model states on this rank, by tier."""
    return ", ".join(f"{tier} {(numbers['used'] or 0) / 2**20:,.1f} MiB" for tier, numbers in usage.items())


def main() -> None:
    """Train, validate, generate, save, and load again."""
    args, plugin = parse_arguments()
    launch_from_torch(seed=args.seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)

    train_text, validation_text = read_text(args.text)
    try:
        windows = Windows(train_text, args.seq_len, stride=max(1, args.seq_len // 2))
        validation_windows = Windows(validation_text, args.seq_len, stride=args.seq_len)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    dataloader = plugin.prepare_dataloader(
        windows,
        batch_size=args.batch_size,
        shuffle=True,
        seed=args.seed,
        drop_last=True,
    )
    if len(dataloader) == 0:
        raise SystemExit(f"The text is too short for {world_size} ranks with --batch-size {args.batch_size}.")

    size = SIZES[args.model]
    config = gpt2_config(width=size.width, layers=size.layers, heads=size.heads, length=args.seq_len)
    with LazyInitContext():  # no memory is taken until boost() gives each rank its shards
        plain = GPT2LMHeadModel(config)
    if args.checkpoint_activations:
        plain.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    numel = sum(parameter.numel() for parameter in plain.parameters())
    adam = HybridAdam(plain.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(adam, functools.partial(learning_rate_factor, steps=args.steps))
    booster = Booster(plugin=plugin)
    try:
        model, optimizer, criterion, dataloader, scheduler = booster.boost(
            plain, adam, criterion=next_byte_loss, dataloader=dataloader, lr_scheduler=scheduler
        )
    except (ValueError, PlacementError) as error:  # settings that do not fit together, or do not fit the capacities
        raise SystemExit(f"train_gpt.py: {error}") from None
    validate = functools.partial(validation_loss, windows=validation_windows, batch_size=args.batch_size, device=device)
    before = validate(model, rank=rank, world_size=world_size)
    console.print(
        f"GPT-2 {args.model}: {numel:,} parameters, {world_size} ranks on {device}, {args.precision}, "
        f"{args.placement_policy} placement"
    )
    console.print(f"validation loss before: {before:.4f} nats per byte")

    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    start = time.perf_counter()
    with progress:
        task = progress.add_task("training", total=args.steps, state="")
        for step, batch in enumerate(itertools.islice(endless(dataloader), args.steps), start=1):
            batch = batch.to(device)
            loss = criterion(model(input_ids=batch, use_cache=False).logits, batch)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            speed = step * world_size * batch.numel() / (time.perf_counter() - start)
            state = f"loss {loss.item():.3f}, {speed:,.0f} tokens/s, {tiers_in_use(model.memory_usage())}"
            progress.update(task, advance=1, state=state)
            if progress.disable and step % max(1, args.steps // 10) == 0:
                console.print(f"step {step} of {args.steps}: {state}")  # a log file has no use for a bar

    after = validate(model, rank=rank, world_size=world_size)
    console.print(f"validation loss after: {after:.4f} nats per byte")

    prompt = torch.tensor([list(b"The ")], device=device)
    torch.manual_seed(args.seed)  # every rank draws the same bytes: a sharded model runs on all ranks together
    model.eval()
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=20, max_length=args.seq_len
    )
    console.print("generated text:", decode(tokens[0]), sep="\n", markup=False)

    booster.save_model(model, args.out, shard=True, use_safetensors=True)
    if rank == 0:
        loaded = GPT2LMHeadModel.from_pretrained(args.out).to(device)
        again = validate(loaded, rank=0, world_size=1)
        console.print(f"validation loss of {args.out} in plain transformers: {again:.4f} nats per byte")
        tolerance = 1e-4 if args.precision == "fp32" else 0.05  # 16-bit arithmetic rounds, the saved weights do not
        if abs(again - after) > tolerance:
            raise SystemExit(f"The loaded model differs by {abs(again - after):.6f}, more than {tolerance}.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
