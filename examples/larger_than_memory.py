"""Train a GPT-2 whose model states are several times larger than the memory that this process may have.

    export MALLOC_MMAP_THRESHOLD_=524288
    (ulimit -d 524288; python examples/larger_than_memory.py)

``ulimit -d`` is a real limit in KiB, set by the shell: beyond it the system refuses memory. The model states rest in
memory-mapped files, which do not count, and come in chunk by chunk. Plain PyTorch cannot even build this model under
the limit. The other line lets glibc return what is freed, rather than keep it for a next time.
"""

from __future__ import annotations

import argparse
import resource
import tempfile

import torch
from transformers import GPT2LMHeadModel

from _text import gpt2_config, next_byte_loss, read_text
from gemini_booster import Booster, GeminiPlugin
from gemini_lazy import LazyInitContext
from gemini_optim import HybridAdam

MIB = 2**20
BYTES_PER_PARAMETER = 16  # in fp32: the parameter, its gradient and the two moments of Adam


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seq-len", type=int, default=64, help="bytes in a window; a step takes one window")
    parser.add_argument("--directory", help="folder on a local disk for the model states (default: a temporary one)")
    args = parser.parse_args()
    if min(args.layers, args.steps) < 1 or args.width % 64 or args.width < 64 or args.seq_len < 2:
        parser.error("--layers and --steps must be at least 1, --seq-len 2, and --width a multiple of 64.")
    return args


def train(args: argparse.Namespace, directory: str) -> None:
    """Train for some steps, and say what the model states would take and where they were."""
    torch.manual_seed(0)
    with LazyInitContext():  # no memory yet: values are made one parameter at a time, straight into the files
        model = GPT2LMHeadModel(
            gpt2_config(width=args.width, layers=args.layers, heads=args.width // 64, length=args.seq_len)
        )
    layer_m = 12 * args.width**2 / MIB  # elements of a layer in units of 2**20
    plugin = GeminiPlugin(
        precision="fp32",
        disk_param_frac=1.0,
        disk_optim_frac=1.0,
        offload_directory=directory,
        hidden_dim=args.width,
        min_chunk_size_m=layer_m / 3,
        search_range_m=layer_m / 12,
    )
    numel = sum(param.numel() for param in model.parameters())
    states = BYTES_PER_PARAMETER * numel
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = "without a limit" if limit == resource.RLIM_INFINITY else f"{states / limit:.1f} times the limit"
    print(f"{numel / 1e6:.0f} million parameters, {states / MIB:,.0f} MiB of model states, {allowed}")

    booster = Booster(plugin=plugin)
    wrapped, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=3e-4))
    assert optimizer is not None
    text = torch.frombuffer(bytearray(read_text(None)[0]), dtype=torch.uint8)
    for step in range(args.steps):
        window = text[step * args.seq_len :][None, : args.seq_len].long()
        loss = next_byte_loss(wrapped(input_ids=window, use_cache=False).logits, window)
        booster.backward(loss, optimizer)
        optimizer.step()
        print(f"step {step + 1} of {args.steps}: loss {loss.item():.6f}", flush=True)
    for tier, usage in wrapped.memory_usage().items():
        print(f"{tier}: {(usage['peak'] or 0) / MIB:,.0f} MiB at the peak")


def main() -> None:
    """Run the example."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        train(args, directory)


if __name__ == "__main__":
    main()
