"""Fill in the tables of docs/en/accuracy.md and docs/zh_cn/accuracy.md from rows that were predicted.

    python -m benchmarks.published.pages FILE [FILE ...] [--docs FOLDER]

Each FILE is what ``benchmarks/published`` or one of its modules writes with --json. A table stands between
``<!-- table: NAME -->`` and ``<!-- end -->``; one whose rows are in no file stays as it is, with its date. The margin's
table comes from ``vram_guard/budget/margins.json``, which ``benchmarks.gpu.margin --write`` makes.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.margin import PROMISING, WRITTEN, kept
from benchmarks.harness import pages
from benchmarks.harness.command import arguments_of
from benchmarks.harness.pages import DOCS, Texts
from benchmarks.harness.records import Results, Row, read
from benchmarks.harness.statistics import OURS, Errors, lines
from vram_guard.errors import InvalidInputError

PAGE = "accuracy.md"
TEXTS = pages.texts(Path(__file__).parent)

#: Table -> the sources whose rows it shows; it is made only where all of them are there.
TABLES: dict[str, tuple[str, ...]] = {
    "tools": ("xMem's runs, transformers", "xMem's runs, CNNs"),
    "parts": ("xMem's runs, transformers", "xMem's runs, CNNs"),
    "rules": ("xMem's runs, CNNs",),
    "peft": ("peft's methods, Llama-3.2-3B", "peft's methods, FLUX.2-klein-4B"),
    "readmes": ("rasbt's ViT-L/16", "litgpt's configurations"),
    "t4": ("LoRA on a T4, reserved", "LoRA on a T4, allocated"),
    "segformer": ("MMSegmentation's SegFormer",),
    "gpumemnet": ("GPUMemNet's table",),
    "liger": ("Liger-Kernel's operators",),
    "timm": ("timm on a 24 GB card", "timm on a 24 GB card, kept aside"),
}

_BLOCK = "(<!-- table: {name} -->\n).*?(<!-- end -->)"


def write_tables(results: Results, docs: Path, made: str) -> list[str]:
    """Fill in both pages; the answer is the names of the tables that were made.

    Args:
        results: the rows.
        docs: folder with a folder for each language.
        made: date of the predictions.
    """
    rows = dict(results.by_source())
    found = {name: [rows[each] for each in sources] for name, sources in TABLES.items() if rows.keys() >= set(sources)}
    for language, words in TEXTS.items():
        path = docs / language / PAGE
        text = path.read_text(encoding="utf-8")
        said = words["made"].format(date=made)
        for name, groups in found.items():
            text = _filled(text, name, f"{_MAKERS[name](groups, words)}\n\n{said}")
        text = _filled(text, "margin", _margin(words))
        path.write_text(text, encoding="utf-8")
    return list(found)


def _filled(text: str, name: str, table: str) -> str:
    """The page with this table in its place.

    Raises:
        InvalidInputError: the page has no such place.
    """
    made, count = re.subn(
        _BLOCK.format(name=name), lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text, flags=re.DOTALL
    )
    if count != 1:
        raise InvalidInputError(f"{PAGE} has {count} places for the table {name}")
    return made


# --- the tables -----------------------------------------------------------------------------------------------


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


def _tools(groups: Sequence[Sequence[Row]], words: Texts) -> str:
    made = []
    for line in lines([row for rows in groups for row in rows]):
        name, there = words["names"].get(line.tool, line.tool), line.ours_there
        if line.tool == OURS:
            name = f"**{name}**"
        elif there is not None:
            name = words["there"].format(
                tool=name, rows=line.rows, median=_percent(there.median), p90=_percent(there.p90)
            )
        wrong = f"{line.wrong}/{line.verdicts}" if line.verdicts else "-"
        seconds = "-" if line.seconds is None else f"{line.seconds:.1f}"
        made.append((name, *_errors(line.errors), wrong, seconds))
    return pages.table(words["tools"], made)


def _parts(groups: Sequence[Sequence[Row]], words: Texts) -> str:
    made = []
    for name, rows in zip(words["part_names"], groups, strict=True):
        theirs = [row.error_of(row.tools["xmem"]) for row in rows if row.has_peak and "xmem" in row.tools]
        there = Errors.of(theirs)
        other = "-" if there is None else f"{_percent(there.median)}, {_percent(there.p90)}"
        inside = [row for row in rows if row.has_peak and row.upper is not None and row.measured is not None]
        covered = sum(row.measured <= row.upper for row in inside if row.measured is not None and row.upper is not None)
        made.append((name, str(len(_judged(rows))), *_of(rows), other, f"{covered}/{len(inside)}" if inside else "-"))
    return pages.table(words["parts"], made)


def _rules(groups: Sequence[Sequence[Row]], words: Texts) -> str:
    made = []
    for name, each in kept(groups[0]).items():
        margins = ", ".join(f"{margin:.1%}" for margin in each.margins)
        counts = str(each.exceeded), str(each.exceeded_elsewhere)
        made.append((words["rule_names"][name], margins, *counts, f"{each.beyond:.1%}"))
    return pages.table(words["rules"], made)


def _named(groups: Sequence[Sequence[Row]], words: Texts, names: Sequence[str]) -> str:
    made = []
    for name, rows in zip(names, groups, strict=True):
        worst = max((row for row in rows if row.has_peak), key=lambda row: abs(row.error))
        largest = f"{worst.error:+.1%} ({worst.name.split('--')[0]})"
        made.append((name, str(len(_judged(rows))), *_of(rows), largest))
    return pages.table(words["named"], made)


def _plain(groups: Sequence[Sequence[Row]], words: Texts) -> str:
    (rows,) = groups
    return pages.table(words["plain"], [(str(len(_judged(rows))), *_of(rows))])


def _others(groups: Sequence[Sequence[Row]], words: Texts) -> str:
    (rows,) = groups
    made = [(words["names"].get(line.tool, line.tool), *_errors(line.errors)) for line in lines(rows)]
    return pages.table((words["rows"].format(rows=len(_judged(rows))), *words["plain"][1:]), made)


def _operators(groups: Sequence[Sequence[Row]], words: Texts) -> str:
    errors = _judged(groups[0])
    found = Errors.of(errors)
    assert found is not None
    near = sum(abs(error) <= 0.0005 for error in errors)
    made = (str(len(errors)), f"{found.median:.3%}", f"{found.p90:.3%}", str(near), f"{min(errors):+.0%}")
    return pages.table(words["liger"], [made])


def _verdicts(groups: Sequence[Sequence[Row]], words: Texts) -> str:
    made = []
    for name, rows in zip(words["timm_names"], groups, strict=True):
        ran, failed = ([row.right_verdict for row in rows if row.ran is kind] for kind in (True, False))
        right = sum(map(bool, ran)) + sum(map(bool, failed))
        whole = len(ran) + len(failed)
        counts = (f"{sum(map(bool, each))}/{len(each)}" for each in (ran, failed))
        made.append((name, str(whole), f"{right / whole:.1%}", *counts))
    return pages.table(words["timm"], made)


def _margin(words: Texts) -> str:
    data = json.loads(WRITTEN.read_text(encoding="utf-8"))

    def each() -> Iterator[tuple[str, ...]]:
        for entry in data["margins"]:
            own, group = entry["own_rows"], entry["group"]
            kind = words["kinds"][entry["network"] or "all networks"]
            count = str(own) if group == (entry["network"] or "all networks") and own == entry["rows"] else None
            count = count or words["taken"].format(own=own, rows=entry["rows"], group=words["kinds"][group])
            shares = [f"{entry['shortfalls'][name]:.1%}" for name in ("0.5", "0.75", "0.95", "0.99")]
            shares.insert(2, f"**{entry['margin']:.1%}**")
            yield (f"{entry['tier']}: {kind}", count, *shares, f"{entry['largest']:.1%}")

    sources = "; ".join(f"{name}: {count}" for name, count in data["sources"].items())
    table = pages.table(words["margin"], list(each()))
    assert {entry["tier"] for entry in data["margins"]} == set(PROMISING)
    return f"{table}\n\n{words['margin_made'].format(date=data['made'], sources=sources)}"


_MAKERS: dict[str, Callable[[Sequence[Sequence[Row]], Any], str]] = {
    "tools": _tools,
    "parts": _parts,
    "rules": _rules,
    "peft": lambda groups, words: _named(groups, words, words["peft_names"]),
    "readmes": lambda groups, words: _named(groups, words, words["readme_names"]),
    "t4": lambda groups, words: _named(groups, words, words["t4_names"]),
    "segformer": _plain,
    "gpumemnet": _others,
    "liger": _operators,
    "timm": _verdicts,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill in the pages; the exit status is 2 for a file that cannot be read."""
    parser = arguments_of("benchmarks.published.pages", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    results = Results()
    try:
        for path in options.files:
            results.add(read(path))
        made = write_tables(results, options.docs, dt.datetime.now(tz=dt.timezone.utc).date().isoformat())
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"made: {', '.join(made)}; left as they are: {', '.join(name for name in TABLES if name not in made) or 'none'}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
