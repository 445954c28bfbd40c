"""``vram-guard --python PATH``: the command in another environment, where vram_guard need not be installed.

That environment's interpreter runs it, with that environment's torch and libraries. Of this environment it sees a
folder that holds vram_guard and its adapters, and nothing else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, NoReturn

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from vram_guard import __version__
from vram_guard.cache import cache_folder
from vram_guard.errors import InvalidInputError, MissingLibraryError
from vram_guard.language import _

#: As in pyproject.toml: the oldest Python, and what vram_guard imports besides the standard library.
OLDEST_PYTHON: Final = (3, 10)
NEEDED: Final = (
    *("torch>=2.4", "rich>=13", "nvidia-ml-py>=12", "PyYAML>=6", "safetensors>=0.4.3", "packaging>=23"),
    "tomli>=2; python_version < '3.11'",
)

#: The import packages of the distribution.
PACKAGES: Final = ("vram_guard", "vram_guard_lightning", "vram_guard_mmengine", "vram_guard_accelerate")

#: The last part of the folder's path, by which installed packages are told from the user's own code.
FOLDER: Final = "site-packages"

#: The groups of entry points that the command looks for in the environment that it runs in.
_GROUPS: Final = ("vram_guard.commands", "vram_guard.integrations")

_CACHES: Final = shutil.ignore_patterns("__pycache__")

#: Run by the other interpreter, of whatever release: its own, and those of the packages that are asked about.
_PROBE: Final = """
import json, sys
found = {"python": list(sys.version_info[:3]), "releases": {}}
try:
    from importlib import metadata
except ImportError:
    metadata = None
for name in sys.argv[1:] if metadata else ():
    try:
        found["releases"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""

#: That is enough for an interpreter on a slow network drive.
_PROBE_SECONDS: Final = 120

_SCRIPT: Final = 'from vram_guard.cli import main\n\nif __name__ == "__main__":\n    raise SystemExit(main())\n'


def run_in(python: str, arguments: Sequence[str]) -> int:
    """Run the command in another environment: on POSIX in place of this process, on Windows in one that is waited for.

    Args:
        python: its interpreter, or its folder.
        arguments: of the command.

    Raises:
        InvalidInputError: there is no interpreter, it does not run, or is too old.
        MissingLibraryError: it lacks what vram_guard imports.
    """
    interpreter = interpreter_of(python)
    check_environment(interpreter)
    if os.name == "posix":
        sys.stdout.flush()
        sys.stderr.flush()
        replace_process(interpreter, _linked(), arguments)
    return run_and_wait(interpreter, arguments)


def interpreter_of(python: str) -> Path:
    """The interpreter that is meant: a path to it, its environment's folder, or a name on the search path.

    Links stay as they are: a virtual environment's interpreter is one.

    Raises:
        InvalidInputError: there is none.
    """
    given = Path(python).expanduser()
    within = ("bin/python", "Scripts/python.exe", "python.exe", "bin/python3")
    named = shutil.which(python) if given.name == python and not given.exists() else None
    candidates = [given / name for name in within] if given.is_dir() else [Path(named or given)]
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            return path.absolute()
    raise InvalidInputError(
        _("--python: there is no interpreter at {path}: name one, or the folder of an environment", path=python)
    )


def check_environment(interpreter: Path) -> None:
    """Check that an interpreter can run vram_guard.

    Raises:
        InvalidInputError: it does not run, or is too old.
        MissingLibraryError: it lacks what vram_guard imports, or has a release that is too old.
    """
    needed = list(map(Requirement, NEEDED))
    found = _probed(interpreter, [one.name for one in needed])
    python = tuple(found["python"])
    release = ".".join(map(str, python))
    if python < OLDEST_PYTHON:
        raise InvalidInputError(
            _(
                "--python: {path} is Python {release}; vram_guard needs {oldest} or later",
                path=interpreter,
                release=release,
                oldest=".".join(map(str, OLDEST_PYTHON)),
            )
        )
    releases: Mapping[str, str] = found["releases"]
    minor = {"python_version": ".".join(map(str, python[:2])), "python_full_version": release}
    here = [one for one in needed if one.marker is None or one.marker.evaluate(minor)]
    wrong = [one for one in here if not _met(one, releases.get(one.name))]
    if wrong:
        asked = [f"{one.name}{one.specifier}" for one in wrong]
        raise MissingLibraryError(
            _(
                "{path} lacks what vram_guard needs there: {missing}. Install it: {command}",
                path=interpreter,
                missing=", ".join(map(_lack, wrong, [releases.get(one.name) for one in wrong])),
                command=shlex.join([str(interpreter), "-m", "pip", "install", *asked]),
            )
        )


def _met(needed: Requirement, release: str | None) -> bool:
    """True for a release of another form too: how old it is cannot be told."""
    try:
        return release is not None and needed.specifier.contains(Version(release), prereleases=True)
    except InvalidVersion:
        return True


def _lack(needed: Requirement, release: str | None) -> str:
    wanted = f"{needed.name}{needed.specifier}"
    return wanted if release is None else _("{wanted} (it has {release})", wanted=wanted, release=release)


def _probed(interpreter: Path, names: Sequence[str]) -> dict[str, Any]:
    """What the probe says; what else is printed while an interpreter starts comes before it."""
    try:
        run = subprocess.run(  # noqa: S603 - the interpreter that the user names
            [str(interpreter), "-c", _PROBE, *names],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_PROBE_SECONDS,
            check=False,
        )
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        _python, _releases = found["python"], found["releases"]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidInputError(_("--python: {path} does not run: {reason}", path=interpreter, reason=error)) from None
    except (ValueError, LookupError, TypeError):
        last = next(reversed(run.stderr.strip().splitlines()), "") or _("exit code {code}", code=run.returncode)
        raise InvalidInputError(
            _("--python: {path} is no Python interpreter that works: {reason}", path=interpreter, reason=last)
        ) from None
    return found


# --- the folder that the other environment sees ---------------------------------------------------------------------


def replace_process(interpreter: Path, folder: Path, arguments: Sequence[str]) -> NoReturn:
    """Go on as the other interpreter: the same process, with its terminal, its signals and its exit code."""
    os.execve(interpreter, [str(interpreter), str(folder / "vram-guard"), *arguments], _environment(folder))  # noqa: S606


def run_and_wait(interpreter: Path, arguments: Sequence[str]) -> int:
    """The exit code of the command in a process of its own, for systems that cannot replace a process by another."""
    with tempfile.TemporaryDirectory(prefix="vram-guard-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / FOLDER
        folder.mkdir()
        _fill(folder, lambda source, target: shutil.copytree(source, target, ignore=_CACHES))
        command = [str(interpreter), str(folder / "vram-guard"), *arguments]
        process = subprocess.Popen(command, env=_environment(folder))  # noqa: S603 - ourselves
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # noqa: PERF203 - the command gets it from the terminal too, and decides
                continue


def _environment(folder: Path) -> dict[str, str]:
    """This process's, with the folder importable in the command and in every process that it starts."""
    own = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *([own] if own else [])])}


def _linked() -> Path:
    """A folder with links to the packages; it stays, for nobody is left to remove it."""
    state = json.dumps([__version__, {name: str(path) for name, path in _sources().items()}, _metadata()])
    base = cache_folder()
    try:
        if base is not None:
            return _made(base / "python", hashlib.sha256(state.encode()).hexdigest()[:16])
    except OSError:  # a home that cannot be written, a file system without links
        pass
    return _made(Path(tempfile.mkdtemp(prefix="vram-guard-")), "python")


def _made(parent: Path, name: str) -> Path:
    folder = parent / name
    if not folder.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=parent))
        (made / FOLDER).mkdir()
        _fill(made / FOLDER, lambda source, target: target.symlink_to(source, target_is_directory=True))
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made, ignore_errors=True)
    return folder / FOLDER


def _fill(folder: Path, place: Any) -> None:
    """The packages, the script, and the metadata by which commands of adapters are found."""
    for name, source in _sources().items():
        place(source, folder / name)
    (folder / "vram-guard").write_text(_SCRIPT, encoding="utf-8")
    described = folder / f"vram_guard-{__version__}.dist-info"
    described.mkdir()
    for name, text in _metadata().items():
        (described / name).write_text(text, encoding="utf-8")


def _sources() -> dict[str, Path]:
    """Package -> its folder, of those that are installed."""
    found = {name: importlib.util.find_spec(name) for name in PACKAGES}
    return {
        name: Path(spec.origin).resolve().parent for name, spec in found.items() if spec is not None and spec.origin
    }


def _metadata() -> dict[str, str]:
    """Files of a distribution, as far as Python reads them to find entry points."""
    lines = []
    for group in _GROUPS:
        own = [one for one in entry_points(group=group) if _of_ours(one)]
        lines += [f"[{group}]", *sorted({f"{one.name} = {one.value}" for one in own}), ""]
    return {
        "METADATA": f"Metadata-Version: 2.1\nName: vram-guard\nVersion: {__version__}\n",
        "entry_points.txt": "\n".join(lines),
    }


def _of_ours(entry: EntryPoint) -> bool:
    return entry.value.partition(":")[0].partition(".")[0] in PACKAGES
