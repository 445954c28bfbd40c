"""Sizes of samples from where a data set tells them: attributes, columns of tables, lists, annotations."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from vram_guard.longest import longest_batch
from vram_guard.longest._sources import source_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VRAM_GUARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Plain(Dataset):
    """A data set with these attributes."""

    def __init__(self, count=4, **attributes):
        self.count = count
        vars(self).update(attributes)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        raise AssertionError("no sample is to be made")


def rows(dataset):
    remarks: list[str] = []
    found = source_of(DataLoader(dataset), len(dataset), remarks)
    assert found is not None
    assert not remarks
    read = found.read
    return found.names, read.tolist() if isinstance(read, torch.Tensor) else [
        list(read(k)) for k in range(len(dataset))
    ]


@pytest.mark.parametrize("lengths", [[5, 9, 4, 7], (5, 9, 4, 7), torch.tensor([5, 9, 4, 7])])
def test_attributes(lengths):
    assert rows(Plain(lengths=lengths)) == (("lengths",), [[5], [9], [4], [7]])
    assert rows(Plain(sizes=[(5, 2), (9, 1), (4, 4), (7, 7)]))[0] == ("sizes[0]", "sizes[1]")


def test_what_is_held_in_lists():
    texts = ["a", "bcd", "", "ef"]
    assert rows(Plain(texts=texts)) == (("texts",), [[1], [3], [0], [2]])
    tokens = [[1, 2], [3], [4, 5, 6], [7]]
    assert rows(Plain(tokens=tokens)) == (("tokens",), [[2], [1], [3], [1]])
    pictures = [torch.ones(3, 4 + k, 5) for k in range(4)]
    assert rows(Plain(pictures=pictures))[1] == [[3, 4 + k, 5] for k in range(4)]


class Infos(Plain):
    def get_data_info(self, index):
        return {"height": 10 + index, "width": 20, "instances": [0] * index}


def test_annotations():
    assert rows(Infos()) == (("height", "width", "instances"), [[10 + k, 20, k] for k in range(4)])


def test_wrappers():
    inner = Plain(lengths=[5, 9, 4, 7])
    assert rows(Subset(inner, [3, 1]))[1] == [[7], [9]]
    assert rows(Subset(Infos(), [3, 1]))[1] == [[13, 20, 3], [11, 20, 1]]
    assert rows(ConcatDataset([inner, inner]))[1] == [[5], [9], [4], [7]] * 2


# --- tables -----------------------------------------------------------------------------------------------------


def test_arrow_tells_offsets_without_values():
    arrow = pytest.importorskip("pyarrow")

    class Table(Plain):
        def __init__(self, **columns):
            self.data = SimpleNamespace(table=arrow.table(columns))
            super().__init__(self.data.table.num_rows)

    tokens = [[1, 2], [3], None, [4, 5, 6]]
    assert rows(Table(input_ids=tokens, label=[1, 2, 3, 4])) == (("input_ids",), [[2], [1], [0], [3]])
    assert rows(Table(length=[2, 1, 0, 3], input_ids=tokens)) == (("length",), [[2], [1], [0], [3]])
    assert rows(Table(text=["a", "bcd"])) == (("text",), [[1], [3]])


@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_hugging_faces_data_sets_in_any_order():
    datasets = pytest.importorskip("datasets")
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"input_ids": [[0] * length for length in (5, 9, 4, 7)]})
    data = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="of this test")
    assert rows(data)[1] == [[5], [9], [4], [7]]
    assert rows(data.select([3, 1]))[1] == [[7], [9]]

    def padded(batch):
        return torch.ones(len(batch), max(len(row["input_ids"]) for row in batch))

    loader = DataLoader(data, 2, shuffle=True, collate_fn=padded)
    found = longest_batch(loader)
    assert found(2).shape == (2, 9)
    assert "known by columns input_ids" in found.notes[0]


def test_bytes_are_texts():
    from vram_guard.longest._extents import extents_of

    assert extents_of({"a": b"abc", "b": io.BytesIO(), "c": [[]]}) == {"a": 3, "c": 1, "c[0]": 0}
