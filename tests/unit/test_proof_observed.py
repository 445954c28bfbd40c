"""What a step did as values, and which differences between two runs of it are more than rounding."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
import multiprocessing
import pickle
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vram_guard.proof.differences import TOLERANCES, Difference, Kind, differences
from vram_guard.proof.observed import (
    DEEPEST,
    MOST_ELEMENTS,
    MOST_ITEMS,
    Observed,
    gradients_of,
    normalisation_buffers,
    observe,
)

FLOAT, DOUBLE = TOLERANCES[torch.float32], TOLERANCES[torch.float64]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Model(nn.Module):
    """Attention with a bias of the keys, whose gradient is zero on paper, between two linear layers."""

    def __init__(self, width=16, classes=5):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, classes)
        self.counter = 0

    def forward(self, x):
        h = self.embed(x)
        h = h + F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h))
        return self.head(h.mean(1))


def cross_entropy(out, y):
    return F.cross_entropy(out, y)


def contrastive(out, y):
    out = F.normalize(out, dim=1)
    return F.cross_entropy(out @ out.T / 0.5, torch.arange(len(out)))


def step(model, x, y, sizes, loss=cross_entropy, optimizer=torch.optim.Adam, **observed):
    """One optimizer step of a copy, in micro-batches of these sizes."""
    model = copy.deepcopy(model)
    optimizer = optimizer(model.parameters(), lr=1e-3)
    before = observe(model)
    start = total = 0
    for size in sizes:
        part = loss(model(x[start : start + size]), y[start : start + size]) * size / len(x)
        part.backward()
        total, start = total + part.item(), start + size
    gradients = gradients_of(model)
    optimizer.step()
    return observe(model, before=before, gradients=gradients, loss=total, **observed)


def data(dtype=torch.float32):
    return torch.randn(8, 6, 16, dtype=dtype), torch.randint(0, 5, (8,))


def named(found):
    return [(each.kind, each.name) for each in found]


# --- comparing steps that ran -------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_micro_batches_of_a_mean_are_no_difference(dtype, optimizer):
    model, (x, y) = Model().to(dtype), data(dtype)
    one = step(model, x, y, [8], optimizer=optimizer)
    other = step(model, x, y, [4, 3, 1], optimizer=optimizer)
    tolerance = TOLERANCES[dtype]
    assert one.is_telling
    assert differences(one, other, tolerance=tolerance) == ()
    # Rounding is there all the same: the gradient of the keys' bias is nothing else, and Adam makes a step of it.
    gap = (one.gradients["key.bias"] - other.gradients["key.bias"]).norm() / one.gradients["key.bias"].norm()
    assert gap > 0.01
    if optimizer is torch.optim.Adam and dtype == torch.float32:
        assert (one.weights["key.bias"] - other.weights["key.bias"]).norm() / one.moved["key.bias"] > 10 * tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_is_no_mean_over_samples_is_found(dtype):
    model, (x, y) = Model().to(dtype), data(dtype)
    one, other = (step(model, x, y, sizes, contrastive) for sizes in ([8], [4, 4]))
    found = differences(one, other, tolerance=TOLERANCES[dtype])
    assert {Kind.LOSS, Kind.GRADIENT} <= {each.kind for each in found}
    assert (Kind.GRADIENT, "head.weight") in named(found)
    assert (Kind.GRADIENT, "key.bias") not in named(found)
    assert [each.amount for each in found] == sorted((each.amount for each in found), reverse=True)


def test_a_step_of_another_size_is_found_though_gradients_agree():
    model, (x, y) = Model(), data()
    one = step(model, x, y, [8])
    other = step(model, x, y, [8], optimizer=lambda weights, lr: torch.optim.Adam(weights, lr * 1.01))
    found = differences(one, other, tolerance=FLOAT)
    assert {each.kind for each in found} == {Kind.WEIGHT}
    assert (Kind.WEIGHT, "head.weight") in named(found)
    assert found[0].amount == pytest.approx(0.01, rel=0.05)


class Teacher(nn.Module):
    """A moving average of the student, which the step before the first changes by nothing."""

    def __init__(self, by_data):
        super().__init__()
        self.student = nn.Linear(16, 5)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(5))
        self.by_data = by_data

    def forward(self, x):
        for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            (mine.data if self.by_data else mine).mul_(0.99).add_(its.detach(), alpha=0.01)
        return self.student(x.mean(1))


def test_a_moving_average_of_equals_is_seen_by_its_writes():
    x, y = data()
    model = Teacher(by_data=False)
    one, other = (step(model, x, y, sizes) for sizes in ([8], [4, 4]))
    found = differences(one, other, tolerance=FLOAT)
    assert set(named(found)) == {(Kind.WRITES, "teacher.weight"), (Kind.WRITES, "teacher.bias")}
    assert found[0].words() == "teacher.bias was written 4 times instead of 2 times"


def test_a_moving_average_is_measured_by_its_move():
    """Half of what the step changed in the teacher, and 0.01% of the teacher: less than rounding may be elsewhere."""
    x, y = data()
    model = Teacher(by_data=True)
    with torch.no_grad():
        for weight in model.student.parameters():
            weight.mul_(1.01)
    one, other = (step(model, x, y, sizes) for sizes in ([8], [4, 4]))
    found = differences(one, other, tolerance=FLOAT)
    assert set(named(found)) == {(Kind.WEIGHT, "teacher.weight"), (Kind.WEIGHT, "teacher.bias")}
    assert found[0].amount > 50 * FLOAT
    gap = (one.weights["teacher.weight"] - other.weights["teacher.weight"]).norm() / one.weights[
        "teacher.weight"
    ].norm()
    assert gap < FLOAT / 5


def test_a_negligible_gradient_is_noise_and_a_small_one_is_not():
    model = nn.Linear(1, 1)

    def outcome(small):
        gradients = {"weight": torch.ones(100, 100), "bias": torch.tensor([small])}
        return observe(model, gradients=gradients)

    assert differences(outcome(1e-7), outcome(-1e-7), tolerance=FLOAT) == ()
    found = differences(outcome(1e-2), outcome(1.03e-2), tolerance=FLOAT)
    assert named(found) == [(Kind.GRADIENT, "bias")]


def test_weights_are_compared_where_their_gradients_agree():
    model = nn.Linear(3, 1)

    def outcome(gradient, weight):
        model.weight.data.copy_(torch.tensor([weight]))
        return observe(model, gradients={"weight": torch.tensor([gradient]), "other": torch.ones(1)})

    one = outcome([1.0, 1.0, 1e-9], [0.1, 0.1, 0.1])
    flipped = outcome([1.0, 1.0, -1e-9], [0.1, 0.1, -0.1])
    assert differences(one, flipped, tolerance=FLOAT) == ()
    settled = outcome([1.0, 1.0, -1e-9], [0.1, -0.1, -0.1])
    assert named(differences(one, settled, tolerance=FLOAT)) == [(Kind.WEIGHT, "weight")]
    # Noise as a whole: an optimizer may mix its elements, and one that agrees by chance says nothing.
    noise, other_noise = outcome([1e-9, 1e-9, 1e-9], [0.1, 0.1, 0.1]), outcome([1e-9, -1e-9, 1e-9], [0.2, 0.1, 0.1])
    assert differences(noise, other_noise, tolerance=FLOAT) == ()


def test_no_gradient_is_a_gradient_of_zeros():
    model = nn.Linear(2, 1)
    none = observe(model, gradients={"weight": None})
    zero = observe(model, gradients={"weight": torch.zeros(1, 2)})
    some = observe(model, gradients={"weight": torch.ones(1, 2)})
    assert differences(none, zero, tolerance=FLOAT) == ()
    assert named(differences(none, some, tolerance=FLOAT)) == [(Kind.GRADIENT, "weight")]
    assert not none.is_telling
    assert not zero.is_telling
    assert some.is_telling


def test_numbers_that_are_none():
    model = nn.Linear(1, 1)

    def outcome(*values):
        return observe(model, gradients={"weight": torch.tensor(values)})

    nan, inf = math.nan, math.inf
    assert differences(outcome(nan, 1.0, inf, -inf), outcome(nan, 1.0, inf, -inf), tolerance=FLOAT) == ()
    for other in ((1.0, nan, inf), (nan, nan, inf), (nan, 1.0, -inf)):
        (found,) = differences(outcome(nan, 1.0, inf), outcome(*other), tolerance=FLOAT)
        assert found.amount == math.inf
    assert found.words() == ("the gradient of weight is not finite in 2 elements instead of not finite in 2 elements")
    (found,) = differences(outcome(nan, 1.0), outcome(nan, 2.0), tolerance=FLOAT)
    assert found.amount == 0.5
    assert not outcome(nan, 1.0).is_telling


def test_statistics_of_normalisation_are_left_out_and_other_buffers_are_not():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    assert normalisation_buffers(model) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    one = observe(model)
    model(torch.randn(3, 4))
    found = differences(one, observe(model), tolerance=FLOAT)
    assert {each.kind for each in found} == {Kind.BUFFER}
    assert all(each.name.startswith("1.parametrizations.weight.0._") for each in found)


# --- attributes ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class State:
    seen: int
    best: torch.Tensor


class Helper:
    def __init__(self):
        self.calls = 1
        self.me = self
        self.parts = {"a": [1, {"b": 2}]}


class Slotted:
    __slots__ = ("absent", "count")

    def __init__(self):
        self.count = 1


class Color(enum.Enum):
    RED = 1


class Busy(nn.Module):
    calls_of_all = 0
    shared: list[int] = []  # noqa: RUF012 - what such a class does

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.linear.steps = 1
        self.number = 1
        self.name = "a"
        self.ratio = 0.5
        self.switch = True
        self.nothing = None
        self.queue = deque([1.0, 2.0])
        self.nested = OrderedDict(a=[1, (2, {"b": 3})])
        self.known = {3, 1, 2}
        self.state = State(1, torch.zeros(2))
        self.helper = Helper()
        self.slotted = Slotted()
        self.array = np.arange(3)
        self.scalar = np.float32(2)
        self.color = Color.RED
        self.hidden = [nn.BatchNorm1d(2)]
        self.carried = torch.zeros(1, 2)
        self.function = lambda: None
        self.itself = [self]
        self.optimizer = torch.optim.Adam(self.parameters())


CHANGES = {
    "number": lambda m: setattr(m, "number", 2),
    "linear.steps": lambda m: setattr(m.linear, "steps", 2),
    "name": lambda m: setattr(m, "name", "b"),
    "ratio": lambda m: setattr(m, "ratio", 0.51),
    "switch": lambda m: setattr(m, "switch", False),
    "nothing": lambda m: setattr(m, "nothing", 1),
    "linear.training": lambda m: m.linear.eval(),
    "queue[1]": lambda m: m.queue.__setitem__(1, 3.0),
    "nested['a'][1][1]['b']": lambda m: m.nested["a"][1][1].update(b=4),
    "known[2]": lambda m: m.known.symmetric_difference_update({3, 4}),
    "state.seen": lambda m: setattr(m.state, "seen", 2),
    "state.best": lambda m: m.state.best.data.add_(1),
    "helper.calls": lambda m: setattr(m.helper, "calls", 2),
    "helper.parts['a'][1]['b']": lambda m: m.helper.parts["a"][1].update(b=9),
    "slotted.count": lambda m: setattr(m.slotted, "count", 2),
    "array": lambda m: m.array.__setitem__(0, 5),
    "scalar": lambda m: setattr(m, "scalar", np.float32(3)),
    "hidden[0].running_mean": lambda m: m.hidden[0].running_mean.data.add_(1),
    "carried": lambda m: setattr(m, "carried", torch.ones(1, 2)),
    "Busy.calls_of_all": lambda m: setattr(type(m), "calls_of_all", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_attribute_is_seen(name, monkeypatch):
    monkeypatch.setattr(Busy, "calls_of_all", 0)
    model = Busy()
    one = observe(model)
    assert one.unseen == ()
    assert differences(one, observe(model), tolerance=FLOAT) == ()
    CHANGES[name](model)
    (found,) = differences(one, observe(model), tolerance=FLOAT)
    assert (found.kind, found.name) == (Kind.ATTRIBUTE, name)
    assert differences(one, observe(model), tolerance=FLOAT, ignored=[name]) == ()
    assert found.words().startswith(f"the attribute {name} ")


def test_what_comes_and_goes():
    model = Busy()
    one = observe(model)
    model.queue.append(3.0)
    Busy.shared.append(1)
    del model.nested["a"]
    model.late = 1
    try:
        words = [each.words() for each in differences(one, observe(model), tolerance=FLOAT)]
    finally:
        Busy.shared.clear()
    assert "the attribute queue[2] is 3 instead of missing" in words
    assert "the attribute len(queue) is 3 instead of 2" in words
    assert "the attribute late is 1 instead of missing" in words
    assert "the attribute nested['a'][0] is missing instead of 1" in words
    assert "the attribute len(Busy.shared) is 1 instead of 0" in words
    found = differences(one, observe(model), tolerance=FLOAT, ignored=["queue", "nested", "late"])
    assert found == ()


def test_the_walk_is_bounded(monkeypatch):
    model = nn.Linear(1, 1)
    deep = inner = []
    for _ in range(DEEPEST + 5):
        inner.append([])
        inner = inner[0]
    model.deep = deep
    model.long = list(range(MOST_ITEMS + 5))
    model.huge = torch.zeros(MOST_ELEMENTS + 1, dtype=torch.uint8)
    model.closed = Helper()
    model.empty = torch.zeros(2, device="meta")
    seen = observe(model, closed=(Helper,))
    deepest = "deep" + "[0]" * DEEPEST
    assert set(seen.unseen) == {f"{deepest}[0]", f"len({deepest})", "long", "empty"}
    assert seen.attributes["len(long)"] == MOST_ITEMS + 5
    assert seen.attributes["huge"].tolist() == [0, 0]
    assert not any(name.startswith("closed") for name in seen.attributes)
    monkeypatch.setattr("vram_guard.proof.observed.MOST_VALUES", 10)
    assert len(observe(model).attributes) == 10


def test_a_change_is_measured_by_the_step():
    """A temperature that decays by a hundredth of a per mille each time it is asked for."""
    model = nn.Linear(1, 1)
    model.temperature = 1.0
    before = observe(model)
    outcomes = []
    for value in (0.99999, 0.99998):
        model.temperature = value
        outcomes.append((observe(model, before=before), observe(model)))
    (known, alone) = zip(*outcomes, strict=True)
    assert named(differences(*known, tolerance=FLOAT)) == [(Kind.ATTRIBUTE, "temperature")]
    assert differences(*alone, tolerance=FLOAT) == ()


def test_a_change_to_what_is_no_number_hides_nothing():
    model = nn.Linear(2, 1)
    model.register_buffer("held", torch.zeros(3))
    model.value, model.whole = 0.0, 10**400
    before, outcomes = observe(model), []
    for other in (1.0, 2.0):
        model.held.copy_(torch.tensor([math.nan, math.inf, other]))
        model.value, model.whole = math.inf if other == 1 else 3.0, model.whole + 1
        outcomes.append(observe(model, before=before))
    found = differences(*outcomes, tolerance=FLOAT)
    assert set(named(found)) == {(Kind.BUFFER, "held"), (Kind.ATTRIBUTE, "value"), (Kind.ATTRIBUTE, "whole")} | {
        (Kind.WRITES, "held")
    }


def test_arrays_of_all_kinds():
    model = nn.Linear(1, 1)
    model.read_only = np.arange(4)
    model.read_only.flags.writeable = False
    model.backwards = np.arange(4.0)[::-1]
    model.text = np.array(["a", "b"])
    model.objects = np.array([model, None])
    model.swapped = np.arange(3, dtype=">i4")
    model.number = np.array(2.5)
    model.long = np.longdouble(2.5)
    model.day = np.datetime64("2020-01-01")
    model.large = np.broadcast_to(np.zeros(1), MOST_ELEMENTS + 1)
    seen = observe(model)
    assert seen.attributes["read_only"].tolist() == [0, 1, 2, 3]
    assert seen.attributes["backwards"].tolist() == [3, 2, 1, 0]
    assert seen.attributes["number"] == 2.5
    assert (seen.attributes["long"], seen.attributes["day"]) == ("2.5", "2020-01-01")
    assert set(seen.unseen) == {"text", "objects", "swapped", "large"}


def test_an_attribute_that_holds_the_batch_holds_a_micro_batch():
    x = torch.randn(4, 3)
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    other.load_state_dict(one.state_dict())
    for model, batch in ((one, x), (other, x[2:])):
        model.last, model.size, model.tokens = batch, len(batch), batch.repeat_interleave(3, 0)
        model.rows = [row.tolist() for row in batch]
        model.calls = 1
    seen, cut = observe(one), observe(other)
    assert differences(seen, cut, tolerance=FLOAT, cut=(4, 2)) == ()
    assert {"last", "size", "tokens", "len(rows)"} <= {each.name for each in differences(seen, cut, tolerance=FLOAT)}
    other.last = x[:2]  # rows of another micro-batch: not what the last one leaves
    other.calls = 2
    found = differences(seen, observe(other), tolerance=FLOAT, cut=(4, 2))
    assert {each.name for each in found} == {"last", "calls"}
    assert "the attribute last is a tensor of shape (2, 3) instead of a tensor of shape (4, 3)" in [
        each.words() for each in found
    ]


def test_the_model_is_as_it_was():
    model = Busy()
    attributes = {name: id(value) for name, value in vars(model).items()}
    state = copy.deepcopy(model.state_dict())
    seen = observe(model)
    assert {name: id(value) for name, value in vars(model).items()} == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.linear.weight.data.add_(1)
    model.carried.add_(1)
    assert torch.equal(seen.weights["linear.weight"], state["linear.weight"])
    assert seen.attributes["carried"].tolist() == [[0, 0]]


# --- logged values, hooks and words -------------------------------------------------------------------------


def test_logged_values_and_hooks():
    model = nn.Linear(1, 1)
    one = observe(model, logged={"loss": torch.tensor(0.5), "seen": 4, "rows": torch.ones(2)}, hooks={"step": 1})
    assert differences(one, one, tolerance=FLOAT) == ()
    other = observe(
        model, logged={"loss": 0.25, "seen": 5, "rows": torch.tensor([1.0, 1.1])}, hooks={"step": 3, "late": 1}
    )
    words = [each.words() for each in differences(one, other, tolerance=FLOAT)]
    assert words == [
        "late ran once instead of 0 times",
        "step ran 3 times instead of once",
        "the logged value loss is 0.25 instead of 0.5",
        "the logged value seen is 5 instead of 4",
        "the logged value rows differs by 6.7%",
    ]
    near = observe(model, logged={"loss": 0.5000001, "seen": 4, "rows": torch.ones(2)}, hooks={"step": 1})
    assert differences(one, near, tolerance=FLOAT) == ()
    assert named(differences(one, near, tolerance=1e-8)) == [(Kind.LOGGED, "loss")]


def test_a_loss_that_cancels_is_noise():
    model = nn.Linear(1, 1)
    one, other = observe(model, loss=1e-8), observe(model, loss=torch.tensor(-3e-8))
    assert differences(one, other, tolerance=FLOAT) == ()
    (found,) = differences(observe(model, loss=0.5), observe(model, loss=0.51), tolerance=FLOAT)
    assert found.words() == "the loss is 0.51 instead of 0.5"


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_words(kind):
    assert "name" in Difference(kind, "name", 1.0, 1, 2).words() or kind is Kind.LOSS
    if kind not in (Kind.LOSS, Kind.HOOK, Kind.WRITES):
        assert "0.12%" in Difference(kind, "name", 0.0012).words()


# --- laws ---------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.none(),
    st.complex_numbers(),
    st.lists(st.floats(width=32), min_size=0, max_size=3).map(torch.tensor),
    st.lists(st.integers(-5, 5), min_size=1, max_size=3).map(torch.tensor),
)
CONTAINERS = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner))
TENSORS = st.lists(st.floats(width=32), min_size=2, max_size=2).map(torch.tensor)


@st.composite
def outcomes(draw) -> Observed:
    model = nn.Linear(2, 1)
    model.register_buffer("held", draw(TENSORS))
    model.value = draw(CONTAINERS)
    model.weight.data.copy_(draw(TENSORS))
    return observe(
        model,
        gradients={"weight": draw(st.none() | TENSORS)},
        loss=draw(st.none() | st.floats()),
        logged={"logged": draw(VALUES)},
        hooks=draw(st.dictionaries(st.sampled_from("ab"), st.integers(0, 3))),
    )


@given(one=outcomes(), other=outcomes())
def test_laws_of_differences(one, other):
    assert differences(one, one, tolerance=DOUBLE) == ()
    assert differences(one, pickle.loads(pickle.dumps(one)), tolerance=DOUBLE) == ()
    there, back = differences(one, other, tolerance=FLOAT), differences(other, one, tolerance=FLOAT)
    assert [(each.kind, each.name, each.amount) for each in there] == [
        (each.kind, each.name, each.amount) for each in back
    ]
    assert all(each.amount > 0 and each.words() for each in there)
    assert {hash(each) for each in there}
    looser = (each for each in named(differences(one, other, tolerance=0.5)) if each[0] is not Kind.WEIGHT)
    assert set(looser) <= set(named(there))  # a weight is compared where its gradients agree


def send(pipe, seen):
    pipe.send(seen)
    pipe.close()


def test_an_outcome_travels_over_a_pipe():
    model = Busy()
    model.linear(torch.ones(1, 2)).sum().backward()
    seen = observe(model, loss=1.0)
    home, away = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=send, args=(away, seen))
    process.start()
    came = home.recv()
    process.join()
    assert differences(seen, came, tolerance=DOUBLE) == ()
    assert came.attributes.keys() == seen.attributes.keys()
    found = differences(seen, dataclasses.replace(came, loss=2.0), tolerance=DOUBLE)
    assert pickle.loads(pickle.dumps(found)) == found


def test_tensors_are_sent_without_a_copy() -> None:
    model = nn.Linear(1000, 100, dtype=torch.bfloat16)
    model.shift, model.mask = torch.tensor(1 + 2j).conj(), torch.zeros(0, 3, dtype=torch.bool)
    seen = observe(model)
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(seen, protocol=5, buffer_callback=buffers.append)
    assert len(sent) < 10_000 < sum(buffer.raw().nbytes for buffer in buffers)
    received = pickle.loads(sent, buffers=[bytearray(buffer.raw()) for buffer in buffers])
    assert torch.equal(received.weights["weight"], model.weight)
    assert (received.attributes["shift"], received.attributes["mask"].shape) == (1 - 2j, (0, 3))
