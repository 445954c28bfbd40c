"""Fill in the tables of docs/lab/accuracy.md from rows that were predicted.

    python -m benchmarks pages FILE [FILE ...] [--out DIR]

Each FILE is what ``published --json`` writes. A table whose rows are in no file stays as it is, with its date. That of
the margins comes from ``vram_guard/budget/margins.json``, which ``margin --write`` makes.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.margin import WRITTEN
from benchmarks.harness.command import arguments_of
from benchmarks.harness.pages import DOCS, fill
from benchmarks.harness.records import Results, Row, read
from benchmarks.harness.statistics import OURS, Errors, lines
from vram_guard.errors import InvalidInputError

NAMES = {
    "xmem": "xMem",
    "dnnmem": "DNNMem",
    "schedtune": "SchedTune",
    "llmem": "LLMem",
    "gpumemnet": "GPUMemNet",
    "faketensor": "FakeTensor",
    "horus": "Horus",
}
Groups = Sequence[Sequence[Row]]
Cells = Iterator[tuple[str, ...]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill in the pages; the exit status is 2 for a file that cannot be read."""
    parser = arguments_of("pages", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args(arguments)
    results = Results()
    try:
        for path in options.files:
            results.add(read(path))
        made = write_tables(results, options.out, dt.datetime.now(tz=dt.timezone.utc).date().isoformat())
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"made: {', '.join(made)}; left as they are: {', '.join(TABLES.keys() - set(made)) or 'none'}")
    return 0


def write_tables(results: Results, docs: Path, made: str) -> list[str]:
    """Fill in the pages; the answer is the names of the tables that were made.

    Args:
        results: the rows.
        docs: the folder of the documentation.
        made: date of the predictions.
    """
    rows = dict(results.by_source())
    found = {name: [rows[each] for each in table[0]] for name, table in TABLES.items() if rows.keys() >= set(table[0])}

    fill("accuracy.md", {name: TABLES[name][1](rows) for name, rows in found.items()}, docs, f"Made on {made}.")
    margins = json.loads(WRITTEN.read_text(encoding="utf-8"))
    sources = "; ".join(f"{name}: {count}" for name, count in margins["sources"].items())
    note = f"Made on {margins['made']} from these rows: {sources}."
    fill("accuracy.md", {"margin": _margin(margins["margins"])}, docs, note)
    return list(found)


def _judged(rows: Sequence[Row]) -> list[float]:
    return [row.error for row in rows if row.has_peak]


def _percent(share: float) -> str:
    return f"{share:.2%}" if abs(share) < 0.01 else f"{share:.1%}"


def _errors(errors: Errors | None) -> tuple[str, str, str]:
    if errors is None:
        return "-", "-", "-"
    return _percent(errors.median), _percent(errors.p90), f"{errors.bias:+.2%}"


def _of(rows: Sequence[Row]) -> tuple[str, str, str]:
    return _errors(Errors.of(_judged(rows)))


def _tools(groups: Groups) -> Cells:
    for line in lines([row for rows in groups for row in rows]):
        name, there = NAMES.get(line.tool, line.tool), line.ours_there
        if line.tool == OURS:
            name = f"**{name}**"
        elif there is not None:
            median, p90 = _percent(there.median), _percent(there.p90)
            name = f"{name} ({line.rows} rows; ours there {median}, {p90})"
        wrong = f"{line.wrong}/{line.verdicts}" if line.verdicts else "-"
        yield (name, *_errors(line.errors), wrong, "-" if line.seconds is None else f"{line.seconds:.1f}")


def _parts(groups: Groups) -> Cells:
    for name, rows in zip(("transformers", "CNNs"), groups, strict=True):
        there = Errors.of([row.error_of(row.tools["xmem"]) for row in rows if row.has_peak and "xmem" in row.tools])
        other = "-" if there is None else f"{_percent(there.median)}, {_percent(there.p90)}"
        inside = [(row.measured or 0) <= row.upper for row in rows if row.has_peak and row.upper is not None]
        covered = f"{sum(inside)}/{len(inside)}" if inside else "-"
        yield (name, str(len(_judged(rows))), *_of(rows), other, covered)


def _named(*names: str) -> Callable[[Groups], Cells]:
    def made(groups: Groups) -> Cells:
        for name, rows in zip(names, groups, strict=True):
            worst = max((row for row in rows if row.has_peak), key=lambda row: abs(row.error))
            largest = f"{worst.error:+.1%} ({worst.name.split('--')[0]})"
            yield (name, str(len(_judged(rows))), *_of(rows), largest)

    return made


def _plain(groups: Groups) -> Cells:
    yield (str(len(_judged(groups[0]))), *_of(groups[0]))


def _others(groups: Groups) -> Cells:
    for line in lines(groups[0]):
        yield (f"{NAMES.get(line.tool, line.tool)} ({line.rows})", *_errors(line.errors))


def _operators(groups: Groups) -> Cells:
    errors = _judged(groups[0])
    found = Errors.of(errors)
    if found is not None:
        near = sum(abs(error) <= 0.0005 for error in errors)
        yield str(len(errors)), f"{found.median:.3%}", f"{found.p90:.3%}", str(near), f"{min(errors):+.0%}"


def _verdicts(groups: Groups) -> Cells:
    names = ("those in which the causes below were sought", "**others, not examined before that**")
    for name, rows in zip(names, groups, strict=True):
        ran, failed = ([bool(row.right_verdict) for row in rows if row.ran is kind] for kind in (True, False))
        whole = len(ran) + len(failed)
        counts = (f"{sum(each)}/{len(each)}" for each in (ran, failed))
        yield (name, str(whole), f"{(sum(ran) + sum(failed)) / whole:.1%}", *counts)


def _margin(entries: Sequence[dict[str, object]]) -> Cells:
    for entry in entries:
        network, group = str(entry["network"] or "all networks"), str(entry["group"])
        own, rows, shares = entry["own_rows"], entry["rows"], entry["shortfalls"]
        assert isinstance(shares, dict)
        count = str(own)
        if (group, own) != (network, rows):
            count = f"{own}; {rows} are taken: {group}"
        told = [f"{shares[name]:.1%}" for name in ("0.5", "0.75", "0.95", "0.99")]
        told.insert(2, f"**{entry['margin']:.1%}**")
        yield (f"{entry['tier']}: {network}", count, *told, f"{entry['largest']:.1%}")


_XMEM = ("xMem's runs, transformers", "xMem's runs, CNNs")

#: Table -> the sources whose rows it shows, and what makes it; it is made only where all of them are there.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Groups], Cells]]] = {
    "tools": (_XMEM, _tools),
    "parts": (_XMEM, _parts),
    "peft": (
        ("peft's methods, Llama-3.2-3B", "peft's methods, FLUX.2-klein-4B"),
        _named("Llama-3.2-3B, adapter methods", "FLUX.2-klein-4B, adapter methods"),
    ),
    "readmes": (
        ("rasbt's ViT-L/16", "litgpt's configurations"),
        _named("ViT-L/16, A100, reserved", "litgpt, A10G, allocated"),
    ),
    "t4": (
        ("LoRA on a T4, reserved", "LoRA on a T4, allocated"),
        _named("LoRA, T4, reserved", "LoRA, T4, allocated"),
    ),
    "segformer": (("MMSegmentation's SegFormer",), _plain),
    "gpumemnet": (("GPUMemNet's table",), _others),
    "liger": (("Liger-Kernel's operators",), _operators),
    "timm": (("timm on a 24 GB card", "timm on a 24 GB card, kept aside"), _verdicts),
}
