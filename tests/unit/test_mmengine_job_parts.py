"""The phases of a Runner's job by themselves: in which order, what is read and saved, what is left out and said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import mmengine.runner.amp
import mmengine.runner.checkpoint
import mmengine.runner.runner
import torch
from mmengine.evaluator import metric as metrics
from mmengine.hooks import CheckpointHook, Hook, LoggerHook
from mmengine.logging import MessageHub
from torch import nn

from vram_guard.guard.places import StepDecisions
from vram_guard_mmengine import _job, _shadow
from vram_guard_mmengine._job import Checkpoint, RunnerJob


class Run:
    """Of a trace: steps are written down in place of being run."""

    def __init__(self) -> None:
        self.order: list[Any] = []
        self.notes: list[str] = []
        self.model = nn.Linear(1, 1)
        self.failing: set[int] = set()
        self.trained = 0

    def note(self, said: Any) -> None:
        self.notes.append(str(said))

    @contextlib.contextmanager
    def phase(self, name: str, label: str = "") -> Iterator[None]:
        self.order.append(("phase", name))
        yield

    def train(self, steps: int, label: str = "", *, after: Any, **changes: Any) -> None:
        self.trained += 1
        self.order.append(("train", steps, label, self.model.training, changes))
        if self.trained in self.failing:
            raise RuntimeError("the first line\nand more")
        for _step in range(steps):
            after()

    def loaded(self, content: Any, place: str) -> Any:
        return content, place


class Traced:
    """A job of a runner with these parts."""

    def __init__(self, *hooks: Any, strategy: bool = False, **parts: Any) -> None:
        self.run = Run()
        order = self.run.order
        hub = MessageHub.get_instance("a job of a test")
        runner = SimpleNamespace(
            hooks=list(hooks), message_hub=hub, load_or_resume=lambda: order.append("load"), save_checkpoint=self.save
        )
        if strategy:
            runner.strategy = SimpleNamespace()
        shadow = SimpleNamespace(
            runner=runner, batch_idx=0, data_batch="batch", loop=SimpleNamespace(_epoch=0, _iter=0),
            call=lambda name, **given: order.append((name, given)), at=lambda *at: order.append(("at", *at)),
        )  # fmt: skip
        self.saved: list[Any] = []
        schedule = SimpleNamespace(asked=StepDecisions(), play=self.later)
        evaluation = SimpleNamespace(play=lambda _run, _shadow, *most: order.append(("evaluated", *most)))
        known = {"validation": None, "test": None, "checkpoint": None, "saves": True, **parts}
        for name in ("validation", "test"):
            known[name] = evaluation if known[name] else None
        self.job = RunnerJob(
            runner, self.run.model, lambda _run: shadow, lambda: order.append("ends"), lambda: "outputs",
            schedule=schedule, **known,
        )  # type: ignore[arg-type]  # fmt: skip

    def save(self, *given: Any, **settings: Any) -> None:
        self.saved.append(settings)

    def later(self, _run: Any, _shadow: Any, train: Any) -> None:
        train(label="later", accumulate=3)

    def play(self) -> list[Any]:
        self.job(self.run)  # type: ignore[arg-type]
        return self.run.order


SETUP, AFTER = ("phase", "setup"), ("after_train_iter", {"batch_idx": 0, "data_batch": "batch", "outputs": "outputs"})
BEGINNING = [("before_run", {}), SETUP, ("before_train", {}), ("before_train_epoch", {}), ("at", 0, 0)]
SECOND = [("before_train_iter", {"batch_idx": 0, "data_batch": "batch"}), ("train", 1, "", True, {}), AFTER, "ends"]
LATER = [("train", 1, "later", True, {"accumulate": 3}), AFTER, "ends"]


def test_phases_come_in_the_order_of_a_training() -> None:
    first = [("train", 2, "", True, {}), AFTER, "ends", AFTER, "ends"]
    plain = Traced()
    plain.run.model.eval()
    assert plain.play() == [SETUP, *BEGINNING, *first, ("phase", "saving"), *SECOND, *LATER]
    whole = Traced(validation=True, test=True, checkpoint=Checkpoint("path", {}), saves=False)
    evaluated = [("phase", "validation"), ("evaluated", None)]
    tested = [("phase", "test"), ("evaluated",)]
    resumed = [SETUP, BEGINNING[0], ("phase", "resuming"), "load", SETUP, *BEGINNING[2:]]
    assert whole.play() == [*resumed, *first, *evaluated, *SECOND, *LATER, *tested]
    flexible = Traced(strategy=True, checkpoint=Checkpoint("path", {}))
    assert flexible.play()[:5] == [SETUP, ("phase", "resuming"), "load", SETUP, ("before_run", {})]


def test_a_step_that_cannot_be_followed_after_validation_is_said() -> None:
    traced = Traced()
    traced.run.failing = {2}
    assert traced.play()[-3:] == LATER
    assert traced.run.notes == ["the step after validation cannot be followed (RuntimeError: the first line)"]


def test_a_phase_that_cannot_be_followed_is_said_in_a_line() -> None:
    traced = Traced()

    def fail() -> None:
        raise ValueError("x" * 400 + "\nmore")

    traced.job.runner.load_or_resume = fail
    vars(traced.job)["checkpoint"] = Checkpoint("path", {})
    assert ("before_train", {}) in traced.play()
    (note,) = traced.run.notes
    assert note.startswith("resuming cannot be followed to its end (ValueError: xxx")
    assert "x" * (300 - len("ValueError: ")) + ")" in note


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ({"interval": 2}, [(True, True)]),
        ({"interval": 2, "save_optimizer": False, "by_epoch": False}, [(False, False)]),
        ({"interval": -1, "save_last": False}, []),
        ({"interval": -1, "save_last": True}, [(True, True)]),
        ({"interval": -1, "save_last": False, "save_best": "auto"}, [(False, True)]),
    ],
)
def test_a_checkpoint_is_saved_as_the_hook_saves_it(given: dict[str, Any], saved: list[tuple[bool, bool]]) -> None:
    traced = Traced(LoggerHook(), CheckpointHook(**given))
    traced.play()
    assert [(one["save_optimizer"], one["by_epoch"]) for one in traced.saved] == saved
    assert not any(one["save_param_scheduler"] for one in traced.saved)


@pytest.mark.parametrize(
    ("location", "place"), [(None, "cpu"), ("cpu", "cpu"), (torch.device("cpu"), "cpu"), ("cuda", "cuda")]
)
def test_a_checkpoint_is_loaded_where_mmengine_asks_for_it(location: Any, place: str) -> None:
    for content in (None, {"weight": 1}):
        traced = Traced(checkpoint=None if content is None else Checkpoint("path", content))
        assert traced.job._read(traced.run)("path", location) == (content or {}, place)  # type: ignore[arg-type]


def test_a_model_that_asks_how_far_the_training_is_is_heard() -> None:
    traced = Traced()
    hub = traced.job.runner.message_hub
    hub.update_info_dict({"epoch": 3, "iter": 9, "loop_stage": "train", "other": 5})
    answered = traced.job._asked(hub)
    assert (answered("loop_stage"), answered("other"), answered("missing", 7)) == ("train", 5, 7)
    assert not traced.job.schedule.asked
    assert answered("iter") > 8
    assert answered("epoch") == 3
    assert traced.job.schedule.asked.differs({"epoch": 3, "iter": 8})


# --- MMEngine during a trace --------------------------------------------------------------------------------------


class Watching(Hook):
    """A hook of the user's."""


def test_in_a_trace_mmengine_writes_nothing_and_waits_for_nobody(capsys: Any) -> None:
    read: list[Any] = []
    runner, checkpoints = mmengine.runner.runner, mmengine.runner.checkpoint
    own = runner.get_device, runner.save_checkpoint, checkpoints.CheckpointLoader.load_checkpoint
    with _shadow.quiet_mmengine(lambda *given: read.append(given) or "content"):  # type: ignore[func-returns-value]
        assert (runner.get_device(), mmengine.runner.amp.get_device()) == ("cuda", "cuda")
        assert runner.save_checkpoint({}, "path") is None
        assert metrics.collect_results([1, 2, 3], 2) == [1, 2]
        assert checkpoints.CheckpointLoader.load_checkpoint("path", "cpu") == "content"
        assert checkpoints.CheckpointLoader.load_checkpoint("other") == "content"
        print("not seen")
    assert read == [("path", "cpu"), ("other", None)]
    assert own == (runner.get_device, runner.save_checkpoint, checkpoints.CheckpointLoader.load_checkpoint)
    assert capsys.readouterr().out == ""


def test_hooks_of_the_users_run_in_copies_of_the_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    own, guard, logger = Watching(), VramGuardHook(budget="1GiB"), LoggerHook()
    mmengines = mmengine.hooks.EMAHook()
    runner = SimpleNamespace(hooks=[own, guard, logger, mmengines])
    assert _shadow.followed_hooks(runner) == [mmengines]
    monkeypatch.setattr(_shadow, "in_copy", lambda: True)
    assert _shadow.followed_hooks(runner) == [own, mmengines]
    assert [_shadow.is_users(one) for one in runner.hooks] == [True, False, False, False]
    nothing = _shadow._Nothing()
    assert nothing.add_image("name", None).anything is nothing


def test_an_error_is_told_in_a_line_of_some_length() -> None:
    assert _shadow._short(ValueError("one\ntwo")) == "ValueError: one"
    assert len(_shadow._short(ValueError("x" * 500))) == 200


def test_tensors_of_a_checkpoint_are_sizes_and_counters_values() -> None:
    assert _job._without_data(torch.ones(2)).device.type == "meta"
    for kept in (torch.tensor(3.0), torch.ones(1), "name", 4):
        assert _job._without_data(kept) is kept
