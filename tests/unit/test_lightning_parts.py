"""Parts of Lightning's adapter by themselves: what is followed of later epochs."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning_cases as cases
from lightning.pytorch import Callback, LightningModule, Trainer

from vram_guard.capture.loader import read_loader
from vram_guard.guard.places import StepDecisions
from vram_guard.techniques import Recipe
from vram_guard_lightning import _epochs, _growth, _recovery, _refusals, _sample, _trainer_proxy, _validation
from vram_guard_lightning._epochs import LaterEpochs, _groups, _State, _switches

# Lightning warns about small loaders and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")
#: Parameters with their switches, modes of modules, groups of optimizers, shapes: a signature as an epoch has it.
FROZEN: tuple[Any, ...] = (((1, "weight", False, (2,)), (1, "bias", True, (2,))), (), ((1,),), ())


class Data(TensorDataset):
    """With a switch as augmentations have them."""

    size = 2


def epochs(*, reload: int = 0, total: float = 10, samples: int = 8, **more: Any) -> Any:
    return LaterEpochs(
        total, 4, read_loader(loader(samples)), reload, lambda: read_loader(loader(3)), lambda one: one.make, **more
    )


def loader(batch_size: int) -> Any:
    return DataLoader(Data(torch.ones(24, 2)), batch_size)


def test_what_later_epochs_change_is_held_against_a_plan() -> None:
    found, host = epochs(), Recipe(frozen_on_host=("layer",), optimizer_on_host=True)
    state = _State(0, FROZEN, 1)
    assert not found._takes_over(state, FROZEN, 0)
    assert found.objection(host) is None
    other_groups = (*FROZEN[:2], ((1, 2),), ())
    assert found._takes_over(state, other_groups, 0)
    assert state.known == other_groups
    assert found.objection(host).technique == "offload_optimizer"
    trained = (((1, "weight", True, (2,)), FROZEN[0][1]), *other_groups[1:])
    assert found._takes_over(state, trained, 0)
    assert found.objection(host).technique == "offload_frozen"
    assert found.objection(Recipe()) is None


def test_a_step_that_was_followed_is_followed_again_where_more_has_been_trained() -> None:
    found, other = epochs(), (*FROZEN[:3], ((8, 2),))
    state = _State(0, FROZEN, 1, seen={(FROZEN, 1), (other, 1)})
    assert (state.shapes, state.followed) == ((), 0)
    assert not found._takes_over(state, other, 1)
    assert not found._takes_over(state, FROZEN, 1)
    assert found._takes_over(state, other, 2)
    assert not found._takes_over(state, other, 2), "nothing has changed since"


def test_every_trace_follows_as_many_epochs_as_the_first() -> None:
    found, never, past = epochs(), math.inf, -1.0
    most = _epochs.PLACES_LOOKED_AT
    assert [found._stops(2 + count, 2, never) for count in (0, most - 1, most)] == [False, False, True]
    assert found._stops(0, 0, past)
    found.reached = 5
    assert [found._stops(epoch, 0, past) for epoch in (4, 5, 6)] == [False, True, True]


def test_loaders_are_asked_for_anew_once_in_so_many_epochs() -> None:
    found = epochs(reload=2)
    read = [found._sample(1, epoch) for epoch in range(1, 6)]
    assert read[0] is read[1] is found.sample
    assert read[2] is read[3] is not read[4]
    assert read[4].batch_size == 3
    assert found._shapes(found.sample) == ((8, 2),)


def test_a_loader_that_hooks_switch_is_read_anew() -> None:
    found = epochs()
    data = found.sample.loader.dataset
    assert found._sample(0, 0) is found._sample(0, 1) is found.sample
    assert found._shapes(found.sample) == ()
    with found.loaders_kept():
        data.size = 3
        switched = found._sample(0, 2)
        assert switched is not found.sample
        assert found._sample(0, 3) is switched
    assert "size" not in vars(data)
    assert found._sample(0, 4) is found.sample


@pytest.mark.parametrize(("loaded", "size", "accumulate", "asked"), [(8, 8, None, 6), (8, 4, 3, 3)])
def test_batches_of_another_size_are_taken_as_the_loop_would(
    loaded: int, size: int, accumulate: int | None, asked: int
) -> None:
    """A loader of 6 in place of 8 samples; where micro-batches are cut out of it, there are fewer of them."""
    taken: list[int] = []
    sample: Any = SimpleNamespace(batch_size=6, make=taken.append)
    playing: Any = SimpleNamespace(run=SimpleNamespace(loaded_samples=loaded, batch_size=size))
    changes = epochs()._batches(playing, sample, 4)
    changes["batch"](8 if accumulate is None else 3)
    assert taken == [asked]
    assert changes.get("accumulate") == accumulate


def test_attributes_and_weights_are_told_apart() -> None:
    one, other = SimpleNamespace(size=2, names=["a"]), SimpleNamespace(size=3, names=["a"])
    assert _switches([one]) == _switches([one]) != _switches([other])
    unhashable = [SimpleNamespace(size=(2, [3])) for _ in range(2)]
    assert _switches(unhashable[:1]) != _switches(unhashable[1:]), "by identity"
    weight = torch.nn.Parameter(torch.ones(2))
    groups = [
        _groups(torch.optim.SGD([weight], lr=rate, nesterov=on, momentum=0.5))
        for rate, on in ((1, True), (2, True), (1, False))
    ]
    assert groups[0] == groups[1] != groups[2]


class Counters(Callback):
    """Writes down what hooks between two epochs see of the Trainer's counters."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, name: str, trainer: Any) -> None:
        loop = trainer.fit_loop
        stepped = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed
        current = loop.epoch_progress.current
        self.seen.append((name, current.processed, current.completed, current.ready, current.started, stepped))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_train_epoch_end", trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_train_epoch_start", trainer)


def test_hooks_between_epochs_see_the_counters_that_a_trainer_has_then(tmp_path: Any) -> None:
    real, traced = Counters(), Counters()
    trainer = cases.make_trainer("lightning.pytorch", tmp_path, [real], max_epochs=3)
    trainer.fit(cases.make_module(), cases.loader(32, 8))
    _start, first_end, second_start, *later = real.seen
    shadow = cases.make_trainer("lightning.pytorch", tmp_path, max_epochs=3)
    current = shadow.fit_loop.epoch_progress.current
    _name, current.processed, current.completed, current.ready, current.started, stepped = first_end
    shadow.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = stepped
    playing: Any = SimpleNamespace(shadow=shadow, has=lambda _name: True, hook=lambda name: traced.note(name, shadow))
    epochs()._next(playing, 0)
    assert traced.seen == [first_end, second_start]
    epochs()._next(playing, 1)
    assert [one[:5] for one in traced.seen[2:]] == [one[:5] for one in later[:2]]


def test_steps_that_decide_otherwise_are_looked_for_in_one_epoch() -> None:
    playing: Any = SimpleNamespace(asked=StepDecisions())
    assert list(epochs()._differing(playing, 1, 4)) == []
    assert playing.asked.answer("global_step", 0) not in (2, 5, 9)
    playing.asked.followed({"current_epoch": 0, "global_step": 0})
    assert [list(epochs()._differing(playing, epoch, 4 * epoch)) for epoch in range(3)] == [[2], [5], [9]]


def test_what_a_step_writes_with_its_logger_is_heard(tmp_path: Any) -> None:
    """A plan that would have it written more often is not taken; what a logger only tells is its own."""
    from lightning.pytorch.loggers import CSVLogger

    heard: list[str] = []
    effects: Any = SimpleNamespace(call=heard.append)
    logger: Any = _trainer_proxy._Logger(CSVLogger(tmp_path, version=7), _trainer_proxy._Log(effects), "logger")
    assert isinstance(logger, CSVLogger)
    assert logger.version == 7
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.experiment.add_image("picture", None)
    assert heard == ["logger.log_metrics", "logger.experiment.add_image"]
    assert not list(tmp_path.iterdir())


def test_steps_of_several_ranks_are_gathered_as_large_as_they_are() -> None:
    alone, four = (_trainer_proxy._gathered(ranks) for ranks in (1, 4))
    data = {"loss": torch.ones(3), "name": "one"}
    assert alone(data) is data
    found = four(data)
    assert (found["loss"].shape, found["name"]) == ((4, 3), "one")


@pytest.mark.parametrize(("total", "between", "steps"), [(1, True, []), (2, True, [1]), (2, False, [])])
def test_a_step_of_a_later_epoch_meets_what_the_validation_left(
    monkeypatch: pytest.MonkeyPatch, total: float, between: bool, steps: list[int]
) -> None:
    """Where no hook changes anything: once, if there is a later epoch and something has run in between."""
    found, trained = epochs(total=total), []
    monkeypatch.setattr(LaterEpochs, "_signature", lambda *_: FROZEN)
    playing: Any = SimpleNamespace(
        run=SimpleNamespace(accumulate=1),
        asked=StepDecisions(),
        shadow=SimpleNamespace(global_step=4, optimizers=[]),
        has=lambda _name: False,
        train=trained.append,
    )
    found.play(playing, 0, 1.0, between=between)
    assert trained == steps


def test_weights_that_training_has_told_apart_are_equal_where_they_are_the_same() -> None:
    one, other = torch.ones(2), torch.ones(2)
    assert _epochs._same(one, one)
    assert not _epochs._same(one, other)


def test_lists_of_loaders_and_lists_of_batches_are_told_apart() -> None:
    first, second, batches = loader(2), loader(3), [torch.ones(2), torch.ones(2)]
    assert _sample.loaders_in(first) == [first]
    assert _sample.loaders_in({"a": first, "b": [second]}) == [first, second]
    assert len(_sample.loaders_in(batches)) == 1
    assert len(_sample.loaders_in([first, batches])) == 2
    assert _sample.loaders_in([]) == []


def test_rates_that_are_not_found_in_a_checkpoint_stay_multiplied_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {"lr_schedulers": [{"base_lrs": [8.0]}], "optimizer_states": [{"param_groups": [{"lr": 8.0}]}]}
    before = copy.deepcopy(checkpoint)
    trainer: Any = SimpleNamespace(lr_scheduler_configs=[])
    monkeypatch.setattr(_growth, "divided_schedulers", lambda *_: None)
    assert not _growth.save_as_written(trainer, checkpoint, 8.0)
    assert checkpoint == before


def ddp(*, layer_sync: Any = None, **settings: Any) -> Any:
    """A Trainer of two processes, none of which has been started."""
    from lightning.pytorch.strategies import DDPStrategy

    strategy = DDPStrategy(**settings)
    made = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    strategy._layer_sync = layer_sync
    return made


@pytest.mark.parametrize(
    ("trainer", "part", "why"),
    [
        (lambda: ddp(), torch.nn.Linear(1, 1), ""),
        (lambda: ddp(layer_sync=object()), torch.nn.Linear(1, 1), "synchronised batch normalisation"),
        (lambda: ddp(), torch.nn.SyncBatchNorm(1), "synchronised batch normalisation"),
        (lambda: ddp(ddp_comm_hook=print), torch.nn.Linear(1, 1), "communication hook"),
        (lambda: ddp(ddp_comm_state=object()), torch.nn.Linear(1, 1), "communication hook"),
        (lambda: ddp(), torch.nn.Embedding(2, 2, sparse=True), "sparse gradients"),
        (lambda: ddp(), torch.nn.Embedding(2, 2), ""),
    ],
)
def test_several_ranks_are_recovered_where_they_can_agree(trainer: Any, part: torch.nn.Module, why: str) -> None:
    module = LightningModule()
    module.part = part
    found = _recovery.why_not(trainer(), module)
    assert why in found
    assert bool(found) == bool(why)
    module._ddp_params_and_buffers_to_ignore = ["part.weight"]  # type: ignore[assignment]
    assert _recovery.why_not(trainer(), module)


def test_what_keeps_an_optimizer_from_stepping_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = ddp(), LightningModule()
    assert _refusals._why_not_in_backward(trainer, module) == ""
    trainer.gradient_clip_val = 1.0
    assert "clipped once all of them are there" in _refusals._why_not_in_backward(trainer, module)
    trainer.gradient_clip_val = None
    monkeypatch.setattr(_refusals._deepspeed, "used", lambda _trainer: True)
    assert "DeepSpeed's engine" in _refusals._why_not_in_backward(trainer, module)
    module.automatic_optimization = False
    assert "manual optimization" in _refusals._why_not_in_backward(trainer, module)


@pytest.mark.parametrize("batches", [1, 2, 3, 5])
@pytest.mark.parametrize(("size", "of_whole"), [(8, 1), (20, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("longest", [False, True])
def test_batches_of_a_validation_stand_for_all_of_them(batches: int, size: int, of_whole: int, longest: bool) -> None:
    """The longest comes last, and is one of them; a sanity check takes one for all that it looks at."""
    sample: Any = SimpleNamespace(batch_size=8, make=lambda count: count, dataset_size=None)
    padded: Any = SimpleNamespace(batch_size=6, make=lambda count: -count)
    one = _validation.Loader(sample, batches, padded if longest else None)
    count = batches * of_whole - (of_whole == 3) * (batches // 3)  # of 24 samples, 8 batches of 3
    assert one.of_at_most(size) == (min(size, 8), count)
    found, repeated, stands = one.followed(size, None)
    assert [batch < 0 for batch in found] == [False] * (len(found) - longest) + [True] * longest
    assert len(found) - 1 + stands == count or (longest and count == 1)
    assert repeated == len(found) - longest <= 2
    assert all(abs(batch) == min(size, 6 if batch < 0 else 8) for batch in found)
    assert one.followed(size, 2) == ([min(size, 8)], 1, min(count, 2))
    assert one.followed(size, 0) == ([min(size, 8)], 1, count)


@pytest.mark.parametrize(
    ("samples", "size", "count"), [(33, 4, 9), (33, 1, 33), (33, 8, 5), (33, 20, 5), (400, 4, 10), (10, 4, 10)]
)
def test_smaller_batches_of_a_validation_are_as_many_as_its_samples_make(samples: int, size: int, count: int) -> None:
    """Five batches of eight: the last may be shorter, a limit leaves out samples, a sampler draws some twice."""
    sample: Any = SimpleNamespace(batch_size=8, make=lambda made: made, dataset_size=samples)
    assert _validation.Loader(sample, 5).of_at_most(size) == (min(size, 8), count)
