"""What a program that a script starts before it trains can still do to the disk, tried in the thread that starts it."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
if not sys.platform.startswith("linux"):
    pytest.skip("only Linux has Landlock", allow_module_level=True)

from vram_guard_accelerate.dry_run import _write_protection
from vram_guard_accelerate.dry_run._write_protection import rights, write_protected

landlock = pytest.mark.skipif(not rights(), reason="this kernel has no Landlock")


@pytest.mark.parametrize(
    ("version", "kept"), [(-1, 0), (0, 0), (1, 0x1FF2), (2, 0x3FF2), (3, 0x7FF2), (4, 0x7FF2), (7, 0x7FF2)]
)
def test_rights_of_each_version_of_the_interface(monkeypatch: Any, version: int, kept: int) -> None:
    """As linux/landlock.h numbers them: no more than the version knows, or the kernel refuses all of them."""
    asked: list[tuple[Any, ...]] = []

    def answered(*given: Any) -> int:
        asked.append(given)
        return version

    monkeypatch.setattr(_write_protection, "_call", answered)
    assert rights.__wrapped__() == kept
    assert asked == [(444, None, 0, 1)]
    monkeypatch.setattr(_write_protection.sys, "platform", "darwin")
    assert rights.__wrapped__() == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("users", "allowed"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "file.txt").write_text("kept")
        (tmp_path / name / "other.txt").write_text("kept")
    return tmp_path


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


ATTEMPTS: dict[str, Callable[[Path], object]] = {
    "writes": lambda folder: (folder / "file.txt").write_text("new"),
    "makes a file": lambda folder: (folder / "new.txt").write_text("new"),
    "makes a folder": lambda folder: (folder / "new").mkdir(),
    "makes a link": lambda folder: (folder / "link").symlink_to("file.txt"),
    "makes a pipe": lambda folder: os.mkfifo(folder / "pipe"),
    "makes a socket": lambda folder: bind(folder / "socket"),
    "moves": lambda folder: (folder / "other.txt").rename(folder / "moved.txt"),
    "removes": lambda folder: (folder / "file.txt").unlink(),
    "removes a folder": lambda folder: (folder / "inner").rmdir(),
}


@landlock
def test_nothing_changes_but_in_folders_that_are_allowed(folder: Path) -> None:
    def attempts(where: str) -> dict[str, bool]:
        """What worked."""
        found = {}
        for name, act in ATTEMPTS.items():
            try:
                act(folder / where)
                found[name] = True
            except PermissionError:  # noqa: PERF203 - each may be refused
                found[name] = False
        return found

    def start() -> Any:
        Path("/dev/null").write_text("gone")
        read = (folder / "users" / "file.txt").read_text()
        program = subprocess.run(["touch", folder / "users" / "program.txt"], stderr=subprocess.DEVNULL, check=False)
        return read, attempts("users"), attempts("allowed"), program.returncode

    allowed = (folder / "allowed", Path("/dev/null"), folder / "never")
    read, users, elsewhere, program = write_protected(start, allowed)
    assert (read, users) == ("kept", dict.fromkeys(ATTEMPTS, False))
    assert elsewhere == dict.fromkeys(ATTEMPTS, True)
    assert program != 0
    assert {path.name for path in (folder / "users").iterdir()} == {"inner", "file.txt", "other.txt"}
    assert (folder / "users" / "file.txt").read_text() == "kept"
    (folder / "users" / "file.txt").write_text("new")  # only that thread was confined


@landlock
@pytest.mark.skipif(rights() < 1 << 14, reason="this kernel cannot refuse to cut files short")
def test_no_file_is_cut_short_or_moved_elsewhere(folder: Path) -> None:
    def start() -> None:
        with pytest.raises(PermissionError):
            os.truncate(folder / "users" / "file.txt", 1)
        os.truncate(folder / "allowed" / "file.txt", 1)
        for act in (os.rename, os.link):
            with pytest.raises(OSError, match=r"Permission|cross-device"):
                act(folder / "allowed" / "other.txt", folder / "users" / "new.txt")
        (folder / "allowed" / "other.txt").rename(folder / "allowed" / "inner" / "moved.txt")

    write_protected(start, [folder / "allowed"])
    assert (folder / "users" / "file.txt").read_text() == "kept"
    assert (folder / "allowed" / "inner" / "moved.txt").exists()


@landlock
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK])
def test_no_device_is_made(folder: Path, kind: int) -> None:
    def start() -> None:
        os.mknod(folder / "users" / "device", kind | 0o600, os.makedev(1, 3))

    with pytest.raises(PermissionError):
        write_protected(start, [folder / "allowed"])


@landlock
def test_a_single_file_may_be_allowed(folder: Path) -> None:
    def start() -> None:
        (folder / "users" / "file.txt").write_text("new")
        with pytest.raises(PermissionError):
            (folder / "users" / "other.txt").write_text("new")

    write_protected(start, [folder / "users" / "file.txt"])
    assert (folder / "users" / "file.txt").read_text() == "new"


@landlock
def test_files_are_closed_and_what_a_start_raises_arrives(folder: Path) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        write_protected(lambda: subprocess.run(["no_such_program"], check=False), [folder, Path("/dev/null")])
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@landlock
@pytest.mark.parametrize("fails", ["prctl", "restrict"])
def test_a_start_that_cannot_be_confined_is_none(monkeypatch: Any, folder: Path, fails: str) -> None:
    call, started = _write_protection._call, []

    def refused(number: int, *arguments: Any) -> int:
        return 1 if number == 446 and fails == "restrict" else call(number, *arguments)

    class Library:
        syscall = ctypes.CDLL(None, use_errno=True).syscall

        @staticmethod
        def prctl(*_arguments: int) -> int:
            return 1 if fails == "prctl" else 0

    monkeypatch.setattr(_write_protection, "_call", refused)
    monkeypatch.setattr(_write_protection, "_libc", Library)
    with pytest.raises(OSError, match="landlock"):
        write_protected(lambda: started.append(1), [folder])
    assert not started


def test_without_landlock_a_program_starts_as_ever(monkeypatch: Any, folder: Path) -> None:
    monkeypatch.setattr(_write_protection, "rights", lambda: 0)
    assert write_protected(lambda: (folder / "users" / "file.txt").write_text("new"), []) == 3
