"""All published measurements in one run: one table, and every row that could not be reproduced, with its reason.

    python benchmarks/published [--rows]

Transformers' rows need transformers; CNN rows need torchvision; timm's brackets need timm. What is missing is said.
"""

from __future__ import annotations

import argparse

import liger
import timm_brackets
import xmem
from table import summary


def main() -> None:
    """Run everything, print the table."""
    parser = argparse.ArgumentParser(prog="python benchmarks/published", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="also print every row as it is predicted")
    options = parser.parse_args()
    operators, others = liger.run_all(liger.rows(), liger.print_result if options.rows else None)
    runs, missing = xmem.run_all(xmem.all_rows(), xmem.print_result if options.rows else None)
    verdicts, unknown = timm_brackets.run_all(
        timm_brackets.rows(), timm_brackets.print_verdict if options.rows else None
    )
    xmem.print_summary(runs)
    seconds = sum(result.seconds for result in operators) / max(1, len(operators))
    summary("Liger-Kernel's operators", {"vram_guard": [r.error for r in operators]}, None, {"vram_guard": seconds})
    timm_brackets.print_summary(verdicts)
    for line in (*missing, *others, *unknown):
        print(f"not reproduced: {line}")


if __name__ == "__main__":
    main()
