"""Libraries that open files in C: they are given other paths, where the script or its dry run wants another file."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")

from vram_guard_accelerate.dry_run import library_writes
from vram_guard_accelerate.dry_run.library_writes import LibraryWrites


class RefusedError(Exception):
    pass


def refuse(message: str) -> Any:
    raise RefusedError(message)


class Paths:
    """Says which path a library was given instead."""

    def __init__(self) -> None:
        self.watches = True
        self.whole = True

    def written(self, file: Any, *, keeps: bool = False) -> str:
        return f"{'kept' if keeps else 'new'} {file}"

    def read(self, file: Any) -> str:
        return f"read {file}"

    def made_whole(self, _folder: Any) -> bool:
        return self.whole

    def thrown_away(self, file: Any) -> str:
        return f"gone {file}"


@pytest.fixture
def library(monkeypatch: Any) -> Any:
    """Modules with the functions of h5py, cv2, pyarrow and lmdb; each returns what it was given."""

    class File:
        def __init__(self, name: Any, mode: str = "r", *, more: Any = None) -> None:
            self.given = (name, mode, more)

    for name, members in {
        "h5py": {"File": File},
        "cv2": {"imwrite": lambda filename, picture: (filename, picture), "imread": lambda filename: filename},
        "lmdb": {"open": lambda path, **options: (path, options)},
        "pyarrow.feather": {"read_table": lambda source, **options: (source, options)},
        "pyarrow": {"OSFile": lambda path, mode="r": (path, mode)},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    return sys.modules


def test_libraries_are_given_other_paths(library: Any) -> None:
    paths = Paths()
    writes = LibraryWrites(paths, refuse)
    writes.watch()
    waiting = {one.where for one in writes._waiting}
    assert "soundfile:SoundFile.__init__" in waiting
    assert not waiting & {"h5py:File.__init__", "cv2:imwrite", "lmdb:open", "pyarrow:OSFile"}
    writes.watch()  # wraps none of them twice
    file = library["h5py"].File
    assert file("a.h5").given == ("read a.h5", "r", None)
    assert file("a.h5", "w", more=1).given == ("new a.h5", "w", 1)
    assert file("a.h5", mode="a").given == ("kept a.h5", "a", None)
    assert file(name=Path("a.h5"), mode="r+").given == ("kept a.h5", "r+", None)
    assert file(mode="x", name="a.h5").given == ("kept a.h5", "x", None)
    stream = io.BytesIO()
    assert file(stream, "w").given == (stream, "w", None)
    assert library["cv2"].imwrite("a.png", 1) == ("new a.png", 1)
    assert library["cv2"].imread(filename="a.png") == "read a.png"
    assert library["pyarrow"].OSFile("a.bin", "w") == ("new a.bin", "w")
    assert library["pyarrow"].OSFile("a.bin") == ("read a.bin", "r")
    reads = library["pyarrow.feather"].read_table
    assert reads("a.feather", filesystem="s3") == ("a.feather", {"filesystem": "s3"})
    assert reads("a.feather", filesystem=None) == ("read a.feather", {"filesystem": None})
    with pytest.raises(TypeError):
        reads()
    opens = library["lmdb"].open
    assert opens("folder") == ("folder", {})
    paths.whole = False
    assert opens("folder", readonly=True) == ("folder", {"readonly": True})
    with pytest.raises(RefusedError, match="it writes into folder, which a dry run cannot"):
        opens("folder")
    paths.watches = False
    assert opens("folder") == ("gone folder", {})
    assert library["cv2"].imwrite("a.png", 1) == ("gone a.png", 1)
    assert file("a.h5").given == ("read a.h5", "r", None)


def test_a_function_of_a_library_is_found_where_it_is_loaded(library: Any) -> None:
    opens = library_writes._Opens("h5py:File.__init__", "name", 1, "mode:2:r")
    assert opens.resolve() == (library["h5py"].File, "__init__")
    assert library_writes._Opens("h5py:Missing.__init__", "name", 1).resolve() is None
    assert library_writes._Opens("h5py:missing", "name", 1).resolve() is None
    assert library_writes._Opens("no_such_library:File", "name", 1).resolve() is None
    assert opens.mode_of((0, "a.h5"), {}) == "r"
    assert opens.mode_of((0, "a.h5", "w"), {}) == "w"
    assert opens.mode_of((0, "a.h5"), {"mode": "a"}) == "a"
    assert library_writes._Opens("h5py:File", "name", 1).mode_of((), {}) == "w"
