"""CPU seconds of a trace of the whole job (validation of 100 batches, saving, a third step) beside the step's own.

Both run in one process, in turn, after a first trace that is not counted: the fastest of ``--repeat`` runs of each. The
goal is a job that adds no more than the step's own trace again: a ratio of at most 2.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from benchmarks.harness.command import arguments_of
from benchmarks.harness.environment import environment
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import WORKLOADS
from vram_guard import Job, trace
from vram_guard.job import Evaluation, Saving


def main() -> None:
    """Measure and print."""
    parser = arguments_of("bench_job.py", __doc__, json="everything measured")
    parser.add_argument("--models", nargs="+", default=["gpt2", "resnet50", "llama7b"], choices=list(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=5, help="traces of each; the fastest counts")
    options = parser.parse_args()
    rows = [Row(**ask(measured, model, options.repeat, limit=None).checked()) for model in options.models]
    if options.json:
        write(Results(rows, environment={**environment(), "repeat": options.repeat}), options.json)
    print(f"{'model':<31}{'step s':>9}{'job s':>9}{'ratio':>8}{'step GiB':>10}{'job GiB':>10}")
    for row in rows:
        step, job = row.details["step"], row.details["job"]
        peaks = (row.details["step_reserved"] / 2**30, row.details["job_reserved"] / 2**30)
        print(f"{row.source:<31}{step:>9.2f}{job:>9.2f}{job / step:>7.2f}x{peaks[0]:>10.2f}{peaks[1]:>10.2f}")


def measured(model: str, repeat: int) -> dict[str, Any]:
    """In a worker: the step alone, and with its job."""
    workload = WORKLOADS[model]
    workload.prepare()
    step = workload.step
    validation = Evaluation(step.batch, step.loss, batch_size=workload.batch_size, batches=100, keeps="all")
    steps = {"step": step, "job": step.with_(job=Job.of(validation, Saving()))}
    found: dict[str, Any] = {}
    for count in range(repeat + 1):
        for name, one in steps.items():
            start = time.process_time()
            timeline = trace(one)
            seconds = time.process_time() - start
            if count:
                found[name] = min(seconds, found.get(name, seconds))
            else:
                found[f"{name}_reserved"] = timeline.at(workload.batch_size).peak_reserved
    return asdict(Row(workload.title, "job", None, found["job_reserved"], "", found["job"], details=found))


if __name__ == "__main__":
    main()
