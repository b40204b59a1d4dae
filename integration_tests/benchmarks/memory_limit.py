"""Train a GPT whose model states are nine times the memory that the system allows: ours, plain PyTorch, and FSDP2.

    PYTHONPATH=integration_tests/support:examples python integration_tests/benchmarks/memory_limit.py

Each case is a process of its own, limited from outside; `limited_memory` says how. The first one has no limit and
everything in memory: its losses are the ones to reach. It needs 5 GB of disk, and of memory for that first case.
"""

from __future__ import annotations

import argparse
import tempfile

from limited_memory import CASES, MIB, Shape, run_case


def main() -> None:
    """Run the cases one after the other and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--limit-mib", type=int, default=512)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="a folder on a local disk")
    args = parser.parse_args()
    shape = Shape(layers=args.layers, width=args.width)
    times = shape.states_bytes / (args.limit_mib * MIB)
    print(f"{shape.states_bytes / MIB:,.0f} MiB of model states, {times:.1f} times the limit of {args.limit_mib} MiB")
    for case in CASES:
        limit = None if case == "ours in memory" else args.limit_mib * MIB
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            outcome = run_case(case, shape, limit_bytes=limit, beyond_imports=False, directory=directory)
        losses = " ".join(f"{loss:.6f}" for loss in outcome.losses) or "no step"
        failure = f", then {outcome.error}" if outcome.error else ""
        print(f"{case}, {'no limit' if limit is None else 'limited'}: {losses}{failure}", flush=True)


if __name__ == "__main__":
    main()
