"""The report as text and as JSON, and that it arrives whatever the stream or the folder is."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from plan_sources import ReadySource

from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError
from vram_guard.files import write_atomically
from vram_guard.module_names import ModuleName, with_class
from vram_guard.plan._search import search
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.search_space import LowerBound, Option, Request, Space
from vram_guard.plan.techniques import splits_of
from vram_guard.report import save
from vram_guard.report.as_json import SCHEMA, as_dict, as_json
from vram_guard.report.html import html_report, where_to_read_on
from vram_guard.report.text import render, show
from vram_guard.timeline import Affine, Block, Note, Phase, Timeline

if TYPE_CHECKING:
    from pathlib import Path

    from vram_guard.plan import Plan

MIB = 2**20


def step(per_sample: int, **changes: object) -> Timeline:
    blocks = (
        Block(Affine(10 * MIB, 0), "parameters", "", "", ""),
        Block(Affine(0, MIB // 8), "batch", "", "", ""),
        Block(Affine(0, per_sample), "activations", "encoder.layers[0]", "src/net.py:42", "aten.addmm.default"),
    )
    phases = (Phase("setup", 0, 0), Phase("batch", 1, 1), Phase("forward", 1, 2), Phase("backward", 1, 3))
    return replace(Timeline(blocks, (0, 1, 2, ~2, ~1), phases, (2, 3)), **changes)


class Halves(ReadySource):
    """Two precisions, the same in however many micro-batches."""

    timelines: ClassVar = {"32-true": step(2 * MIB), "bf16-mixed": step(MIB)}

    def __call__(self, option: Option) -> Timeline:
        return self.timelines[option.precision]


class Prices:
    """Half precision is faster, micro-batches cost a little."""

    def relative(self, option: Option) -> float:
        return (0.5 if option.precision == "bf16-mixed" else 1.0) + 0.01 * (option.splits - 1)

    def lower_bound(self, option: Option) -> LowerBound:
        return LowerBound(0, Why.NEEDS_STATES)


def planned(usable: int = 64 * MIB, **changes: object) -> Plan:
    space = Space(("32-true", "bf16-mixed"), (1, *splits_of(64)))
    asked = Request(64, "32-true", Budget.of(usable, margin=0), space, why_precision=Reason(Why.BFLOAT16))
    return search(replace(asked, **changes), Halves(), Prices())


def test_the_estimate_s_table_adds_up() -> None:
    rows = {
        line[0]: line[1:] for line in (re.split(" {2,}", one.strip()) for one in render(step(MIB).at(32)).splitlines())
    }
    assert rows["parameters"] == ["10.00 MiB", "21.7%"]
    assert rows["activations"] == ["32.00 MiB", "69.6%"]
    assert rows["peak allocated"] == ["46.00 MiB", "100.0%"]
    assert len(rows["peak reserved"]) == 1


def test_the_peak_is_located() -> None:
    text = render(step(MIB).at(32))
    for part in ("forward, step 1", "encoder.layers[0]", "src/net.py:42", "aten.addmm.default", "symbolic"):
        assert part in text


def test_a_plan_says_what_changes_why_and_what_was_not_taken() -> None:
    text = render(planned())
    for part in ("FITS", "32-true -> bf16-mixed", "64 -> 32", "1 -> 2"):
        assert part in text
    for part in (
        "Why",
        "The GPU computes in bfloat16, which needs no gradient scaling.",
        "Alternatives considered",
        "bf16-mixed, batch 64: needs",
        "over budget",
        "Budget: 64.00 MiB usable",
    ):
        assert part in text


def test_a_short_report_is_a_dozen_lines_and_leaves_out_what_only_explains() -> None:
    text = render(planned(), verbose=False)
    assert text.startswith("Does not fit as written (")
    for part in ("fits with: bf16-mixed, 2 micro-batches of 32", "FITS", "forward, step 1", "x 0.51"):
        assert part in text
    for part in ("Why", "Alternatives considered", "no gradient scaling", "peak allocated", "equal micro-batches"):
        assert part not in text
    assert len(text.splitlines()) <= 12
    asked = step(MIB).at(32)
    alone = render(asked, verbose=False)
    assert "62.00 MiB" in alone
    assert len(alone.splitlines()) <= 4


def test_a_short_report_keeps_what_makes_an_answer_uncertain() -> None:
    bounded = step(MIB, tier="partly symbolic").at(32)
    assert "some sizes are bounds" in render(bounded, verbose=False)
    told = render(replace(bounded, notes=tuple(Note(f"bound {number}") for number in range(5))), verbose=False)
    assert [line.strip() for line in told.partition("Notes\n")[2].splitlines()] == [
        *(f"- bound {number}" for number in range(3)),
        "- and 2 more",
    ]
    assert "Notes" not in render(replace(step(MIB).at(32), notes=(Note("exact"),)), verbose=False)
    refused = Reason(Why.REFUSED, technique="a larger batch", why="the loader is a stream")
    plan = planned()
    text = render(replace(plan, reason_values=(*plan.reason_values, refused)), verbose=False)
    assert "a larger batch is not possible here: the loader is a stream" in text
    text = render(planned(usable=5 * MIB), verbose=False)
    assert text.startswith("DOES NOT FIT")
    assert "nothing changes" in text
    assert "Nothing that is allowed makes it fit. Closest: bf16-mixed" in text


def test_equal_modules_are_one_row_with_their_class() -> None:
    held = {ModuleName(f"layers.{number}.up", "Linear"): 8 * MIB for number in (0, 1, 2, 5)}
    held |= {ModuleName("layers.3.up", "Linear"): 4 * MIB, ModuleName("head", "Head"): 9 * MIB, "": MIB}
    text = render(replace(step(MIB).at(32), by_module=held))
    rows = ("layers.*.up (Linear)", "4 x 8.00 MiB", "head (Head)", "9.00 MiB", "layers.3.up (Linear)", "4.00 MiB")
    for words in (*rows, "(outside any module)", "1.00 MiB"):
        assert words in text
    name = pickle.loads(pickle.dumps(ModuleName("h.0", "Block")))
    assert (name, with_class(name)) == ("h.0", "h.0 (Block)")
    assert json.dumps({name: 1}) == '{"h.0": 1}'


def test_the_page_of_a_short_report_is_left_where_it_can_be_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VRAM_GUARD_CACHE", str(tmp_path))
    line = where_to_read_on(html_report(planned()), "-v")
    path = next((tmp_path / "reports").glob("*.html"))
    assert line == f"Full report (-v prints it here): {path}"
    assert "Alternatives considered" in path.read_text("utf-8")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VRAM_GUARD_CACHE", str(tmp_path / "file"))
    assert where_to_read_on("<p>", "-v") == "Full report: with -v"


def test_what_does_not_fit_says_by_how_much() -> None:
    plan = planned(usable=5 * MIB)
    many = tuple(replace(plan.rejected[0], missing=number) for number in range(1, 15))
    text = render(replace(plan, rejected=many))
    assert text.startswith("DOES NOT FIT")
    assert "nothing changes" in text
    assert "too much" in text
    assert "and 8 more" in text  # only the nearest few of the rejected are listed


def test_a_lower_bound_is_not_called_fitting() -> None:
    text = render(step(MIB, tier="formula").at(32), budget=Budget.of("1GiB"))
    assert text.startswith("NOT KNOWN TO FIT")
    assert "lower bound" in text


def test_notes_are_told() -> None:
    noted = step(MIB, notes=(Note("a size depends on data", "loss.py:3"),), tier="partly symbolic")
    text = render(noted.at(32))
    assert "a size depends on data (loss.py:3)" in text


def test_a_miss_by_one_byte_shows() -> None:
    estimate = step(MIB).at(32)
    text = render(estimate, budget=Budget.of(estimate.peak_reserved - 1, margin=0))
    assert "1 B too much" in text
    fitting = render(estimate, budget=Budget.of(estimate.peak_reserved, margin=0))
    assert fitting.startswith("FITS")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_asked(width: int) -> None:
    long = step(MIB)
    deep = long.blocks[2]._replace(module="model." * 30 + "attention", source="a/" * 50 + "net.py:1")
    text = render(replace(long, blocks=(*long.blocks[:2], deep)).at(32), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
    assert "attention" in text.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "latin-1", "utf-8"])
def test_any_encoding_is_served(encoding: str) -> None:
    raw = io.BytesIO()
    noted = step(MIB, notes=(Note("尺寸取决于数据 ✓"),))
    stream = io.TextIOWrapper(raw, encoding=encoding)
    assert show(noted.at(32), file=stream)
    text = raw.getvalue().decode(encoding)
    assert "peak allocated" in text
    assert ("尺寸" in text) == (encoding in ("gbk", "utf-8"))


def test_a_closed_stream_ends_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "nobody reads")

    closed = io.StringIO()
    closed.close()
    assert show(step(MIB).at(32), file=Gone()) is False
    assert show(step(MIB).at(32), file=closed) is False


def test_a_terminal_gets_colour() -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    stream = Terminal()
    assert show(planned(), file=stream)
    assert "FITS" in stream.getvalue()


# --- JSON ---


def test_json_of_a_plan_round_trips_with_ints_of_bytes() -> None:
    plan = planned()
    read = json.loads(as_json(plan))
    assert read == as_dict(plan)
    assert read["schema"] == SCHEMA == "vram_guard.report/1"
    assert read["kind"] == "plan"
    assert read["fits"] is True
    assert read["precision"] == {"before": "32-true", "after": "bf16-mixed"}
    assert read["accumulate"] == {"before": 1, "after": 2}
    assert read["estimate"]["peak_reserved"] == plan.estimate.peak_reserved
    assert isinstance(read["estimate"]["peak_reserved"], int)
    assert sum(read["estimate"]["breakdown"].values()) == read["estimate"]["peak_allocated"]
    assert read["rejected"][0]["missing"] == plan.rejected[0].missing
    assert read["budget"]["usable"] == 64 * MIB
    assert read["estimate"]["peak"]["source"] == "src/net.py:42"


def test_json_of_an_estimate_with_and_without_a_budget() -> None:
    estimate = step(MIB).at(32, capacity=40 * MIB)
    alone = as_dict(estimate)
    assert alone["kind"] == "estimate"
    assert "budget" not in alone
    assert alone["estimate"]["out_of_memory"]["source"] == "src/net.py:42"
    assert as_dict(step(MIB).at(32), budget=Budget.of("1GiB"))["fits"] is True
    assert as_dict(step(MIB, tier="formula").at(32), budget=Budget.of("1GiB"))["fits"] is False


def test_json_is_ascii_whatever_the_names_are() -> None:
    assert as_json(step(MIB, notes=(Note("尺寸"),)).at(1)).isascii()


# --- files ---


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report.json"
    save(planned(), target)
    save(step(MIB).at(32), target)
    assert json.loads(target.read_text())["kind"] == "estimate"
    assert [path.name for path in target.parent.iterdir()] == ["report.json"]


def test_two_runs_that_write_one_report_leave_one_of_them_whole(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    contents = {str(number) * 200_000 for number in range(4)}
    write_atomically(target, "0" * 200_000)
    seen, over = set(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.add(target.read_text())

    def run(content: str) -> None:
        for _ in range(20):
            write_atomically(target, content)

    watcher = threading.Thread(target=watch)
    runs = [threading.Thread(target=run, args=(content,)) for content in contents]
    for thread in (watcher, *runs):
        thread.start()
    for thread in runs:
        thread.join()
    over.set()
    watcher.join()
    assert seen <= contents, "a reader saw a part of a report, or two of them mixed"
    assert target.read_text() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_full_disk_is_an_error_and_the_old_report_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidInputError, match="No space left"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidInputError):
        save(planned(), tmp_path / "file" / "report.json")
    with pytest.raises(InvalidInputError):
        write_atomically(tmp_path, "a folder stands there")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupt_while_writing_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "report.json", "new")
    assert list(tmp_path.iterdir()) == []


def test_reading_only_the_json_module_needs_neither_torch_nor_rich() -> None:
    heavy = {"torch", "rich", "matplotlib"}
    code = f"import sys, vram_guard.report.as_json; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
