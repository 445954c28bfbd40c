"""Parts of MMEngine's adapter by themselves: what is read of wrappers and values, where later steps are looked at."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from each import each

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook, _optim  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import torch
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper

from vram_guard.proof.effects import StepEffects
from vram_guard_mmengine._schedule import Schedule, _numbers_of
from vram_guard_mmengine._step_switches import StepSwitches, _parts_of, _simple
from vram_guard_mmengine._symbolic_run import symbolic_run


@pytest.mark.parametrize("clip", [None, {"max_norm": 2.5}, {"type": "value", "clip_value": 0.5}])
def test_a_wrapper_that_is_built_says_how_it_clips(clip: dict[str, Any] | None) -> None:
    wrapper = OptimWrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), clip_grad=clip)
    facts = _optim.read(wrapper)
    assert (facts.clip_grad_norm, facts.clip_grad_value) == (
        (clip or {}).get("max_norm"),
        (clip or {}).get("clip_value"),
    )


def test_what_a_hook_exchanges_in_a_list_of_transforms_is_seen() -> None:
    pipeline: Any = [[[[["flip", 1]]]]]
    before = _parts_of(pipeline)
    assert before == _parts_of([[[[["crop", 1]]]]])
    assert before != _parts_of([[[[["flip"]]]]])
    pipeline.append(pipeline)
    assert _parts_of(pipeline) != before, "and one that contains itself ends"


@pytest.mark.parametrize(("accumulate", "splits", "steps"), [(1, 1, 12), (4, 4, 12), (6, 2, 4)])
def test_optimizer_steps_are_counted_where_the_user_accumulates(accumulate: int, splits: int, steps: int) -> None:
    counted: list[int] = []
    hook: Any = VramGuardHook(budget="1GiB")
    hook.plan = SimpleNamespace(accumulate=accumulate, splits=splits)
    hook._guard = SimpleNamespace(measured=counted.append)
    for _iteration in range(12):
        hook.after_train_iter(None, 0)
    assert counted[-1] == steps


class Holder:
    """An object of the user's, with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@each(
    ("one", "other", "same"),
    [
        (0.1, 0.2, True),  # a factor
        (0.1, 0.0, False),
        (4, 5, False),
        ([1, 2], [1, 3], False),
        ({"size": 1}, {"size": 2}, False),
        ({"of": {"size": 1}}, {"of": {"size": 2}}, False),
        ({"of": {"of": {"size": 1}}}, {"of": {"of": {"size": 2}}}, True),  # too far inside
        ("pad", "crop", False),
        (True, False, False),
        (None, "pad", False),
        (torch.ones(2), torch.zeros(2), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, requires_grad=True), False),
        (len, repr, False),
        (Holder(size=1), Holder(size=1), True),
        (Holder(size=1), Holder(size=2), False),
        (Holder(inner=Holder(size=1)), Holder(inner=Holder(size=2)), False),
        (Holder(inner=[[1]]), Holder(inner=[[2]]), True),  # too far inside
        (torch.nn.Linear(1, 2), torch.nn.Linear(1, 3), True),  # looked at by themselves
        (torch.nn.Linear(1, 2), torch.nn.Bilinear(1, 1, 2), False),
    ],
)
def test_values_are_compared_by_what_decides_about_memory(one: Any, other: Any, same: bool) -> None:
    assert (_simple(one) == _simple(other)) == same


def test_a_trace_sees_a_training_that_has_just_begun() -> None:
    outside, logger = MessageHub.get_instance("a training"), logging.getLogger("mmengine")
    outside.update_info("epoch", 7)
    with symbolic_run(3, 12, StepEffects()):
        hub = MessageHub.get_current_instance()
        names = ("loop_stage", "epoch", "iter", "max_epochs", "max_iters")
        assert [hub.get_info(name) for name in names] == ["train", 0, 0, 3, 12]
        assert logger.disabled
    assert not logger.disabled
    assert MessageHub.get_current_instance() is outside


# --- where later steps are looked at ----------------------------------------------------------------------------


class OfEpochs(Hook):
    """A hook of the user's."""

    def before_train_epoch(self, runner: Any) -> None: ...


class OfIterations(Hook):
    """One that changes something at an iteration."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None: ...


def schedule(batches: int | None = 5, *, by_epoch: bool = True) -> Schedule:
    return Schedule(None, None, by_epoch, batches)  # type: ignore[arg-type]


class Called:
    """The shadow of a Runner, whose hooks are written down."""

    def __init__(self, *hooks: Hook, at: int = 0, most: int = 20, sets_modes: bool = False) -> None:
        self.hooks, self.sets_modes, self.data_batch = hooks, sets_modes, "data"
        self.loop = SimpleNamespace(_iter=at, _epoch=0, _max_iters=most)
        self.calls: list[Any] = []

    def call(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, self.loop._epoch, *arguments.values()))

    def at(self, epoch: int, place: int) -> None:
        self.loop._epoch, self.loop._iter = epoch, place


@pytest.mark.parametrize(
    ("hooks", "batches", "places"),
    [
        ((), 5, []),
        ((OfEpochs(),), 5, [5, 10, 15]),
        ((OfEpochs(),), None, []),
        ((OfIterations(at=7),), None, [6, 7, 8]),
        ((OfIterations(at=1),), None, [1, 2]),
        ((OfIterations(at=3),), 5, [2, 3, 4, 10, 15]),
        ((OfIterations(at=[19, 0, -4], on=True),), None, [18, 19]),
    ],
)
def test_hooks_of_the_user_say_where_steps_may_differ(
    hooks: tuple[Hook, ...], batches: int | None, places: list[int]
) -> None:
    shadow: Any = Called(*hooks)
    assert list(schedule(batches)._places(shadow)) == places


def test_the_last_step_is_looked_at_where_the_model_asks_how_far_the_training_is() -> None:
    shadow: Any = Called()
    asking = schedule(None, by_epoch=False)
    assert not list(asking._places(shadow))
    assert asking.asked.answer("iter", 0) != 7
    assert list(asking._places(shadow))[-1] == 19
    longer: Any = Called(most=500)
    assert list(asking._places(longer))[-1] == 499, "also where not every step can be looked at"


def test_places_have_the_names_that_users_count_by() -> None:
    assert [schedule()._name(place) for place in (5, 6)] == ["epoch 2", "iteration 7"]
    assert schedule(by_epoch=False)._name(5) == schedule(None)._name(5) == "iteration 6"
    assert schedule()._numbers(12) == {"epoch": 2, "iter": 12}
    assert schedule(None)._numbers(12) == {"epoch": 0, "iter": 12}


@pytest.mark.parametrize("sets_modes", [True, False])
def test_hooks_between_two_places_run_as_the_loop_would_run_them(sets_modes: bool) -> None:
    shadow: Any = Called(sets_modes=sets_modes)
    run: Any = SimpleNamespace(model=torch.nn.Linear(1, 1).eval())
    schedule()._go(run, shadow, 3)
    schedule()._go(run, shadow, 6)
    assert shadow.calls == [
        ("before_train_iter", 0, 3, "data"),
        ("after_train_epoch", 0),
        ("before_train_epoch", 1),
        ("before_train_iter", 1, 1, "data"),
    ]
    assert (shadow.loop._epoch, shadow.loop._iter) == (1, 6)
    assert run.model.training == sets_modes


@pytest.mark.parametrize("batches", [5, None])
def test_loops_of_iterations_number_their_batches_through(batches: int | None) -> None:
    shadow: Any = Called()
    schedule(batches, by_epoch=False)._go(SimpleNamespace(model=torch.nn.Linear(1, 1)), shadow, 7)  # type: ignore[arg-type]
    assert shadow.calls == [("before_train_iter", 0, 7, "data")]
    assert shadow.batch_idx == 7, "what hooks are told after the iteration"


def test_numbers_that_a_hook_may_mean_are_found_in_its_attributes() -> None:
    hook = OfIterations(at=7, never=0, off=False, often=(8, [9]), of={10: 11}, far=[[[12]]], other=OfIterations(at=13))
    assert sorted(_numbers_of(hook)) == [7, 8, 9, 10, 11]
    assert list(_numbers_of(OfIterations(many=[1] * 100_000))) == []


@pytest.mark.parametrize(
    ("attributes", "counts", "last", "asks"),
    [
        ({"initial_epoch": 3}, True, False, True),
        ({"warmup_iters": 17}, True, False, True),
        ({"initial_epoch": 4, "warmup_iters": 16}, True, False, False),
        ({"depth": 3}, True, False, False),
        ({"epoch_share": 3.0}, True, False, False),
        ({"initial_epoch": 3}, False, False, False),
        ({"initial_epoch": 4}, True, True, True),
        ({"initial_epoch": 3}, False, True, False),
    ],
)
def test_a_model_that_counts_may_name_the_epoch_at_which_it_changes(
    attributes: dict[str, Any], counts: bool, last: bool, asks: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    vars(model[0]).update(attributes)
    shadow: Any = Called()
    shadow.runner = SimpleNamespace(model=model)
    shadow.at(3, 17)
    assert schedule()._asked_at(shadow, 17, last=last, counts=counts) == asks


def looking(**state: Any) -> Any:
    """A look at a step, in this state."""
    look: Any = object.__new__(StepSwitches)
    look.counters, look.other_loss, look._gone, look._state = set(), False, {}, state
    return look


@pytest.mark.parametrize(
    ("before", "after", "words", "other_loss"),
    [
        ({"requires_grad a": False, "requires_grad b": False}, {"requires_grad a": True, "requires_grad b": True},
         "2 more parameters are trained", False),
        ({"requires_grad a": True}, {"requires_grad a": False}, "1 fewer parameters are trained", False),
        ({"requires_grad a": True, "requires_grad b": True, "requires_grad c": False},
         {"requires_grad a": False, "requires_grad b": False, "requires_grad c": True},
         "1 fewer parameters are trained", False),
        ({"accumulative_counts": 1}, {"accumulative_counts": 2}, "accumulative_counts", False),
        ({"train_dataloader": 1}, {"train_dataloader": 2}, "train_dataloader", False),
        ({"head.weight": 1}, {"head.weight": 2, "seen": 1}, "head.weight, seen", True),
        ({}, {"a": 1, "b": 1, "c": 1}, "a, b, c", True),
        ({}, {"a": 1, "b": 1, "c": 1, "d": 1}, "a, b, c, ...", True),
        ({"counter": 1}, {"counter": 2}, "", False),
    ],
)  # fmt: skip
def test_what_is_different_is_told_in_words(
    before: dict[str, Any], after: dict[str, Any], words: str, other_loss: bool
) -> None:
    look = looking(**after)
    look.counters.add("counter")
    assert (look._in_words(before), look.other_loss) == (words, other_loss)


def test_a_counter_goes_the_same_step_twice_in_a_row() -> None:
    look = looking()
    for moment in ({"n": 0, "odd": 0, "on": False}, {"n": 2, "odd": 1, "on": True}, {"n": 4, "odd": 3, "on": False}):
        before, look._state = look._state, moment
        look._count(before)
    assert look.counters == {"n"}
