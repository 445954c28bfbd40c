"""Sizes of samples from where a data set tells them: annotations, tables, heads of picture files, and what is kept."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from vram_guard.longest import longest_batch
from vram_guard.longest._headers import picture_size
from vram_guard.longest._limit import TimeIsUpError, at_most
from vram_guard.longest._sources import source_of
from vram_guard.longest.file_sizes import PictureReader


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
    found = source_of(dataset, len(dataset), remarks)
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

    class Coco:
        def __init__(self):
            self.imgs = {10 * k: {"height": k, "width": 2 * k} for k in range(4)}
            self.imgToAnns = {10: [0, 0], 30: [0]}

    assert rows(Plain(coco=Coco(), ids=[30, 0, 10, 20]))[1] == [[3, 6, 1], [0, 0, 0], [1, 2, 2], [2, 4, 0]]


def test_wrappers():
    inner = Plain(lengths=[5, 9, 4, 7])
    assert rows(Subset(inner, [3, 1]))[1] == [[7], [9]]
    assert rows(Subset(Infos(), [3, 1]))[1] == [[13, 20, 3], [11, 20, 1]]
    assert rows(ConcatDataset([inner, inner]))[1] == [[5], [9], [4], [7]] * 2
    assert rows(ConcatDataset([Infos(), Infos()]))[1] == [[10 + k, 20, k] for k in range(4)] * 2
    assert rows(Plain(8, dataset=inner, times=2))[1] == [[5], [9], [4], [7]] * 2  # MMEngine's RepeatDataset
    assert rows(Plain(dataset=inner))[1] == [[5], [9], [4], [7]]
    assert rows(Plain(3, dataset=inner, repeat_indices=[1, 1, 2]))[1] == [[9], [9], [4]]


# --- tables -----------------------------------------------------------------------------------------------------


def test_arrow_tells_offsets_without_values():
    arrow = pytest.importorskip("pyarrow")

    class Table(Plain):
        def __init__(self, **columns):
            self.data = arrow.table(columns)
            super().__init__(self.data.num_rows)

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


# --- pictures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *[(kind, {}) for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")],
        ("JPEG", {"progressive": True}),
        ("JPEG", {"exif": b"Exif\0\0" + b"\xff\xc0" * 4000}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0MM"}),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (37, 500), (641, 3)])
def test_heads_of_picture_files(tmp_path, kind, options, size):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / f"picture.{kind.lower()}"
    image.new("RGB", size).save(path, kind, **options)
    assert picture_size(path) == (size[1], size[0])


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0\0\x10", b"RIFF", b"text"])
def test_broken_pictures_are_errors(tmp_path, content):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises((OSError, ValueError, struct.error)):
        picture_size(path)


def png(height, width):
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", width, height, 8, 2, 0, 0, 0)


class Folder(Dataset):
    """As torchvision's ImageFolder has its samples."""

    def __init__(self, root, sizes):
        self.samples = []
        for number, size in enumerate(sizes):
            path = root / f"{number}.png"
            path.write_bytes(png(*size))
            self.samples.append((str(path), 0))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.empty(3, *picture_size(self.samples[index][0]), dtype=torch.uint8)


def largest(batch):
    height, width = (max(one.shape[axis] for one in batch) for axis in (1, 2))
    return torch.empty(len(batch), 3, height, width, dtype=torch.uint8)


def test_a_folder_of_pictures(tmp_path, own_cache):
    sizes = [(10 + number % 7, 20 + number % 11) for number in range(500)]
    sizes[300], sizes[400] = (200, 9), (9, 300)
    data = Folder(tmp_path, sizes)
    loader = DataLoader(data, 4, shuffle=True, collate_fn=largest)
    found = longest_batch(loader)
    assert found(4).shape == (4, 3, 200, 300)
    assert "sizes of all 500 samples are known by heads of picture files" in found.notes[0]
    (kept,) = (own_cache / "sizes").iterdir()
    assert len(json.loads(kept.read_text())["entries"]) == 500
    # A file that has changed is read again; those that have not are not.
    Path(data.samples[17][0]).write_bytes(png(400, 400) + b" ")
    assert longest_batch(loader)(4).shape == (4, 3, 400, 400)
    kept.write_text("{")
    assert longest_batch(loader)(4).shape == (4, 3, 400, 400)


def test_what_was_read_is_remembered_and_more_is_added(tmp_path, monkeypatch):
    data = Folder(tmp_path, [(10, 20), (30, 40), (50, 60)])
    paths = [path for path, _label in data.samples]
    first = PictureReader(paths)
    assert first(0) == (10, 20)
    first.learned().save()
    second = PictureReader(paths)
    monkeypatch.setattr("vram_guard.longest.file_sizes.picture_size", lambda path: (len(path), 1))
    assert second(0) == (10, 20)
    assert second(1) == (len(paths[1]), 1)
    second.learned().save()
    assert PictureReader(paths).learned().entries.keys() == {0, 1}
    os.utime(paths[0], (1, 1))
    assert PictureReader(paths)(0) == (len(paths[0]), 1)
    assert not PictureReader(paths[:2]).learned().entries  # another data set


def test_pictures_that_cannot_be_read_are_said(tmp_path):
    data = Folder(tmp_path, [(10 + number, 20) for number in range(40)])
    Path(data.samples[33][0]).write_bytes(b"")
    found = longest_batch(DataLoader(data, 4, shuffle=True, collate_fn=largest))
    assert found(4).shape == (4, 3, 49, 20)
    assert "39 of 40 samples are known" in found.notes[0]
    assert any("sample 33 tells no size" in note for note in found.notes)


# --- time -------------------------------------------------------------------------------------------------------


def test_the_limit_interrupts_and_leaves_other_alarms_alone():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        began = time.monotonic()
        with at_most(0.1):
            time.sleep(60)
        assert time.monotonic() - began < 5
        assert not rung
        time.sleep(0.4)
        assert rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_limit_that_a_block_has_noticed_itself_does_not_ring_as_well():
    for _round in range(50):  # both are for the same point in time
        with at_most(0.002) as limit:
            while True:
                limit.check()


def test_no_time_is_no_time():
    done = []
    for seconds in (0, -3):
        with at_most(seconds):
            time.sleep(60)
            done.append(1)
    with at_most(0.01, interrupt=False) as limit:
        time.sleep(0.02)
        limit.check()
        done.append(1)
    assert not done
    assert not isinstance(TimeIsUpError(), Exception)


def test_bytes_are_texts():
    from vram_guard.longest._extents import extents_of

    assert extents_of({"a": b"abc", "b": io.BytesIO(), "c": [[]]}) == {"a": 3, "c": 1, "c[0]": 0}
