"""The dry run, seen from outside: a process of its own, its log, its answer, and answers that are remembered."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.errors import UnsupportedStepError, VramGuardError
from vram_guard_accelerate.cli.target import OF_A_RANK
from vram_guard_accelerate.dry_run.results import state_of
from vram_guard_accelerate.dry_run.side_effects import SILENT_ENVIRONMENT
from vram_guard_accelerate.launch_plan import Orders
from vram_guard_accelerate.relaunch.relaunch import Variant, settled

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard_accelerate.settings import Settings

#: Libraries whose version decides what a step allocates, or how a script is launched.
LIBRARIES = ("vram-guard", "torch", "accelerate", "transformers", "diffusers", "peft", "numpy")

#: Launches whose plans are remembered; the longest ago go first.
MOST_REMEMBERED = 64

#: Files that say what a model or a training is, rather than hold what came of it.
DESCRIPTIONS = (".json", ".yaml", ".yml", ".toml", ".py", ".cfg")


@dataclass(frozen=True)
class Prediction:
    """What a dry run came to."""

    plan: Mapping[str, Any]
    """As :mod:`vram_guard.report.as_json` has it."""
    text: str
    """The same for people."""
    orders: Orders
    notes: tuple[str, ...]
    fits: bool
    changed: bool
    seconds: Mapping[str, float]
    """Of the script until its first batch, and of the planning."""
    host_memory: Mapping[str, int]
    """Bytes that the script's process had taken until then, and that it or a copy took at the most."""
    log: str
    """Where the script's own prints are."""
    remembered: bool = False
    """Whether an earlier dry run of an equal launch said it."""


@dataclass(frozen=True)
class Question:
    """A script, how it is to be launched, and what may be changed."""

    command: tuple[str, ...]
    module: bool
    settings: Settings
    budget: Budget
    ranks: int
    environment: Mapping[str, str]
    """What accelerate adds to the environment."""
    local_ranks: int = 1
    """Processes that share a machine, and its memory."""

    def key(self) -> str:
        """A stable name of everything that the answer depends on, as far as it can be known beforehand."""
        digest = hashlib.sha256()
        all_of_it = {**os.environ, **self.environment}
        kept = {name: value for name, value in all_of_it.items() if name.startswith("ACCELERATE_")}
        launch = (self.command, self.module, self.settings.as_dict(), sorted(kept.items()), str(Path.cwd()))
        machine = (self.ranks, self.local_ranks, self.budget.usable, self.budget.compute_capability, sys.version)
        digest.update(repr((launch, machine)).encode())
        for name in LIBRARIES:
            with contextlib.suppress(PackageNotFoundError):
                digest.update(f"{name}=={version(name)}\n".encode())
        for path in self._files():
            with contextlib.suppress(OSError):
                state = path.stat()
                digest.update(f"{path} {state.st_size} {state.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:32]

    def varied(self, variant: Variant) -> Question:
        """The same for a variant of the launch."""
        environment = {**self.environment, **variant.environment}
        return replace(self, command=(*self.command, *variant.arguments), environment=environment)

    def _files(self) -> list[Path]:
        """The script, its neighbours (which it may import), and descriptions that its arguments name.

        Not everything that they name: a script writes into some of it, and is still the same script.
        """
        script = Path(self.command[0])
        if self.module:
            found = importlib.util.find_spec(self.command[0])
            script = Path(found.origin) if found is not None and found.origin else script
        named = [Path(word.partition("=")[2] or word) for word in self.command[1:]]
        described = [path for path in named if path.suffix in DESCRIPTIONS]
        folders = [path / "config.json" for path in named]
        return [*sorted(script.resolve().parent.glob("*.py")), *described, *folders]


def predict(
    question: Question, *, fresh: bool = False, progress: Callable[[str], None] = lambda _line: None
) -> Prediction:
    """Run the script dry, or remember what came of it.

    Args:
        question: what is asked.
        fresh: do not look for a remembered answer.
        progress: called with the options of every variant of the launch that is run dry too.

    Raises:
        UnsupportedStepError: the script cannot be followed; the message says where and why.
        KeyboardInterrupt: Ctrl-C; the dry run is ended.
    """
    from vram_guard.report.files import write_atomically
    from vram_guard.watch.corrections import cache_folder

    base = cache_folder()
    remembered = None if base is None else base / "launches" / f"{question.key()}.json"
    if remembered is not None and not fresh:
        known = _remembered(remembered)
        if known is not None:
            return known
    log = _log_beside(remembered)
    if remembered is not None:
        _forget_oldest(remembered.parent)
    answer = _run(question, log)
    if "error" in answer:
        raise _error(answer, log)
    answer = settled(answer, lambda asked: _run(question.varied(Variant(**asked["variant"])), log, asked), progress)
    prediction = _read(answer, str(log))
    if remembered is not None and remembered.parent.is_dir():
        with contextlib.suppress(OSError):
            write_atomically(remembered, json.dumps({**answer, "log": str(log)}))
    return prediction


def _remembered(path: Path) -> Prediction | None:
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
        if any(state_of(name) != state for name, state in answer["files"].items()):
            return None  # what the script imports, from folders below or elsewhere, was edited since
        return _read(answer, answer.get("log", ""), remembered=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _forget_oldest(folder: Path) -> None:
    """Where free memory decides the budget, hardly two launches are equal: their plans must not pile up."""
    with contextlib.suppress(OSError):
        for kind in ("*.json", "*.log"):
            for path in sorted(folder.glob(kind), key=lambda path: path.stat().st_mtime)[:-MOST_REMEMBERED]:
                path.unlink(missing_ok=True)


def _read(answer: Mapping[str, Any], log: str, *, remembered: bool = False) -> Prediction:
    return Prediction(
        plan=answer["plan"],
        text=answer["text"],
        orders=Orders(**answer["orders"]),
        notes=tuple(answer["notes"]),
        fits=bool(answer["fits"]),
        changed=bool(answer["changed"]),
        seconds=answer["seconds"],
        host_memory=answer["host_memory"],
        log=log,
        remembered=remembered,
    )


def _log_beside(remembered: Path | None) -> Path:
    """A file for what the script says; where there is no place of our own, in the folder for temporary files."""
    if remembered is not None:
        with contextlib.suppress(OSError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            log = remembered.with_suffix(".log")
            log.write_text("", encoding="utf-8")
            return log
    handle, name = tempfile.mkstemp(prefix="vram-guard-", suffix=".log")
    os.close(handle)
    return Path(name)


def _run(question: Question, log: Path, varied: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Start the process of the dry run and wait for its answer; ``varied``: of what the question is a variant."""
    with tempfile.TemporaryDirectory(prefix="vram-guard-") as name:
        folder = Path(name)
        request = {
            "command": list(question.command),
            "module": question.module,
            "settings": question.settings.as_dict(),
            "ranks": question.ranks,
            "local_ranks": question.local_ranks,
            "varied": varied,
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        (folder / "budget.pickle").write_bytes(pickle.dumps(question.budget))
        with log.open("ab") as out:
            process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", "vram_guard_accelerate.dry_run.worker", str(folder)],
                env=_environment(question.environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it through us
            )
            try:
                with _ending_with_us():
                    code = process.wait()
            finally:
                _end(process)  # and what the script had started
        answer = folder / "answer.json"
        if answer.is_file():
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return found
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return {"error": "UnsupportedStepError", "message": f"the dry run of the script {how}", "traceback": ""}


@contextlib.contextmanager
def _ending_with_us() -> Iterator[None]:
    """Whoever ends us ends the dry run too: SIGTERM and SIGHUP become exceptions, as SIGINT is one."""

    def leave(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all of its copies."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """The script's own environment, on a machine without a GPU: no driver is touched, the GPU is a pretence."""
    environment = {name: value for name, value in {**os.environ, **added}.items() if name not in OF_A_RANK}
    environment.update(SILENT_ENVIRONMENT)
    environment.update(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="False", PYTHONUNBUFFERED="1")
    return environment


def _error(answer: Mapping[str, Any], log: Path) -> VramGuardError:
    from vram_guard import errors

    if answer.get("traceback"):
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as out:
            out.write(answer["traceback"])
    kind = getattr(errors, answer["error"], UnsupportedStepError)
    message = f"no plan for this script, which is not started: {answer['message']}. What it printed: {log}"
    made: VramGuardError = kind(message)
    return made
