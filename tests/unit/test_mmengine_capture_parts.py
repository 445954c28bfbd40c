"""What is captured of a real Runner, and the stand-ins in its traces, by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import torch
from mmengine.dataset import InfiniteSampler
from mmengine.hooks import Hook
from mmengine.model import MMDistributedDataParallel
from mmengine.hooks import CheckpointHook, LoggerHook
from mmengine.optim import OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import nn
from torch.utils.data import DataLoader

from vram_guard import plan, trace
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.longest.planned_batch import LARGEST
from vram_guard.proof.effects import StepEffects
from vram_guard.simulate.parallel.groups import alone
from vram_guard.techniques import Sharding
from vram_guard_mmengine import _capture, _evaluation, _shadow
from vram_guard_mmengine._symbolic_run import symbolic_run
from vram_guard_mmengine._capture import HostBatch, RecordingOptimWrapper, _AccumulatedLoss, _Loss


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    root = cases.write_configs(tmp_path_factory.mktemp("configs"), cases.MMSEG)

    def built(**changes: Any) -> Any:
        changes = {"train_dataloader.dataset.size": 16, "val_dataloader.dataset.size": 16, **changes}
        return cases.build(cases.load(root, "seg.py", tmp_path_factory.mktemp("work"), **changes))

    return built


@pytest.fixture(scope="module")
def runner(build: Callable[..., Any]) -> Any:
    return build(**{"optim_wrapper.accumulative_counts": 2, "activation_checkpointing": "stages"})


@pytest.fixture(scope="module")
def captured(runner: Any) -> Any:
    return _capture.capture(runner)


def test_a_training_is_captured_as_its_config_says(runner: Any, captured: Any) -> None:
    step = captured.step
    assert (step.accumulate, step.precision, step.zero_grad, step.keeps) == (2, "32-true", "after_step", "nothing")
    assert (step.data_parallel_ranks, step.parallel, step.device, step.update_compiled) == (1, None, "cpu", None)
    assert captured.epoch_samples is None, "it is counted in iterations"
    assert captured.evaluated_samples == (3,)
    assert _capture.checkpointed_by_config(runner) == ["stages"]
    assert captured.read_afterwards, "the diary is the user's"
    assert captured.rehearses(Sharding(fsdp2=True))
    assert not captured.rehearses(Sharding(reshard=True))
    batch = step.batch(4)
    assert len(captured.loaded(batch)["inputs"]) == 4
    assert captured.loaded(captured.given(batch.data)) is batch.data
    play = step.job.play
    assert (play.evaluation_batch_size("validation"), play.evaluation_batch_size("test")) == (1, None)
    smaller = play.with_evaluation_batch_size("validation", 3)
    assert (smaller.most, play.most) == (3, None)
    assert _capture.capture(runner, whole_job=False).evaluated_samples == ()


def test_the_loss_is_the_models_and_what_it_logs_is_heard(captured: Any) -> None:
    batch = captured.step.batch(4).data
    with captured.effects.heard():
        loss = captured.loss_of(batch)
    assert loss.ndim == 0
    assert loss.requires_grad
    assert list(captured.effects.logged) == ["accuracy"], "parts of the loss are put together as it is"
    assert captured.recorder._loss is None, "and let go of"


def test_a_plan_that_cuts_batches_is_objected_to_where_the_loss_changes_later(captured: Any) -> None:
    split, whole = (SimpleNamespace(splits=splits, evaluation=None) for splits in (2, 1))
    assert captured.objection(split) is None
    captured.schedule.unproven = "epoch 3: a.switch"
    try:
        assert captured.objection(whole) is None
        found = captured.objection(split)
        assert (found.technique, "epoch 3: a.switch" in found.reason) == ("accumulate", True)
        vars(captured).update(loss_said=True)
        assert captured.objection(split) is None
    finally:
        vars(captured).update(loss_said=False)
        captured.schedule.unproven = ""
    evaluated = SimpleNamespace(splits=1, evaluation=SimpleNamespace(batch_size=1))
    hook = cases.Diary()
    hook.__class__ = type("OfRounds", (cases.Diary,), {"before_val_iter": lambda *_args, **_kwargs: None})
    captured.runner._hooks.append(hook)
    found = captured.objection(evaluated)
    captured.runner._hooks.remove(hook)
    assert (found.technique, "before_val_iter of OfRounds" in found.reason) == ("evaluation", True)


def test_the_wrapper_of_a_trace_takes_one_loss_a_step() -> None:
    recorder = RecordingOptimWrapper()
    with pytest.raises(UnsupportedStepError, match="did not call"):
        _ = recorder.loss
    loss = torch.ones(())
    recorder.update_params(loss)
    assert recorder.loss is not loss, "scaled, as OptimWrapper does where nothing is accumulated"
    assert recorder.loss == loss
    with pytest.raises(UnsupportedStepError, match="more than once"):
        recorder.update_params(loss)
    recorder.begin()
    with pytest.raises(UnsupportedStepError, match="did not call"):
        _ = recorder.loss
    for name in ("backward", "step", "zero_grad", "scale_loss"):
        with pytest.raises(UnsupportedStepError, match="drives the optimizer itself"):
            getattr(recorder, name)(loss)
    accumulating = RecordingOptimWrapper(accumulate=2)
    accumulating.update_params(loss)
    assert accumulating.loss is loss
    with recorder.optim_context(nn.Linear(1, 1)):
        pass


class Model(nn.Linear):
    """Returns what it logs."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.logged: Any = {"loss": 1.0, "loss_ce": 2.0, "accuracy": 0.5}
        self.unsynchronised: list[str] = []

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.unsynchronised.append("begin")
        yield
        self.unsynchronised.append("end")

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        optim_wrapper.update_params(self(data).sum())
        return self.logged


def test_what_callers_hold_is_held_until_the_next_step() -> None:
    recorder = RecordingOptimWrapper()
    model, loss = Model(), _Loss(recorder)
    batch = torch.ones(2, 1)
    assert loss(model, HostBatch(batch)).ndim == 0
    assert recorder.outputs is model.logged
    assert any(held.get("data") is batch for held in recorder._held)
    assert not any("model" in held for held in recorder._held), "up to the caller that is ours"
    recorder.begin()
    assert (recorder._held, recorder.outputs) == ([], None)
    model.logged = [1, 2]
    loss(model, HostBatch(batch))


def test_all_but_the_last_accumulated_batch_run_unsynchronised() -> None:
    model = Model()
    loss = _AccumulatedLoss(RecordingOptimWrapper(2))
    seen = []
    for _batch in range(4):
        loss(model, HostBatch(torch.ones(2, 1)))
        seen.append(list(model.unsynchronised))
    assert seen == [["begin"], ["begin", "end"], ["begin", "end", "begin"], ["begin", "end"] * 2]


@pytest.mark.parametrize(
    ("flexible", "given", "name", "options"),
    [
        (False, None, None, None),
        (False, False, None, None),
        (False, True, "train_step", {}),
        (False, {"backend": "eager"}, "train_step", {"backend": "eager"}),
        (False, {"target": "forward"}, "train_step", {"target": "forward"}),
        (True, True, "train_step", {}),
        (True, {"target": "forward", "backend": "eager"}, "forward", {"backend": "eager"}),
        (True, {"backend": "eager"}, "train_step", {"backend": "eager"}),
        (True, False, None, None),
    ],
)
def test_what_a_runner_compiles_is_known_before_it_does(flexible: bool, given: Any, name: Any, options: Any) -> None:
    runner: Any = SimpleNamespace(_compile=given) if flexible else object.__new__(Runner)
    if not flexible:
        runner.cfg = {} if given is None else {"compile": given}
    found = _capture._compiled(runner)
    assert (found is None) == (name is None)
    assert found is None or (found.name, found.options) == (name, options)


def test_a_wrapper_that_is_known_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone():
        plain = nn.Linear(1, 1)
        wrapped = MMDistributedDataParallel(plain)
        assert _capture._plain_model(SimpleNamespace(model=wrapped, world_size=1)) is plain
        wrapped.__class__ = type("Sharding", (MMDistributedDataParallel,), {})
        with pytest.raises(UnsupportedStepError, match="the model wrapper Sharding is not supported"):
            _capture._plain_model(SimpleNamespace(model=wrapped, world_size=1))
    for ranks, kind in ((1, nn.BatchNorm1d), (2, nn.SyncBatchNorm)):
        runner = SimpleNamespace(model=nn.Sequential(nn.SyncBatchNorm(1)), world_size=ranks)
        found = _capture._plain_model(runner)
        assert isinstance(found[0], kind) or type(found[0]).__name__ == "_BatchNormXd"  # type: ignore[index]
        assert (type(found[0]) is nn.SyncBatchNorm) == (ranks == 2)  # type: ignore[index]
        assert runner.model is found
    described = SimpleNamespace(
        model={"type": "a"}, world_size=1, strategy=SimpleNamespace(build_model=lambda _: plain)
    )
    assert _capture._plain_model(described) is plain


def test_exchanged_statistics_are_said() -> None:
    assert _capture._notes(nn.Sequential(nn.BatchNorm1d(1))) == []
    assert len(_capture._notes(nn.Sequential(nn.SyncBatchNorm(1)))) == 1


@pytest.mark.parametrize("samples", [3, 8])
def test_a_data_set_without_a_whole_batch_is_refused(samples: int) -> None:
    data: Any = list(range(samples))
    loader = DataLoader(data, 8, drop_last=True)
    refused = contextlib.nullcontext() if samples == 8 else pytest.raises(InvalidInputError, match="has 3 samples, no")
    with refused:
        assert _capture._sample(loader).batch_size == 8
    assert _capture._sample(DataLoader(data, 8, sampler=InfiniteSampler(data))).batch_size == 8


def test_a_share_of_a_data_set_that_is_counted_in_batches_does_not_grow() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    assert _capture._sample(DataLoader(data, 4)).growable == ""
    data.num_samples = 8  # type: ignore[attr-defined]
    assert "num_batch_per_epoch" in _capture._sample(DataLoader(data, 4)).growable


@pytest.mark.parametrize(
    ("begin", "most", "validated"), [(1, 10, True), (10, 10, True), (11, 10, False), (None, 10, True)]
)
def test_a_validation_that_begins_after_the_training_is_not_read(
    build: Callable[..., Any], begin: int | None, most: int, validated: bool
) -> None:
    changes = {"train_cfg.max_iters": most} if begin is None else {"train_cfg.val_begin": begin}
    assert bool(_capture.capture(build(**changes)).evaluated_samples) is validated


# --- rounds of an evaluation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "sizes"), [(3, [3]), (16, [8, 8]), (30, [8, 8, 6])])
def test_a_loader_of_a_trace_has_a_few_batches_for_all(samples: int, sizes: list[int]) -> None:
    sample: Any = SimpleNamespace(batch_size=min(8, samples), make=torch.zeros)
    loader = DataLoader(torch.ones(samples), 8)  # type: ignore[arg-type]
    rounds = _evaluation.EvaluationLoop(None, "val", sample, loader, None, len(loader), samples)
    repeated: list[int] = []

    @contextlib.contextmanager
    def repeat(count: int) -> Iterator[None]:
        repeated.append(count)
        try:
            yield
        finally:
            repeated.append(0)

    found = _evaluation._Loader(SimpleNamespace(repeat=repeat), rounds, None)  # type: ignore[arg-type]
    assert (len(found), found.batch_size, found.dataset) == (len(sizes), sizes[0], loader.dataset)
    assert [len(batch) for batch in found] == sizes
    assert sum(repeated) == len(loader)
    opened = iter(found)
    next(opened)
    found.close()
    assert repeated[-1] == 0, "a round that was left in the middle is over"


@pytest.mark.parametrize("longest", [None, 8])
@pytest.mark.parametrize("samples", [1, 8, 9, 16, 40])
def test_each_batch_that_is_followed_stands_for_one_at_least(samples: int, longest: int | None) -> None:
    sample: Any = SimpleNamespace(batch_size=min(8, samples), make=lambda count: count)
    padded: Any = None if longest is None else sample
    loader = DataLoader(range(samples), 8)  # type: ignore[arg-type]
    found = _evaluation.EvaluationLoop(None, "val", sample, loader, None, len(loader), samples, padded).followed(None)
    assert all(count >= 1 for _batch, count in found)


@pytest.mark.parametrize(
    ("changes", "batches", "samples", "notes"),
    [
        ({}, 3, 3, 0),
        ({"val_dataloader.batch_size": 2}, 2, 3, 0),
        ({"val_dataloader.sampler": {"type": "InfiniteSampler", "shuffle": False}}, None, None, 1),
        ({"val_dataloader.dataset.samples": 0}, 0, None, 0),
    ],
)
def test_rounds_are_those_of_the_loader(
    build: Callable[..., Any], changes: dict[str, Any], batches: int | None, samples: int | None, notes: int
) -> None:
    said: list[str] = []
    made = build(**changes)
    if batches == 0:
        made._val_dataloader = DataLoader(torch.ones(0), 1)  # type: ignore[arg-type]
    found = _evaluation.rounds_of_training(made, "val", said, LARGEST)
    assert len(said) == notes
    assert (found is None) == (batches == 0)
    if found is not None:
        assert (found.batches, found.kind, found.longest) == (batches, "val", None)
        assert batches is None or found.samples == samples
    assert _evaluation.rounds_of_training(made, "test", said, LARGEST) is None


@pytest.mark.parametrize(("kind", "said"), [("val", "validation is not included"), ("test", "the test after the")])
def test_an_evaluation_whose_data_cannot_be_read_is_said(kind: Any, said: str) -> None:
    notes: list[str] = []
    broken = SimpleNamespace(**{f"_{kind}_loop": SimpleNamespace()})
    assert _evaluation.rounds_of_training(broken, kind, notes, LARGEST) is None
    assert len(notes) == 1
    assert notes[0].startswith(said)


# --- the copy of a runner --------------------------------------------------------------------------------------------


class Broken(Hook):  # type: ignore[misc]
    """A hook of the user's that fails."""

    called = 0

    def before_train(self, runner: Any) -> None:
        self.called += 1
        raise ValueError("no training here")

    def before_train_epoch(self, runner: Any) -> None:
        self.called += 10


def test_the_copy_of_a_runner_begins_at_the_beginning(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shadow, "in_copy", lambda: True)
    notes: list[Any] = []
    model = runner.model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run: Any = SimpleNamespace(model=model, optimizer=optimizer, note=lambda said: notes.append(str(said)))
    broken, loader = Broken(), DataLoader(torch.ones(4))  # type: ignore[arg-type]
    runner._hooks.append(broken)
    try:
        with symbolic_run(2, 10, StepEffects()):
            shadow = _shadow.Shadow(
                runner, run, loader=loader, loop_class=EpochBasedTrainLoop, length=(2, 10), accumulate=3, data_batch="b"
            )
            hub = shadow.runner.message_hub
            assert (hub.get_info("epoch"), hub.get_info("iter")) == (0, 0)
            shadow.at(1, 7)
            assert (hub.get_info("epoch"), hub.get_info("iter"), shadow.loop.epoch, shadow.loop.iter) == (1, 7, 1, 7)
    finally:
        runner._hooks.remove(broken)
    assert (shadow.loop.max_epochs, shadow.loop.max_iters, shadow.loop.stop_training) == (2, 10, False)
    assert (shadow.accumulate, shadow.batch_idx, shadow.data_batch, shadow.sets_modes) == (3, 0, "b", False)
    assert shadow.runner.optim_wrapper._accumulative_counts == 3
    assert shadow.runner.optim_wrapper.optimizer is optimizer
    assert shadow.loader is not loader
    assert shadow.runner is not runner
    for _time in range(2):
        shadow.call("before_train")
        shadow.call("before_train_epoch")
    assert broken.called == 1 + 2 * 10
    (note,) = notes
    assert note.startswith("Broken.before_train cannot be followed (ValueError: no training here)")


# --- what a training is given built, and what its hooks look up -------------------------------------------------


@pytest.mark.parametrize("form", ["optimizer", "wrapper"])
def test_an_optimizer_that_was_built_before_takes_what_one_of_a_config_takes(
    build: Callable[..., Any], form: str
) -> None:
    def peak(runner: Any) -> int:
        found = _capture.capture(runner, whole_job=False)
        with found.symbolic_run():
            return trace(found.step).at(8).peak_allocated

    written, given = build(), build()
    written.optim_wrapper = {"optimizer": {"type": "AdamW", "lr": 0.1}}
    made = torch.optim.AdamW(given.model.parameters(), lr=0.1)
    given.optim_wrapper = {"optimizer": made} if form == "optimizer" else OptimWrapper(made)
    assert peak(given) == peak(written)
    assert not made.state
    assert all(held is one for held, one in zip(made.param_groups[0]["params"], given.model.parameters(), strict=True))


class LookingHook(Hook):  # type: ignore[misc]
    """Makes an iterator as the training begins, for its model, and looks up MMEngine's own hooks."""

    found = ()

    def before_train(self, runner: Any) -> None:
        runner.model.more = iter(range(10**6))
        hook = next(one for one in runner.hooks if isinstance(one, CheckpointHook))
        self.found = (hook.interval, next(one for one in runner.hooks if isinstance(one, LoggerHook)).interval)


def test_steps_that_need_what_hooks_make_as_the_training_begins_are_followed(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = LookingHook()
    monkeypatch.setattr(_shadow, "in_copy", lambda: True)
    runner = build()
    runner.register_hook(looking)
    scores = type(runner.model).scores

    def counted(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        return scores(model, inputs) + next(model.more)

    monkeypatch.setattr(type(runner.model), "scores", counted)
    found = _capture.capture(runner)
    with found.symbolic_run():
        made = plan(found.step, 8, "4GiB")
    assert made.fits
    assert not [note for note in made.estimate.notes if "LookingHook" in str(note.said)]
    assert (looking.found, hasattr(runner.model, "more")) == ((), False)
