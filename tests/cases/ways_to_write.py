"""The ways in which people and libraries write files: a table for tests, and for the scripts that they run."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import gzip
import hashlib
import json
import logging
import mmap
import os
import pickle
import shelve
import shutil
import socket
import sqlite3
import subprocess
import tarfile
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pyarrow as pa
import safetensors.torch
import tokenizers
import torch
from PIL import Image, PngImagePlugin  # noqa: F401 - the second is imported when one is written
from pyarrow import parquet

from vram_guard.forks.side_effects import way

# ruff: noqa: PERF203, PTH101, PTH103, PTH104, PTH105, PTH107, PTH110, PTH115, PTH119, PTH120, PTH123, PTH211, SIM115 - in
# all the ways in which people write

TABLE = pa.table({"loss": [1.0, 2.0]})
PICTURE = np.full((8, 8, 3), 7, np.uint8)


def _descriptor(path: str, *, flags: int = os.O_TRUNC) -> None:
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | flags)
    os.write(handle, b"others")
    os.close(handle)


def _below_an_open_folder(path: str) -> None:
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.close(os.open(os.path.basename(path), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, dir_fd=folder))


def _mapped(path: str) -> None:
    with open(path, "ab") as file:
        file.write(bytes(64))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE) as mapped:
        mapped[:4] = b"mmap"


def _memmap(path: str) -> None:
    mapped = np.memmap(path, dtype="uint8", mode="w+", shape=(16,))
    mapped[:] = 7
    mapped.flush()


def _sent(path: str) -> None:
    with open(__file__, "rb") as source, open(path, "wb") as target:
        os.sendfile(target.fileno(), source.fileno(), 0, 100)


def _logged(path: str) -> None:
    handler = logging.FileHandler(path)
    handler.emit(logging.makeLogRecord({"msg": "step"}))
    handler.close()


def _database(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("create table runs (name text)")
        database.commit()


def _moved_over(path: str) -> None:
    with open(f"{path}.new", "w") as file:
        file.write("others")
    os.replace(f"{path}.new", path)


def hdf5(path: str) -> None:
    with h5py.File(path, "w") as file:
        file["loss"] = np.zeros(3)


def _words(path: str) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(path)


def _zipped(path: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")


def _tarred(path: str) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__)


def _table(path: str) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerow([1, 2])


def _temporary(path: str) -> None:
    tempfile.NamedTemporaryFile(delete=False, dir=os.path.dirname(path)).close()
    os.close(tempfile.mkstemp(dir=os.path.dirname(path))[0])
    tempfile.mkdtemp(dir=os.path.dirname(path))
    tempfile.NamedTemporaryFile(delete=False).close()


def _listened(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)


def _again(make: Callable[[str], None]) -> Callable[[str], None]:
    """Where a name is taken, what has it is removed first."""

    def made(path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        make(path)

    return made


#: Each is given a file that is there, and one that is not.
WRITES: dict[str, Callable[[str], Any]] = {
    "open": lambda path: open(path, "w").write("others"),
    "append": lambda path: open(path, "a").write("others"),
    "exclusive": _again(lambda path: open(path, "x").close()),
    "os.open": _descriptor,
    "os.open append": lambda path: _descriptor(path, flags=os.O_APPEND),
    "dir_fd": _below_an_open_folder,
    "fdopen": lambda path: os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT), "r+").write("others"),
    "Path.write_text": lambda path: Path(path).write_text("others"),
    "Path.touch": lambda path: Path(path).touch(),
    "mmap": _mapped,
    "memmap": _memmap,
    "tofile": lambda path: np.arange(3).tofile(path),
    "np.savez": lambda path: np.savez(open(path, "wb"), a=np.arange(3)),
    "sendfile": _sent,
    "logging": _logged,
    "json": lambda path: json.dump({}, open(path, "w")),
    "csv": _table,
    "pickle": lambda path: pickle.dump({}, open(path, "wb")),
    "gzip": lambda path: gzip.open(path, "wb").write(b"others"),
    "zip": _zipped,
    "tar": _tarred,
    "shelve": lambda path: shelve.open(f"{path}.shelf").close(),
    "sqlite3": _database,
    "torch.save": lambda path: torch.save({"a": torch.ones(1)}, path),
    "torch.jit": lambda path: torch.jit.save(torch.jit.script(torch.nn.ReLU()), path),
    "torch.from_file": lambda path: torch.from_file(path, shared=True, size=8, dtype=torch.uint8).fill_(9),
    "safetensors": lambda path: safetensors.torch.save_file({"a": torch.ones(1)}, path),
    "tokenizers": _words,
    "h5py": hdf5,
    "parquet": lambda path: parquet.write_table(TABLE, path),
    "OpenCV": lambda path: cv2.imwrite(f"{path}.png", PICTURE),
    "Pillow": lambda path: Image.fromarray(PICTURE).save(path, format="png"),
    "libc": lambda path: os.close(ctypes.CDLL(None).creat(os.fsencode(path), 0o600)),
    "copy": lambda path: shutil.copy(__file__, path),
    "move": lambda path: shutil.move(shutil.copy(__file__, f"{path}.copy"), path),
    "os.replace": _moved_over,
    "remove": _again(lambda _path: None),
    "rename": lambda path: os.path.exists(path) and os.rename(path, f"{path}.old"),
    "link": lambda path: os.link(os.path.dirname(path) + "/linked", f"{path}.link"),
    "symlink": lambda path: os.symlink(path, f"{path}.symbolic"),
    "through a symlink": lambda path: open(os.path.dirname(path) + "/alias", "a").write("others"),
    "mkfifo": lambda path: os.mkfifo(f"{path}.pipe"),
    "socket": _listened,
    "mkdir": lambda path: os.makedirs(f"{path}.folders/inner"),
    "rmtree": lambda path: shutil.rmtree(os.path.dirname(path) + "/folder", ignore_errors=True),
    "copytree": lambda path: shutil.copytree(os.path.dirname(path) + "/tree", f"{path}.tree"),
    "truncate": lambda path: os.path.exists(path) and os.truncate(path, 1),
    "chmod": lambda path: os.path.exists(path) and os.chmod(path, 0o600),
    "utime": lambda path: os.path.exists(path) and os.utime(path, (1, 1)),
    "chown": lambda path: os.path.exists(path) and os.chown(path, os.getuid(), os.getgid()),
    "xattr": lambda path: os.path.exists(path) and os.setxattr(path, "user.mark", b"1"),
    "temporary": _temporary,
    "touch": lambda path: subprocess.run(["touch", path], check=True),
    "shell": lambda path: os.system(f"echo others > '{path}' && test -s '{path}'") and 1 / 0,
    "rm": lambda path: subprocess.run(f"rm -f '{path}' && ! test -e '{path}'", shell=True, check=True),
}


def seen(folder: Path) -> dict[str, Any]:
    """Everything in a folder: names, contents, owners, rights and times."""
    found: dict[str, Any] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        state = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        marks = os.listxattr(path, follow_symlinks=False)
        link = os.readlink(path) if path.is_symlink() else ""
        found[str(path)] = (*state[:4], *state[4:7], state.st_mtime_ns, content, link, marks)
    return found


#: Those of them that start a program.
PROGRAMS = ("touch", "shell", "rm")


def files_of_the_users(folder: Path) -> Path:
    """A folder for each way to write."""
    for number in range(len(WRITES)):
        one = folder / str(number)
        (one / "folder").mkdir(parents=True)
        (one / "tree").mkdir()
        for name in ("there", "linked", "folder/weights", "tree/weights"):
            (one / name).write_text("kept")
        (one / "alias").symlink_to(one / "linked")
    return folder


def written(folder: Path, *, programs: bool = True) -> tuple[str, dict[str, str]]:
    """How this process writes, and the ways in which it could not; without the programs that it would start."""
    failed = {}
    for number, (name, write) in enumerate(WRITES.items()):
        if not programs and name in PROGRAMS:
            continue
        for file in ("there", "new"):
            try:
                write(str(folder / str(number) / file))
            except Exception:  # noqa: BLE001 - of all libraries
                failed[f"{name} {file}"] = traceback.format_exc(limit=-2)
    return way(), failed
