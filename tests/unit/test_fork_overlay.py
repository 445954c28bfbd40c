"""The view of the disk that a dry run has, when the disk changes under it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vram_guard.forks.fork import can_fork, run_in_fork
from vram_guard.forks.side_effects import discard_writes, way

if not can_fork() or sys.platform != "linux":
    pytest.skip("overlays need Linux", allow_module_level=True)


def test_a_shared_folder_that_another_process_removes_is_gone_for_later_copies(tmp_path: Path) -> None:
    shared, stays = tmp_path / "shared", tmp_path / "stays"
    shared.mkdir()
    stays.mkdir()
    asked, asking = os.pipe()
    told, telling = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            discard_writes((shared, stays))
            os.write(telling, way().encode() or b"none")
            os.read(asked, 1)  # the folder is removed meanwhile

            def writes(_say: object) -> str:
                (stays / "written").write_text("really")
                (tmp_path / "gone").write_text("only here")
                return (tmp_path / "gone").read_text() + str(shared.exists())

            os.write(telling, run_in_fork(writes).encode())
        finally:
            os._exit(0)
    try:
        if os.read(told, 100) != b"overlay":
            pytest.skip("this system gives a process no overlay")
        shared.rmdir()
    finally:
        os.write(asking, b".")
        os.close(telling)
    assert os.read(told, 1000) == b"only hereFalse"
    os.waitpid(process, 0)
    assert [one.name for one in tmp_path.iterdir()] == ["stays"]
    assert (stays / "written").read_text() == "really"
