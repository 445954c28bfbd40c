"""Step times that the GPU suite measured, held against the cost model: rows, and how many pairs it ranks right.

    python -m benchmarks.step_time_gpu [FOLDER ...] [--only WORD ...] [--write]

A FOLDER holds a ``results.json`` of ``benchmarks.gpu.measure``; without any, all of ``benchmarks/gpu/results``.
``--write`` puts the tables of each GPU into ``docs/*/cost-model.md``. Nothing is fitted to the rows. Results without
``batch_seconds`` are of updates that made their batch on the CPU and copied it: rows with a large batch are listed and
not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.gpu.cases import Case, allow_tf32
from benchmarks.gpu.compare import OWN_RESULTS
from benchmarks.gpu.records import RESULTS, Measured, read_results
from benchmarks.harness.command import arguments_of, is_chosen
from benchmarks.harness.pages import DOCS, table
from benchmarks.harness.workers import ask
from benchmarks.step_time_mpt import NEAR
from vram_guard import trace
from vram_guard.budget.catalogue import find_gpu
from vram_guard.plan.step_time import recompute_seconds, step_seconds

PAGE = "cost-model.md"
#: Before the tables of a GPU, whose name is the first word that NVIDIA gives it; and behind them.
BEGIN, END = "<!-- table: step times on the {gpu} -->", "<!-- end -->"

#: Bytes of a batch from which on making it counts as part of the time that was measured: pageable memory is copied at
#: some GB/s, and filled more slowly where its pages are new, so that a batch of this size takes about a millisecond.
LARGE_BATCH = 2**20

HEADS = {
    "en": (
        ("case", "measured ms", "model ms", "model / measured", "GPU", "host", "also measured"),
        ("pairs", "ranked right"),
        (
            "of one network, seconds of a sample",
            "of two networks, seconds of a step",
            "measured at least 10% apart",
            ", ",
        ),
        {"batch": "batch", "recorder": "recorder"},
        "with the recorder's rows: ",
    ),
    "zh_cn": (
        ("用例", "实测毫秒", "模型毫秒", "模型 / 实测", "GPU", "主机", "还测到"),
        ("成对比较", "次序正确"),
        ("同一网络，每个样本的秒数", "两个网络，每步的秒数", "实测相差 10% 以上", "，"),
        {"batch": "批次", "recorder": "记录器"},
        "连同带记录器的行：",
    ),
}


@dataclass(frozen=True)
class Row:
    """One measured case and what the model says of it. Seconds of one update."""

    case: Case
    batch_size: int
    measured: float
    beside: tuple[str, ...]
    """What the measured time contains beside the step: "batch", "recorder"."""
    predicted: float = 0.0
    device: float = 0.0
    host: float = 0.0
    """The two sums of which the longer one is predicted: the device's, and the host's that starts everything."""

    @property
    def samples(self) -> int:
        """Of one update."""
        return self.batch_size * self.case.accumulate


Pair = tuple[Row, Row]


def measured_rows(measured: Iterable[Measured], words: Sequence[str] = ()) -> Iterator[Row]:
    """The cases whose updates were timed, each with the median."""
    for one in measured:
        if one.update_seconds and is_chosen(one.case.name, words):
            yield Row(one.case, one.batch_size, median(one.update_seconds), beside_step(one))


def beside_step(measured: Measured) -> tuple[str, ...]:
    """What the seconds of updates contain that no training step has; see ``Measured.batch_seconds``."""
    if measured.batch_seconds:
        return ()
    batch = measured.case.step().batch(measured.batch_size)
    size = sum(leaf.nbytes for leaf in pytree.tree_leaves(batch))
    return (*(["batch"] if size > LARGE_BATCH else []), *(["recorder"] if measured.case.history else []))


def predicted_seconds(case: Case, batch_size: int, gpu: str, multiprocessors: int | None) -> list[float]:
    """In a worker, whose switches for TF32 are its own: the seconds of a step, the device's and the host's.

    Those of checkpointed modules are added to a step that has none, as plans are compared: a trace does not show what
    the host does besides operators.
    """
    allow_tf32(case.tf32)
    card, step = find_gpu(gpu), case.step()
    blocks, keeps = step.recipe.checkpoint, step.recipe.checkpoint_keeps
    step = replace(step, recipe=step.recipe.with_(checkpoint=(), checkpoint_keeps=()))
    timeline = trace(step, compute_capability=card.compute_capability, multiprocessors=multiprocessors)
    time = step_seconds(timeline, batch_size, card, micro_batches=case.accumulate)
    work = timeline.exact(batch_size).work
    time += recompute_seconds(work, blocks, batch_size, card, keeps=keeps, micro_batches=case.accumulate)
    return [time.seconds, time.device, time.dispatch]


def with_prediction(row: Row, gpu: str, multiprocessors: int | None) -> Row:
    """The row with the model's seconds."""
    found = ask(predicted_seconds, row.case, row.batch_size, gpu, multiprocessors, limit=None).checked()
    seconds, device, host = found
    return Row(row.case, row.batch_size, row.measured, row.beside, seconds, device, host)


def pairs(rows: Iterable[Row], *, one_network: bool) -> list[Pair]:
    """Rows of one network that differ in seconds of a sample, or rows of two networks."""
    found = combinations(rows, 2)
    return [pair for pair in found if (pair[0].case.network == pair[1].case.network) == one_network]


def ranked_right(one: Row, other: Row) -> bool:
    """True if the model puts two rows in the order in which they were measured."""
    (first, ours), (second, theirs) = _compared(one, other)
    return (first < second) == (ours < theirs)


def is_near(one: Row, other: Row) -> bool:
    """True if two rows were measured at nearly the same speed."""
    (first, _), (second, _) = _compared(one, other)
    return abs(first - second) < NEAR * max(first, second)


def _compared(one: Row, other: Row) -> Iterator[tuple[float, float]]:
    """Measured and modelled seconds of both: of a sample within one network, of a step otherwise."""
    same = one.case.network == other.case.network
    for row in (one, other):
        count = row.samples if same else 1
        yield row.measured / count, row.predicted / count


def lines(rows: Sequence[Row], marks: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """The cells of the table of rows."""
    for row in rows:
        cells = (row.measured, row.predicted, row.predicted / row.measured, row.device, row.host)
        measured, predicted, ratio, device, host = cells
        yield (
            row.case.name,  # the batch size is in it
            *(f"{1000 * seconds:.1f}" for seconds in (measured, predicted)),
            f"{ratio:.2f}",
            *(f"{1000 * seconds:.1f}" for seconds in (device, host)),
            ", ".join(marks[mark] for mark in row.beside),
        )


def ranked(rows: Sequence[Row], language: str) -> Iterator[tuple[str, str]]:
    """The cells of the table of pairs: of rows that measured the step alone, and with those of the recorder."""
    (within, across, apart, comma), also = HEADS[language][2], HEADS[language][4]
    for title, chosen in (
        ("", [row for row in rows if not row.beside]),
        (also, [row for row in rows if "batch" not in row.beside]),
    ):
        for name, found in ((within, pairs(chosen, one_network=True)), (across, pairs(chosen, one_network=False))):
            far = [pair for pair in found if not is_near(*pair)]
            yield f"{title}{name}", _share(found)
            yield f"{title}{name}{comma}{apart}", _share(far)


def _share(found: Sequence[Pair]) -> str:
    return f"{sum(ranked_right(*pair) for pair in found)} / {len(found)}"


def section(rows: Sequence[Row], language: str) -> str:
    """Both tables in Markdown."""
    head, of_pairs, _titles, marks, _also = HEADS[language]
    return "\n\n".join((table(head, lines(rows, marks)), table(of_pairs, ranked(rows, language))))


def write(rows: Sequence[Row], gpu: str, docs: Path = DOCS) -> None:
    """Put the tables of a GPU between its two marks of the page in each language.

    Raises:
        ValueError: a page has no marks for this GPU.
    """
    begin = BEGIN.format(gpu=gpu.partition(" ")[0])
    for language in HEADS:
        path = docs / language / PAGE
        before, found, rest = path.read_text(encoding="utf-8").partition(begin)
        if not found:
            raise ValueError(f"{path}: write {begin} and {END} where the tables belong")
        _, _, after = rest.partition(END)
        path.write_text(f"{before}{begin}\n\n{section(rows, language)}\n\n{END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Print every row, the share of pairs that are ranked right, and those that are not."""
    parser = arguments_of("benchmarks.step_time_gpu", __doc__, only="cases")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/*/cost-model.md")
    options: Any = parser.parse_args(arguments)
    for folder in options.folders or sorted(path.parent for path in OWN_RESULTS.glob(f"*/{RESULTS}")):
        results = read_results(folder / RESULTS)
        machine = results.machine
        gpu = machine.gpu.removeprefix("NVIDIA ")
        print(f"{machine.gpu}, torch {machine.torch}; predicted with torch {torch.__version__}")
        rows: list[Row] = []
        for row in measured_rows(results.measured, options.only):
            rows.append(with_prediction(row, gpu, machine.multiprocessors or None))
            name, *cells = next(lines([rows[-1]], HEADS["en"][3]))
            print(f"{name:55}", *(f"{cell:>9}" for cell in cells), flush=True)
        _tell_pairs(rows)
        if options.write:
            write(rows, gpu)


def _tell_pairs(rows: Sequence[Row]) -> None:
    for name, share in ranked(rows, "en"):
        print(f"{name}: {share}")
    for one_network in (True, False):
        for one, other in pairs([row for row in rows if "batch" not in row.beside], one_network=one_network):
            if not ranked_right(one, other) and not is_near(one, other):
                print(f"  wrong: {one.case.name} and {other.case.name}")


if __name__ == "__main__":
    main()
