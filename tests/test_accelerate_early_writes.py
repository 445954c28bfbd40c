"""A dry run leaves the disk as it was, also of scripts that write before ``prepare``; and trains nothing for real."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases  # noqa: E402 - what is tested has to be there
from safetensors.torch import save_file  # noqa: E402

from vram_guard_accelerate.dry_run._write_protection import rights  # noqa: E402

SCRIPT = cases.HERE / "accelerate_scripts" / "early_writes.py"
REFUSED = {
    "removes": "removes or moves",
    "removes_where_it_has_moved_something": "removes or moves",
    "writes_where_it_has_moved_something": "removes or moves",
    "removes_below_an_open_folder": "removes or moves",
    "moves": "removes or moves",
    "writes_into_a_folder": "writes into",
    "overwrites": "replaces",
    "by_itself": "trains without Accelerate",
    "warms_up": "computes gradients before Accelerator.prepare",
}


def seen(folder: Path) -> dict[str, Any]:
    """Everything in a folder: names, contents, sizes and times of files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        state = os.lstat(path)
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        times = state.st_mtime_ns if path.is_file() else 0
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_size if content else 0, times, content)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each script, with files of the user's in it."""
    base = tmp_path_factory.mktemp("kept")
    made = {}
    for name in ("writes", *REFUSED):
        folder = made[name] = base / name
        (folder / "old").mkdir(parents=True)
        (folder / "old" / "weights.bin").write_bytes(b"weights")
        (folder / "log.txt").write_text("kept\n")
        (folder / "settings.json").write_text('{"kept": true}')
        (folder / "raw.bin").write_bytes(b"kept")
        (folder / "tokenizer.json").write_text("kept")
        (folder / "vocab.json").write_text("kept")
        (folder / "mapped.bin").write_bytes(bytes(64))
        (folder / "linked.txt").write_text("kept")
        for kind in ("table.parquet", "table.h5", "picture.png"):
            (folder / kind).write_bytes(b"kept")
        save_file({"weight": torch.ones(1)}, folder / "weights.safetensors")
        torch.save({"step": 1000}, folder / "checkpoint.pt")
        known = sqlite3.connect(folder / "known.sqlite")
        known.execute("create table runs (name text)")
        known.execute("insert into runs values ('kept')")
        known.commit()
        known.close()
    made["home"] = base / "home"
    made["home"].mkdir()
    (made["home"] / ".netrc").write_text("kept")
    return made


@pytest.fixture(scope="module")
def before(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: seen(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path], before: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    assert before
    asked = tmp_path_factory.mktemp("early") / "asked"
    for name, folder in folders.items():
        if name != "home":
            cases.request(asked / name, SCRIPT, name, folder, *(["programs"] if rights() else []))
    temporary = tmp_path_factory.mktemp("temporary")  # where others than the user work
    return cases.dry_runs(asked, HOME=str(folders["home"]), TMPDIR=str(temporary))


def test_what_was_sent_is_said(answers: dict[str, Any]) -> None:
    said = [note for note in answers["writes"]["notes"] if "was really sent" in note]
    assert "127.0.0.1:" in said[0]


def test_a_script_that_writes_in_many_ways_is_followed(answers: dict[str, Any]) -> None:
    assert answers["writes"].get("fits"), answers["writes"]
    held_back = any("could write nothing: touch" in note for note in answers["writes"]["notes"])
    assert held_back == bool(rights())


@pytest.mark.parametrize("name", ["writes", "home", *REFUSED])
def test_the_folder_is_as_it_was(
    answers: dict[str, Any], folders: dict[str, Path], before: dict[str, Any], name: str
) -> None:
    assert answers["writes" if name == "home" else name]
    assert seen(folders[name]) == before[name]


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_taken_back_is_refused_before_it_happens(answers: dict[str, Any], name: str) -> None:
    assert REFUSED[name] in answers[name]["message"]
    assert "early_writes.py, line" in answers[name]["message"]


def test_from_prepare_on_no_file_gets_another_time(tmp_path: Path) -> None:
    """Whatever changes the file system does nothing then: the same functions as in every other copy of a process."""
    (tmp_path / "kept.txt").write_text("kept")
    before = seen(tmp_path)
    changes = 'os.utime(name, (1, 1)); os.rename(name, name + "2"); os.remove(name); shutil.copy(name, name + "3")'
    code = f"import os, shutil, sys; discard_file_writes(); name = sys.argv[1]; {changes}"
    discarded = "from vram_guard_accelerate.dry_run.side_effects import discard_file_writes"
    subprocess.run([sys.executable, "-c", f"{discarded}; {code}", str(tmp_path / "kept.txt")], check=True)
    assert seen(tmp_path) == before
