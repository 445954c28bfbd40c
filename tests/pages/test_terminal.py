"""Lines that end where a terminal's do: real pseudo-terminals of 80 and 120 columns, in both languages."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import pytest
from docs_blocks import files_of
from folders import SMALL, SMALL_TEXT, write_cogvideox

from vram_guard import cli
from vram_guard.cli import _doctor
from vram_guard.cli.printing import progress_shown
from vram_guard.language import CHINESE, ENGLISH
from vram_guard.report.columns import columns
from vram_guard.terminal import display_width, encodings_of, fitting, fitting_log, in_log, terminal_width, wrapped

ROOT = Path(__file__).parents[2]
WIDTHS = (60, 80, 120)
COMMANDS = (
    "gpus",
    "gpus --hidden-dim 64 --num-layers 4 --resolutions 64,128,256,512,1024,2048 --quick",
    "gpus nothing-like-it",
    "doctor",
    "estimate --batch 16 --height 256 --width 256 --hidden-dim 512 --num-layers 10 --gpu-memory 24",
    "estimate --model-path small --train transformer --num-frames 3 --height 8 --width 8 --gpu A100",
    "plan model.py:net --input 8 --batch 4 --gpu 4090 --html page.html",
    "plan model.py:net --input 8 --batch 4 --gpu 4090 --margn 0.1",
)
MODEL = "from torch import nn\n\ndef net():\n    return nn.Linear(8, 8)\n"
#: One process for all: what it prints is divided by the lines that name the width.
SCRIPT = f"""
import contextlib, fcntl, struct, sys, termios
from vram_guard import cli
from vram_guard.cli import _doctor
_doctor._integrations = dict  # importing the frameworks takes seconds, and shows nothing wide
for width in {WIDTHS}:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    for command in {COMMANDS}:
        print("$", width, command)
        with contextlib.suppress(SystemExit):
            cli.main(command.split())
"""


def in_terminal(script, language, folder, width=80):
    """What a Python script shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    own = {"VRAM_GUARD_LANG": language, "VRAM_GUARD_CACHE": str(folder / "cache"), "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=folder, env={**environment, **own}, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not read:
            break
        shown += read
    process.wait()
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")
    return re.sub(r"[^\n]*\r", "", lines)  # progress that was replaced


@pytest.mark.parametrize("language", [ENGLISH, CHINESE])
def test_no_line_is_wider_than_the_terminal(language, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    write_cogvideox(tmp_path / "small", SMALL, SMALL_TEXT)
    shown = in_terminal(SCRIPT, language, tmp_path)
    _, *runs = re.split(r"^\$ ", shown, flags=re.MULTILINE)
    assert len(runs) == len(WIDTHS) * len(COMMANDS), shown
    for run in runs:
        head, *lines = run.rstrip().split("\n")
        width = int(head.split()[0])
        assert lines, head
        wide = [line for line in lines if display_width(line) > width and len(line.split()) > 1]
        assert not wide, f"{head}\n" + "\n".join(wide)
    assert "Traceback" not in shown


@pytest.mark.torch_since(2, 6)  # MMEngine imports what warns before
def test_the_table_of_mmengine_s_configs(tmp_path):
    for name, content in files_of(ROOT / "docs" / "en" / "mmengine.md").items():
        (tmp_path / name).write_text(content)
    command = ["mmengine", "compare", "config.py", "--gpu", "RTX 4070"]
    script = f"import sys; sys.path.insert(0, ''); from vram_guard import cli; cli.main({command})"
    lines = in_terminal(script, CHINESE, tmp_path, width=80).split("\n")
    rows = [line.split() for line in lines if line.startswith(" 批大小")]
    assert [row[1] for row in rows] == ["32，32-true", "64，32-true"]
    assert [row[-3:-1] for row in rows] == [["0.001", "x"], ["0.002", "x"]]
    assert max(map(display_width, lines)) <= 80, "\n".join(lines)


def test_a_pipe_gets_every_row_in_one_line(monkeypatch, capsys):
    """At any COLUMNS: what reads it is a program."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(_doctor, "_integrations", dict)
    assert cli.main(["doctor"]) == 0
    facts = capsys.readouterr().out.splitlines()
    assert facts
    assert not [line for line in facts if line.startswith(" ")]
    assert cli.main(["gpus"]) == 0
    cards = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert {len(re.split(r"  +", line)) for line in cards} == {9}


class Terminal(StringIO):
    """A terminal that was told no size, but what COLUMNS says."""

    def isatty(self):
        return True

    def fileno(self):
        raise OSError


@pytest.mark.parametrize(
    ("line", "width", "expected"),
    [
        ("short", 20, "short"),
        ("  - a note that goes on and on", 20, "  - a note that goes\n    on and on"),
        ("3. 显存（GiB）不够，请减小批大小", 16, "3. 显存（GiB）不\n   够，请减小批\n   大小"),
        ("a    b    cccccccccc", 12, "a    b\ncccccccccc"),
        ("/a/path/that/is/longer here", 12, "/a/path/that/is/longer\nhere"),
        ("one two\n\nthree four", 9, "one two\n\nthree\nfour"),
        ("    " + "x" * 30, 10, "    " + "x" * 30),
    ],
)
def test_lines_of_a_terminal(line, width, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert fitting(line, Terminal()) == expected
    assert fitting(line, StringIO()) == line


@pytest.mark.parametrize(("told", "width"), [("", 80), ("0", 80), ("x", 80), ("132", 132)])
def test_a_terminal_that_was_told_no_size(told, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", told)
    assert terminal_width(Terminal()) == width
    assert terminal_width(StringIO()) is None
    assert terminal_width(SimpleNamespace(write=print)) is None  # what a script may have put in the place of its stream


def test_the_size_is_that_of_the_stream_s_own_terminal(monkeypatch):
    """Standard error may be a terminal where standard output is a file."""
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 57, 0, 0))
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        assert terminal_width(stream) == 57
    os.close(ours)


def on_screen(written):
    """What is left of it on a screen: lines, after returns and the control sequences that erase and go up."""
    screen, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", written):
        if part == "\n":
            row, column = row + 1, 0
            screen += [""] * (row + 1 - len(screen))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            screen[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif not part.startswith("\x1b"):
            screen[row] = screen[row][:column].ljust(column) + part + screen[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in screen if line.strip()]


def test_progress_is_one_line_above_which_all_else_stands(monkeypatch):
    """Also where a line is wider than the terminal, and a model prints."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with progress_shown() as progress:
        progress("tracing 32-true")
        assert on_screen(terminal.getvalue()) == ["vram-guard: tracing 32-true"]
        print("from the model", file=sys.stderr)
        progress("trying 2 of 72 ways: bf16-mixed, batch 256")
        assert on_screen(terminal.getvalue()) == ["from the model", "vram-guard: trying 2 of 72 ways: bf16-m…"]
    assert on_screen(terminal.getvalue()) == ["from the model"]
    monkeypatch.setattr("sys.stderr", file := StringIO())
    with progress_shown() as progress:
        progress("tracing")
    assert file.getvalue() == ""


def test_text_for_a_log_is_what_all_its_streams_take(tmp_path):
    log = logging.getLogger("vram_guard.tests.terminal")
    log.propagate = False
    latin = logging.StreamHandler(TextIOWrapper(BytesIO(), encoding="latin-1"))
    later = logging.FileHandler(tmp_path / "log", encoding="ascii", delay=True)
    assert in_log("é 显 \x1b[2J", log) == "é 显 \\x1b[2J"
    log.addHandler(latin)
    assert in_log("é 显", log) == "é ?"
    log.addHandler(later)
    assert in_log("é 显", log) == "? ?"
    assert list(encodings_of(log)) == ["latin-1", "ascii"]
    child = log.getChild("child")
    assert in_log("é", child) == "?"
    child.propagate = False
    assert in_log("é", child) == "é"
    for handler in (latin, later):
        log.removeHandler(handler)


def test_a_log_that_a_terminal_shows_has_lines_as_wide_as_that(tmp_path, monkeypatch):
    """In a file alone a sentence stays whole: who looks for it finds it."""
    monkeypatch.setenv("COLUMNS", "20")
    log = logging.getLogger("vram_guard.tests.wide")
    log.propagate = False
    note = "  - a note that goes on and on"
    file = logging.FileHandler(tmp_path / "log", delay=True)
    log.addHandler(file)
    assert fitting_log(note, log) == note
    log.addHandler(shown := logging.StreamHandler(Terminal()))
    assert fitting_log(note, log) == "  - a note that goes\n    on and on"
    for handler in (file, shown):
        log.removeHandler(handler)


def test_paragraphs_break_where_chinese_may():
    assert wrapped("可用：“显存”，单位 GiB。", 8) == ["可用：", "“显存”，", "单位", "GiB。"]


ROWS = [("name", "12", "what it is in words"), ("显卡", "3", "short"), ("x", "456", "")]


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (None, ["name   12  what it is in words", "显卡    3  short", "x     456"]),
        (30, ["name   12  what it is in words", "显卡    3  short", "x     456"]),
        (24, ["name   12  what it is in", " " * 11 + "words", "显卡    3  short", "x     456"]),
    ],
)
def test_columns_of_a_terminal(width, expected):
    assert columns(ROWS, to_the_right=lambda index, _cell: index == 1, width=width) == expected
