"""What a loop is seen to do between two optimizer steps, and what follows for later ones; in copies of this process."""

from __future__ import annotations

import importlib
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if not hasattr(os, "fork"):
    pytest.skip("the observer changes torch for good", allow_module_level=True)

from torch import nn  # noqa: E402 - what is tested has to be there
from torch.optim import lr_scheduler  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler  # noqa: E402

from vram_guard.capture.loader import Sample  # noqa: E402
from vram_guard_accelerate.dry_run import loop_profile  # noqa: E402
from vram_guard_accelerate.dry_run.loop_profile import LoopObserver, LoopProfile, epoch_of  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """What an optimizer imports, once for all copies."""
    importlib.import_module("torch._dynamo")


def in_copy(work: Callable[[], Any]) -> Any:
    """What came of it in a copy, where torch may be changed."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        torch.set_num_threads(1)  # the threads of its pool were not copied
        try:
            answer = pickle.dumps(work())
        except BaseException:  # noqa: BLE001 - the copy has nobody else to tell
            answer = pickle.dumps(traceback.format_exc())
        with os.fdopen(writing, "wb") as stream:
            stream.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        found = pickle.loads(stream.read())
    os.waitpid(process, 0)
    assert not isinstance(found, str), found
    return found


class Loop:
    """A training of two parameter groups that is observed."""

    def __init__(self, batch_size: int = 4) -> None:
        self.observer = LoopObserver()
        self.observer.install()
        self.observer.reads_losses = True
        self.model = nn.Linear(2, 3)
        groups = [{"params": [self.model.weight], "lr": 1.0}, {"params": [self.model.bias], "lr": 0.5}]
        self.optimizer = torch.optim.SGD(groups)
        self.loader = DataLoader(torch.zeros(10, 2), batch_size=batch_size)
        self.batch_size = batch_size

    def backward(self, reduction: str = "mean", factor: float = 1.0) -> None:
        labels = torch.zeros(self.batch_size, dtype=torch.long)
        out = self.model(torch.ones(self.batch_size, 2))
        (nn.functional.cross_entropy(out, labels, reduction=reduction) * factor).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.observer.stepped()

    def profile(self, batches_per_step: int = 1) -> LoopProfile:
        sample = Sample(lambda _size: None, self.batch_size, 10, self.loader, lambda _size: None)
        return self.observer.profile(sample, batches_per_step)


def rates_of(make: Callable[[Any], Any], steps: int = 2, between: Callable[[Any, Any], None] | None = None) -> Any:
    """The rates of a loop with this schedule, and why later ones are not known."""

    def work() -> Any:
        loop_profile.FORETOLD = 20
        loop = Loop()
        schedule = make(loop.optimizer)
        for step in range(steps):
            loop.backward()
            loop.step()
            if step + 1 == steps:  # where the second step ends, the dry run does
                break
            if between is None:
                schedule.step()
            else:
                between(schedule, loop.optimizer)
            loop.optimizer.zero_grad()
        found = loop.profile()
        return found.rates, found.rates_unknown

    return in_copy(work)


def test_what_happens_between_two_optimizer_steps() -> None:
    def work() -> LoopProfile:
        loop = Loop()
        for _ in range(3):
            for _ in range(2):
                loop.backward(factor=0.5)
            loop.observer.clipped()
            loop.step()
            loop.optimizer.zero_grad()
            loop.model.zero_grad()
        return loop.profile(2)

    found = in_copy(work)
    assert found.complete
    assert (found.batch_size, found.batches_per_step) == (4, 2)
    assert len(found.losses) == 2  # not those of the first step, or of the third
    (term,) = found.losses[0]
    assert (term.reduction, term.elements, term.of_each_element) == ("mean", 4, 0.5 / 4)
    assert found.counts == (("clip", 1), ("zero", 2))
    assert (found.batches, found.samples, found.drops_last, found.bars) == (3, 10, False, ())
    assert not found.counts_items


def test_a_loop_that_took_one_step_is_not_complete() -> None:
    def work() -> LoopProfile:
        loop = Loop()
        loop.backward("sum")
        loop.step()
        return loop.profile()

    found = in_copy(work)
    assert not found.complete
    assert len(found.losses) == 1
    assert found.rates[:2] == ((1.0, 0.5), ())


def test_losses_are_read_through_a_scaler_and_only_where_they_may_be() -> None:
    def work() -> Any:
        loop = Loop()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for reads in (True, True, False):
            loop.observer.reads_losses = reads
            scaler.scale(loop.model(torch.ones(4, 2)).mean()).backward()
            torch.autograd.backward([loop.model(torch.ones(4, 2)).sum(), loop.model(torch.ones(4, 2)).mean()])
            loop.step()
        return [event.what for event in loop.observer._events if event.kind == "loss"]

    found = in_copy(work)
    assert [(term.reduction, term.of_each_element) for (term,) in found] == 2 * [
        ("mean", 1 / 12),
        ("sum", 1.0),
        ("mean", 1 / 12),
    ]


def test_rates_go_on_as_their_schedules_do() -> None:
    rates, unknown = rates_of(lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.1))
    assert unknown == ""
    assert rates[:2] == ((1.0, 0.5), (1.0, 0.5))
    assert len(rates) == 22
    assert [rate for one in rates[2:5] for rate in one] == pytest.approx([0.1, 0.05, 0.1, 0.05, 0.01, 0.005])
    constant, unknown = rates_of(lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda _: 2.0]))
    assert (constant[0], constant[-1], unknown) == ((1.0,), (1.0,), "")  # each rate once


def test_rates_of_a_schedule_within_another_move_once() -> None:
    def chained(optimizer: Any) -> Any:
        halves = [lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) for _ in range(2)]
        return lr_scheduler.SequentialLR(optimizer, halves, [100])

    rates, unknown = rates_of(chained)
    assert unknown == ""
    assert [one[0] for one in rates[:5]] == pytest.approx([1.0, 0.5, 0.25, 0.125, 0.0625])


def test_rates_of_a_schedule_that_ends_are_known_to_its_end() -> None:
    rates, unknown = rates_of(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [1.0, 0.5], total_steps=6))
    assert unknown == ""
    assert len(rates) == 7  # one more than it has steps


def test_rates_that_follow_a_measured_value_are_not_known() -> None:
    def measured(schedule: Any, _optimizer: Any) -> None:
        schedule.step(1.0)

    rates, unknown = rates_of(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer), between=measured)
    assert (rates, unknown) == (((1.0, 0.5), (1.0, 0.5)), "measured")


def test_a_measured_schedule_that_moves_by_epochs_stays_out_of_it() -> None:
    rates, unknown = rates_of(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer), between=lambda *_: None)
    assert unknown == ""
    assert set(rates[:2]) == {(1.0, 0.5)}


def test_rates_that_the_loop_sets_are_not_known() -> None:
    def by_hand(_schedule: Any, optimizer: Any) -> None:
        optimizer.param_groups[1]["lr"] *= 0.5

    rates, unknown = rates_of(lambda _: None, between=by_hand)
    assert (rates, unknown) == (((1.0, 0.5), (1.0, 0.25)), "set by the loop")
    rates, unknown = rates_of(lambda _: None, steps=1, between=by_hand)
    assert unknown == ""


def test_a_schedule_that_moves_twice_a_step_goes_on_so() -> None:
    def twice(schedule: Any, _optimizer: Any) -> None:
        schedule.step()
        schedule.step()

    rates, unknown = rates_of(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5), between=twice)
    assert unknown == ""
    assert [one[0] for one in rates[:4]] == pytest.approx([1.0, 0.25, 1 / 16, 1 / 64])


def test_lengths_of_progress_bars_are_seen() -> None:
    tqdm = pytest.importorskip("tqdm")

    def work() -> Any:
        loop = Loop()
        for total in (7, None, 2.5):
            tqdm.tqdm(total=total, disable=True)
        for _ in tqdm.tqdm(range(3), disable=True):
            pass
        return loop.profile().bars

    assert in_copy(work)[0] == 7


def test_a_number_of_items_is_seen_where_a_trainer_counts_them() -> None:
    class Trainer:
        def get_batch_samples(self, count: Any) -> Any:
            return ["batch"], count

    def work() -> Any:
        observer = LoopObserver()
        found = [observer.items]
        observer.watch_items(object)  # one that does not count
        observer.watch_items(Trainer)
        for count in (7, torch.tensor(5), None):
            assert Trainer().get_batch_samples(count) == (["batch"], count)
            found.append(observer.items)
        return found

    assert in_copy(work) == [None, 7.0, 5.0, None]


def test_the_end_of_an_epoch_is_known_of_samplers_of_torchs_own() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    class Sampler(SequentialSampler):
        __len__ = None  # type: ignore[assignment]

    class Batches(BatchSampler):
        pass

    data = torch.zeros(10)
    assert epoch_of(DataLoader(data, batch_size=4)) == (3, 10)
    assert epoch_of(DataLoader(data, batch_size=4, drop_last=True)) == (2, 10)
    assert epoch_of(DataLoader(Endless(), batch_size=4)) == (None, None)
    assert epoch_of(DataLoader(data, batch_sampler=Batches(SequentialSampler(data), 4, False))) == (3, None)
    assert epoch_of(range(3)) == (3, None)


def test_what_counts_items_shows_it_in_every_loss() -> None:
    def work() -> LoopProfile:
        loop = Loop()
        for _ in range(2):
            loop.backward()
            loop.step()
        return loop.profile()

    found = in_copy(work)
    assert not found.by_items
    assert not replace(found, losses=()).by_items
    ((term,),) = found.losses
    assert replace(found, losses=((term._replace(by_items=True),),)).by_items
    assert not replace(found, losses=((term._replace(by_items=True), term),)).by_items
