"""What a training came to, how two of them are compared, and the verdict about a training under the guard.

A case is a small training and, where the guard cannot keep it equal, the words that the guard owes its user. A mode is
a way to run it under the guard. Every pair of the two gets one verdict:

- EQUAL: weights, buffers, optimizer states, logged metrics, hook counts, generator states and side effects are those of
  the training without the guard; to the bit where nothing was to change, up to rounding where something was.
- SAID: the guard left the training alone, refused it or warned, in words that name the cause.
- DIFFERS IN SILENCE: neither.

Words that are printed for every training say nothing about this one: what the guard says about a control training (a
plain mean squared error) in the same mode does not count, and neither does a promise that all is well.
"""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pickle
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch

REPORT, FIT, MICRO, CHECKPOINT, TIGHT = "report", "fit", "micro", "checkpoint", "tight"
#: A budget that nothing but slices of the batch may meet.
SLICES = "slices"
#: Largest relative difference: where nothing is changed, none; recomputed forwards; sums in another order.
TOLERANCES = {REPORT: 0.0, FIT: 0.0, CHECKPOINT: 1e-6, MICRO: 1e-5, TIGHT: 1e-5, SLICES: 1e-5}
#: Values below are rounding errors of what they were computed from (gradients that cancel out).
FLOOR = 1e-2
#: Promises, facts about every plan, and what is said about sizes: never the words that a difference needs.
IRRELEVANT = re.compile(
    r"(?<!not )(?<!un)proven by|samples were run(, and nothing| as written)|as you said|this plan is applied|"
    r"micro-batches; the effective batch size stays|"
    r"losses of micro-batches are weighted by sample count|out-of-memory error would not be recovered|"
    r"^(the step fits|fits as written)|no symbolic kernel|sizes are bounds|^the size of|sequence of allocations",
    re.IGNORECASE,
)


class Verdict(enum.Enum):
    EQUAL = "equal"
    SAID = "said"
    SILENT = "differs in silence"


def unchanged(name: str) -> str:
    """One of the two modes that change nothing, by turns: where nothing in particular speaks for running both."""
    return (REPORT, FIT)[sum(name.encode()) % 2]


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: unique within its framework.
        make: a new training, after the generators were seeded; what it returns is the framework's driver's business.
        modes: in which it is run under the guard.
        says: what the guard's words must match where the training is not equal; "" where it has to be equal.
        exact: the training has to be run in micro-batches and be equal: refusing it is no way out.
        micro: samples of a micro-batch where it is pinned.
        tolerance: largest relative difference where more than rounding is changed on purpose (a precision).
    """

    name: str
    make: Callable[[], Any]
    modes: tuple[str, ...] = (REPORT, FIT, MICRO)
    says: str = ""
    exact: bool = False
    micro: int = 4
    tolerance: float | None = None

    @property
    def pairs(self) -> list[tuple[Case, str]]:
        return [(self, mode) for mode in self.modes]


@dataclass
class Outcome:
    """What one training came to."""

    record: dict[str, Any] | None = None
    """None where the training did not take place, or did not end."""
    words: list[str] = field(default_factory=list)
    """Sentences of the guard's: of warnings, of the report below the tables, of the error."""
    applied: bool = False
    """A changed plan was."""
    peak: int = 0
    """Bytes of the step as written."""
    crash: str = ""
    """The error that ended it when it had begun."""


@dataclass(frozen=True)
class Judged:
    verdict: Verdict
    words: tuple[str, ...] = ()
    """Those that the control training was not told."""
    difference: str = ""
    applied: bool = False


# --- comparing ----------------------------------------------------------------------------------------------


def differences(one: Any, other: Any, tolerance: float, path: str = "") -> Iterator[tuple[float, str]]:
    """(relative size, where) of everything in which two records differ."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        one, other = one.detach(), other.detach()
        if one.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        if one.shape != other.shape or one.dtype != other.dtype:
            yield float("inf"), f"{path}: {tuple(one.shape)} {one.dtype}, {tuple(other.shape)} {other.dtype}"
        elif one.dtype.is_floating_point or one.dtype.is_complex:
            yield from _numbers(one, other, tolerance, path)
        elif not torch.equal(one, other):
            yield float("inf"), f"{path}: other values"
    elif isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        yield from differences(torch.from_numpy(one.copy()), torch.from_numpy(other.copy()), tolerance, path)
    elif isinstance(one, float) and isinstance(other, float):
        yield from _numbers(torch.tensor(one).double(), torch.tensor(other).double(), tolerance, path)
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            if key in one and key in other:
                yield from differences(one[key], other[key], tolerance, f"{path}.{key}")
            else:
                yield float("inf"), f"{path}.{key}: only {'without' if key in one else 'with'} the guard"
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield float("inf"), f"{path}: {len(one)} entries without the guard, {len(other)} with it"
        for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            yield from differences(mine, theirs, tolerance, f"{path}[{index}]")
    elif is_dataclass(one) and type(one) is type(other):
        yield from differences(vars(one), vars(other), tolerance, path)
    elif one != other:
        yield float("inf"), f"{path}: {one!r:.60} without the guard, {other!r:.60} with it"


def _numbers(one: torch.Tensor, other: torch.Tensor, tolerance: float, path: str) -> Iterator[tuple[float, str]]:
    if tolerance == 0:
        if not torch.equal(one.nan_to_num(nan=7e7), other.nan_to_num(nan=7e7)):
            yield float((one - other).abs().max()) or 1.0, f"{path}: not the same bits"
        return
    if not torch.equal(one.isfinite(), other.isfinite()):
        yield float("inf"), f"{path}: not finite in the same places"
        return
    one, other = (x.nan_to_num(0.0, 0.0, 0.0).to(torch.promote_types(x.dtype, torch.float64)) for x in (one, other))
    if one.numel():
        size = float((one - other).abs().max()) / max(float(one.abs().max()), FLOOR)
        if size > tolerance:
            yield size, f"{path}: {size:.1e}"


def largest_difference(plain: Any, guarded: Any, tolerance: float) -> str:
    """The worst one in words; "" where there is none."""
    found = sorted(differences(plain, guarded, tolerance), key=lambda each: -each[0])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0][1].lstrip('.')}{more}" if found else ""


def judge(case: Case, mode: str, plain: Outcome, guarded: Outcome, control: Iterable[str]) -> Judged:
    """The verdict about a training under the guard."""
    assert plain.record is not None
    usual = {generalised(line) for line in control}
    words = tuple(line for line in guarded.words if generalised(line) not in usual and not IRRELEVANT.search(line))
    tolerance = TOLERANCES[mode] if case.tolerance is None or not guarded.applied else case.tolerance
    if not guarded.applied:  # what changes nothing changes no bit, whatever was asked for
        tolerance = 0.0
    different = guarded.crash or "it was not trained"
    if guarded.record is not None:
        different = largest_difference(plain.record, guarded.record, tolerance)
    if not different and (guarded.applied or mode in (REPORT, FIT)):
        return Judged(Verdict.EQUAL, words, applied=guarded.applied)
    # Asked for a change and not applied: it is owed a reason, as a training that differs is owed its cause.
    wanted = case.says or "(?!)"
    if not different:
        wanted += "|possible|cannot|not cut|nothing|known to fit|differ|supported|not proven"
    said = any(re.search(wanted, without_files(line), re.IGNORECASE) for line in words)
    verdict = Verdict.SAID if said else Verdict.SILENT
    return Judged(verdict, words, different or "a change was asked for and dropped without a reason", guarded.applied)


def generalised(line: str) -> str:
    """Without its numbers."""
    return re.sub(r"[\d.,]+", "#", line).strip()


def without_files(line: str) -> str:
    """Without "(file:line)": a file's name is no cause."""
    return re.sub(r"\([^()]*\.py:\d+\)", "", line)


# --- listening ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(outcome: Outcome) -> Iterator[None]:
    """Collect what the guard says: its warnings, and what it prints below its tables."""
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            yield
        finally:
            said = [str(one.message) for one in caught]
            outcome.words += [text for text in said if "vram_guard" in text or "micro-batch" in text]
            outcome.words += notes(printed.getvalue())


def notes(printed: str) -> list[str]:
    """The sentences of a report: reasons ("•") and notes ("-"), wrapped lines joined."""
    found: list[str] = []
    within = False
    for line in printed.splitlines():
        if re.match(r"\s*[•*-] ", line):
            found.append(line.strip(" •*-"))
            within = True
        elif line.startswith("vram_guard:"):
            found.append(line)
            within = False
        elif within and line.startswith("    "):
            found[-1] += f" {line.strip()}"
        else:
            within = False
    return found


def refusal(error: Exception) -> list[str]:
    """The sentences of an error that kept a training from beginning: each is judged by itself, as in a report."""
    parts = re.split(r"\n\s*\n|\n(?=\s*[•*-] )", f"{type(error).__name__}: {error}")
    return [" ".join(part.split()).strip(" •*-") for part in parts if part.strip()]


def in_copy(train: Callable[[], Outcome]) -> Outcome:
    """What a training comes to in a copy of this process, which it may leave in any state."""
    with tempfile.TemporaryFile() as answer:  # a pipe would be held open by what the copy leaves running
        process = os.fork()
        if process == 0:
            try:
                torch.set_num_threads(1)  # the threads of a pool are not copied
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                found = pickle.dumps(train())
            except BaseException:  # noqa: BLE001 - the copy ends here, whatever it was
                found = pickle.dumps(traceback.format_exc())
            answer.write(found)
            answer.flush()
            os._exit(0)
        os.waitpid(process, 0)
        answer.seek(0)
        found = answer.read()
    outcome = pickle.loads(found) if found else "this training's process died"
    assert isinstance(outcome, Outcome), outcome
    return outcome


def seed(number: int = 3) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def generator_states() -> dict[str, Any]:
    """Of the process: torch's, Python's and numpy's."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


# --- the table ----------------------------------------------------------------------------------------------


class Suite:
    """The cases of one framework; every training without the guard is run once."""

    def __init__(
        self, framework: str, train: Callable[..., Outcome], controls: Mapping[str, Case], control: Case
    ) -> None:
        self.framework, self.train, self.controls, self.control = framework, train, controls, control
        self._plain: dict[tuple[str, bool], Outcome] = {}
        self._usual: dict[str, list[str]] = {}
        self._peak = 0  # bytes of the control as written
        self._peaks: dict[tuple[Any, ...], int] = {}
        """Of cases that take others, by the shapes of their weights."""

    def plain(self, case: Case, *, heavy: bool) -> Outcome:
        """Without the guard."""
        key = case.name, heavy
        if key not in self._plain:
            self._plain[key] = self.train(case, None, heavy=heavy)
        return self._plain[key]

    def guarded(self, case: Case, mode: str) -> Outcome:
        """Under the guard; where a budget has to be tight, with one for the peak of a case like it, or for its own."""
        if mode not in (TIGHT, SLICES):
            return self.train(case, mode)
        if not self._peak:
            self._peak = self.train(self.control, REPORT, heavy=True).peak
        plain = self._plain.get((case.name, True))
        weights = {} if plain is None or plain.record is None else plain.record.get("weights", {})
        shapes = tuple(weight.shape for weight in weights.values())
        like = self._peaks.get(shapes, self._peak)
        found = self.train(case, mode, heavy=True, peak=like)
        # What ran in slices under a budget that is right for another size has run in slices.
        if (mode == SLICES and found.applied) or abs(found.peak - like) <= 0.05 * like:
            return found
        if found.peak:
            self._peaks[shapes] = found.peak
        return self.train(case, mode, heavy=True, peak=found.peak)

    def usual(self, mode: str) -> list[str]:
        """What every training is told in this mode."""
        if mode not in self._usual:
            self._usual[mode] = self.guarded(self.controls.get(mode, self.control), mode).words
        return self._usual[mode]

    def judge(self, case: Case, mode: str) -> Judged:
        return judge(
            case, mode, self.plain(case, heavy=mode in (TIGHT, SLICES)), self.guarded(case, mode), self.usual(mode)
        )


def fault(case: Case, mode: str, judged: Judged) -> str:
    """What is wrong with a verdict; "" where nothing is."""
    if judged.verdict is Verdict.SILENT:
        return f"differs in silence: {judged.difference}; the guard's words: {list(judged.words)}"
    if case.exact and mode == MICRO and not (judged.applied and judged.verdict is Verdict.EQUAL):
        return f"micro-batches are exact here, and were not run: {list(judged.words)}"
    return ""


def check(suite: Suite, case: Case, mode: str) -> None:
    """Judge, and fail where it differs in silence, or is exact and was not run as asked."""
    wrong = fault(case, mode, suite.judge(case, mode))
    assert not wrong, wrong


def every(suite: Suite, cases: Iterable[Case], *, cut: bool = False) -> Any:
    """A test's parameters: each case in one of its modes by turns.

    With ``VRAM_GUARD_FIDELITY=all`` in each of its modes; with ``third`` three of nine cases, and so each mode.

    Args:
        suite: whose cases they are.
        cases: some of them.
        cut: those that have to be cut into micro-batches are, besides.
    """
    import pytest

    share = os.environ.get("VRAM_GUARD_FIDELITY")
    pairs: list[tuple[Case, str]] = []
    for at, case in enumerate(cases):
        if share == "third" and at % 9 > 2:
            continue
        turn = case.pairs[at % len(case.pairs)]
        pairs += [
            pair for pair in case.pairs if share == "all" or pair == turn or (cut and case.exact and pair[1] == MICRO)
        ]
    ids = [f"{case.name}-{mode}".replace(" ", "_") for case, mode in pairs]
    return pytest.mark.parametrize(("suite", "case", "mode"), [(suite, *pair) for pair in pairs], ids=ids)
