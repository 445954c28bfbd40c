"""Proof that smaller batches of an evaluation leave what it computes as it was: by running it on a few samples, twice.

What an evaluation logs is compared, and what it leaves in the model, its lists and its files. Values that are averaged
batch by batch come out the same only where all batches are of equal size: so the few samples end with a shorter batch
wherever the data set does. A value that is the same for the first batch as for all samples (an accuracy of 0) would be
so under any rule, and proves nothing.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from vram_guard.errors import UnsupportedStepError
from vram_guard.forks.fork import run_in_fork
from vram_guard.forks.side_effects import opened_for_writing, refuse_connections
from vram_guard.guard.applied import Applied
from vram_guard.language import _
from vram_guard.proof.differences import TOLERANCES, differences
from vram_guard.proof.observed import Observed, observe
from vram_guard.proof.watched import WatchedNumber
from vram_guard.state.random_generators import RandomState
from vram_guard.techniques.cpu_as_gpu import cpu_as_gpu, without_gpu
from vram_guard.techniques.recipe import AS_WRITTEN

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.plan.model import SmallerEvaluation

#: Samples of a smaller batch: two, and where some value does not tell them apart, more.
PART_SIZES = (2, 16)


@dataclass(frozen=True)
class EvaluationRehearsal:
    """One way to run an evaluation."""

    samples: int
    batch_size: int
    double: bool = True
    """In double precision, where differences of rounding are far below all others."""

    def loader(self, loader: Any) -> DataLoader[Any]:
        """In place of a loader: some of its samples, from all over its data set, in batches of this size."""
        length = len(loader.dataset)
        count = min(self.samples, length)
        return DataLoader(
            loader.dataset,
            batch_size=self.batch_size,
            sampler=[number * length // count for number in range(count)],
            collate_fn=loader.collate_fn,
            generator=torch.Generator(),  # its draw is none of the evaluation's
        )


class RehearsedEvaluation(ExitStack):
    """A rehearsal of an evaluation while it runs, in a copy of the process: takes down what it does.

    Args:
        model: that is evaluated, on the CPU.
        closed: types of attributes that are not compared: a framework's own objects.

    Attributes:
        applied: for what the adapter changes.
    """

    def __init__(self, model: nn.Module, closed: tuple[type, ...] = ()) -> None:
        super().__init__()
        self.applied = Applied()
        self._model = model
        self._closed = closed
        self._calls: Counter[str] = Counter()
        self._given: dict[str, Any] = {}
        self._indices: set[str] = set()
        self.enter_context(cpu_as_gpu(AS_WRITTEN))
        self.enter_context(without_gpu())
        self.applied.replace(torch.distributed, "is_initialized", lambda: False)
        refuse_connections()

    def begin(self) -> None:
        """Everything is set up, and the evaluation is about to begin."""
        self._opened = opened_for_writing()
        self._before = observe(self._model, closed=self._closed)
        self._generators = RandomState()

    def compare_calls(self, owner: Any, names: Iterable[str], label: str = "") -> None:
        """Compare how often these methods of an object are called, and what with."""
        for name in names:
            method = getattr(owner, name, None)
            if callable(method):
                self.applied.replace(owner, name, self._compared(label + name, method))

    def _compared(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def compared(*args: Any, **kwargs: Any) -> Any:
            self._calls[name] += 1
            for at, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
                self._given[f"{name}#{self._calls[name]}[{at}]"] = _comparable(name, leaf)
            return method(*args, **kwargs)

        return compared

    def recorder(self, label: str) -> Any:
        """An object that takes every call and does nothing: what it is called with is compared."""

        class EvaluationRecorder:
            def __getattr__(_self, name: str) -> Any:  # noqa: N805 - the rehearsal is self
                if name.startswith("__"):
                    raise AttributeError(name)
                return self._compared(label + name, lambda *_args, **_kwargs: None)

        return EvaluationRecorder()

    def watch_index(self, owner: Any, name: str, position: int) -> None:
        """See whether a method looks at the number of a batch, its argument at this position."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                number = WatchedNumber(args[position], lambda: self._indices.add(name))
                args = (*args[:position], number, *args[position + 1 :])
            return method(*args, **kwargs)

        self.applied.replace(owner, name, watched)

    def result(self, logged: Mapping[str, Any]) -> Observed:
        """What the evaluation did.

        Raises:
            UnsupportedStepError: it did what depends on how the samples are cut into batches.
        """
        if self._indices:
            raise UnsupportedStepError(
                _("{names} looks at the number of a batch", names=", ".join(sorted(self._indices)))
            )
        if not self._generators.is_current():
            raise UnsupportedStepError(_("it draws random numbers, which would be others in smaller batches"))
        for path, times in (opened_for_writing() - self._opened).items():
            self._calls[_("writing to {path}", path=path)] = times
        self.close()
        self.applied.close()
        return observe(
            self._model,
            before=self._before,
            gradients={},
            logged={**logged, **self._given},
            hooks=self._calls,
            closed=self._closed,
        )


def _comparable(name: str, leaf: Any) -> Any:
    if hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor):
        return torch.as_tensor(leaf.__array__())
    if isinstance(leaf, (torch.Tensor, bool, int, float, complex, str, bytes, type(None))):
        return leaf
    raise UnsupportedStepError(
        _("{name} is given a {kind}, which cannot be compared", name=name, kind=type(leaf).__name__)
    )


def prove_evaluation(
    rehearse: Callable[[EvaluationRehearsal], Observed],
    change: SmallerEvaluation,
    dataset_sizes: Iterable[int],
    *,
    lacking: Callable[[int, bool], str],
    seconds: float,
) -> tuple[int, str]:
    """Whether an evaluation computes the same in smaller batches.

    Args:
        rehearse: runs it, in the process in which it is called.
        change: of its batches.
        dataset_sizes: samples of the data sets of its loaders.
        lacking: samples, in double precision or not -> why they cannot be run here; "" where they can.
        seconds: that a run may take.

    Returns:
        The samples on which it was run, and why it is not known to compute the same; "" where it is.
    """
    why = ""
    for part in PART_SIZES:
        samples, whole = _few(change, tuple(dataset_sizes), part)
        found = _compared_on(rehearse, samples, whole, whole // 2, lacking, seconds)
        if not isinstance(found, _Untold):
            return samples, found
        why = found.words
    return samples, why


@dataclass(frozen=True)
class _Untold:
    """The values of these samples prove nothing."""

    words: str


def _few(change: SmallerEvaluation, dataset_sizes: tuple[int, ...], part: int) -> tuple[int, int]:
    """Samples, and those of a whole batch: the last batches are short where the data set's are."""
    part = min(part, change.batch_size)
    whole = 2 * part
    if all(size % change.batch_size_before == 0 for size in dataset_sizes):
        return 2 * whole, whole
    if all(size % change.batch_size == 0 for size in dataset_sizes):
        return whole + part, whole
    return (2 * whole - 1 if part > 1 else 3), whole


def _compared_on(
    rehearse: Callable[[EvaluationRehearsal], Observed],
    samples: int,
    whole: int,
    part: int,
    lacking: Callable[[int, bool], str],
    seconds: float,
) -> str | _Untold:
    why = ""
    for double in (True, False):
        if short := lacking(samples, double):
            why = why or short
            continue
        try:
            way = EvaluationRehearsal(samples, whole, double)
            ran = {
                name: _run(rehearse, one, seconds)
                for name, one in {
                    "whole": way,
                    "first": replace(way, samples=whole),
                    "parts": replace(way, batch_size=part),
                }.items()
            }
        except UnsupportedStepError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - the user's own code runs in it
            why = why or _("it does not run on the CPU ({problem})", problem=f"{type(error).__name__}: {error}")
            continue
        found = differences(ran["whole"], ran["parts"], tolerance=TOLERANCES[_dtype(double=double)])
        if found:
            return _("run on {count} samples, {difference}", count=samples, difference=found[0].words())
        return _untold(ran["whole"], ran["first"], samples)
    return why


def _dtype(*, double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32


def _run(rehearse: Callable[[EvaluationRehearsal], Observed], way: EvaluationRehearsal, seconds: float) -> Observed:
    return run_in_fork(lambda _progress: rehearse(way), most_seconds=10 * max(seconds, 1.0))


def _untold(whole: Observed, first: Observed, samples: int) -> str | _Untold:
    if not whole.logged:
        return _("it logs nothing that could be compared")
    for name, value in whole.logged.items():
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        other = first.logged.get(name)
        other = other.item() if isinstance(other, torch.Tensor) and other.numel() == 1 else other
        if isinstance(number, float) and number == other:
            return _Untold(
                _(
                    "the logged value {name} is {value} for some of the {count} samples as for all, which shows "
                    "nothing",
                    name=name,
                    value=f"{number:.4g}",
                    count=samples,
                )
            )
    return ""
