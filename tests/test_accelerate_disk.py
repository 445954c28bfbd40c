"""What a script writes before ``prepare``: read back, and the disk stays as it was. In copies of this process."""

# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH105, PTH106, PTH107, PTH108, PTH116, PTH123, PTH211 - all ways to write

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if not sys.platform.startswith("linux"):
    pytest.skip("where a folder is open is read from /proc", allow_module_level=True)

from vram_guard_accelerate.dry_run import early_writes  # noqa: E402 - what is tested has to be there
from vram_guard_accelerate.dry_run.early_writes import JOURNAL, EarlyWrites, undo  # noqa: E402
from vram_guard_accelerate.dry_run.side_effects import discard_file_writes  # noqa: E402


class RefusedError(Exception):
    pass


def refuse(message: str) -> Any:
    raise RefusedError(message)


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A folder with files of the user's."""
    folder = tmp_path / "users"
    (folder / "old" / "inner").mkdir(parents=True)
    for name in ("log.txt", "other.txt", "old/weights.bin", "old/inner/deep.txt"):
        (folder / name).write_text("kept\n")
    with sqlite3.connect(folder / "known.sqlite") as known:
        known.execute("create table runs (name text)")
    known.close()
    return folder


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    folder = tmp_path / "asked"
    folder.mkdir()
    return folder


def seen(folder: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        regular = stat.S_ISREG(state.st_mode)
        found[str(path.relative_to(folder))] = (
            state.st_mode,
            *((state.st_mtime_ns, path.read_bytes()) if regular else ()),
        )
    return found


def follow(asked: Path, users: Path, act: Callable[[EarlyWrites], object]) -> str:
    """Act in a copy whose writes are watched; what stopped it, "" where nothing did. All of it is undone."""
    before = seen(users)
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        said = "it ended early"
        try:
            os.chdir(users)
            writes = EarlyWrites(asked, refuse, lambda path: "/cache/" in os.fspath(path))
            writes.install()
            act(writes)
            said = ""
        except RefusedError as stopped:
            said = str(stopped)
        except BaseException as error:  # noqa: BLE001 - the copy has nobody else to tell
            said = f"line {error.__traceback__.tb_next.tb_lineno}: {error!r}"  # type: ignore[union-attr]
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        found = stream.read()
    os.waitpid(process, 0)
    undo(asked)
    assert seen(users) == before
    return found


def text(name: str) -> str:
    return Path(name).read_text()


def test_files_of_the_users_are_written_as_copies(asked: Path, users: Path) -> None:
    def act(_writes: EarlyWrites) -> None:
        with open("log.txt", "a") as log:
            log.write("more\n")
        assert text("log.txt") == "kept\nmore\n"
        with open("log.txt", "a") as log:  # the same copy again
            log.write("more\n")
        assert text("log.txt") == "kept\nmore\nmore\n"
        Path("log.txt").write_text("new")
        assert text("log.txt") == "new"
        Path("old/weights.bin").write_text("other")
        assert text("log.txt") == "new"  # each file has its own copy
        with io.open("other.txt", "r+") as file:  # noqa: UP020 - the other name of it
            assert file.read(2) == "ke"
            file.seek(0)
            file.write("K")
        assert text("other.txt") == "Kept\n"
        assert open(b"other.txt", "rb").read() == b"Kept\n"  # noqa: SIM115
        with pytest.raises(FileExistsError):
            open("log.txt", "x")  # noqa: SIM115

    assert follow(asked, users, act) == ""


def test_copies_keep_the_suffix_and_the_reader_of_another_file_gets_that(asked: Path, users: Path) -> None:
    def act(writes: EarlyWrites) -> None:
        assert writes.read("other.txt") == "other.txt"
        copy = writes.written("log.txt", keeps=True)
        assert Path(copy).parent == asked
        assert Path(copy).suffix == ".txt"
        assert text(copy) == "kept\n"
        assert writes.read("log.txt") == writes.read(users / "log.txt") == copy
        assert writes.read("other.txt") == "other.txt"
        assert writes.read(3) == 3
        second = writes.written("old/weights.bin")
        assert second != copy
        assert text(second) == ""
        assert writes.written("fresh.txt") == "fresh.txt"
        assert (writes.thrown_away("a.png"), writes.thrown_away(b"b.h5")) == (
            str(asked / "gone_1.png"),
            str(asked / "gone_2.h5"),
        )
        assert writes.written("cache/some.bin") == "cache/some.bin"

    assert follow(asked, users, act) == ""


def test_descriptors_open_copies_too(asked: Path, users: Path) -> None:
    def put(flags: int, **more: Any) -> None:
        handle = os.open("other.txt", flags, **more)
        os.write(handle, b"K")
        os.close(handle)

    def act(_writes: EarlyWrites) -> None:
        put(os.O_WRONLY)
        assert text("other.txt") == "Kept\n"
        put(os.O_WRONLY | os.O_TRUNC)
        assert text("other.txt") == "K"
        put(os.O_WRONLY | os.O_APPEND)
        assert text("other.txt") == "KK"
        handle = os.open("other.txt", os.O_RDONLY)
        assert os.read(handle, 9) == b"KK"
        with pytest.raises(FileExistsError):
            os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        below = os.open("old", os.O_RDONLY | os.O_DIRECTORY)
        inner = os.open("weights.bin", os.O_WRONLY, dir_fd=below)
        os.write(inner, b"K")
        assert text("old/weights.bin") == "Kept\n"
        read = os.open("inner/deep.txt", os.O_RDONLY, dir_fd=below)
        assert os.read(read, 9) == b"kept\n"
        made = os.open("new.bin", os.O_WRONLY | os.O_CREAT, dir_fd=below)
        os.write(made, b"new")
        assert text("old/new.bin") == "new"

    assert follow(asked, users, act) == ""


def test_torch_and_sqlite_write_copies(asked: Path, users: Path) -> None:
    torch.save({"step": 1}, users / "checkpoint.pt")
    (users / "mapped.bin").write_bytes(bytes([5] * 4))

    def act(_writes: EarlyWrites) -> None:
        torch.save({"step": 2}, "checkpoint.pt")
        assert torch.load("checkpoint.pt") == {"step": 2}
        torch.save({"step": 3}, "fresh.pt")
        assert torch.load("fresh.pt") == {"step": 3}
        with warnings.catch_warnings():  # newer releases deprecate it
            warnings.simplefilter("ignore")
            scripted = torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1))
            torch.jit.save(scripted, "log.txt")
            scripted.save("other.txt")
            torch.jit.script(torch.nn.Linear(1, 1)).save("old/weights.bin")
        mapped = torch.from_file("mapped.bin", shared=True, size=4, dtype=torch.uint8)
        assert mapped.tolist() == [5] * 4
        mapped[0] = 1
        assert Path("mapped.bin").read_bytes() == bytes([1, 5, 5, 5])
        assert torch.from_file("mapped.bin", size=4, dtype=torch.uint8).tolist() == [1, 5, 5, 5]
        torch.from_file("made.bin", shared=True, size=4, dtype=torch.uint8).fill_(1)
        for name in ("known.sqlite", "fresh.sqlite"):
            database = sqlite3.connect(name)
            database.execute("create table if not exists runs (name text)")
            database.execute("insert into runs values ('one')")
            database.commit()
            database.close()
        database = sqlite3.dbapi2.connect("known.sqlite")
        assert database.execute("select count(*) from runs").fetchone() == (1,)
        sqlite3.connect(":memory:").execute("create table runs (name text)")

    assert follow(asked, users, act) == ""
    assert not (users / ":memory:").exists()


def test_a_database_that_is_too_large_is_not_copied(asked: Path, users: Path, monkeypatch: Any) -> None:
    size = (users / "known.sqlite").stat().st_size
    monkeypatch.setattr(early_writes, "LARGEST_COPY", size)
    assert follow(asked, users, lambda _: sqlite3.connect("known.sqlite").close()) == ""
    monkeypatch.setattr(early_writes, "LARGEST_COPY", size - 1)
    said = follow(asked, users, lambda _: sqlite3.connect("known.sqlite"))
    assert "known.sqlite, which is too large to be copied" in said

    def own(_writes: EarlyWrites) -> None:
        for _ in range(2):
            database = sqlite3.connect("own.sqlite")
            database.execute("create table if not exists runs (name text)")
            database.close()

    assert follow(asked, users, own) == ""


def test_what_the_system_keeps_about_files_of_the_users_stays(asked: Path, users: Path) -> None:
    def act(_writes: EarlyWrites) -> None:
        os.truncate("log.txt", 2)
        assert text("log.txt") == "ke"
        os.utime("other.txt", (1, 1))
        os.chmod("other.txt", 0o600)
        with pytest.raises(FileNotFoundError):
            os.utime("never.txt", (1, 1))
        Path("own.txt").write_text("own")
        os.utime("own.txt", (1, 1))
        os.chmod("own.txt", 0o600)
        state = os.stat("own.txt")
        assert (state.st_mtime, stat.S_IMODE(state.st_mode)) == (1, 0o600)
        os.mkfifo("pipe")
        with pytest.raises(FileExistsError):
            os.mkfifo("log.txt")

    assert follow(asked, users, act) == ""


def test_links_lead_to_what_they_name(asked: Path, users: Path) -> None:
    def act(_writes: EarlyWrites) -> None:
        os.symlink("log.txt", "symbolic.txt")
        Path("symbolic.txt").write_text("new")
        assert text("symbolic.txt") == text("log.txt") == "new"
        os.link("other.txt", "hard.txt")
        Path("hard.txt").write_text("new")  # of the script's making, but another name of the user's
        assert text("hard.txt") == "new"
        os.symlink(users / "old", "folder")
        Path("folder/inner/deep.txt").write_text("new")
        assert text("old/inner/deep.txt") == "new"

    assert follow(asked, users, act) == ""


def test_the_scripts_own_files_are_moved_and_removed(asked: Path, users: Path) -> None:
    def act(_writes: EarlyWrites) -> None:
        os.makedirs("run/first")
        for name in ("a", "b", "c", "d"):
            Path(f"run/first/{name}.txt").write_text(name)
        os.replace("run/first/a.txt", "log.txt")  # takes the place of one of the user's
        assert text("log.txt") == "a"
        assert not os.path.lexists("run/first/a.txt")
        os.rename("run/first/b.txt", "run/first/e.txt")
        assert text("run/first/e.txt") == "b"
        os.rename("run/first/c.txt", "run/first/e.txt")  # takes the place of its own
        assert text("run/first/e.txt") == "c"
        os.unlink("run/first/e.txt")
        shutil.copytree("run", "another")
        shutil.rmtree("another")
        os.rename("run", "moved")
        os.unlink("moved/first/d.txt")
        Path("moved/first/f.txt").write_text("f")
        shutil.move("moved/first/f.txt", "old")
        os.rename("moved", "run")
        with pytest.raises(FileNotFoundError):
            os.rename("never.txt", "nowhere.txt")

    assert follow(asked, users, act) == ""


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: os.remove("log.txt"), "removes or moves"),
        (lambda: os.remove("dangling"), "removes or moves"),
        (lambda: os.rmdir("empty"), "removes or moves"),
        (lambda: shutil.rmtree("old"), "removes or moves"),
        (lambda: os.rename("log.txt", "moved.txt"), "removes or moves"),
        (lambda: os.remove("weights.bin", dir_fd=os.open("old", os.O_RDONLY)), "removes or moves"),
        (lambda: (os.mkdir("own"), os.replace("own", "empty")), "replaces"),
        (lambda: (os.mkdir("own"), os.rename("own", "own2"), os.remove("log.txt")), "removes or moves"),
    ],
)
def test_what_cannot_be_taken_back_is_stopped(asked: Path, users: Path, act: Callable[[], Any], said: str) -> None:
    (users / "empty").mkdir()
    (users / "dangling").symlink_to("never")
    assert said in follow(asked, users, lambda _writes: act())


def test_a_folder_that_was_there_is_not_made_whole(asked: Path, users: Path) -> None:
    (users / "empty").mkdir()

    def act(writes: EarlyWrites) -> None:
        assert not writes.made_whole("old")
        for name in ("empty", "fresh"):
            assert writes.made_whole(name)
            Path(name).mkdir(exist_ok=True)
            Path(name, "inner").mkdir()
            Path(name, "inner", "data").write_text("new")
            assert writes.made_whole(f"{name}/inner")
        assert writes.made_whole("cache/some")

    os.utime(users / "empty", (1, 1))
    assert follow(asked, users, act) == ""


def test_from_prepare_on_libraries_in_c_write_nothing_either(asked: Path, users: Path, monkeypatch: Any) -> None:
    (users.parent / "elsewhere.txt").write_text("")
    (users / "mapped.bin").write_bytes(bytes([5] * 4))
    with warnings.catch_warnings():  # newer releases deprecate it
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(torch.nn.Linear(1, 1))

    def count(name: str) -> int:
        with contextlib.closing(sqlite3.connect(name)) as database:
            database.execute("create table if not exists runs (name text)")
            database.execute("insert into runs values ('one')")
            database.commit()
            return int(database.execute("select count(*) from runs").fetchone()[0])

    def act(writes: EarlyWrites) -> None:
        Path("log.txt").write_text("new")
        assert count("known.sqlite") == 1
        writes.watches = False
        assert text("log.txt") == "new"  # what was written is still read back
        assert writes.made_whole("old")
        os.remove("../elsewhere.txt")  # this is kept from happening elsewhere
        assert writes.written("other.txt") == str(asked / "gone_1.txt")
        assert writes.written("/dev/null") == "/dev/null"
        assert writes.written("cache/some.bin") == "cache/some.bin"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted.save("other.txt")
            torch.jit.save(scripted, "fresh.pt")
            torch.jit.save(scripted, io.BytesIO())
        mapped = torch.from_file("mapped.bin", shared=True, size=4, dtype=torch.uint8)
        assert mapped.tolist() == [5] * 4
        mapped.fill_(1)
        torch.from_file("fresh.bin", shared=True, size=4, dtype=torch.uint8).fill_(1)
        # What the database held at prepare, with what was written before.
        assert count("known.sqlite") == 2
        assert count("known.sqlite") == 2
        assert count("another.sqlite") == count("fresh.sqlite") == 1
        monkeypatch.setattr(early_writes, "LARGEST_COPY", 0)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            count("another.sqlite")

    shutil.copy(users / "known.sqlite", users / "another.sqlite")
    assert follow(asked, users, act) == ""
    assert not (users.parent / "elsewhere.txt").exists()


def test_from_prepare_on_files_are_opened_and_nothing_is_written(asked: Path, users: Path) -> None:
    def act(writes: EarlyWrites) -> None:
        writes.watches = False
        discard_file_writes()
        for name in ("log.txt", "fresh.txt"):
            with open(name, "w") as file:
                assert file.write("new") == 3
            with open(name, "ab") as file:
                assert file.write(b"new") == 3
            Path(name).write_text("new")
            Path(name).write_bytes(b"new")
            torch.save({"step": 1}, name)
        assert text("log.txt") == "kept\n"
        assert not os.path.lexists("fresh.txt")
        os.makedirs("folder")
        os.remove("log.txt")
        os.rename("log.txt", "moved.txt")
        shutil.rmtree("old")

    assert follow(asked, users, act) == ""


def test_undone_is_what_the_journal_names_the_deepest_first(tmp_path: Path) -> None:
    undo(tmp_path)  # nothing was written
    made = tmp_path / "made"
    (made / "inner" / "whole" / "deep").mkdir(parents=True)
    for name in ("a.txt", "inner/b.txt", "inner/whole/c.txt", "inner/whole/deep/d.txt"):
        (made / name).write_text("x")
    (made / "link").symlink_to(tmp_path)
    kept = tmp_path / "kept"
    (kept / "inner").mkdir(parents=True)
    (kept / "inner" / "somebodys.txt").write_text("x")
    lines = [str(made), str(made / "inner"), str(made / "a.txt"), str(made / "never"), [str(made / "inner" / "whole")]]
    lines += [str(made / "inner" / "whole"), str(made / "inner" / "b.txt"), str(made / "link"), str(kept / "inner")]
    (tmp_path / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    undo(tmp_path)
    assert not made.exists()
    assert (kept / "inner" / "somebodys.txt").exists()
    assert tmp_path.is_dir()
