"""The framework-free core of recovery, on a plain loop."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import decimal
import enum
import functools
import io
import itertools
import logging
import math
import operator
import random
import re
import threading
import types
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oom_cases
import pytest
import torch
from torch import nn
from tqdm import tqdm

from vram_guard.apply.microbatch import Splitter, batch_size, split
from vram_guard.apply.normalisers import Normaliser
from vram_guard.errors import RecoveryFailedError
from vram_guard.limits import ARRAY_REACHED, ITEMS_REACHED, OBJECTS_REACHED
from vram_guard.watch import rank_coordinator
from vram_guard.watch._gradients import SetAside
from vram_guard.watch._rollback import CannotRollBackError, StateSnapshot
from vram_guard.watch.batches import MicroBatches, Share
from vram_guard.watch.optimizer_step import guard_step
from vram_guard.watch.rank_coordinator import SingleProcess, Verdict
from vram_guard.watch.recovery import Attempt, MicroBatchSchedule, Recovery


class Stateful(nn.Module):
    """State of every kind that an attempt may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.zeros(600, 600))  # larger than what is copied in place
        self.register_buffer("flag", torch.tensor([True, False]))
        self.count, self.seen, self.recent = 0, [1], deque([1], maxlen=2)
        self.long = list(range(100))
        self.stored = {"mean": torch.zeros(2)}
        self.hidden = torch.zeros(3)
        self.own = torch.Generator().manual_seed(5)
        self.known: set[int] = set()


def state(model: Stateful) -> Any:
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    plain = (model.count, list(model.seen), list(model.recent), len(model.long), set(model.known), sorted(vars(model)))
    return tensors, plain, model.stored["mean"].clone(), model.hidden.clone(), model.own.get_state()


def assert_same_state(one: Any, other: Any) -> None:
    assert one[1] == other[1]
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)
    for mine, theirs in zip(one[2:], other[2:], strict=True):
        assert torch.equal(mine, theirs)


def change(model: Stateful) -> None:
    model.norm(model.layer(torch.randn(5, 4)))
    model.flag.logical_not_()
    model.count += 1
    model.seen.append(2)
    model.recent.append(3)
    model.long += [1, 2]
    model.stored["mean"] += 1
    model.stored["new"] = torch.ones(1)
    model.hidden = torch.ones(3)
    model.known.add(7)
    model.surprise = "new"
    torch.rand(1, generator=model.own)
    random.random()
    np.random.rand()


def streams() -> Any:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_everything_is_taken_back() -> None:
    model = Stateful()
    keeper = StateSnapshot(model)
    for _ in range(3):  # a second attempt uses what was kept for the first
        keeper.take()
        before, rng = state(model), streams()
        change(model)
        keeper.check()
        keeper.restore()
        assert_same_state(state(model), before)
        assert streams() == rng
        keeper.take()
        change(model)


def test_a_large_buffer_is_put_back_whenever_it_changes() -> None:
    model = Stateful()
    keeper = StateSnapshot(model)
    for changes in (True, False, True, True, False, False, True):
        keeper.take()
        before = float(model.table.mean())
        if changes:
            model.table += 1
            keeper.check()
            keeper.restore()
        assert float(model.table.mean()) == before
        model.table += float(changes)


def test_changed_weights_are_noticed() -> None:
    model = Stateful()
    keeper = StateSnapshot(model)
    keeper.take()
    with torch.no_grad():
        model.layer.weight.add_(1)
    with pytest.raises(CannotRollBackError, match=r"layer\.weight"):
        keeper.check()


@pytest.mark.parametrize("name", ["model.count", "model.known", "model.norm.running_mean", "model.layer.weight"])
def test_what_a_hook_changes_that_runs_once_for_a_batch_is_not_repeated(name: str) -> None:
    model = Stateful()
    keeper = StateSnapshot(model)
    keeper.take()
    change(model)
    with keeper.once():
        pass
    keeper.check()
    with keeper.once(), torch.no_grad():
        if name == "model.count":
            model.count += 100
        elif name == "model.known":
            model.known.add(9)
        else:
            operator.attrgetter(name)(SimpleNamespace(model=model)).mul_(0.5)
    with pytest.raises(CannotRollBackError, match=re.escape(name)):
        keeper.check()


def test_nothing_is_held_after_an_attempt() -> None:
    model = Stateful()
    recovery = Recovery(model)
    recovery.run(lambda attempt: None, MicroBatchSchedule(), lambda: 8, what="this batch")
    model.hidden = torch.zeros(3)
    gone = weakref.ref(model.hidden)
    recovery.run(lambda attempt: None, MicroBatchSchedule(), lambda: 8, what="this batch")
    del model.hidden
    assert gone() is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_set_aside_are_added_as_autograd_adds_them(layout: torch.memory_format) -> None:
    def backwards(aside: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        tied = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=layout)  # used twice
        for seed in (1, 2):
            keeper = SetAside(tied.parameters())
            if aside:
                keeper.begin()
                keeper.begin()
            torch.manual_seed(seed)
            tied(tied(torch.randn(2, 3, 5, 5).to(memory_format=layout))).square().sum().backward()
            keeper.merge()
        return [parameter.grad for parameter in tied.parameters() if parameter.grad is not None]

    for mine, autograds in zip(backwards(True), backwards(False), strict=True):
        assert torch.equal(mine, autograds)


def test_sparse_gradients_and_parameters_without_any() -> None:
    table, unused = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)
    parameters = [*table.parameters(), *unused.parameters()]
    unused.weight.grad = torch.ones(2, 2)
    table(torch.tensor([1, 2])).sum().backward()
    aside = SetAside(parameters)
    aside.begin()
    assert all(parameter.grad is None for parameter in parameters)
    table(torch.tensor([2, 3])).sum().backward()
    aside.merge()
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 1, 2, 1, 0]
    assert unused.weight.grad is not None
    assert unused.bias.grad is None


# --- a plain loop -------------------------------------------------------------------------------------------


class Loop:
    """What an adapter is, at its smallest: batches, accumulation over two of them, an optimizer."""

    def __init__(self, **recovery: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = oom_cases.BreakingAdamW(self.model.parameters(), lr=0.05, foreach=True)
        self.said: list[str] = []
        self.recovery = Recovery(self.model, log=self.said.append, **recovery)
        self.schedule = MicroBatchSchedule()
        self.undo = guard_step(self.optimizer, self.recovery, lambda: "/checkpoints/last.ckpt")
        self.capacity: dict[int, int] = {}
        self.where = "forward"

    def train(self, batches: int = 6) -> None:
        data = torch.Generator().manual_seed(1)
        torch.manual_seed(2)  # dropout
        for number in range(batches):
            batch = torch.randn(8, 4, generator=data)
            self.recovery.run(
                lambda attempt, number=number, batch=batch: self._attempt(attempt, number, batch),
                self.schedule,
                lambda batch=batch: batch_size(batch),
                what="this batch",
            )
            if number % 2:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def _attempt(self, attempt: Attempt, number: int, batch: torch.Tensor) -> None:
        for part in split(batch, 8, attempt.micro_batch_size or 8):
            hidden = self.model[:3](part.data)
            if part.samples > self.capacity.get(number, 8):
                if self.where == "forward":
                    raise oom_cases.no_memory()
                hidden = oom_cases.breaks_in_backward(hidden)
            loss = self.model[3](hidden).square().mean() * part.weight
            attempt.before_backward()
            loss.backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_plain_loop_recovers(where: str, number: int) -> None:
    runs_out_in(where, number, batches=6)


def test_memory_that_runs_out_in_the_thousandth_step() -> None:
    """A step of two batches; nothing lost, nothing repeated."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small operators only wait for each other
    try:
        runs_out_in("backward", 1999, batches=2004)
    finally:
        torch.set_num_threads(threads)


def runs_out_in(where: str, number: int, batches: int) -> None:
    """A loop whose memory runs out, against one that is cut by hand from that batch on."""
    broken, reference = Loop(), Loop()
    broken.where, broken.capacity = where, {number: 2}
    broken.train(batches)

    plain = reference.recovery.run

    def run(attempt: Any, schedule: MicroBatchSchedule, samples: Any, **more: Any) -> Any:
        schedule.size = 2 if numbers.pop(0) >= number else None
        return plain(attempt, schedule, samples, **more)

    numbers = list(range(batches))
    reference.recovery.run = run  # type: ignore[method-assign]
    reference.train(batches)
    assert len(broken.said) == 2
    assert broken.optimizer.steps == reference.optimizer.steps == batches // 2
    assert broken.schedule.size == 2
    for mine, theirs in zip(broken.model.state_dict().values(), reference.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_schedule_goes_down_by_equal_parts() -> None:
    assert [MicroBatchSchedule(size, 12).below(5) for size in (None, 12, 6, 4, 3, 2, 1)] == [6, 6, 4, 3, 2, 1, 0]
    assert MicroBatchSchedule().below(7) == 1
    assert MicroBatchSchedule().below(1) == 0


def test_an_optimizer_step_is_done_again_or_not() -> None:
    plain, redone, broken = Loop(), Loop(), Loop()
    plain.train()
    redone.optimizer.at, redone.optimizer.armed = 0, True
    redone.train()
    for mine, theirs in zip(redone.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), "parameter by parameter is the same arithmetic"
    assert "optimizer step before it had changed anything" in redone.said[0]

    later = oom_cases.no_memory()
    torch_step = broken.optimizer.step

    def half(closure: Any = None) -> Any:
        torch_step(closure)
        raise later

    broken.undo()
    broken.optimizer.step = half  # type: ignore[method-assign]
    guard_step(broken.optimizer, broken.recovery, lambda: "/checkpoints/last.ckpt")
    with pytest.raises(RecoveryFailedError, match=r"5 of 5 weights[\s\S]*half-updated[\s\S]*/checkpoints/last\.ckpt"):
        broken.train()


def test_lbfgs_calls_its_closure_often() -> None:
    def train(armed: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        if armed:
            guard_step(optimizer, Recovery(model))
        inputs = torch.randn(16, 4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return model.weight.detach()

    assert torch.equal(train(True), train(False))


def test_schedulers_and_scalers_see_the_same_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    guard_step(optimizer, Recovery(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()  # warns, which is an error here, where the optimizer seems not to have stepped
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_the_price_of_being_armed_is_small() -> None:
    """A few microseconds a module; the bound is loose, for a busy machine."""
    import time

    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(100)])
    keeper = StateSnapshot(model)
    keeper.take()
    start = time.process_time()
    for _ in range(10):
        keeper.take()
    assert (time.process_time() - start) / 10 < 0.05


# --- ranks ----------------------------------------------------------------------------------------------------


class Told(SingleProcess):
    """Writes down what this rank tells the others."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    def agree(self, verdict: Verdict) -> Verdict:
        self.verdicts.append(verdict)
        return super().agree(verdict)


def test_a_rank_that_stops_with_another_error_tells_the_others_once() -> None:
    ranks = Told()
    recovery = Recovery(nn.Linear(1, 1), ranks=ranks)

    def fails(attempt: Attempt) -> None:
        raise ValueError("the user's own")

    for _ in range(2):
        with pytest.raises(ValueError, match="the user's own"):
            recovery.run(fails, MicroBatchSchedule(), lambda: 8, what="this batch")
    assert ranks.verdicts == [Verdict.STOPPED]


@pytest.mark.parametrize("most", [1, 2])
def test_as_many_errors_as_allowed_are_recovered_from(most: int) -> None:
    loop = Loop(most=most)
    loop.capacity = {0: 4, 1: 2, 2: 1}  # one error in each of the first batches
    with pytest.raises(RecoveryFailedError, match=f"out-of-memory error {most + 1}, and max_recoveries is {most}"):
        loop.train()
    assert len(loop.said) == most


# --- what is reached from the model ---------------------------------------------------------------------------


class Meter:
    """A helper of the user's own, with one in slots inside."""

    def __init__(self) -> None:
        self.total, self.history = 0.0, [[1, {"loss": [1.0]}]]
        self.inner = Slotted()


class Slotted:
    __slots__ = ("__hidden", "count", "later")

    def __init__(self) -> None:
        self.count, self.__hidden = 0, 1

    def advance(self) -> None:
        self.count += 1
        self.__hidden += 1
        self.later = True

    def told(self) -> tuple[int, int, bool]:
        return self.count, self.__hidden, hasattr(self, "later")


class Nested(nn.Module):
    """State that lies deeper than in the module's own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.meter = Meter()
        self.queue: deque[list[int]] = deque([[1], [2]])
        self.bank = {"a": {"b": [torch.zeros(2)]}, **{str(number): [number] for number in range(100)}}
        self.long = list(range(500))
        self.teacher = [nn.BatchNorm1d(2)]
        self.dice, self.noise, self.legacy = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.counts = np.zeros(3)
        self.loop = [self]


def told(model: Nested) -> Any:
    """Everything of it, as text."""
    return repr((
        vars(model.meter).keys(), model.meter.total, model.meter.history, model.meter.inner.told(),
        model.queue, model.bank, model.long, dict(model.teacher[0].named_buffers()), model.counts,
        model.dice.getstate()[1][-1], model.noise.bit_generator.state, model.legacy.get_state()[2],
    ))  # fmt: skip


def test_what_lies_deeper_is_taken_back() -> None:
    model = Nested()
    keeper = StateSnapshot(model)
    for _ in range(2):
        keeper.take()
        before = told(model)
        model.meter.total += 1
        model.meter.history[0][1]["loss"].append(2.0)  # type: ignore[index]
        model.meter.new = "attribute"  # type: ignore[attr-defined]
        model.meter.inner.advance()
        model.queue[0].append(7)
        model.bank["a"]["b"][0] += 1  # type: ignore[call-overload, index]
        model.bank["50"].append(51)  # type: ignore[attr-defined]
        model.long[3] = -1
        model.teacher[0](torch.randn(4, 2))
        model.counts += 1
        model.dice.random()
        model.noise.random()
        model.legacy.rand()
        assert told(model) != before
        keeper.check()
        keeper.restore()
        assert told(model) == before


def test_changed_weights_of_a_hidden_module_are_noticed() -> None:
    model = Nested()
    keeper = StateSnapshot(model)
    keeper.take()
    with torch.no_grad():
        model.teacher[0].weight.add_(1)
    with pytest.raises(CannotRollBackError, match="weights"):
        keeper.check()


class Advancing(nn.Module):
    """Draws from something in every forward, as in noise that is read from a file."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(2, 1), [source]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + next(self.held[0]))


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (lambda: (0.1 * number for number in range(9)), "generator"),
        (lambda: iter([0.1, 0.2, 0.3]), "list_iterator"),
        (itertools.count, "count"),
        (lambda: iter(torch.utils.data.DataLoader([0.1, 0.2, 0.3])), "_SingleProcessDataLoaderIter"),
        (lambda: io.StringIO("1"), "StringIO"),
    ],
)
def test_a_batch_is_not_repeated_where_something_may_have_moved_that_cannot_be_put_back(source: Any, kind: str) -> None:
    """Repeated, it would draw other numbers than the training without the error."""
    model = Advancing(source())
    recovery = Recovery(model, log=lambda line: pytest.fail(line), prediction_text=lambda: "What was predicted: 1 GiB")

    def attempt(running: Attempt) -> None:
        next(model.held[0])
        if not running.micro_batch_size:
            raise oom_cases.no_memory()

    with pytest.raises(RecoveryFailedError) as caught:
        recovery.run(attempt, MicroBatchSchedule(), lambda: 8, what="this batch")
    said = str(caught.value)
    for part in (f"model.held[0] (a {kind})", "micro_batch_size': 4", "budget=", "What was predicted: 1 GiB"):
        assert part in said


def test_what_is_too_much_to_look_at_stops_a_recovery() -> None:
    model = Nested()
    keeper = StateSnapshot(model)

    def refused() -> str:
        keeper.take()
        try:
            keeper.check()
        except CannotRollBackError as error:
            return str(error)
        return ""

    model.vocabulary = {str(number): number for number in range(ITEMS_REACHED + 1)}
    model.samples = [(str(number), number) for number in range(ITEMS_REACHED + 1)]
    model.data = Samples([[1] for _ in range(ITEMS_REACHED + 1)])
    assert refused() == ""
    model.many = [[number] for number in range(ITEMS_REACHED + 1)]
    model.values = np.zeros(ARRAY_REACHED)
    for name in ("model.many (a list of 10001 items)", "model.values (a NumPy array of 1048576 values)"):
        assert name in refused()
    model.many = [[[] for _ in range(OBJECTS_REACHED // 2)] for _ in range(3)]
    assert "a list, and what follows it" in refused()


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A data set that the module holds: its items are the loader's."""

    def __init__(self, items: Any) -> None:
        self.items, self.epoch = items, 0


def test_what_common_modules_hold_does_not_stop_a_recovery() -> None:
    model = Nested()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.scheduler = {"one": torch.optim.lr_scheduler.StepLR(model.optimizer, 1)}
    model.args = argparse.Namespace(lr=0.1, parts=[1])
    model.others = [re.compile("a"), logging.getLogger("x"), threading.Lock(), torch, Path("a"), torch.float32]
    model.others += [len, functools.partial(max, 1), lambda: model, Kind.ONE, Kind, weakref.ref(model), object()]
    model.others += [decimal.Decimal(1), frozenset({1}), np.float32(1), np.dtype("float32"), list[int], model.forward]
    model.others += [tqdm(total=3, disable=True), collections.Counter("ab"), types.MappingProxyType({})]
    keeper = StateSnapshot(model, frameworks=("concurrent",))
    model.pool = concurrent.futures.Future()
    keeper.take()
    model.scheduler["one"].last_epoch = 7
    model.args.lr = 0.2
    model.args.parts.append(2)
    keeper.check()
    keeper.restore()
    assert model.scheduler["one"].last_epoch == 7
    assert model.args == argparse.Namespace(lr=0.1, parts=[1])


class Kind(enum.Enum):
    ONE = 1


class Another(rank_coordinator.RankCoordinator):
    """A second rank that needs ``needed`` micro-batches for its batch of ``samples``."""

    def __init__(self, needed: int, samples: int) -> None:
        self.needed, self.samples = needed, samples

    def parts(self, needed: int, samples: int) -> tuple[int, int]:
        return max(needed, self.needed), min(samples, self.samples)


@pytest.mark.parametrize(
    ("micro_batch_size", "samples", "needed_there", "samples_there", "in_step", "expected"),
    [
        (4, 8, 1, 2, False, [4, 4]),  # the other one needs fewer
        (4, 8, 3, 12, False, [3, 3, 2]),
        (4, 4, 4, 16, False, [2, 2]),  # pairs at least
        (1, 3, 4, 4, False, [1, 1, 1]),  # as the plan has single samples
        (2, 8, 1, 3, True, [3, 3, 2]),  # every forward waits: the shortest batch decides
        (2, 2, 4, 8, True, [1, 1]),
    ],
)
def test_ranks_agree_on_the_number_of_micro_batches(
    micro_batch_size: int, samples: int, needed_there: int, samples_there: int, in_step: bool, expected: list[int]
) -> None:
    ranks = Another(needed_there, samples_there)
    batches = MicroBatches(Splitter(16, micro_batch_size, torch.ones(16, 2)), ranks=ranks, in_step=in_step)
    found = batches.run(torch.ones(samples, 2), lambda batch: [part.samples for part in batch.parts])
    assert found == expected


def test_a_part_without_a_label_that_counts_is_left_out() -> None:
    batch = {"labels": torch.tensor([-100, -100, 4, 5])}
    batches = MicroBatches(Splitter(4, 2, batch), Normaliser(("labels",)))

    def loss(share: Share) -> torch.Tensor:  # of the part that is left out it would be 0 / 0, and so would its weight's
        return share.weight * nn.functional.cross_entropy(torch.zeros(2, 6), share.data["labels"])

    shares: list[Share] = []
    found = batches.run(batch, lambda one: one.run(lambda share: shares.append(share) or loss(share)))
    assert [(share.data["labels"].tolist(), share.weight, share.first, share.last) for share in shares] == [
        ([4, 5], 1.0, True, True)
    ]
    assert float(found) == pytest.approx(math.log(6))


def test_a_batch_that_cannot_be_cut_is_one_part_for_the_other_ranks_too() -> None:
    told: list[tuple[int, int]] = []

    class Listening(Another):
        def parts(self, needed: int, samples: int) -> tuple[int, int]:
            told.append((needed, samples))
            return super().parts(needed, samples)

    batches = MicroBatches(Splitter(16, 4, (torch.ones(16), torch.ones(16))), ranks=Listening(2, 8))
    with pytest.warns(UserWarning, match="without splitting it"):
        batches.run((torch.ones(8), torch.ones(7)), lambda batch: batch.parts)
    assert told == [(1, 1)]


def test_what_got_no_gradient_is_said_once() -> None:
    model = nn.ModuleDict({name: nn.Linear(1, 1) for name in "abcd"})

    class Averaging(SingleProcess):
        def average_gradients(self) -> list[nn.Parameter]:
            return list(model.parameters())[:7]

    said: list[str] = []
    recovery = Recovery(model, ranks=Averaging(), log=said.append)
    for _ in range(2):
        recovery.run(lambda attempt: None, MicroBatchSchedule(), lambda: 8, synchronise=True, what="this batch")
    assert len(said) == 1
    assert "no gradient: a.weight, a.bias, b.weight, b.bias, c.weight, ...." in said[0]
