"""How later epochs of a training with Lightning are followed: which steps, under which label, and what is said."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning_cases as cases

from vram_guard.capture.loader import read_loader
from vram_guard.guard.places import StepDecisions
from vram_guard_lightning import _epochs, _namespaces, _shadow
from vram_guard_lightning._epochs import LaterEpochs

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = _namespaces.installed()[0].__name__
pl = importlib.import_module(NAMESPACE)
STEPS = 4


def signature(switch: Any, shapes: Any = ()) -> tuple[Any, ...]:
    """What an epoch's steps depend on."""
    return (((1, "weight", True, (2,)),), (switch,), ((),), 0, shapes)


class Play:
    """Traces of a training whose epochs differ as this says."""

    def __init__(
        self, root: Any, monkeypatch: pytest.MonkeyPatch, total: float, of_epoch: Callable[[int], Any], **more: Any
    ) -> None:
        loader = DataLoader(TensorDataset(torch.ones(24, 2)), 8)
        sample = read_loader(loader)
        self.later = LaterEpochs(total, STEPS, sample, 0, lambda: sample, lambda one: one.make, **more)
        self.root, self.hooks = root, True
        self.trained: list[tuple[str, int, Any]] = []
        self.called: list[tuple[str, int]] = []
        self.asks: Callable[[StepDecisions, int], None] = lambda _asked, _step: None
        self.said: list[str] = []
        self.phases: list[str] = []
        monkeypatch.setattr(LaterEpochs, "_signature", lambda _self, _playing, _first, epoch: of_epoch(epoch))

    def trace(self, *, first: int = 0, between: bool = False, seconds: float = 0.0) -> list[tuple[str, int]]:
        """Labels of the steps that one trace follows, and the global step that they are told."""
        shadow = cases.make_trainer(NAMESPACE, self.root)
        total = shadow.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        total.completed = STEPS * first + 2
        self.trained.clear()
        self.called.clear()

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            self.phases.append(name)
            yield

        run = SimpleNamespace(accumulate=1, optimizer=None, allocated=0, phase=phase, batch_size=8, loaded_samples=8)
        run.note = lambda message: self.said.append(str(message))
        asked = StepDecisions()

        def train(_steps: int, label: str = "", **changes: Any) -> None:
            self.trained.append((label, shadow.global_step, changes))
            self.asks(asked, shadow.global_step)

        playing: Any = SimpleNamespace(
            run=run, asked=asked, shadow=shadow, train=train, has=lambda _name: self.hooks,
            hook=lambda name: self.called.append((name, shadow.current_epoch)),
            followed=lambda _message: contextlib.nullcontext(),
        )  # fmt: skip
        self.asks(asked, shadow.global_step)
        self.later.play(playing, first, seconds, between=between)
        return [(label, step) for label, step, _changes in self.trained]


def test_an_epoch_that_differs_is_followed_where_it_begins(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(tmp_path, monkeypatch, 6, lambda epoch: signature(epoch >= 3))
    for _trace in range(2):
        assert play.trace() == [("epoch 3", 3 * STEPS)]
        starts = [epoch for name, epoch in play.called if name == "on_train_epoch_start"]
        assert starts == [1, 2, 3, 4, 5]
    assert play.said == []
    assert play.later.reached == 5
    assert set(play.phases) == {"hooks"}


def test_epochs_are_counted_from_the_one_that_a_training_goes_on_with(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play(tmp_path, monkeypatch, 6, lambda epoch: signature(epoch >= 3))
    assert play.trace(first=2, between=True) == [("epoch 3", 3 * STEPS)]
    assert Play(tmp_path, monkeypatch, 3, lambda epoch: signature(epoch)).trace(first=2) == []
    assert play.called[-1] == ("on_train_epoch_start", 5)


@pytest.mark.parametrize(
    ("total", "hooks", "between", "trained"),
    [(1, True, True, []), (2, True, True, [""]), (2, True, False, []), (4, True, True, [""]), (4, False, True, [""]),
     (4, False, False, [])],
)  # fmt: skip
def test_a_step_of_the_second_epoch_meets_what_the_first_has_left(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, total: float, hooks: bool, between: bool, trained: list[str]
) -> None:
    play = Play(tmp_path, monkeypatch, total, lambda _epoch: signature(0))
    play.hooks = hooks
    assert [label for label, _step in play.trace(between=between)] == trained
    assert bool(play.called) == (hooks and total > 1)


@pytest.mark.parametrize("changes", [7, 8, 9, 12])
def test_so_many_different_steps_are_followed_and_the_last_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    play = Play(tmp_path, monkeypatch, changes + 1, lambda epoch: signature(epoch))
    epochs = range(1, changes + 1)
    most = _epochs.LATER_STEPS
    followed = [*epochs] if changes <= most else [*epochs[:most], changes]
    assert play.trace() == [(f"epoch {epoch}", epoch * STEPS) for epoch in followed]


def test_a_step_by_its_number_is_followed_in_its_epoch(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first epoch too, where it is named by its number."""
    play = Play(tmp_path, monkeypatch, 4, lambda _epoch: signature(0))

    def asks(asked: StepDecisions, step: int) -> None:
        assert asked.answer("global_step", step) not in (3, 9)

    play.asks = lambda asked, step: asked.answer("global_step", step) in (3, 9)  # type: ignore[assignment]
    assert play.trace() == [("global_step 3", 3), ("epoch 2", 9)]
    asks(StepDecisions(), 0)


@pytest.mark.parametrize(("total", "words"), [(9, "(9 epochs)"), (math.inf, "(an unlimited number of epochs)")])
def test_epochs_that_take_too_long_are_said(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, total: float, words: str
) -> None:
    monkeypatch.setattr(_epochs, "PLACES_LOOKED_AT", 3)
    play = Play(tmp_path, monkeypatch, total, lambda _epoch: signature(0))
    for _trace in range(2):
        play.trace()
        assert [epoch for name, epoch in play.called if name == "on_train_epoch_start"] == [1, 2, 3, 4][
            : 1 + play.later.reached - 1
        ]  # type: ignore[operator]
    assert len(play.said) == 2
    assert all(words in said and f"epoch {play.later.reached}" in said for said in play.said)


def test_hooks_have_half_a_second_or_as_long_as_the_steps_took(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_epochs, "LATER_SECONDS", -1.0)
    play = Play(tmp_path, monkeypatch, 50, lambda _epoch: signature(0))
    play.trace(seconds=-1.0)
    assert play.later.reached == 1
    longer = Play(tmp_path, monkeypatch, 50, lambda _epoch: signature(0))
    longer.trace(seconds=1000.0)
    assert longer.later.reached == 49


def test_batches_of_a_loader_that_was_switched_are_taken(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(tmp_path, monkeypatch, 4, lambda epoch: signature(0, ((8 + (epoch >= 2), 2),)))
    play.trace()
    ((label, step, changes),) = play.trained
    assert (label, step, list(changes)) == ("epoch 2", 2 * STEPS, ["batch"])
    same = Play(tmp_path, monkeypatch, 4, lambda epoch: signature(epoch))
    same.trace()
    assert [changes for _label, _step, changes in same.trained] == [{}] * 3


def test_weights_that_join_the_training_are_noted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_epoch(epoch: int) -> Any:
        weight = (1, "weight", epoch >= 2, (2,))
        return ((weight,), (), (((1,) if epoch < 3 else (1, 2),),), 0, ())

    play = Play(tmp_path, monkeypatch, 3, of_epoch)
    play.trace()
    assert (play.later.unfreezes, play.later.regroups) == (True, False)
    longer = Play(tmp_path, monkeypatch, 4, of_epoch)
    longer.trace()
    assert (longer.later.unfreezes, longer.later.regroups) == (True, True)


def test_another_optimizer_takes_over_the_run() -> None:
    taken: list[Any] = []
    weight = nn.Parameter(torch.ones(1))
    one, other = (torch.optim.SGD([weight], lr=rate) for rate in (1.0, 2.0))
    for own, optimizers, expected in ((one, [one], []), (one, [other], [other]), (None, [other], []), (one, [], [])):
        run = SimpleNamespace(optimizer=own, optimize_with=taken.append, allocated=0)
        playing: Any = SimpleNamespace(
            run=run,
            shadow=SimpleNamespace(optimizers=optimizers),
            train=lambda *_given, **_changes: None,
            followed=lambda _message: contextlib.nullcontext(),
        )
        LaterEpochs._train(SimpleNamespace(), playing, "", {})  # type: ignore[arg-type]
        assert taken == expected
        taken.clear()


# --- what a step's memory depends on ------------------------------------------------------------------------------


class Averaging(pl.Callback):  # type: ignore[misc, name-defined]
    """Keeps modules among its attributes."""

    def __init__(self, *kept: Any) -> None:
        self.kept, self.by_name, self.same = list(kept), {"one": kept[0] if kept else None}, kept


def test_modules_that_callbacks_keep_are_found_once() -> None:
    module, own = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 2))
    found = _shadow.modules_in([Averaging(own, module[0])], besides=module)
    assert {id(one) for one in found} == {id(own), id(own[0]), id(own[1])}
    assert len(found) == 3
    assert _shadow.modules_in([Averaging()], besides=module) == []
    own.register_module("absent", None)
    assert len(list(_shadow.within(own))) == 3


def test_weights_that_callbacks_keep_become_symbolic_where_they_are() -> None:
    module = pl.LightningModule()
    module.layer = nn.Linear(2, 2, device="meta")
    copied, shared = nn.BatchNorm1d(3), nn.Linear(1, 1)
    weight = copied.weight
    copied.register_parameter("again", weight)
    copied.register_buffer("absent", None)
    swa = pl.callbacks.StochasticWeightAveraging(0.1)
    swa._average_model = shared
    shadow = SimpleNamespace(callbacks=[Averaging(copied), swa])
    trainer: Any = SimpleNamespace(lightning_module=module, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    placed: list[Any] = []

    class Symbolic(torch.Tensor):
        """In place of a symbolic weight: says where twins are made."""

        def new_empty(self, *size: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
            placed.append((tuple(size[0]), options["device"]))
            return torch.empty(*size, dtype=options["dtype"])

    module.layer.weight = nn.Parameter(torch.ones(1))
    symbolic = torch.ones(1).as_subclass(Symbolic)
    module.parameters = lambda: iter([symbolic])
    _shadow.take_copies(trainer, shadow)
    assert copied.weight is copied.again is not weight
    assert isinstance(copied.weight, nn.Parameter)
    assert (copied.absent, int(copied.num_batches_tracked)) == (None, 0), "numbers stay"
    assert sorted(placed) == sorted([((3,), "cuda")] * 4 + [((1, 1), "cpu"), ((1,), "cpu")]), (
        "a copy that waits on the host is there"
    )


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda module, trainer: None, False),
        (lambda module, trainer: module.net[0].weight.requires_grad_(False), True),
        (lambda module, trainer: module.net.eval(), True),
        (lambda module, trainer: trainer.optimizers[0].param_groups[0].update(nesterov=True), True),
        (lambda module, trainer: trainer.optimizers[0].param_groups[0].update(lr=0.5), False),
        (
            lambda module, trainer: trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            True,
        ),
        (lambda module, trainer: setattr(module, "more", nn.Linear(1, 1)), True),
    ],
)
def test_what_hooks_change_is_in_an_epochs_signature(change: Any, differs: bool) -> None:
    module = cases.make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.5)
    trainer = SimpleNamespace(optimizers=[optimizer], callbacks=[Averaging(nn.Linear(1, 1))])
    sample = read_loader(DataLoader(TensorDataset(torch.ones(8, 2)), 4))
    later = LaterEpochs(3, STEPS, sample, 0, lambda: sample, lambda one: one.make)
    playing: Any = SimpleNamespace(module=module, shadow=trainer)
    before = later._signature(playing, 0, 0)
    change(module, trainer)
    assert (later._signature(playing, 0, 1) != before) is differs
    assert _epochs._states(playing) == 0
    optimizer.state[module.net[0].bias] = {}
    assert _epochs._states(playing) == 1
