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
import random
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oom_cases
import pytest
import torch
from each import each
from torch import nn
from tqdm import tqdm

from vram_guard.apply.microbatch import Splitter, batch_size, split
from vram_guard.apply.normalisers import Normaliser
from vram_guard.errors import RecoveryFailedError
from vram_guard.limits import ARRAY_REACHED, ITEMS_REACHED, OBJECTS_REACHED
from vram_guard.watch.batches import MicroBatches, Share
from vram_guard.watch.rank_coordinator import RankCoordinator
from vram_guard.watch.recovery import Attempt, MicroBatchSchedule, Recovery


def tried(recovery: Recovery, change: Callable[[], object], found: Callable[[], Any] = str) -> Any:
    """What ``found`` says where a batch begins anew; before, it made a change and ran out of memory."""
    again = []

    def attempt(running: Attempt) -> None:
        if running.micro_batch_size:
            again.append(found())
        else:
            change()
            raise oom_cases.no_memory()

    recovery.run(attempt, MicroBatchSchedule(), lambda: 8, "this batch")
    return again[0]


def quiet(model: nn.Module, *frameworks: str) -> Recovery:
    return Recovery(model, log=lambda _line: None, frameworks=frameworks)


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


class Stateful(nn.Module):
    """State of every kind that an attempt may change, in the module's own attributes and deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("table", torch.zeros(600, 600))  # larger than what is copied in place
        self.register_buffer("flag", torch.tensor([True, False]))
        self.count, self.seen, self.recent = 0, [1], deque([1], maxlen=2)
        self.stored = {"mean": torch.zeros(2)}
        self.hidden = torch.zeros(3)
        self.own = torch.Generator().manual_seed(5)
        self.known: set[int] = set()
        self.meter = Meter()
        self.queue: deque[list[int]] = deque([[1], [2]])
        self.bank = {"a": {"b": [torch.zeros(2)]}, **{str(number): [number] for number in range(100)}}
        self.long = list(range(500))
        self.teacher = [nn.BatchNorm1d(2)]
        self.dice, self.noise, self.legacy = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.counts = np.zeros(3)
        self.loop = [self]


def told(model: Stateful) -> str:
    """Everything of it, and the process's generators, as text."""
    return repr((
        {name: value.sum().item() for name, value in model.state_dict().items()}, sorted(vars(model)),
        model.count, model.seen, model.recent, model.stored, model.hidden, model.own.get_state().sum(), model.known,
        vars(model.meter).keys(), model.meter.total, model.meter.history, model.meter.inner.told(),
        model.queue, model.bank, model.long, dict(model.teacher[0].named_buffers()), model.counts,
        model.dice.getstate()[1][-1], model.noise.bit_generator.state, model.legacy.get_state()[2],
        random.getstate()[1][-1], np.random.get_state()[2], torch.get_rng_state().sum(),
    ))  # fmt: skip


def change(model: Stateful) -> None:
    model.norm(model.layer(torch.randn(5, 4)))
    model.table += 1
    model.flag[0] = False
    model.count += 1
    model.seen.append(2)
    model.recent.append(3)
    model.stored["mean"] += 1
    model.stored["new"] = torch.ones(1)
    model.hidden = torch.ones(3)
    model.known.add(7)
    model.surprise = "new"
    torch.rand(1, generator=model.own)
    random.random()
    np.random.rand()
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


def test_everything_is_taken_back() -> None:
    model = Stateful()
    recovery = quiet(model)
    for _ in range(3):  # a second attempt uses what was kept for the first
        before = told(model)
        assert tried(recovery, lambda: change(model), lambda: told(model)) == before
        recovery.run(lambda _attempt: change(model), MicroBatchSchedule(), lambda: 8, "this batch")
        assert told(model) != before


def test_a_large_buffer_is_put_back_whenever_it_changes() -> None:
    model = Stateful()
    recovery = quiet(model)
    for changes in (True, False, True, True, False, False, True):
        before = float(model.table.mean())
        found = tried(recovery, lambda by=int(changes): model.table.add_(by), lambda: float(model.table.mean()))
        assert found == before
        model.table += float(changes)


def test_changed_weights_cannot_be_taken_back() -> None:
    """Written in place, or replaced as averages of a teacher are."""
    model = Stateful()
    with pytest.raises(RecoveryFailedError, match=r"the weights of model\.layer\.weight"):
        tried(quiet(model), lambda: model.layer.weight.detach().add_(1))
    teacher = model.teacher[0].weight
    with pytest.raises(RecoveryFailedError, match=r"the weights of model\.teacher\[0\]\.weight"):
        tried(quiet(model), lambda: setattr(teacher, "data", teacher.data * 0.9))


class Counting(Stateful):
    """Counts in its class, and in a global."""

    batches = 0

    def in_class(self) -> None:
        type(self).batches += 1

    def in_global(self) -> None:
        global COUNTED  # noqa: PLW0603 - as scripts do
        COUNTED += 1


COUNTED = 0


@pytest.mark.parametrize(("method", "named"), [("in_class", "Counting.batches"), ("in_global", "recovery.COUNTED")])
def test_what_a_step_assigns_in_classes_and_globals_is_named(method: str, named: str) -> None:
    model = Counting()
    tried(quiet(model), lambda: None)
    with pytest.raises(RecoveryFailedError, match=named):
        tried(quiet(model), getattr(model, method))


def test_nothing_is_held_after_an_attempt() -> None:
    model = Stateful()
    recovery = Recovery(model)
    for _ in range(2):
        recovery.run(lambda attempt: None, MicroBatchSchedule(), lambda: 8, "this batch")
        model.hidden = torch.zeros(3)
        gone = weakref.ref(model.hidden)
    del model.hidden
    assert gone() is None


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Conv2d(3, 3, 3), torch.randn(2, 3, 9, 9)),
        (nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last), torch.randn(2, 3, 9, 9)),
        (nn.Embedding(5, 2, sparse=True), torch.tensor([2, 3])),
    ],
)
def test_gradients_of_several_batches_add_up_as_autograd_adds_them(model: nn.Module, inputs: torch.Tensor) -> None:
    model.unused = nn.Linear(2, 2)
    model.unused.weight.grad = torch.ones(2, 2)

    def found(train: Callable[[Callable[[], Any]], object]) -> list[Any]:
        for batch in (inputs, inputs.flip(0)):
            train(lambda batch=batch: type(model).forward(model, batch).square().sum().backward())
        made = [None if one.grad is None else one.grad.to_dense().tolist() for one in model.parameters()]
        for one in model.parameters():
            one.grad = None if one is not model.unused.weight else one.grad
        return made

    armed = Recovery(model)
    assert found(lambda work: armed.run(lambda one: one.backward(work), MicroBatchSchedule(), int, "it")) == found(
        lambda work: work()
    )


# --- a plain loop -------------------------------------------------------------------------------------------


class Loop:
    """What an adapter is, at its smallest: batches, accumulation over two of them, an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.said: list[str] = []
        self.recovery = Recovery(self.model, log=self.said.append)
        self.schedule = MicroBatchSchedule()
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
                "this batch",
            )
            if number % 2:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def _attempt(self, attempt: Attempt, number: int, batch: torch.Tensor) -> None:
        parts = split(batch, 8, attempt.micro_batch_size or 8)
        for part in parts:
            attempt.last = part is parts[-1]
            hidden = self.model[:3](part.data)
            if part.samples > self.capacity.get(number, 8):
                if self.where == "forward":
                    raise oom_cases.no_memory()
                hidden = oom_cases.breaks_in_backward(hidden)
            attempt.backward((self.model[3](hidden).square().mean() * part.weight).backward)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_plain_loop_recovers(where: str, number: int) -> None:
    runs_out_in(where, number, batches=6)


def runs_out_in(where: str, number: int, batches: int) -> None:
    """A loop whose memory runs out, against one that is cut by hand from that batch on."""
    broken, reference = Loop(), Loop()
    broken.where, broken.capacity = where, {number: 2}
    broken.train(batches)

    plain = reference.recovery.run

    def run(attempt: Any, schedule: MicroBatchSchedule, *rest: Any) -> Any:
        schedule.size = 2 if numbers.pop(0) >= number else None
        return plain(attempt, schedule, *rest)

    numbers = list(range(batches))
    reference.recovery.run = run  # type: ignore[method-assign]
    reference.train(batches)
    assert len(broken.said) == 2
    assert broken.schedule.size == 2
    for mine, theirs in zip(broken.model.state_dict().values(), reference.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_schedule_goes_down_by_equal_parts() -> None:
    assert [MicroBatchSchedule(size, 12).below(5) for size in (None, 12, 6, 4, 3, 2, 1)] == [6, 6, 4, 3, 2, 1, 0]
    assert MicroBatchSchedule().below(7) == 1
    assert MicroBatchSchedule().below(1) == 0


# --- what is reached from the model ---------------------------------------------------------------------------


@each(
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
    model = Stateful()
    model.held = [source()]
    recovery = Recovery(model, log=lambda line: pytest.fail(line), prediction_text=lambda: "What was predicted: 1 GiB")
    with pytest.raises(RecoveryFailedError) as caught:
        tried(recovery, lambda: next(model.held[0]))
    said = str(caught.value)
    for part in (f"model.held[0] (a {kind})", "micro_batch_size': 4", "budget=", "What was predicted: 1 GiB"):
        assert part in said


def test_what_is_too_much_to_look_at_stops_a_recovery() -> None:
    model = Stateful()

    def refused() -> str:
        try:
            tried(quiet(model), lambda: None)
        except RecoveryFailedError as error:
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


class Kind(enum.Enum):
    ONE = 1


def test_what_common_modules_hold_does_not_stop_a_recovery() -> None:
    model = Stateful()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.scheduler = {"one": torch.optim.lr_scheduler.StepLR(model.optimizer, 1)}
    model.args = argparse.Namespace(lr=0.1, parts=[1])
    model.others = [re.compile("a"), logging.getLogger("x"), threading.Lock(), torch, Path("a"), torch.float32]
    model.others += [len, functools.partial(max, 1), lambda: model, Kind.ONE, Kind, weakref.ref(model), object()]
    model.others += [decimal.Decimal(1), frozenset({1}), np.float32(1), np.dtype("float32"), list[int], model.forward]
    model.others += [tqdm(total=3, disable=True), collections.Counter("ab"), types.MappingProxyType({})]
    model.pool = concurrent.futures.Future()

    def change() -> None:
        model.scheduler["one"].last_epoch = 7
        model.args.lr = 0.2
        model.args.parts.append(2)

    tried(quiet(model, "concurrent"), change)
    assert model.scheduler["one"].last_epoch == 7
    assert model.args == argparse.Namespace(lr=0.1, parts=[1])


# --- micro-batches --------------------------------------------------------------------------------------------


class Another(RankCoordinator):
    """A second rank that needs ``needed`` micro-batches for its batch of ``samples``."""

    def __init__(self, needed: int, samples: int) -> None:
        self.needed, self.samples = needed, samples

    def parts(self, needed: int, samples: int) -> tuple[int, int]:
        return max(needed, self.needed), min(samples, self.samples)


@each(
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
    found = batches.run(torch.ones(samples, 2), lambda batch: [part.samples for part in batch.parts], "this batch")
    assert found == expected


def test_a_part_without_a_label_that_counts_is_left_out() -> None:
    batch = {"labels": torch.tensor([-100, -100, 4, 5])}
    batches = MicroBatches(Splitter(4, 2, batch), Normaliser(("labels",)))

    def loss(share: Share) -> torch.Tensor:  # of the part that is left out it would be 0 / 0, and so would its weight's
        return share.weight * nn.functional.cross_entropy(torch.zeros(2, 6), share.data["labels"])

    shares: list[Share] = []
    found = batches.run(batch, lambda one: one.run(lambda share: shares.append(share) or loss(share)), "this batch")
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
        batches.run((torch.ones(8), torch.ones(7)), lambda batch: batch.parts, "this batch")
    assert told == [(1, 1)]
