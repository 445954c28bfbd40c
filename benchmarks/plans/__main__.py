"""Plans for large models on small budgets, compared with halving the batch until it fits.

    python -m benchmarks.plans [--json FILE] [--only WORD ...] [--budgets AMOUNT ...] [--gpu NAME] [--out DIR]

Prints the table and writes the pages DIR/en/plans.md and DIR/zh_cn/plans.md (DIR is the repository's ``docs`` unless
told otherwise). Each training is planned in a worker of its own, built symbolically: it takes no GPU, no weights and
no download, and host memory only for the trace. Seconds exclude imports; "processor" is processor time, which other
work on the machine hardly changes.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.environment import environment
from benchmarks.harness.pages import DOCS, GIB
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import WORKLOADS
from benchmarks.plans.compare import planned
from benchmarks.plans.pages import write_pages

TRAININGS = ("gpt2-medium", "vit-large", "unet", "cogvideox")
BUDGETS = ["8GiB", "12GiB", "16GiB", "24GiB", "40GiB", "80GiB"]
#: One card for all budgets, so that only the budget differs from row to row.
GPU = "A100 80GB"


def main(arguments: list[str] | None = None) -> int:
    """Plan everything, print and write; the exit status is 1 where a training could not be planned for."""
    parser = arguments_of("benchmarks.plans", __doc__, only="trainings", json="everything")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, metavar="AMOUNT")
    parser.add_argument("--gpu", default=GPU, help="the card whose speed and kernels count (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args(arguments)
    names = chosen(TRAININGS, options.only)
    if not names:
        print(f"no training contains {' or '.join(options.only)}; there are {', '.join(TRAININGS)}", file=sys.stderr)
        return 2
    results = plan_everything(names, options.budgets, options.gpu)
    if options.json:
        write(results, options.json)
    print_tables(results)
    for page in write_pages(results, options.out):
        print(page)
    return int(bool(results.failed))


def plan_everything(names: list[str], budgets: list[str], gpu: str) -> Results:
    """Everything that the tables and the pages show."""
    results = Results(environment={**environment(), "planned_for": gpu})
    for name in names:
        missing = [package for package in WORKLOADS[name].needs if find_spec(package) is None]
        if missing:
            results.failed[name] = f"not installed: pip install {' '.join(missing)}"
            continue
        for budget in budgets:  # each in a process of its own, as a training plans once
            heard = ask(planned, name, [budget], gpu, limit=None)
            results.rows += [Row(**row) for row in heard.result or ()]
            if heard.error:
                print(heard.error, file=sys.stderr)
                results.failed[name] = heard.error.strip().splitlines()[-1]
                break
    return results


def print_tables(results: Results) -> None:
    """One table for each training."""
    for title, found in results.by_source():
        print(f"\n{title}: {found[0].details['as_written'] / GIB:.2f} GiB as written")
        cost = f"{'planned in':>12}{'processor':>11}{'traces':>8}"
        print(f"  {'budget':>8}{'peak GiB':>10}{'step time':>11}{cost}  {'halved':<16} plan")
        for row in found:
            slowdown, half = row.details["slowdown"], row.details["halving"]
            time = f"x {slowdown:.2f}" if row.fits and slowdown is not None else "-"
            seconds, used = f"{row.seconds:.1f} s", f"{row.details['processor']:.1f} s"
            traces, peak = row.details["traces"], f"{(row.predicted or 0) / GIB:.2f}"
            halved = "fails" if half is None else f"{half['batch_size']} (x {half['slowdown']:.2f})"
            print(
                f"  {row.name:>8}{peak:>10}{time:>11}{seconds:>12}{used:>11}{traces:>8}"
                f"  {halved:<16} {row.details['plan']}"
            )
    for name, why in results.failed.items():
        print(f"\n{name}: {why}")


if __name__ == "__main__":
    raise SystemExit(main())
