"""How later steps of a training with MMEngine are found: what is looked at between epochs, and which are followed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

import torch
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vram_guard.capture.loader import read_loader
from vram_guard_mmengine import _schedule
from vram_guard_mmengine._schedule import Schedule
from vram_guard_mmengine._step_switches import StepSwitches


class Pictures(Dataset[torch.Tensor]):
    """Samples of the size that the pipeline says."""

    def __init__(self) -> None:
        self.pipeline: list[Any] = [SimpleNamespace(size=4)]

    def __len__(self) -> int:
        return 32

    def __getitem__(self, _index: int) -> torch.Tensor:
        return torch.zeros(self.pipeline[0].size)


class Layer(nn.Linear):
    """With attributes as hooks set them."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.share, self.count, self.kinds, self.inner = 0.5, 0, {"loss": "l1"}, SimpleNamespace(size=1)
        self.nothing: Any = None
        self.register_parameter("absent", None)


def exchange(look: Any, size: int) -> None:
    look._shadow.loader.dataset.pipeline = [SimpleNamespace(size=size)]


def larger_batches(look: Any, size: int) -> None:
    """As a batch sampler of a repository's own does it."""
    data = look._shadow.loader.dataset
    look._shadow.loader = DataLoader(data, batch_size=size)


def unreadable(look: Any) -> None:
    look._shadow.loader.dataset.pipeline = []


def looked() -> tuple[Any, Any]:
    """A look at the step of a real model, wrapper and loader; and the model."""
    model = nn.Sequential(Layer(), Layer())
    loader = DataLoader(Pictures(), batch_size=8)
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=1.0))
    shadow: Any = SimpleNamespace(loader=loader, runner=SimpleNamespace(model=model, optim_wrapper=wrapper))
    run: Any = SimpleNamespace(notes=[])
    run.note = run.notes.append
    return StepSwitches(run, shadow, read_loader(loader)), model


@pytest.mark.parametrize(
    ("change", "words", "other_loss"),
    [
        (lambda look, model: None, "", False),
        (lambda look, model: model[0].requires_grad_(False), "2 fewer parameters are trained", False),
        (lambda look, model: setattr(model[0], "share", 0.25), "", False),
        (lambda look, model: setattr(model[0], "share", 0.0), "0.share", True),
        (lambda look, model: setattr(model[1], "nothing", "l2"), "1.nothing", True),
        (lambda look, model: model[0].kinds.update(loss="l2"), "0.kinds", True),
        (lambda look, model: setattr(model[0].inner, "size", 2), "0.inner", True),
        (lambda look, model: model.eval(), "training, 0.training, 1.training", True),
        (lambda look, model: model[1].register_module("more", nn.Identity()), "1.more", True),
        (lambda look, model: setattr(look._shadow.runner.optim_wrapper, "_accumulative_counts", 4),
         "accumulative_counts", False),
        (lambda look, model: exchange(look, 6), "train_dataloader", False),
        (lambda look, model: exchange(look, 4), "", False),
        (lambda look, model: larger_batches(look, 16), "train_dataloader", False),
        (lambda look, model: unreadable(look), "", False),
    ],
)  # fmt: skip
def test_what_hooks_change_of_a_step_is_seen(change: Callable[[Any, Any], Any], words: str, other_loss: bool) -> None:
    look, model = looked()
    assert look.difference() == ""
    change(look, model)
    found = look.difference()
    assert found.startswith(words)
    assert bool(found) == bool(words)
    assert look.other_loss is other_loss
    assert look.difference() == "", "nothing has changed since"
    assert bool(look._run.notes) == (change.__code__.co_names[:1] == ("unreadable",))


def test_a_state_that_was_there_before_is_no_other_step() -> None:
    look, model = looked()
    for frozen, differs in ((True, True), (False, False), (True, False)):
        model[0].requires_grad_(not frozen)
        assert bool(look.difference()) is differs


def test_a_counter_of_the_models_own_is_known_from_its_second_step_on() -> None:
    look, model = looked()
    said = []
    for number in (3, 6, 9, 12):
        model[0].count = number
        said.append(look.difference())
    assert said == ["0.count", "", "", ""]
    assert look.counters == {"0.count"}
    model[0].count, model[0].share = 15, 0.0
    assert look.difference() == "0.share"


@pytest.mark.parametrize(("size", "asked", "delivered"), [(16, 4, 8), (6, 4, 3), (3, 4, 2), (8, 4, 4)])
def test_micro_batches_follow_the_size_of_the_batch(size: int, asked: int, delivered: int) -> None:
    """Of a loader of 8 samples: the same share of it, rounded up."""
    look, _model = looked()
    larger_batches(look, size)
    exchange(look, 5)
    look.difference()
    assert look.batches()(asked).shape == (delivered, 5)
    assert look.accumulative_counts == 1


# --- which of them are followed ---------------------------------------------------------------------------------


class EveryStep(Hook):
    """Names iterations, as hooks of users do."""

    def __init__(self, *at: int) -> None:
        self.at = list(at)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None: ...


class Playing:
    """A schedule in the traces of a training of 40 iterations, whose steps differ where this says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, differs: Callable[[int], str], *at: int) -> None:
        self.schedule = Schedule(None, lambda make: make, False, None)  # type: ignore[arg-type]
        self.trained: list[Any] = []
        self.gone: list[int] = []
        self.hook, self.differs, self.taken = EveryStep(*at), differs, {}
        owner = self

        class Look:
            """In place of StepSwitches."""

            counters, other_loss, accumulative_counts = frozenset(), True, 3

            def __init__(self, *_args: Any) -> None: ...

            def difference(self) -> str:
                return owner.differs(owner.gone[-1])

            def batches(self) -> Any:
                return lambda size: ("batch", size)

        monkeypatch.setattr(_schedule, "StepSwitches", Look)

    def play(self, train: Any = None) -> list[str]:
        """One trace; what it said."""
        said: list[str] = []
        run: Any = SimpleNamespace(
            note=lambda message: said.append(str(message)), accumulate=4, allocated=0, model=nn.Linear(1, 1)
        )

        def call(name: str, **arguments: Any) -> None:
            if name == "before_train_iter":
                self.gone.append(arguments["batch_idx"])
                run.allocated += self.taken.get(arguments["batch_idx"], 0)

        def trained(label: str, **changes: Any) -> None:
            self.trained.append((label, run.model.training, changes))
            run.model.eval()
            if train is not None:
                train(run)

        loop = SimpleNamespace(_iter=1, _epoch=0, _max_iters=40)
        shadow: Any = SimpleNamespace(
            hooks=[self.hook], loop=loop, accumulate=2, sets_modes=False, data_batch=None, call=call,
            at=lambda epoch, place: vars(loop).update(_epoch=epoch, _iter=place),
        )  # fmt: skip
        shadow.runner = SimpleNamespace(model=run.model)
        self.schedule.play(run, shadow, trained)
        return said


def test_steps_that_differ_are_followed_in_every_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    playing = Playing(monkeypatch, lambda place: "a switch" if place == 11 else "", 10, 20)
    for _trace in range(2):
        said = playing.play()
        assert said == ["from iteration 12 on the step differs: a switch"]
        assert playing.gone == [9, 10, 11, 19, 20, 21]
        ((label, training, changes),) = playing.trained
        assert (label, training, changes["accumulate"]) == ("iteration 12", True, 2 * 3)
        assert changes["batch"](5) == ("batch", 5)
        playing.trained.clear()
        playing.gone.clear()
    assert playing.schedule.unproven == "iteration 12: a switch"


def test_a_step_that_leaves_memory_is_followed_by_a_second_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    playing = Playing(monkeypatch, lambda place: "a switch" if place == 11 else "", 11)

    def leave(run: Any) -> None:
        run.allocated += 512

    playing.play(leave)
    assert [sorted(changes) for _label, _training, changes in playing.trained] == [["accumulate", "batch"], []]


def test_memory_that_a_hook_takes_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    playing = Playing(monkeypatch, lambda _place: "", 10)
    playing.taken = {10: 512, 11: -512}
    assert playing.play() == ["from iteration 11 on the step differs: a hook takes memory"]


def test_a_step_that_cannot_be_followed_is_said_and_the_next_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    playing = Playing(monkeypatch, lambda place: "a switch" if place in (9, 11) else "", 10)

    def fail(_run: Any) -> None:
        if len(playing.trained) == 1:
            raise RuntimeError("the first line\nand more")

    said = playing.play(fail)
    assert said[1].startswith("the step from iteration 10 on cannot be followed (RuntimeError: the first line):")
    assert [label for label, *_others in playing.trained] == ["iteration 10", "iteration 12"]


@pytest.mark.parametrize("count", [5, 6, 7, 9])
def test_so_many_different_steps_are_followed_and_the_last_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    numbers = itertools.count()
    places = [*range(4, 4 + 3 * count, 3)]  # each brings itself and its neighbours
    playing = Playing(monkeypatch, lambda place: f"{next(numbers)}" if place in places else "", *places[:-1])
    playing.hook.at.append(places[-1] - 1)  # so that this is the last place of all
    said = playing.play()
    most = _schedule.LATER_STEPS
    followed = [f"iteration {place + 1}" for place in (places if count <= most else [*places[:most], places[-1]])]
    assert [label for label, *_others in playing.trained] == followed
    left_out = count - len(followed)
    assert [one for one in said if "not followed" in one] == [
        f"{left_out} more steps that differ are not followed"
    ] * bool(left_out)


def test_places_that_are_not_looked_at_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_schedule, "PLACES_LOOKED_AT", 2)
    playing = Playing(monkeypatch, lambda _place: "", 10, 20)
    assert playing.play() == [
        "hooks are followed up to iteration 11 only: what they change later is not included in the prediction"
    ]
    assert playing.gone == [9, 10]
    assert playing.play() == []
    assert playing.gone == [9, 10] * 2, "as many in every trace"
    monkeypatch.setattr(_schedule, "LATER_SECONDS", -1.0)
    late = Playing(monkeypatch, lambda _place: "", 10)
    late.play()
    assert late.gone == []


def test_the_last_step_is_followed_where_the_model_has_asked_for_an_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that nothing was decided by may be a factor that grows: the last step has the most of it."""
    playing = Playing(monkeypatch, lambda _place: "", 10)
    playing.schedule.asked.answer("iter", 0)
    assert playing.play()[-1] == "from iteration 40 on the step differs: the model asks how far the training is"
    assert [label for label, *_others in playing.trained] == ["iteration 40"]
