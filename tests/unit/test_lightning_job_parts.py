"""The phases of a Trainer's job by themselves: in which order, with which counters, and what is left out and said."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning_cases as cases
from torch.utils.data import DataLoader

from vram_guard.errors import UnsupportedStepError
from vram_guard.longest.planned_batch import LARGEST
from vram_guard_lightning import _evaluation, _job, _namespaces, _play, _shadow, _utilization

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = _namespaces.installed()[0].__name__
pl = importlib.import_module(NAMESPACE)


class Order(pl.Callback):  # type: ignore[misc, name-defined]
    """Writes down the counters that hooks see, until a validation or the second epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, name: str, trainer: Any) -> None:
        current = trainer.fit_loop.epoch_progress.current
        self.seen.append((name, trainer.current_epoch, current.ready, current.started, trainer.training))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_fit_start", trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_train_start", trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_train_epoch_start", trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.note("train", trainer)


class Traced:
    """One play of a job, whose phases are written down in place of being run."""

    def __init__(self, trainer: Any, *, hooks: tuple[str, ...] = ("on_train_batch_end",)) -> None:
        self.order, self.shadow, self.hooks, self.module = Order(), trainer, hooks, trainer.lightning_module
        self.trained: list[int] = []
        self.called: list[Any] = []
        self.notes: list[str] = []
        self.phases: list[Any] = []
        self.heard = _play.Heard()
        self.run = SimpleNamespace(phase=self.phase, note=lambda said: self.notes.append(str(said)), model=None)

    def has(self, name: str) -> bool:
        return name in self.hooks

    def hook(self, *given: Any) -> None:
        self.called.append(given)

    def call(self, name: str) -> None:
        self.order.note(name, self.shadow)

    def train(self, steps: int) -> None:
        self.trained.append(steps)
        self.order.note("train", self.shadow)

    def followed(self, _what: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def phase(self, name: str, label: str = "") -> Iterator[None]:
        self.phases.append((name, label))
        yield


class Later:
    """In place of the later epochs."""

    def __init__(self) -> None:
        self.played: list[Any] = []

    def play(self, _playing: Any, first: int, seconds: float, *, between: bool) -> None:
        self.played.append((first, seconds >= 0, between))


class Rounds:
    """In place of a validation's."""

    batch_size = 8

    def __init__(self) -> None:
        self.played: list[Any] = []

    def play(self, _run: Any, shadow: Any, _loop: Any, _start: Any, **how: Any) -> None:
        self.played.append((shadow.validating, shadow.training, how))


def play(trainer: Any, validation: Any = None, module: Any = None) -> Any:
    return _job._TrainingJob(trainer, module or cases.make_module(), validation, Later(), None, _play.Heard())  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks keep nothing here."""
    monkeypatch.setattr(_shadow, "take_copies", lambda *_: None)


def test_hooks_see_the_counters_that_a_trainer_has_at_the_start(tmp_path: Any) -> None:
    real = Order()
    cases.make_trainer(NAMESPACE, tmp_path, [real], max_epochs=1).fit(cases.make_module(), cases.loader(8, 8))
    trainer = cases.make_trainer(NAMESPACE, tmp_path)
    traced, made = Traced(trainer), play(trainer)
    made._fit(traced)
    assert traced.order.seen == real.seen
    assert traced.trained == [2]
    assert made.later.played == [(0, True, False)]
    assert traced.phases == []


@pytest.mark.parametrize(
    ("sanity", "validates", "hooks", "between"),
    [(2, True, (), True), (0, True, (), True), (2, False, (), False), (0, False, ("on_save_checkpoint",), True)],
)
def test_a_validation_is_followed_where_there_is_one(
    tmp_path: Any, sanity: int, validates: bool, hooks: tuple[str, ...], between: bool
) -> None:
    trainer = cases.make_trainer(NAMESPACE, tmp_path, num_sanity_val_steps=sanity)
    module = cases.make_module()
    trainer.strategy.connect(module)
    trainer.fit_loop.epoch_loop.val_loop._results = SimpleNamespace(batch="held")
    rounds = Rounds() if validates else None
    traced, made = Traced(trainer, hooks=hooks), play(trainer, rounds, module)
    made._fit(traced)
    assert made.later.played == [(0, True, between)]
    if rounds is not None:
        checked = [(False, True, {"sanity": sanity, "most": None})] * bool(sanity)
        assert rounds.played == [*checked, (True, False, {"most": None})]
        assert traced.phases == [("validation", "sanity check")] * bool(sanity) + [("validation", "")]
        assert trainer.training
        assert trainer.fit_loop.epoch_loop.val_loop._results.batch is None
    assert made.evaluation_batch_size("validation") == (8 if validates else None)
    assert made.evaluation_batch_size("test") is None
    assert made.with_evaluation_batch_size("validation", 3).most == 3


@pytest.mark.parametrize(
    ("callbacks", "settings", "saved"),
    [
        ((), {}, []),
        ((lambda: pl.callbacks.ModelCheckpoint(),), {}, [False]),
        ((lambda: pl.callbacks.ModelCheckpoint(save_weights_only=True),), {}, [True]),
        (
            (
                lambda: pl.callbacks.ModelCheckpoint(save_weights_only=True),
                lambda: pl.callbacks.ModelCheckpoint(monitor="train_loss"),
            ),
            {},
            [False],
        ),
        ((lambda: pl.callbacks.ModelCheckpoint(),), {"fast_dev_run": True}, []),
    ],
)
def test_a_checkpoint_is_saved_as_the_callbacks_save_it(
    tmp_path: Any, callbacks: Any, settings: dict[str, Any], saved: list[bool]
) -> None:
    made = [one() for one in callbacks]
    trainer = cases.make_trainer(NAMESPACE, tmp_path, made, **{"enable_checkpointing": bool(made), **settings})
    told: list[Any] = []
    trainer.save_checkpoint = lambda path, weights_only: told.append((path, weights_only))
    traced = Traced(trainer)
    play(trainer)._save(traced)
    assert told == [("", weights_only) for weights_only in saved]
    assert traced.phases == [("saving", "")] * len(saved)


@pytest.mark.parametrize(
    ("checkpoint", "restored"),
    [({}, []), ({"epoch": 1}, ["loops"]), ({"optimizer_states": []}, ["loops", "optimizers"])],
)
def test_states_of_a_checkpoint_are_loaded_where_it_has_them(
    tmp_path: Any, checkpoint: dict[str, Any], restored: list[str]
) -> None:
    trainer, told = cases.make_trainer(NAMESPACE, tmp_path), []
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_loops = lambda: told.append("loops")
    connector.restore_optimizers = lambda: told.append("optimizers")
    traced = Traced(trainer)
    traced.run.model = torch.nn.Linear(1, 1)
    play(trainer)._resume(traced)
    assert (told, connector._loaded_checkpoint) == (restored, {})
    assert traced.phases == [("resuming", "")] * bool(restored)


def test_the_end_of_a_batch_is_told_with_its_batch_and_output(tmp_path: Any) -> None:
    """After each step of the optimizer that the Trainer has, and once; nothing is held after the trace."""
    trainer = cases.make_trainer(NAMESPACE, tmp_path)
    module = cases.make_module()
    optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.0) for _ in range(2))
    for one in module.parameters():
        one.grad = torch.zeros_like(one)
    trainer.strategy.optimizers = [optimizer]
    traced = Traced(trainer)
    with _job._batch_ends_called(traced):  # type: ignore[arg-type]
        for number in range(2):
            traced.heard.step(f"batch {number}", f"output {number}")
            other.step()
            optimizer.step()
            assert (traced.heard.batch, traced.heard.output) == (None, None)
        assert trainer.global_step == 2
        traced.heard.step("left", "left")
    assert traced.called == [("on_train_batch_end", f"output {number}", f"batch {number}", 0) for number in range(2)]
    assert (traced.heard.listening, traced.heard.batch, traced.heard.output) == (False, None, None)
    optimizer.step()
    for hooks, optimizers in (((), [optimizer]), (("on_train_batch_end",), [optimizer, other])):
        trainer.strategy.optimizers, traced = optimizers, Traced(trainer, hooks=hooks)
        with _job._batch_ends_called(traced):  # type: ignore[arg-type]
            optimizer.step()
            assert not traced.heard.listening
        assert traced.called == []


def test_a_module_logs_by_itself_inside_a_validation() -> None:
    module = cases.make_module()
    vars(module)["log"] = vars(module.net)["log_dict"] = "silent"
    vars(module.net)["other"] = 1
    with contextlib.suppress(KeyError), _job.logging_own(module):
        assert "log" not in vars(module)
        assert "log_dict" not in vars(module.net)
        raise KeyError
    assert (vars(module)["log"], vars(module.net)["log_dict"], module.net.other) == ("silent", "silent", 1)


# --- hooks of a trace ---------------------------------------------------------------------------------------------


class Failing(pl.Callback):  # type: ignore[misc, name-defined]
    """Can be told to fail."""

    def __init__(self) -> None:
        self.fails, self.called = False, 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.called += 1
        pl_module.net.eval()
        trainer.training = False
        if self.fails:
            raise ValueError("no epoch ends here")


class Ended(type(cases.make_module())):  # type: ignore[misc]
    """Has a hook of its own."""

    def on_train_epoch_start(self) -> None:
        self.started = True


def playing(trainer: Any, module: Any) -> Any:
    traced = Traced(trainer)
    trainer.strategy.connect(module)
    trainer.training = True
    traced.run.train = lambda steps, label, **changes: traced.called.append((seen._asked, steps, label, changes))
    seen: Any = SimpleNamespace(_asked=None)
    made = _play.Playing(traced.run, trainer, module, traced.heard, seen)  # type: ignore[arg-type]
    return made, traced


def test_hooks_are_called_where_somebody_has_them_and_no_more_where_they_fail(tmp_path: Any) -> None:
    callback, module = Failing(), Ended()
    made, traced = playing(cases.make_trainer(NAMESPACE, tmp_path, [callback]), module)
    assert [made.has(name) for name in ("on_train_epoch_end", "on_train_epoch_start", "on_train_start")] == [
        True,
        True,
        False,
    ]
    made.call("on_train_start", "on_train_epoch_start")
    assert module.started
    assert traced.phases == [("setup", "")]
    made.call("on_train_start")
    assert traced.phases == [("setup", "")]
    made.hook("on_train_epoch_end")
    assert made.has("on_train_epoch_end")
    assert (callback.called, traced.notes, module.net.training) == (1, [], False)
    module.net.train()
    callback.fails = made.shadow.training = True
    made.hook("on_train_epoch_end")
    assert not made.has("on_train_epoch_end")
    assert made.has("on_train_epoch_start")
    (note,) = traced.notes
    assert note.startswith("the hook on_train_epoch_end cannot be followed to its end (ValueError: no epoch ends here)")
    assert module.net.training, "modes are put back"
    assert made.shadow.training


def test_steps_are_heard_asking_for_the_place_in_the_training(tmp_path: Any) -> None:
    made, traced = playing(cases.make_trainer(NAMESPACE, tmp_path), cases.make_module())
    made.train(2)
    made.train(1, "a label", accumulate=3)
    assert traced.called == [(made.asked, 2, "", {}), (made.asked, 1, "a label", {"accumulate": 3})]
    assert made.seen._asked is None


# --- evaluations by themselves --------------------------------------------------------------------------------------


class Declaring(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Declares loaders."""

    def test_dataloader(self) -> Any:
        return cases.loader(8, 8)


@pytest.mark.parametrize(
    ("module", "called", "forks", "found"),
    [
        (Declaring, ("test", "predict"), True, ["test"]),
        (Declaring, ("predict",), True, []),
        (Declaring, ("test",), False, []),
        (pl.LightningModule, ("test",), True, []),
    ],
)
def test_evaluations_that_a_script_calls_later_are_known_where_their_loaders_are(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, module: Any, called: Any, forks: bool, found: list[str]
) -> None:
    monkeypatch.setattr(_evaluation, "later_calls", lambda *stages: [one for one in stages if one in called])
    monkeypatch.setattr(_evaluation, "can_fork", lambda: forks)
    trainer = cases.make_trainer(NAMESPACE, tmp_path)
    assert list(_evaluation.comes_later(trainer)) == []
    made = module()
    trainer.strategy.connect(made)
    trainer._data_connector.attach_data(made)
    assert list(_evaluation.comes_later(trainer)) == found


@pytest.mark.parametrize("copy", [True, False])
def test_an_evaluation_that_comes_later_is_read_in_a_copy_as_if_it_had_begun(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, copy: bool
) -> None:
    monkeypatch.setattr(_evaluation, "in_copy", lambda: copy)
    monkeypatch.setattr(
        _evaluation, "capture_evaluation", lambda trainer, _module, stage, _planned_batch: (trainer.state.fn, stage)
    )
    trainer, setups = cases.make_trainer(NAMESPACE, tmp_path), []
    module: Any = SimpleNamespace(setup=lambda stage: setups.append(("module", stage)))
    for datamodule in (None, SimpleNamespace(setup=lambda stage: setups.append(("data", stage)))):
        trainer.datamodule = datamodule
        if not copy:
            with pytest.raises(UnsupportedStepError, match="before it begins"):
                _evaluation.capture_later(trainer, module, "test", LARGEST)
            continue
        assert _evaluation.capture_later(trainer, module, "test", LARGEST) == ("test", "test")
        assert trainer.testing
    assert setups == ([("module", "test"), ("data", "test"), ("module", "test")] if copy else [])


class Evaluated(type(cases.make_module())):  # type: ignore[misc]
    def test_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize(
    ("samples", "settings", "size", "refused"),
    [(40, {}, 8, ""), (0, {}, 0, "its loaders have no batches"), (40, {"limit_test_batches": 0}, 0, "have no batches")],
)
def test_an_evaluation_is_captured_with_the_batches_of_its_loaders(
    tmp_path: Any, samples: int, settings: dict[str, Any], size: int, refused: str
) -> None:
    trainer, module = cases.make_trainer(NAMESPACE, tmp_path, **settings), Evaluated()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, test_dataloaders=DataLoader(cases.Vectors(samples), 8))
    if refused:
        with pytest.raises(UnsupportedStepError, match=refused):
            _evaluation.capture_evaluation(trainer, module, "test", LARGEST)
        return
    found = _evaluation.capture_evaluation(trainer, module, "test", LARGEST)
    assert (found.batch_size, found.step.device) == (size, "cpu")
    assert len(found.step.batch(3)[0]) == 3
    assert len(found.step.batch(99)[0]) == size, "no more than its loader delivers"


def test_numbers_of_a_gpu_are_logged_as_often_as_the_trainer_logs() -> None:
    logged: list[Any] = []
    sample = SimpleNamespace(utilization=50, used=None)
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append((values, step)))
    trainer: Any = SimpleNamespace(loggers=[logger], log_every_n_steps=2, global_step=0)
    watched: Any = object.__new__(_utilization.Utilization)
    found = SimpleNamespace(gpu=0, name="GPU", words=lambda: "50%", metrics=lambda: {"mean": 0.5})
    watched._monitor = SimpleNamespace(latest=lambda: [sample], stop=lambda: [found], error=None)
    for trainer.global_step in range(3):
        watched.log(trainer)
    assert logged == [({"vram_guard/gpu_utilization": 50.0}, step) for step in (0, 2)]
    assert watched.finish(trainer) == ["GPU 0 GPU: 50%"]
    watched._monitor.error = ValueError("lost")
    assert watched.finish(trainer) == ["GPU 0 GPU: 50%", "lost"]
    assert logged[-1] == ({"vram_guard/mean": 0.5}, 2)
