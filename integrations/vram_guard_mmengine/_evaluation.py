"""Evaluations of a runner in a trace, by MMEngine's own loops: of a training, or ``Runner.val`` and ``Runner.test``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from mmengine.device import get_device

from vram_guard.capture.loader import number_of_batches, read_loader
from vram_guard.errors import UnsupportedStepError
from vram_guard.guard.evaluation import CapturedEvaluation, evaluation_step
from vram_guard.guard.evaluation_loader import EvaluationLoader
from vram_guard.guard.unfollowed import in_a_line
from vram_guard.language import _
from vram_guard.longest.choice import longest_beside
from vram_guard.longest.planned_batch import PlannedBatch
from vram_guard.proof.effects import StepEffects
from vram_guard.state.containers import leaves
from vram_guard.state.random_generators import random_state_kept
from vram_guard_mmengine import _layouts
from vram_guard_mmengine._followed import FollowedRunner
from vram_guard_mmengine._symbolic_run import symbolic_run

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from vram_guard.job import JobRun, LoopRun

# ruff: noqa: SLF001 - the runner has no public names for what is not built yet

#: Runner's function, and the part of the names of what it is made of.
Kind = Literal["val", "test"]


@dataclass(frozen=True)
class EvaluationLoop:
    """The rounds of an evaluation's loop.

    Attributes:
        runner: the user's, whose loop may not be built yet.
        kind: of evaluation.
        rounds: over its loader.
        loader: built.
        evaluator: built.
    """

    runner: Any
    kind: Kind
    rounds: EvaluationLoader
    loader: Any
    evaluator: Any

    def in_loop(self, followed: FollowedRunner, most: int | None = None) -> Any:
        """The runner's loop, built as MMEngine builds it, over these rounds; batches have at most so many samples."""
        runner, kind = followed.runner, self.kind
        for metric in self.evaluator.metrics:
            metric.results.clear()
            metric.compute_metrics = lambda _results: {}  # MMEngine hands it copies in host memory
        rounds = _Loader(followed.run, self, most)
        vars(runner).update({f"_{kind}_dataloader": rounds, f"_{kind}_evaluator": self.evaluator})
        loop = getattr(runner, f"_{kind}_loop")
        if isinstance(loop, dict):
            loop = getattr(runner, f"build_{kind}_loop")(loop)
        vars(loop).update(_runner=runner, dataloader=rounds, evaluator=self.evaluator)
        setattr(loop, f"{kind}_loss", {})
        setattr(runner, f"_{kind}_loop", loop)
        return loop


class _Loader:
    """In place of the loader: a first batch, one that stands for those that follow, a shorter last one, the longest."""

    def __init__(self, run: JobRun, rounds: EvaluationLoop, most: int | None) -> None:
        self.dataset = rounds.loader.dataset
        self._followed = rounds.rounds.followed(most)
        self.batch_size = rounds.rounds.size(most)
        self._run = run

    def __len__(self) -> int:
        return len(self._followed)

    def __iter__(self) -> Iterator[Any]:
        for batch, count in self._followed:
            with self._run.repeat(count):
                yield batch


def rounds_of(runner: Any, kind: Kind, notes: list[str], planned_batch: PlannedBatch) -> EvaluationLoop | None:
    """The rounds of an evaluation, of which two samples are read; None where there are none.

    Args:
        runner: whose loop may not be built yet.
        kind: of evaluation.
        notes: remarks for a reader of the prediction.
        planned_batch: its longest batch.

    Raises:
        Exception: whatever the user's code raises that reads the data.
    """
    loop = getattr(runner, f"_{kind}_loop")
    with random_state_kept():
        config = isinstance(loop, dict)
        loader: Any = built(runner, getattr(runner, f"_{kind}_dataloader") if config else loop.dataloader)
        evaluator = getattr(runner, f"_{kind}_evaluator") if config else loop.evaluator
        if isinstance(evaluator, (dict, list)):
            evaluator = runner.build_evaluator(evaluator)
        batches = number_of_batches(loader)
        if batches == 0:
            return None
        sample = read_loader(loader)
    if batches is None or is_endless(loader):
        notes.append(
            _(
                "the loader of an evaluation has no known end: two of its batches are followed, and what metrics "
                "collect of more is not included in the prediction"
            )
        )
        batches = None
    samples = sample.dataset_size if sample.dataset_size is None else len(loader.sampler)
    longest, said = longest_beside(functools.partial(read_loader, loader), planned_batch)
    what = _("validation") if kind == "val" else _("test")
    notes += [_("{phase}: {note}", phase=what, note=note) for note in said if longest is not None]
    return EvaluationLoop(runner, kind, EvaluationLoader(sample, batches, samples, longest), loader, evaluator)


def rounds_of_training(runner: Any, kind: Kind, notes: list[str], planned_batch: PlannedBatch) -> EvaluationLoop | None:
    """The validation of a training, or the test that the script calls after it; what is in the way is among the notes.

    Args:
        runner: whose loops are not built yet.
        kind: of evaluation.
        notes: remarks for a reader of the prediction.
        planned_batch: its longest batch.
    """
    if getattr(runner, f"_{kind}_loop", None) is None:
        return None
    try:
        return rounds_of(runner, kind, notes, planned_batch)
    except Exception as error:  # noqa: BLE001 - the user's own code reads the data
        if kind == "val":
            notes.append(_("validation is not included in the prediction ({why})", why=in_a_line(error)))
        else:
            notes.append(
                _("the test after the training is not included in the prediction ({why})", why=in_a_line(error))
            )
        return None


# --- loaders ----------------------------------------------------------------------------------------------------


def built(runner: Any, given: Any) -> DataLoader[Any]:
    """A loader of a config, as BaseLoop builds it."""
    if not isinstance(given, dict):
        return given  # type: ignore[no-any-return]
    different = runner._randomness_cfg.get("diff_rank_seed", False)
    return runner.build_dataloader(given, seed=runner.seed, diff_rank_seed=different)  # type: ignore[no-any-return]


def is_endless(loader: Any) -> bool:
    """MMEngine's InfiniteSampler, and others that never stop: recognised by their names."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    return any("Infinite" in type(sampler).__name__ for sampler in samplers)


# --- by itself --------------------------------------------------------------------------------------------------


def capture_evaluation(runner: Any, kind: Kind, model: nn.Module, planned_batch: PlannedBatch) -> CapturedEvaluation:
    """Read ``Runner.val`` or ``Runner.test``, which are about to begin. Changes nothing.

    Args:
        runner: whose loop may not be built yet.
        kind: of evaluation.
        model: the runner's, without its wrapper.
        planned_batch: its longest batch.

    Raises:
        UnsupportedStepError: it cannot be predicted; the message says what stands in the way.
    """
    notes: list[str] = []
    rounds = rounds_of(runner, kind, notes, planned_batch)
    if rounds is None:
        raise UnsupportedStepError(_("its loaders have no batches"))
    states = [(one.shape, one.dtype) for one in _left_of_training(runner)]

    def play(run: LoopRun) -> None:
        run.hold([torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in states])
        followed = FollowedRunner(run, runner)
        loop = rounds.in_loop(followed, run.batch_size)
        with run.phase("validation" if kind == "val" else "test"):
            loop.run()

    step = evaluation_step(
        model,
        rounds.rounds.sample.make,
        play,
        ends_process=True,
        parallel=_layouts.layout_of(runner),
        device="cpu" if get_device() == "cpu" else "cuda",
    )
    quiet = functools.partial(symbolic_run, 1, 1, StepEffects())
    return CapturedEvaluation(step, rounds.rounds.sample.batch_size, quiet, tuple(notes))


def _left_of_training(runner: Any) -> list[torch.Tensor]:
    """States of an optimizer that has trained in this process already: MMEngine gives nothing of it back."""
    optimizer = getattr(getattr(runner, "optim_wrapper", None), "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    found = leaves([list(state.values()) for state in optimizer.state.values()])
    return [one for one in found if isinstance(one, torch.Tensor) and one.dim() and one.device.type == get_device()]
