"""Compiled steps of whole models: what they take, CPU seconds of the answer, and whether a law covers a third size.

``make bench`` runs it without the law, which takes two more compilations of each model: with ``--law`` two smaller
sizes are compiled, and an affine timeline is made of these, as for uncompiled steps. It is held against the size of the
table, compiled by itself.
"""

from __future__ import annotations

import resource
from typing import Any

from benchmarks.harness.command import arguments_of
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import WORKLOADS
from vram_guard.simulate.compiled import Compiler
from vram_guard.simulate.tracing.run import run_step
from vram_guard.timeline import Timeline, merge_affine

#: Seconds that one compilation may take.
LIMIT = 600.0


def main() -> None:
    """Measure and print."""
    parser = arguments_of("bench_compiled.py", __doc__)
    parser.add_argument("--models", nargs="+", default=["gpt2", "resnet50", "unet"], choices=list(WORKLOADS))
    parser.add_argument("--law", action="store_true", help="also compile two smaller sizes")
    options = parser.parse_args()
    print(f"{'model, in bf16-mixed':<55}{'uncompiled GiB':>18}{'compiled GiB':>18}{'CPU s':>7}  law")
    for model in options.models:
        row: Any = ask(measured, model, options.law, limit=None).checked()
        peaks = "".join(f"{f'{a / 2**30:.2f} / {r / 2**30:.2f}':>18}" for a, r in (row["uncompiled"], row["compiled"]))
        title = WORKLOADS[model].title.removesuffix(f", {WORKLOADS[model].step.precision}")
        print(f"{title:<55}{peaks}{row['seconds']:>7.0f}  {row['law']}", flush=True)


def measured(model: str, law: bool) -> dict[str, Any]:
    """In a worker: one model."""
    workload = WORKLOADS[model]
    step, size = workload.step.with_(precision="bf16-mixed"), workload.batch_size

    def followed(asked: int) -> Timeline:
        return Compiler(lambda one: run_step(_compiled(step), one, (8, 0), compiled=True), LIMIT)(asked)

    uncompiled = run_step(step, size, (8, 0)).at(size)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    direct = followed(size)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = "not asked"
    if law:
        merged = merge_affine(followed(size // 4), followed(size // 2))
        if merged is None:
            said = "none"
        else:
            equal = merged.events == direct.events and merged.sizes(size) == direct.sizes(size)
            said = "holds" if equal else "breaks"
    found = direct.at(size)
    return {
        "uncompiled": (uncompiled.peak_allocated, uncompiled.peak_reserved),
        "compiled": (found.peak_allocated, found.peak_reserved),
        "seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "law": said,
    }


def _compiled(step: Any) -> Any:
    def model() -> Any:
        made = step.model()
        made.compile()
        return made

    return step.with_(model=model)


if __name__ == "__main__":
    main()
