"""A view of the disk that is one process's own: what it writes lies in memory, over files that stay as they are.

Linux lets a process have its own mounts (a mount namespace), and so lay an overlay over every file system that it sees.
All that it and the programs that it starts write, move, rename and remove, by whatever library, goes into the upper
layer, in a tmpfs that is gone with the last of these processes. A user who is not root gets there through a namespace
of users, in which the own number stays what it is.

The system keeps its own files (``/proc``, ``/sys``, ``/dev``). A mount that takes no overlay can be read, not written.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import stat
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

# ruff: noqa: PTH101, PTH102, PTH103, PTH107, PTH109, PTH112, PTH115, PTH116, PTH118, PTH120, PTH123, PTH208, PTH211 -
# system calls in a fixed order, on paths as the system gives them

_NEW_MOUNTS, _NEW_USERS = 0x20000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_RECURSIVE, _READ_ONLY = 442, 0x8000, 1
_CAPABILITIES_3 = 0x20080522

#: Where the tmpfs is mounted until it becomes the root: any folder that every system has.
_ANY_FOLDER = "/dev"

#: Folders that hold devices and what the system tells. Memory that processes share is a file system like any other.
_SYSTEMS_OWN: Final = ("/proc", "/sys", "/dev")
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - shared memory, not a temporary file

#: Folders are renamed by a mark that only root may read; other users get EXDEV, as between two disks.
_AS_ROOT, _AS_USER = "redirect_dir=on,index=off,metacopy=off", "userxattr,index=off,metacopy=off"


@dataclass(frozen=True)
class _Mount:
    """One mount of the new root."""

    point: str
    kind: Literal["overlay", "bind", "read-only"]
    lower: str


@dataclass
class _Mounts:
    """The state of the mounts of this process.

    Attributes:
        scratch: descriptor of the tmpfs, which holds the layers and, in ``old``, the disk.
        mounts: from the root down.
        layers: folders in the tmpfs, the newest first.
        options: of overlays.
        capabilities: a word of those that the process uses otherwise; None where it has not got others for this.
        places: folders in which it will write, as far as that is known. An overlay copies the folders above what is
            written, with their owners, which a namespace of users may not have: these are there beforehand.
    """

    scratch: int
    mounts: list[_Mount]
    options: str
    capabilities: int | None
    places: tuple[str, ...] = ()
    layers: list[str] = field(default_factory=list)


_view: _Mounts | None = None


def enter(kept: Iterable[Path] = (), words: Iterable[str] = ()) -> None:
    """From now on what this process writes is nowhere but in memory; the same again puts a layer on top.

    Must be called in a process with one thread, the first time. A copy of a process that has a view shares it until it
    enters again: what it writes afterwards, the original does not see.

    Args:
        kept: folders that are written to for real, of those that are there. Asked for the first time.
        words: a command, in which folders are named where it will write, as in the variables of the environment.

    Raises:
        OSError: the system does not let this process do that; it sees the disk as before.
    """
    here, folders = os.getcwd(), dict(_open_folders())
    if _view is None:
        _first(kept, [here, *_named((*words, *sys.argv, *os.environ.values()))])
    else:
        _further(_view)
    _stand_in(here)
    for number, path in folders.items():
        with contextlib.suppress(OSError):
            again = os.open(path, os.O_DIRECTORY | os.O_CLOEXEC)
            os.dup2(again, number, inheritable=os.get_inheritable(number))
            os.close(again)


def is_entered() -> bool:
    """True if what this process writes is thrown away with it."""
    return _view is not None


def changed() -> Iterator[tuple[str, Path]]:
    """Each path that the newest layer holds other than folders: as the process names it, and the file to read.

    A file that was removed is a device without a number (0, 0).
    """
    view = _view
    if view is None:
        return
    base = f"/proc/self/fd/{view.scratch}{view.layers[0]}"
    for at, mount in enumerate(view.mounts):
        if mount.kind == "overlay":
            for folder, _folders, names in os.walk(f"{base}/{at}/up"):
                inside = os.path.relpath(folder, f"{base}/{at}/up")
                for name in names:
                    yield os.path.normpath(os.path.join(mount.point, inside, name)), Path(folder, name)


# --- the mounts ----------------------------------------------------------------------------------------------------


def _first(kept: Iterable[Path], places: list[str]) -> None:
    global _view  # noqa: PLW0603 - one for the process
    points, sockets, effective = _mount_points(), _sockets(), _effective()
    shared = [os.path.realpath(folder) for folder in kept]
    by_users = _own_mounts()
    scratch = -1
    try:
        _mount("none", "/", None, _RECURSIVE | _PRIVATE)
        _mount("tmpfs", _ANY_FOLDER, "tmpfs", 0, "mode=755")
        os.mkdir(f"{_ANY_FOLDER}/old")
        _checked(_libc().pivot_root(_ANY_FOLDER.encode(), f"{_ANY_FOLDER}/old".encode()), "pivot_root")
        os.chdir("/")
        scratch = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        mounts = list(_planned("/", points, splits=by_users))
        binds = [one for one in (*sockets, *shared) if os.path.lexists(f"/old{one}")]
        mounts += [_Mount(one, "bind", f"/old{one}") for one in binds]
        if by_users:
            view = _Mounts(scratch, mounts, _AS_USER, effective, tuple(places))
        else:
            view = _Mounts(scratch, mounts, _AS_ROOT, None)
        _put_layer(view)
        _set_effective(view.capabilities)
        _try_out(places[0])
    except BaseException:
        _set_effective(-1)
        if scratch >= 0:
            os.fchdir(scratch)
            os.chroot("old")
            _stand_in(places[0])
        _set_effective(effective)
        raise
    _view = view


def _further(view: _Mounts) -> None:
    if view.capabilities is not None:
        _set_effective(-1)
    os.fchdir(view.scratch)
    os.chroot(".")
    _checked(_libc().unshare(_NEW_MOUNTS), "unshare")
    again = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # as it is mounted for this process
    os.dup2(again, view.scratch, inheritable=False)
    os.close(again)
    try:
        _put_layer(view)
    except OSError:  # it is told where the answer is awaited
        os.chroot(f"{view.layers[0]}/root")
        raise
    finally:
        _set_effective(view.capabilities)


def _put_layer(view: _Mounts) -> None:
    """Mount everything over a new upper layer, and make that the root."""
    layer = f"/{len(os.listdir('/'))}-{os.getpid()}"
    root = f"{layer}/root"
    os.makedirs(root)
    for at, mount in enumerate(view.mounts):
        target = root if mount.point == "/" else root + mount.point
        if mount.kind == "overlay":
            lower = [*(f"{one}/{at}/up" for one in view.layers), mount.lower]
            try:
                made_before = [] if view.layers else _above(mount.point, view)
                _put_overlay(f"{layer}/{at}", lower, target, view.options, made_before)
            except OSError:
                if view.layers or mount.point == "/":
                    raise
                mount = view.mounts[at] = _Mount(mount.point, "read-only", mount.lower)  # noqa: PLW2901
        if mount.kind != "overlay":
            try:
                _mount(mount.lower, target, None, _BIND | _RECURSIVE)
            except FileNotFoundError:
                if os.path.lexists(mount.lower):
                    raise
                continue  # another process has removed it since
        if mount.kind == "read-only":
            _forbid_writing(target)
    view.layers.insert(0, layer)
    os.chroot(root)


def _put_overlay(folder: str, lower: list[str], target: str, options: str, inside: list[str]) -> None:
    up, work = f"{folder}/up", f"{folder}/work"
    os.makedirs(up)
    os.mkdir(work)
    for one in inside:
        os.makedirs(f"{up}/{one}", exist_ok=True)
    for one in (*sorted(inside, reverse=True), "."):
        _make_like(f"{up}/{one}", f"{lower[0]}/{one}")
    below = ":".join(re.sub(r"([\\:,])", r"\\\1", one) for one in lower)
    _mount("overlay", target, "overlay", 0, f"lowerdir={below},upperdir={up},workdir={work},{options}")


def _above(point: str, view: _Mounts) -> list[str]:
    """The folders below a mount, and in it, that hold the places where the process will write, and these."""
    found: set[str] = set()
    for place in view.places:
        deepest = max((one.point for one in view.mounts if _is_below(place, one.point)), key=len)
        if deepest == point and os.path.isdir(f"/old{place}"):
            names = os.path.relpath(place, point).split("/")
            found.update("/".join(names[: end + 1]) for end in range(len(names)))
    return sorted(found - {"."})


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _try_out(folder: str) -> None:
    """Raises OSError where nothing can be written in a folder through the overlay, and could be without."""
    if os.access(folder, os.W_OK):
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        os.remove(name)


def _planned(point: str, points: dict[str, bool], *, splits: bool) -> Iterator[_Mount]:
    """The mounts at a folder and below it, the folder first.

    Args:
        point: the folder.
        points: mount points of this process, and whether they can be written to.
        splits: whether a folder with mounts below it takes no overlay, as in a namespace of users, which may not see
            what such mounts hide. What it holds is mounted one by one then.
    """
    lower = f"/old{point}"
    if point in _SYSTEMS_OWN:
        yield _Mount(point, "bind", lower)
        if point == "/dev" and _SHARED_MEMORY in points:
            yield _Mount(_SHARED_MEMORY, "overlay", f"/old{_SHARED_MEMORY}")
        return
    below = [one for one in points if one != point and _is_below(one, point)]
    if not points.get(point, True):
        yield _Mount(point, "bind", lower)
    elif not stat.S_ISDIR(os.stat(lower).st_mode):
        yield _Mount(point, "read-only", lower)
    elif splits and below:
        yield from _split(point, points)
        return
    else:
        yield _Mount(point, "overlay", lower)
    done: list[str] = []
    for one in below:
        if not any(_is_below(one, above) for above in done):
            yield from _planned(one, points, splits=splits)
            done += [one]
    if point == "/":
        for one in _SYSTEMS_OWN:
            if one not in below and os.path.isdir(f"/old{one}"):
                yield from _planned(one, points, splits=splits)


def _split(point: str, points: dict[str, bool]) -> Iterator[_Mount]:
    """Each thing that a folder holds, over a folder in memory with the same names."""
    old, like = f"/old{point}".rstrip("/"), f"/like{point}".rstrip("/")
    os.makedirs(like, exist_ok=True)
    yield _Mount(point, "overlay", like)
    for entry in os.scandir(old):
        inner = f"{point.rstrip('/')}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), f"{like}/{entry.name}")
            continue
        if entry.is_dir():
            os.makedirs(f"{like}/{entry.name}", exist_ok=True)
        else:
            os.close(os.open(f"{like}/{entry.name}", os.O_CREAT | os.O_WRONLY))
        yield from _planned(inner, points, splits=True)
    _make_like(like, old)


def _make_like(folder: str, other: str) -> None:
    """Give a folder the rights and times of another one; where it cannot have its owner, those that this user has."""
    state = os.stat(other)
    mode = stat.S_IMODE(state.st_mode)
    try:
        os.chown(folder, state.st_uid, state.st_gid)
    except OSError:
        if not os.access(other, os.W_OK):
            mode &= ~0o222
    os.chmod(folder, mode)
    os.utime(folder, ns=(state.st_atime_ns, state.st_mtime_ns))


# --- what the process has and sees ---------------------------------------------------------------------------------


def _mount_points() -> dict[str, bool]:
    """Folders and files at which something is mounted, the outer ones first, and whether it can be written to."""
    seen = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields, _dash, rest = line.partition(" - ")
            number, _parent, _device, _root, point, options, *_more = fields.split(" ")
            point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), point)
            if _number_of_mount(point) == number:  # others are hidden by what is mounted over them
                writable = "ro" not in options.split(",") and "ro" not in rest.split()[-1].split(",")
                seen[point] = writable
    return dict(sorted(seen.items()))


def _number_of_mount(point: str) -> str:
    with contextlib.suppress(OSError):
        handle = os.open(point, os.O_PATH | os.O_CLOEXEC)
        try:
            with open(f"/proc/self/fdinfo/{handle}", encoding="utf-8") as told:
                return next(line.split()[1] for line in told if line.startswith("mnt_id:"))
        finally:
            os.close(handle)
    return ""


def _sockets() -> list[str]:
    """Paths at which processes listen: through an overlay nobody would be found there."""
    found = set()
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            path = "/" + line.rstrip("\n").partition(" /")[2]
            with contextlib.suppress(OSError):
                if path != "/" and stat.S_ISSOCK(os.stat(path).st_mode):
                    found.add(os.path.realpath(path))
    return sorted(found)


def _named(words: Iterable[str]) -> set[str]:
    """Folders that words name, or the files in them, and the user may write to."""
    pieces = {piece for word in words for piece in re.split("[=:]", word) if piece.startswith("/")}
    found = {path if os.path.isdir(path) else os.path.dirname(path) for path in map(os.path.realpath, pieces)}
    return {folder for folder in found if os.access(folder, os.W_OK)}


def _open_folders() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (_view is None or int(name) != _view.scratch) and stat.S_ISDIR(os.fstat(int(name)).st_mode):
                yield int(name), os.readlink(f"/proc/self/fd/{name}")


def _stand_in(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError:  # it was removed
        os.chdir("/")


def _own_mounts() -> bool:
    """Take leave of the mounts of other processes; True where that takes a namespace of users."""
    if _libc().unshare(_NEW_MOUNTS) == 0:
        return False
    user, group = os.geteuid(), os.getegid()
    _checked(_libc().unshare(_NEW_USERS | _NEW_MOUNTS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as table:
            table.write(text)
    return True


def _effective() -> int:
    """A word of the capabilities that this process uses."""
    with open("/proc/self/status", encoding="utf-8") as told:
        return next(int(line.split()[1], 16) for line in told if line.startswith("CapEff:"))


def _set_effective(wanted: int | None) -> None:
    """Use these capabilities of those that the process may have; None: stay with those that it uses."""
    if wanted is None:
        return
    header = struct.pack("=Ii", _CAPABILITIES_3, 0)
    sets = ctypes.create_string_buffer(24)
    _checked(_libc().capget(header, sets), "capget")
    _used, low, inherited, _used_high, high, inherited_high = struct.unpack("=6I", sets.raw)
    used = (wanted & low & 0xFFFFFFFF, low, inherited, (wanted >> 32) & high & 0xFFFFFFFF, high, inherited_high)
    _checked(_libc().capset(header, struct.pack("=6I", *used)), "capset")


def _forbid_writing(target: str) -> None:
    attributes = struct.pack("=4Q", _READ_ONLY, 0, 0, 0)
    found = _libc().syscall(_MOUNT_SETATTR, -100, target.encode(), _AT_RECURSIVE, attributes, len(attributes))
    _checked(found, f"mount_setattr {target}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = None if kind is None else kind.encode()
    found = _libc().mount(
        os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), os.fsencode(options)
    )
    _checked(found, f"mount {target}")


def _checked(found: int, what: str) -> None:
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
