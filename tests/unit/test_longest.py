"""The longest batch: the largest that a loader can make is planned for, whatever samples and samplers are."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from vram_guard import TrainingStep
from vram_guard.errors import InvalidInputError
from vram_guard.longest import longest_batch

COUNT = 10_000


def heavy_tail(count=COUNT, most=4000, seed=1):
    drawn = random.Random(0)
    return [min(most, int(10 * drawn.paretovariate(1.2))) for _ in range(count)]


LENGTHS = heavy_tail()


class Texts(Dataset):
    """Tokens, and an attribute that says how many."""

    def __init__(self, lengths=LENGTHS):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.ones(self.lengths[index], dtype=torch.long)


class Untold(Dataset):
    """The same, and nobody says how many."""

    def __init__(self, lengths=LENGTHS):
        self._of = dict(enumerate(lengths))

    def __len__(self):
        return len(self._of)

    def __getitem__(self, index):
        return torch.ones(self._of[index], dtype=torch.long)


def padded(batch):
    return pad_sequence(batch, batch_first=True)


class Buckets:
    """Batches of samples of similar length, drawn at random within their bucket."""

    def __init__(self, lengths, size, buckets=8):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        width = -(-len(order) // buckets)
        self.buckets = [order[start : start + width] for start in range(0, len(order), width)]
        self.size, self.drawn = size, random.Random(0)

    def __iter__(self):
        batches = []
        for bucket in self.buckets:
            mixed = self.drawn.sample(bucket, len(bucket))
            batches += [mixed[start : start + self.size] for start in range(0, len(mixed), self.size)]
        self.drawn.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return sum(-(-len(bucket) // self.size) for bucket in self.buckets)


class Budget:
    """Batches of so many tokens with their padding, of samples in random order."""

    def __init__(self, lengths, max_tokens, seed=0):
        self.lengths, self.max_tokens, self.drawn = lengths, max_tokens, random.Random(0)

    def __iter__(self):
        batch = []
        for index in self.drawn.sample(range(len(self.lengths)), len(self.lengths)):
            longest = max(self.lengths[one] for one in [*batch, index])
            if batch and longest * (len(batch) + 1) > self.max_tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def epochs(loader, count=3):
    for _epoch in range(count):
        yield from ([int(index) for index in batch] for batch in loader.batch_sampler)


# --- ten thousand samples with a heavy tail ---------------------------------------------------------------------


@pytest.mark.parametrize("data", [Texts(), Untold(), Subset(Texts(), range(COUNT)), ConcatDataset([Texts(), Texts()])])
def test_texts_in_random_order(data):
    found = longest_batch(DataLoader(data, 32, shuffle=True, collate_fn=padded), seconds=60)
    assert found(32).shape == (32, max(LENGTHS))
    assert found(3).shape == (3, max(LENGTHS))  # cut from the whole: its padding stays
    assert found(40).shape == (40, max(LENGTHS))
    assert "longer ones among the others are not planned for" not in found.notes[0]


def test_in_a_fixed_order_the_batches_are_those_of_the_loader():
    loader = DataLoader(Texts(), 32, collate_fn=torch.cat)
    true = max(sum(LENGTHS[start : start + 32]) for start in range(0, COUNT, 32))
    assert longest_batch(loader)(32).shape == (true,)
    together = sum(sorted(LENGTHS)[-32:])
    assert together > true
    shuffled = DataLoader(Texts(), 32, shuffle=True, collate_fn=torch.cat)
    assert longest_batch(shuffled)(32).shape == (together,)


def test_processes_share_samples_out():
    def true(rank):
        own = LENGTHS[rank::4]
        return max(sum(own[start : start + 8]) for start in range(0, len(own), 8))

    expected = max(map(true, range(4)))
    loader = DataLoader(Texts(), 8, collate_fn=torch.cat)
    assert longest_batch(loader, ranks=4)(8).shape == (expected,)
    own = DistributedSampler(Texts(), 4, 1, shuffle=False)
    assert longest_batch(DataLoader(Texts(), 8, sampler=own, collate_fn=torch.cat))(8).shape == (expected,)


def test_buckets():
    sampler = Buckets(LENGTHS, 16)
    loader = DataLoader(Texts(), batch_sampler=sampler, collate_fn=torch.cat)
    found = longest_batch(loader)
    assert "batches, and may make others" in found.notes[0]
    assert sampler.drawn.getstate() == Buckets(LENGTHS, 16).drawn.getstate()  # drawn from in a copy only
    assert all(sum(LENGTHS[one] for one in batch) <= len(found(16)) for batch in epochs(loader))


@pytest.mark.parametrize("cost", [lambda count, longest: count * longest, lambda count, longest: count * longest**2])
def test_a_budget_of_tokens(cost):
    loader = DataLoader(Texts(), batch_sampler=Budget(LENGTHS, 8192), collate_fn=padded)
    step = TrainingStep(
        lambda: torch.nn.Embedding(2, 1),
        None,
        lambda net, tokens: net(tokens).expand(-1, -1, 1 if cost(1, 2) == 2 else tokens.shape[1]).exp().sum(),
        torch.optim.SGD,
    )
    found = longest_batch(loader, step=step)
    count, longest = found(found.size).shape
    assert count * longest <= 8192
    worst = max(cost(len(batch), max(LENGTHS[one] for one in batch)) for batch in epochs(loader))
    assert cost(count, longest) >= worst


class Pictures(Dataset):
    """Pictures of any size with any number of boxes."""

    def __init__(self, count=300):
        drawn = random.Random(3)
        self.infos = [
            {"height": drawn.randint(200, 1333), "width": drawn.randint(200, 1333), "instances": [0] * boxes}
            for boxes in heavy_tail(count, 900, seed=5)
        ]

    def __len__(self):
        return len(self.infos)

    def __getitem__(self, index):
        info = self.infos[index]
        picture = torch.empty(info["height"], info["width"], dtype=torch.uint8)
        return {"picture": picture, "boxes": torch.zeros(len(info["instances"]), 4)}


def stacked(samples):
    height, width = (max(one["picture"].shape[axis] for one in samples) for axis in (0, 1))
    pictures = torch.empty(len(samples), height, width, dtype=torch.uint8)
    return {"picture": pictures, "boxes": [one["boxes"] for one in samples]}


def of_pictures(batch):
    return batch["picture"].float().sum()


def of_boxes(batch):
    boxes = torch.cat(batch["boxes"])
    return (boxes[:, None] - boxes[None]).abs().sum() + batch["picture"].sum(dtype=torch.float32)


@pytest.mark.parametrize("loss", [of_pictures, of_boxes])
def test_detection_by_pictures_or_by_boxes_as_the_trace_says(loss):
    data = Pictures()
    loader = DataLoader(data, 4, shuffle=True, collate_fn=stacked)
    step = TrainingStep(
        lambda: torch.nn.Linear(1, 1), None, lambda net, batch: loss(batch) * net.weight.sum(), torch.optim.SGD
    )
    found = longest_batch(loader, step=step)
    batch = found(4)
    if loss is of_boxes:
        most = sum(sorted(len(info["instances"]) for info in data.infos)[-4:])
        assert sum(map(len, batch["boxes"])) == most
    else:  # the highest and the widest picture in one batch
        highest, widest = (max(info[name] for info in data.infos) for name in ("height", "width"))
        assert batch["picture"].shape == (4, highest, widest)
    assert "all 300 samples were read" in found.notes[0]


# --- laws -------------------------------------------------------------------------------------------------------


def sampler_of(kind, lengths, size):
    data, generator = Texts(lengths), torch.Generator().manual_seed(4)
    single = {
        "in order": lambda: SequentialSampler(data),
        "random": lambda: RandomSampler(data, generator=generator),
        "with replacement": lambda: RandomSampler(data, replacement=True, generator=generator),
        "longer": lambda: RandomSampler(data, num_samples=2 * len(data) + 1, generator=generator),
        "part": lambda: SubsetRandomSampler(range(0, len(data), 2), generator),
        "weighted": lambda: WeightedRandomSampler([1, *range(1, len(data))], len(data), generator=generator),
        "shared": lambda: DistributedSampler(data, 2, 1),
        "by length": lambda: sorted(range(len(data)), key=lengths.__getitem__),
    }
    whole = {
        "buckets": lambda: Buckets(lengths, size, 3),
        "budget": lambda: Budget(lengths, max(*lengths, 40)),
        "listed": lambda: [list(part) for part in torch.arange(len(data)).split(size)],
    }
    return whole[kind]() if kind in whole else BatchSampler(single[kind](), size, drop_last=False)


KINDS = ["in order", "random", "with replacement", "longer", "part", "weighted", "shared", "by length", "listed"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_batch_of_some_epochs_takes_more(seed):
    lengths = heavy_tail(20 * seed, 60, seed)
    for kind, size in itertools.product(KINDS, (1, 4, 7)):
        loader = DataLoader(Texts(lengths), batch_sampler=sampler_of(kind, lengths, size), collate_fn=padded)
        found = longest_batch(loader)
        most = max(len(one) * max(lengths[k] for k in one) for one in epochs(loader))
        assert found(found.size).numel() >= most, (kind, size)


# Of a few samples, a sampler draws the same batches again and again by chance.
def test_of_a_sampler_of_batches_those_that_it_draws_are_known():
    lengths = heavy_tail(60, 30, 4)
    for kind in ("buckets", "budget"):
        loader = DataLoader(Texts(lengths), batch_sampler=sampler_of(kind, lengths, 5), collate_fn=padded)
        found = longest_batch(loader)
        assert "may make others" in found.notes[0]
        most = max(len(one) * max(lengths[k] for k in one) for one in epochs(loader))
        assert found(found.size).numel() >= most, kind


@pytest.mark.parametrize("wrong", [0, -1.0, "2", True, float("inf")])
def test_seconds_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidInputError, match="seconds must be a number"):
        longest_batch(DataLoader(Texts(), 2), seconds=wrong)


# --- nothing to choose ------------------------------------------------------------------------------------------


class Fixed(Texts):
    """Texts that are cut and padded to one length."""

    def __getitem__(self, index):
        return torch.ones(64)


class Captions(Dataset):
    """Pictures of one size with texts of any length."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.ones(3, 8, 8), "word " * (index + 1)


@pytest.mark.parametrize("data", [TensorDataset(torch.ones(50, 4)), Fixed(), Captions()])
def test_samples_that_are_alike_stay_as_they_were_read(data):
    found = longest_batch(DataLoader(data, 8), seconds=3)
    assert (found.notes, found.size) == ((), 8)


# --- bad input --------------------------------------------------------------------------------------------------


def lengths_that(value):
    class Telling(Untold):
        @property
        def lengths(self):
            return value() if callable(value) else value

    return Telling([5, 9, 4, 7, 3, 8])


def raising():
    raise RuntimeError("no such file")


@pytest.mark.parametrize(
    "value",
    [
        raising,
        [5, 9, 4, -7, 3, 8],
        [5.0, 9.0, float("nan"), 7.0, 3.0, 8.0],
        [9, 5, 40, 7, 3, 8],
        [5, 9],
        ["a"] * 6,
    ],
)
def test_where_lengths_cannot_be_used_samples_are_read(value):
    found = longest_batch(DataLoader(lengths_that(value), 2, collate_fn=padded))
    assert found(2).shape == (2, 9)
    assert "all 6 samples were read" in found.notes[0]


class Slow(Untold):
    """Samples that take time, and one of which hangs in a copy of the process."""

    def __init__(self, hangs=False):
        super().__init__()
        self.hangs = hangs

    def __getitem__(self, index):
        if self.hangs and index > 1:
            time.sleep(60)
        time.sleep(0.002)
        return super().__getitem__(index)


def test_a_sample_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("vram_guard.longest.choice.ANSWER_SECONDS", 1.0)
    found = longest_batch(DataLoader(Slow(hangs=True), 2, collate_fn=padded, shuffle=True), seconds=1)
    assert any("the longest batch is not known" in note for note in found.notes)


def test_samples_are_read_until_the_limit():
    found = longest_batch(DataLoader(Slow(), 4, collate_fn=padded, shuffle=True), seconds=1)
    assert "of 10000 samples were read in 1 s; longer ones among the others" in found.notes[0]
    assert found(4).shape[1] > sorted(LENGTHS)[COUNT // 2]


class Endless(IterableDataset):
    """A stream of samples of any length, that never ends."""

    def __iter__(self):
        return (torch.ones(LENGTHS[number % COUNT]) for number in itertools.count())


def test_of_a_stream_the_largest_of_the_first_samples_is_planned_for():
    found = longest_batch(DataLoader(Endless(), 4, collate_fn=padded))
    assert found(4).shape == (4, max(LENGTHS[:4]))
    assert "the largest of the first 4" in found.notes[0]


class Counting(Untold):
    """Samples that count how often they are read, and cannot all be."""

    def __init__(self):
        super().__init__()
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        if index % 100 == 77:
            raise OSError("truncated file")
        return super().__getitem__(index)


def test_side_effects_stay_in_the_copy():
    data = Counting()
    before = torch.get_rng_state()
    found = longest_batch(DataLoader(data, 8, shuffle=True, collate_fn=padded), seconds=60)
    assert data.read <= 3 * 8  # the first ones, and the batch's own
    assert torch.equal(before, torch.get_rng_state())
    assert "9900 of 10000 samples were read" in found.notes[0]
    readable = max(length for index, length in enumerate(LENGTHS) if index % 100 != 77)
    assert found(8).shape == (8, readable)


class Forever:
    """Batches without end, whose sizes change."""

    def __init__(self):
        self.drawn = random.Random(0)

    def __iter__(self):
        while True:
            yield self.drawn.sample(range(COUNT), 4)


def test_a_sampler_without_end_is_bounded():
    sampler = Forever()
    state = sampler.drawn.getstate()
    found = longest_batch(DataLoader(Texts(), batch_sampler=sampler, collate_fn=padded))
    assert "batches, and may make others" in found.notes[0]
    assert found(4).shape[0] == 4
    sampler.drawn.setstate(state)


def test_what_the_collate_function_crops_is_cropped():
    found = longest_batch(DataLoader(Texts(), 32, shuffle=True, collate_fn=lambda batch: padded(batch)[:, :100]))
    assert found(32).shape == (32, 100)


def test_a_data_set_that_cannot_be_looked_at_is_read_as_before():
    class Odd(Texts):
        def __getattr__(self, name):
            raise KeyboardInterrupt if name == "sizes" else AttributeError(name)

    found = longest_batch(DataLoader(Odd([5, 9, 4, 7]), 2, collate_fn=padded))
    assert found(2).shape == (2, 9)
    assert any("the longest batch is not known" in note for note in found.notes)


def test_a_sampler_of_unknown_order_is_named():
    class Own(SequentialSampler):
        pass

    found = longest_batch(DataLoader(Texts(), 4, sampler=Own(Texts()), collate_fn=padded))
    assert "the order of Own is not known: any samples are taken together" in found.notes[0]
    assert found(4).shape == (4, max(LENGTHS))


# --- columns ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_hugging_faces_data_sets_in_any_order():
    datasets = pytest.importorskip("datasets")
    arrow = pytest.importorskip("pyarrow")
    lengths = (5, 9, 4, 7)
    table = arrow.table({"input_ids": [[0] * length for length in lengths], "length": lengths})
    data = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="of this test")

    def made(batch):
        return torch.ones(len(batch), max(len(row["input_ids"]) for row in batch))

    for one, most, said in (
        (data, 9, "the data set tells"),
        (data.select([3, 0]), 7, "the data set tells"),
        (data.remove_columns("length"), 9, "all 4 samples were read"),
    ):
        found = longest_batch(DataLoader(one, 2, shuffle=True, collate_fn=made))
        assert found(2).shape == (2, most)
        assert said in found.notes[0]
