"""The benchmarks, by their names: python -m benchmarks NAME [options]; --help after a name lists them."""

from __future__ import annotations

import sys
from importlib import import_module

#: Name -> its module, and what it does.
COMMANDS = {
    "speed": ("speed", "seconds of a trace and a plan"),
    "peers": ("peers", "error and seconds beside other estimators"),
    "gpu-measure": ("gpu.measure", "train the suite on this machine's GPU and record what it took"),
    "gpu-compare": ("gpu.compare", "predict what was recorded, and replay allocator histories"),
    "gpu-operators": ("gpu.operators.command", "the requests of single operators: predict what was measured"),
    "margin": ("gpu.margin", "the safety margin that follows from predictions and measurements"),
    "published": ("published.command", "predict what others measured and published"),
    "recorded": ("recorded.command", "replay and predict allocator histories that others recorded"),
    "sharded": ("sharded.command", "predict what others measured on several GPUs"),
}


def main(arguments: list[str]) -> int:
    """Run one benchmark; the exit status is its own, or 2 where there is none of that name."""
    name, *rest = arguments or [""]
    if name in COMMANDS:
        status: int = import_module(f"benchmarks.{COMMANDS[name][0]}").main(rest)
        return status
    print(__doc__, *(f"  {name:14} {what}" for name, (_, what) in COMMANDS.items()), sep="\n", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
