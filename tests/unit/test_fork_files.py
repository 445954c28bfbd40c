"""A copy of the process writes in every way there is, and the disk stays byte for byte and name for name as it was."""

from __future__ import annotations

import ctypes
import encodings.ascii  # noqa: F401 - the copies of somebody else could not import it
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vram_guard.forks import fork
from vram_guard.forks.fork import run_in_fork
from vram_guard.forks.side_effects import BEST_WAY, opened_for_writing

if not fork.can_fork() or sys.platform != "linux":
    pytest.skip("copies of processes and overlays need Linux", allow_module_level=True)
for library in ("h5py", "pyarrow.parquet", "cv2", "PIL.Image", "safetensors", "tokenizers"):
    pytest.importorskip(library)

from ways_to_write import WRITES, files_of_the_users, hdf5, seen, written  # noqa: E402 - the libraries have to be there

# ruff: noqa: PTH208 - names only


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder into which everybody may look; pytest's own is for one user."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        (base / "temporary").mkdir(mode=0o1777)
        (base / "temporary").chmod(0o1777)
        files_of_the_users(base / "kept")
        yield base


def no_longer_root(folder: Path) -> None:
    """Go on as a user who may write in the folder only."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 4711, 4711, follow_symlinks=False)
    os.setgroups([])
    os.setgid(4711)
    os.setuid(4711)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: /proc/self is this user's own, as after a new start
    os.chdir(folder)  # the folders above are root's


def look(folder: Path, user: str) -> dict[str, Any]:
    """What comes of it in a process of its own."""
    with tempfile.TemporaryDirectory() as first:  # libraries import parts of themselves when they first write
        tempfile.tempdir = first
        written(files_of_the_users(Path(first)))
    tempfile.tempdir = None
    if user == "no longer root":
        no_longer_root(folder)
    before = seen(folder)
    how, failed = run_in_fork(lambda _progress: written(folder))
    after = seen(folder)
    differ = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {"way": how, "failed": failed, "differ": differ}


@pytest.mark.parametrize("best", ["overlay", "landlock"])
@pytest.mark.parametrize("user", ["as we are", "no longer root"])
def test_nothing_that_a_copy_writes_is_on_the_disk(base: Path, best: str, user: str) -> None:
    if user == "no longer root" and os.getuid():
        pytest.skip("needs root, to become somebody else")
    folder = base / "kept"
    cases = str(Path(__file__).parents[1] / "cases")
    variables = {**os.environ, BEST_WAY: best, "TMPDIR": str(base / "temporary"), "PYTHONPATH": cases}
    command = [sys.executable, "-W", "ignore", __file__, str(folder), user]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    if best == "landlock":  # it knows nothing of times and rights: a program may change them
        touched = f"{folder / str(list(WRITES).index('touch'))}/"
        found["differ"] = [name for name in found["differ"] if not name.startswith(touched)]
    assert found["way"] == best
    assert found["differ"] == []
    assert os.listdir(base / "temporary") == []
    if best == "overlay":
        assert found["failed"] == {}


def test_what_a_copy_has_written_is_read_back_and_told(tmp_path: Path) -> None:
    """Also by a copy of it, whose own writes it does not see; files that C opens are told by what they hold."""

    def work(_progress: object) -> tuple[str, str, list[str], list[str]]:
        before = opened_for_writing()
        (tmp_path / "text").write_text("one")
        hdf5(str(tmp_path / "table"))
        told = [path.removeprefix(f"{tmp_path}/") for path in opened_for_writing() - before]

        def more(_progress: object) -> tuple[str, list[str]]:
            with (tmp_path / "text").open("a") as file:
                file.write(" and two")
            (tmp_path / "table").unlink()
            return (tmp_path / "text").read_text(), os.listdir(tmp_path)

        inner, names = run_in_fork(more)
        return inner, (tmp_path / "text").read_text(), names, told

    inner, outer, names, told = run_in_fork(work)
    assert (inner, outer, names) == ("one and two", "one", ["text"])
    assert told[0] == "text"
    assert told[1].startswith("table [")
    assert os.listdir(tmp_path) == []


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]), sys.argv[2])))
