"""The guard's core: settings from any source, refused pins, verdicts by mode, changes that are undone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from each import each
from torch import nn

from vram_guard import TrainingStep
from vram_guard.budget import Budget
from vram_guard.capture.loader import Sample
from vram_guard.errors import DoesNotFitError, InvalidInputError, RecoveryFailedError, UnsupportedStepError
from vram_guard.forks.fork import is_ours
from vram_guard.guard.applied import Applied
from vram_guard.guard.guard import Guard
from vram_guard.guard.refusals import Refusal, check_pins, splitting_notes
from vram_guard.guard.settings import GuardSettings, PlanSettings
from vram_guard.guard.training import CapturedTraining
from vram_guard.plan.pins import Pins
from vram_guard.plan.techniques import DEFAULT_ALLOW, OFFLOADS
from vram_guard.proof.effects import other_draws
from vram_guard.techniques import Recipe

# --- settings -----------------------------------------------------------------------------------------------


@each(
    ("given", "says"),
    [
        ({"buget": 1}, "did you mean 'budget'"),
        ({"allow": ["acumulate"]}, "did you mean 'accumulate'"),
        ({"margin": 2}, "margin"),
        ({"grow": 1}, "grow"),
        ({"recover": "no"}, "recover"),
        ({"mode": "fits"}, "mode"),
        ({"loss_weight": "median"}, "loss_weight"),
        ({"pin": {"micro_batch": 1}}, "did you mean 'micro_batch_size'"),
        ({"advanced": {"recover": True}}, "recover"),
        ({"advanced": 3}, "advanced"),
        ({"remember": False}, r"did you mean advanced=dict\(remember=...\)"),
        ([], "dict"),
    ],
)
def test_what_makes_no_sense_is_refused(given: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        GuardSettings.of(given)


def test_settings_from_arguments_and_a_config_are_equal() -> None:
    given = {"budget": "24GiB", "allow": ["accumulate", "precision"]}
    assert PlanSettings(**given) == PlanSettings.of(given)
    assert PlanSettings(**given).allow == {"accumulate", "precision"}


def test_a_refusal_is_told_of_what_was_asked_for() -> None:
    assert all("because" in Refusal(technique, "because").words() for technique in ("checkpoint", "8bit", "grow"))
    by_default = {"precision", "accumulate", "checkpoint", "slices", "foreach", "reshard", "evaluation", *OFFLOADS}
    assert PlanSettings().techniques == by_default
    assert PlanSettings().asked_for == PlanSettings(allow=DEFAULT_ALLOW).asked_for
    assert PlanSettings().asked_for == {"precision", "accumulate", "checkpoint", "foreach", "reshard"}
    assert PlanSettings(allow="offload").asked_for == set(OFFLOADS)


# --- pins ---------------------------------------------------------------------------------------------------


@each(
    ("pin", "technique"),
    [
        ({"micro_batch_size": 4}, "accumulate"),
        ({"precision": "bf16-mixed"}, "precision"),
        ({"precision": "bf16-true"}, "half"),
        ({"checkpoint": 2}, "checkpoint"),
        ({"offload_activations": "all"}, "offload_activations"),
        ({"frozen_on_host": ("teacher",)}, "offload_frozen"),
        ({"optimizer": "fused"}, "fused"),
        ({"optimizer": "for-loop"}, "foreach"),
        ({"optimizer": "8bit"}, "8bit"),
        ({"optimizer_on_host": True}, "offload_optimizer"),
        ({"parameters_on_host": True}, "offload_parameters"),
    ],
)
def test_a_pin_that_asks_for_a_refused_technique_is_refused(pin: dict[str, Any], technique: str) -> None:
    with pytest.raises(UnsupportedStepError, match=next(iter(pin))):
        check_pins(Pins.of(pin), {technique: "because"}, precision="32-true", batch_size=8)
    check_pins(Pins.of(pin), {"grow": "because"}, precision="32-true", batch_size=8)


@each(
    "pin",
    [
        {"micro_batch_size": 8},
        {"precision": "32-true"},
        {"checkpoint": "none", "offload_activations": 0, "frozen_on_host": ()},
        {"optimizer": "as-written", "optimizer_on_host": False},
    ],
)
def test_pins_to_what_is_written_ask_for_nothing(pin: dict[str, Any]) -> None:
    names = ("accumulate", "precision", "half", "checkpoint", "foreach", "fused", "8bit", *OFFLOADS)
    check_pins(Pins.of(pin), dict.fromkeys(names, "because"), precision="32-true", batch_size=8)


# --- errors ---------------------------------------------------------------------------------------------------


def test_an_error_that_this_package_raises_is_told_from_one_of_torch() -> None:
    def raised(work: Any) -> bool:
        with pytest.raises((InvalidInputError, RuntimeError, TypeError), match=r"\w") as caught:
            work()
        return is_ours(caught.value)

    assert raised(lambda: Budget.resolve(budget="24 parsecs"))
    assert not raised(lambda: torch.ones(2).view(3))
    assert not raised(lambda: Path(b"x"))


# --- changes ------------------------------------------------------------------------------------------------


class Thing:
    def __init__(self) -> None:
        self.own = 1
        self._held = 2

    def method(self) -> int:
        return 3

    @property
    def held(self) -> int:
        return self._held

    @held.setter
    def held(self, value: int) -> None:
        self._held = value


def test_changes_are_undone_the_latest_first_and_once() -> None:
    thing, applied, order = Thing(), Applied(), list[int]()
    before = dict(vars(thing))
    applied.callback(order.append, 1)
    applied.callback(order.append, 2)
    for name, value in (("own", 10), ("own", 11), ("held", 20), ("method", lambda: 30)):
        applied.replace(thing, name, value)
    assert (thing.own, thing.held, thing.method()) == (11, 20, 30)
    applied.close()
    assert order == [2, 1]
    assert vars(thing) == before
    thing.own = 5
    applied.close()
    assert thing.own == 5


# --- splitting ----------------------------------------------------------------------------------------------


def notes_of(model: nn.Module, batch: Any, loss_weight: Any = "mean") -> list[str]:
    return [note.partition(" ")[0] for note in splitting_notes(model, loss_weight, lambda _size: batch, 4)]


class DropoutOfItsOwn(nn.Module):
    """Without the attribute that torch's have."""


def test_notes_of_a_split_name_what_the_training_has() -> None:
    plain, labels = nn.Linear(1, 1), torch.tensor([1, -100])
    assert notes_of(plain, {"x": torch.ones(2)}) == ["the"]  # how losses are weighted
    assert notes_of(plain, {"labels": labels}) == ["the", "the"]  # labels that are ignored, too
    assert notes_of(plain, [labels + 1, labels.float()]) == ["the"]
    assert notes_of(plain, {"labels": labels}, "sum") == []
    assert list(splitting_notes(nn.Sequential(nn.Dropout(0.5)), "sum", lambda _size: [], 4)) == [other_draws()]
    assert notes_of(nn.Sequential(nn.Dropout(0.0)), [], "sum") == []
    assert notes_of(nn.Sequential(nn.Dropout(0.5)).eval(), [], "sum") == []
    assert notes_of(DropoutOfItsOwn(), [], "sum") == []


# --- one training -------------------------------------------------------------------------------------------


class FakeTraining:
    """Nothing can be predicted of it, in its one process."""

    device = torch.device("cpu")
    ranks = SimpleNamespace(rank=0, world_size=1, broadcast=lambda value, _source: value)

    def __init__(self) -> None:
        self.warned: list[str] = []

    def why_left_alone(self) -> str:
        return ""

    def progress(self) -> Any:
        return nullcontext(lambda _line: None)

    def why_not_recovered(self, refused: Any) -> str:
        return refused.get("accumulate", "")

    def warn(self, message: str) -> None:
        self.warned.append(message)

    def capture(self) -> Any:
        raise UnsupportedStepError("an odd loop")


class Captured(CapturedTraining):
    def symbolic_run(self) -> Any:
        return nullcontext()

    def refusals(self, settings: GuardSettings) -> list[Refusal]:
        return []


class Small(FakeTraining):
    """It can be predicted; what would be applied and reported is not looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(256, 256)

    def capture(self) -> Any:
        step = TrainingStep(self.model, torch.ones(8, 256), lambda net, x: net(x).mean(), torch.optim.SGD)
        sample = Sample(lambda size: torch.ones(size, 256), 8, None, None, lambda size: torch.ones(size, 256))
        return Captured(step, self.model, sample, None, ("Read.",))

    def apply(self, *_given: Any) -> None:
        pass

    def report(self, *_given: Any, **_how: Any) -> None:
        pass


@pytest.mark.parametrize("micro", [8, 4])
def test_batches_are_cut_where_the_plan_splits_them(micro: int) -> None:
    training: Any = Small()
    guard = Guard(training, GuardSettings(budget="1GiB", pin={"micro_batch_size": micro}, remember=False))
    guard.begin()
    decision = guard.decision
    assert decision is not None
    assert decision.plan.splits == 8 // micro
    assert decision.notes[0] == "Read."
    assert (decision.splitter is None) == (micro == 8)
    assert (len(decision.notes) > 1) == (micro == 4)  # how losses are weighted
    assert decision.spare is not None
    assert len(decision.spare.split(torch.ones(8, 256))) == 8 // micro


@pytest.mark.parametrize("mode", ["fit", "report", "strict"])
def test_the_mode_says_what_follows_from_a_plan_that_does_not_fit(mode: Any) -> None:
    training: Any = Small()
    guard = Guard(training, GuardSettings(budget="1KiB", mode=mode, remember=False))
    if mode == "strict":
        with pytest.raises(DoesNotFitError):
            guard.begin()
    else:
        guard.begin()
        assert len(training.warned) == (mode == "fit")
    assert not guard.changes


@pytest.mark.parametrize("mode", ["fit", "report", "strict"])
def test_a_users_own_error_is_named_by_its_line_and_ends_a_strict_training_alone(mode: Any) -> None:
    class Wrong(Small):
        def capture(self) -> Any:
            torch.ones(2).view(3)

    training: Any = Wrong()
    guard = Guard(training, GuardSettings(budget="1GiB", mode=mode))
    if mode == "strict":
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            guard.begin()
        return
    guard.begin()
    (said,) = training.warned
    assert f"test_guard.py, line {Wrong.capture.__code__.co_firstlineno + 1}" in said


def begun(training: FakeTraining, **given: Any) -> Guard:
    """A guard whose decision was made."""
    guard = Guard(training, GuardSettings(budget="1GiB", **given))
    plan = SimpleNamespace(fits=True, changed=True, recipe=Recipe())
    guard.decision = SimpleNamespace(plan=plan, refused={}, unproven="", spare=None)  # type: ignore[assignment]
    return guard


@pytest.fixture
def _rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans that :func:`begun` makes up have no figures to report."""
    monkeypatch.setattr("vram_guard.guard.guard.render", lambda _plan, **_how: "The plan.")


@pytest.mark.usefixtures("_rendered")
def test_an_error_of_several_processes_is_not_recovered_and_stops_with_the_plan() -> None:
    training = FakeTraining()
    guard = begun(training)
    with pytest.raises(RecoveryFailedError) as caught, guard.stopping():
        raise torch.OutOfMemoryError
    assert "the weights may be half-updated" in str(caught.value)
    assert str(caught.value).endswith("What was predicted:\nThe plan.")
    for error, one in ((torch.OutOfMemoryError(), begun(training, recover=False)), (ValueError(), guard)):
        with pytest.raises(type(error)), one.stopping():
            raise error


@pytest.mark.usefixtures("_rendered")
def test_a_training_without_a_prediction_is_left_and_recovers_as_the_user_says() -> None:
    training = FakeTraining()
    guard = Guard(training, GuardSettings(budget="1GiB"))  # type: ignore[arg-type]
    assert guard.no_recovery == "it has not begun"
    guard.begin()
    assert [warning.partition(":")[2] for warning in training.warned] == [" an odd loop"]
    assert guard.no_recovery.startswith("how the losses of micro-batches are to be weighted is not known")
    assert (guard.prediction(), guard.first_steps) == ("", None)
    said = Guard(FakeTraining(), GuardSettings(budget="1GiB", loss_weight="mean"))  # type: ignore[arg-type]
    said.begin()
    assert said.no_recovery == ""
    assert guard.measured(100) is None
    guard.out_of_memory()
    with pytest.raises(UnsupportedStepError):
        Guard(FakeTraining(), GuardSettings(budget="1GiB", mode="strict")).begin()  # type: ignore[arg-type]
    assert begun(training).prediction() == "What was predicted:\nThe plan."
