"""The dry run, seen from outside: a process of its own, its log, and its answer."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vram_guard import signals
from vram_guard.cache import cache_folder, forget_oldest
from vram_guard.codec import from_json, to_json
from vram_guard.forks import ended
from vram_guard.language import _
from vram_guard.limits import FILES_KEPT
from vram_guard_accelerate.dry_run.results import DryRunFailure
from vram_guard_accelerate.dry_run.side_effects import SILENT_ENVIRONMENT
from vram_guard_accelerate.launch_plan import ON_CPU
from vram_guard_accelerate.planning.caches import make_caches, remove_empty
from vram_guard_accelerate.planning.requests import ANSWER, REQUEST, DryRunAnswer, DryRunRequest

if TYPE_CHECKING:
    from typing_extensions import Self

#: Variables that accelerate and torchrun put into the environment of a rank; a dry run is not a rank.
OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK", "MV2_COMM_WORLD_SIZE"),
)


@dataclass(frozen=True)
class Prediction:
    """The answer of a dry run."""

    answer: DryRunAnswer
    log: str
    """Path of the file with the script's own output."""


def predict(request: DryRunRequest) -> Prediction:
    """Run the script dry.

    Raises:
        UnsupportedStepError: the script cannot be followed; the message says where and why.
        EndedCopyError: something was ended from outside, twice: there is no plan.
        KeyboardInterrupt: Ctrl-C; the dry run is ended.
    """
    log = _new_log()
    first = _run(request, log)
    if isinstance(first, DryRunFailure):
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as out:
            out.write(first.traceback)
        reason = first.message
        if first.ended_itself and (last := _last_line(log)):
            reason = f"{reason}: {last}"
        message = _(
            "no plan for this script, which is not started: {reason}. What it printed: {log}",
            reason=reason.rstrip("."),
            log=log,
        )
        raise replace(first, message=message).as_error()
    return Prediction(first, str(log))


def _last_line(log: Path) -> str:
    """The last line that a script has printed, but for progress bars; "" where it printed nothing."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line and "%|" not in line), "")
    return ""


def _new_log() -> Path:
    """A file for what the script says; where there is no place of our own, in the folder for temporary files."""
    base = cache_folder()
    if base is not None:
        with contextlib.suppress(OSError):
            folder = base / "launches"
            folder.mkdir(parents=True, exist_ok=True)
            forget_oldest(folder, FILES_KEPT, ("*.log",))
            return _new_file(folder)
    return _new_file(None)


def _new_file(folder: Path | None) -> Path:
    handle, name = tempfile.mkstemp(prefix="vram-guard-", suffix=".log", dir=folder)
    os.close(handle)
    return Path(name)


# --- the process ------------------------------------------------------------------------------------------------


def _run(request: DryRunRequest, log: Path) -> DryRunAnswer | DryRunFailure:
    """The answer of a dry run; where it is ended from outside, that of a second one."""
    for _attempt in range(2):
        answer, code = _run_once(request, log)
        if answer is not None:
            return answer
        if not ended.from_outside(code):
            return DryRunFailure.unsupported(_how_it_ended(code))
    return DryRunFailure.of(ended.twice(_("the dry run of the script"), code))


def _run_once(request: DryRunRequest, log: Path) -> tuple[DryRunAnswer | DryRunFailure | None, int]:
    """Start the process of a dry run; its answer, and its exit code."""
    with _DryRunProcess() as process, log.open("ab") as out:
        (process.folder / REQUEST).write_text(to_json(request), encoding="utf-8")
        command = [sys.executable, "-m", "vram_guard_accelerate.planning.worker", str(process.folder)]
        with signals.handled(_leave, (signal.SIGTERM, signal.SIGHUP)):
            code = process.run(command, _environment(request.environment), out)
        return read_answer(process.folder), code


class _DryRunProcess:
    """A folder and a process that works in it; both are gone after the block, and where this process is killed in it.

    What is left then is removed by a process that does nothing but wait for that.

    Attributes:
        folder: for what goes to and fro.
    """

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="vram-guard-"))
        self._made = make_caches()
        self._process: subprocess.Popen[bytes] | None = None
        waiting, self._held = os.pipe()
        self._watcher = os.fork()
        if self._watcher == 0:
            try:
                os.setsid()  # what ends us from a terminal does not reach it
                os.close(self._held)
                self._clean_up(waiting)
            finally:
                os._exit(0)
        os.close(waiting)
        return self

    def run(self, command: Sequence[str], environment: Mapping[str, str], out: IO[bytes]) -> int:
        """Run a program; its exit code, the negative number of a signal that ended it."""
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it through us
        )
        os.write(self._held, b"%d" % self._process.pid)
        return self._process.wait()

    def __exit__(self, *_error: object) -> None:
        os.close(self._held)
        with contextlib.suppress(ChildProcessError):  # its end is ignored, or somebody else has waited for it
            os.waitpid(self._watcher, 0)
        if self._process is not None:
            self._process.wait()

    def _clean_up(self, waiting: int) -> None:
        """In the process that waits: once the other one has left the block, or is gone."""
        with open(waiting, "rb") as held:
            process = held.read()
        if process:
            with contextlib.suppress(OSError):
                os.killpg(int(process), signal.SIGKILL)  # and what the script had started
        remove_empty(self._made)
        shutil.rmtree(self.folder, ignore_errors=True)


def read_answer(folder: Path) -> DryRunAnswer | DryRunFailure | None:
    """The answer of a dry run to the request in a folder; None where it gave none."""
    answer = folder / ANSWER
    kinds: Any = DryRunAnswer | DryRunFailure
    with contextlib.suppress(OSError, ValueError):  # it was killed before it had written all of it
        found: DryRunAnswer | DryRunFailure = from_json(kinds, answer.read_bytes())
        return found
    return None


def _how_it_ended(code: int) -> str:
    if code < 0:
        return _("the dry run of the script was killed by signal {number}", number=-code)
    return _("the dry run of the script ended with exit code {code}", code=code)


def _leave(number: int, _frame: Any) -> None:
    """SIGTERM and SIGHUP become exceptions, as SIGINT is one: what ends us ends the dry run too."""
    sys.exit(signals.EXIT_BASE + number)


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """The script's own environment, on a machine without a GPU: no driver is touched, the GPU is simulated."""
    environment = {name: value for name, value in {**os.environ, **added}.items() if name not in OF_A_RANK}
    environment.update(SILENT_ENVIRONMENT)
    environment[ON_CPU] = environment.get("ACCELERATE_USE_CPU", "False")
    environment.update(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="False", PYTHONUNBUFFERED="1")
    return environment
