"""Cutting a batch into micro-batches: exact, in views, and refused where it cannot be told."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from each import each
from hypothesis import given
from hypothesis import strategies as st

from vram_guard.apply.microbatch import (
    CannotSplitError,
    Layout,
    Splitter,
    batch_size,
    even_sizes,
    probe_layout,
    split,
    splitter_of,
)
from vram_guard.errors import InvalidInputError, UnsupportedStepError, VramGuardError


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    names: list[str]
    scale: float = 1.0


X = torch.arange(24.0).reshape(8, 3)
Y = torch.arange(8)


@given(st.integers(1, 500), st.integers(1, 500))
def test_even_sizes(total: int, most: int) -> None:
    sizes = even_sizes(total, most)
    assert sum(sizes) == total
    assert max(sizes) <= most or most >= total
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-total // most)
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_parts_make_the_batch_again(size: int, micro: int) -> None:
    batch = {"x": torch.randn(size, 2), "names": [f"n{i}" for i in range(size)], "scale": 3.0}
    parts = split(batch, size, micro)
    assert torch.equal(torch.cat([part.data["x"] for part in parts]), batch["x"])
    assert [name for part in parts for name in part.data["names"]] == batch["names"]
    assert sum(part.weight for part in parts) == pytest.approx(1)
    assert all(len(part.data["x"]) == part.samples for part in parts)


@each(
    "batch",
    [
        X,
        [X, Y],
        (X, Y),
        {"x": X, "y": Y},
        collections.OrderedDict(x=X, y=Y),
        collections.defaultdict(list, x=X),
        collections.UserDict(x=X, y=Y),
        Pair(X, Y),
        Pair(X, {"boxes": Y, "note": None}),
        Record(X, list("abcdefgh")),
        [X, [Y, {"z": X}], "text", 3, None, True, 2.5, torch.tensor(4.0), torch.float32],
        {"image": X.numpy(), "label": Y.numpy()},
        {"x": X, "mask": torch.ones(1, 5), "empty": []},
        [{"image": torch.zeros(3, 4), "label": index} for index in range(8)],
        [torch.zeros(3, index + 1) for index in range(8)],
        (X, [{"boxes": torch.zeros(index, 4)} for index in range(8)]),
    ],
)
def test_structures(batch: Any) -> None:
    parts = split(batch, 8, 3)
    assert [part.samples for part in parts] == [3, 3, 2]
    assert all(type(part.data) is type(batch) for part in parts)
    assert Splitter(8, 3, batch).split(batch)[0].samples == 3


def test_tensors_are_views_and_the_rest_is_shared() -> None:
    batch = [X, {"scale": torch.tensor(2.0), "mask": torch.ones(1, 5), "kind": "train", "none": {}}]
    parts = split(batch, 8, 4)
    for index, part in enumerate(parts):
        assert part.data[0].data_ptr() == X[4 * index].data_ptr()
        assert part.data[1]["scale"] is batch[1]["scale"]
        assert part.data[1]["mask"] is batch[1]["mask"]
        assert part.data[1]["kind"] == "train"


def test_hugging_face_batches() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": X, "labels": Y})
    second = split(encoding, 8, 4)[1].data
    assert type(second) is type(encoding)
    assert torch.equal(second["input_ids"], X[4:])
    assert torch.equal(second.labels, Y[4:])
    assert len(encoding["input_ids"]) == 8
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=X)
    assert torch.equal(split(output, 8, 4)[1].data.last_hidden_state, X[4:])


@each(
    ("batch", "says"),
    [
        ({"x": X, "prototypes": torch.zeros(5, 2)}, r"batch\['prototypes'\].*\(5, 2\).*8 samples"),
        ([X, {"a": [torch.zeros(5)]}], r"batch\[1\]\['a'\]\[0\]"),
        ({"x": X, "graph": object()}, r"batch\['graph'\]: a object has no samples"),
        (torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]), "packed sequence"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "nested and sparse"),
        (torch.eye(8).to_sparse(), "nested and sparse"),
        ({"scale": 3.0}, "no part of it holds 8 samples"),
        ({}, "no part of it holds 8 samples"),
        ("text", "no part of it holds 8 samples"),
    ],
)
def test_refusals_name_the_part(batch: Any, says: str) -> None:
    with pytest.raises(CannotSplitError, match=says) as caught:
        split(batch, 8, 2)
    assert isinstance(caught.value, VramGuardError)
    assert caught.value.path.startswith("batch")


@each(
    ("batch", "size"),
    [
        (X, 8),
        ([X, Y], 8),
        ({"x": X, "mask": torch.ones(1, 5), "scale": torch.tensor(2.0)}, 8),
        ([X[:2], Y[:2]], 2),
        ([X[:1], Y[:1]], 1),
        ([{"image": torch.zeros(3, 4)}] * 5, 3),  # tensors win; say the size where it is a list of samples
        (["a", "b", "c"], 3),
        ([torch.zeros(2), torch.zeros(3), torch.zeros(4)], 3),
        ({"image": np.zeros((4, 2))}, 4),
    ],
)
def test_inferred_size(batch: Any, size: int) -> None:
    assert batch_size(batch) == size


def test_no_size_to_infer() -> None:
    with pytest.raises(CannotSplitError, match=r"batch\['a'\] has 8, batch\['b'\] has 5"):
        batch_size({"a": X, "b": torch.zeros(5)})
    with pytest.raises(CannotSplitError):
        batch_size({"a": 3})


def test_a_splitter_remembers_how_to_read_a_batch_of_two() -> None:
    columns = Splitter(8, 1, [X, Y])
    parts = columns.split([X[:2], Y[:2]])
    assert [part.samples for part in parts] == [1, 1]
    assert parts[1].data[0].shape == (1, 3)

    samples = Splitter(8, 1, [torch.zeros(2, 5) for _ in range(8)])
    parts = samples.split([torch.zeros(2, 5), torch.ones(2, 5)])
    assert [len(part.data) for part in parts] == [1, 1]
    assert parts[1].data[0].sum() == 10


def test_a_splitter_learns_from_its_first_full_batch() -> None:
    splitter = Splitter(8, 4)
    assert [part.samples for part in splitter.split([X, Y])] == [4, 4]
    assert [part.samples for part in splitter.split([X[:5], Y[:5]])] == [3, 2]


# --- how a loader's batches are cut -------------------------------------------------------------------------------


def pictures(size: int, channels: int = 3) -> dict[str, Any]:
    return {"inputs": [torch.zeros(channels, 4) for _ in range(size)], "labels": list(range(size))}


@pytest.mark.parametrize(
    "make",
    [
        lambda size: (torch.zeros(size, 3), torch.zeros(size)),
        pictures,
        lambda size: pictures(size, 5),  # at five samples it reads in two ways
        lambda size: {"x": torch.zeros(size, 2), "mask": torch.ones(1, 4), "meta": {"names": ["a"] * size}},
    ],
)
def test_two_sizes_agree_on_a_layout(make: Any) -> None:
    layout = probe_layout(make)
    for size in (1, 2, 3, 4, 8):
        parts = Splitter(size, 1, layout=layout).split(make(size))
        assert [part.samples for part in parts] == [1] * size
    assert splitter_of(make, 8, 2).count(make(3)) == 3


def test_without_a_layout_what_reads_in_two_ways_is_refused() -> None:
    with pytest.raises(CannotSplitError, match=r"batch\['inputs'\]: its 3 tensors of 3 rows each may be samples or"):
        Splitter(3, 1).split(pictures(3))
    assert Splitter(2, 1).count([torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)]) == 2, "inputs and their labels"


def test_sizes_that_a_loader_cannot_make_are_passed_over() -> None:
    def pairs(size: int) -> torch.Tensor:
        if size % 2:
            raise ValueError("an odd one out")
        return torch.zeros(size, 3)

    assert probe_layout(pairs) == Layout(rows=True)
    with pytest.raises(UnsupportedStepError, match="ValueError"):
        probe_layout(lambda size: (_ for _ in ()).throw(ValueError("no")))


def test_a_layout_that_changes_with_the_size_is_none() -> None:
    with pytest.raises(CannotSplitError, match=r"\(4, 5\)"):
        probe_layout(lambda size: {"x": torch.zeros(4, size), "y": torch.zeros(size)})
    with pytest.raises(CannotSplitError):
        probe_layout(lambda size: {f"x{size}": torch.zeros(size)})


@dataclasses.dataclass
class WithHidden(Record):
    hidden: Any = dataclasses.field(default=None, init=False)


def test_a_dataclass_with_fields_outside_its_constructor() -> None:
    batch = WithHidden(X, list("abcdefgh"))
    batch.hidden = Y
    second = split(batch, 8, 4)[1].data
    assert torch.equal(second.hidden, Y[4:])
    assert torch.equal(batch.hidden, Y)


@each("wrong", [0, -1, True, 2.5, float("nan"), 2**63, None, "8"])
def test_sizes_that_are_none(wrong: Any) -> None:
    with pytest.raises(InvalidInputError):
        split(X, wrong, 2)
    with pytest.raises(InvalidInputError):
        split(X, 8, wrong)
    with pytest.raises(InvalidInputError):
        Splitter(8, wrong)


def test_a_splitter_reads_batches_of_another_structure_afresh() -> None:
    splitter = Splitter(8, 4, [X, Y])
    assert [part.samples for part in splitter.split({"x": X[:6]})] == [3, 3]


def test_a_splitter_refuses_parts_that_disagree() -> None:
    splitter = Splitter(8, 4, {"x": X, "y": Y})
    with pytest.raises(CannotSplitError, match=r"batch\['y'\]: 3 samples, where batch\['x'\] has 8"):
        splitter.split({"x": X, "y": Y[:3]})
