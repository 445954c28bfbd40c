"""Recorded runs: replays to the address, predictions to the byte, and files that are no recordings."""

from __future__ import annotations

import gzip
import pickle

import pytest

from benchmarks.harness.records import read
from benchmarks.recorded import command, predictions, recordings
from benchmarks.recorded.recordings import replayed
from vram_guard.allocator import read_recording, read_recordings
from vram_guard.errors import InvalidInputError

NAMES = recordings.names()

# Replays


def test_every_recording_has_a_source():
    notes = (recordings.DATA / "NOTES.md").read_text(encoding="utf-8")
    assert {recordings.source_of(name) for name in NAMES} == set(recordings.SOURCES.values())
    assert all(source in notes for source in recordings.SOURCES.values())
    assert set(predictions.RUNS) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_takes_the_same_segments_and_addresses(name):
    """lm-medium-512-training holds a block larger than its request: its size is read off the block behind it."""
    for row in replayed(recordings.path_of(name), name, recordings.source_of(name)):
        assert row.details["same_segments"], row.details["difference"]
        assert row.details["same_addresses"], row.details["difference"]
        assert row.predicted == row.measured


def test_every_device_with_a_history_is_read():
    assert [each.device for each in recordings.recordings(recordings.path_of("three-gpus-expandable"))] == [0, 1, 2]


# Predictions; all of them: make recorded


@pytest.mark.parametrize(
    ("name", "in_order"),
    [
        # Two steps fall 0.4 to 0.5% short: those before it decide where blocks lie. Of torch 2.11, as it was recorded.
        pytest.param("lm-medium-512-training", 1, marks=pytest.mark.torch_since(2, 11)),
        ("lm-medium-512-inference", 1),
        ("lm-2.7b-128-fullstep", 0.999),
        ("lm-2.7b-256-forward-mixed", 0.999),
    ],
)
def test_a_language_model_takes_what_was_recorded(name, in_order):
    row = predictions.predicted(name)
    assert row.predicted == row.measured
    assert row.details["predicted_allocated"] == row.details["allocated"]
    assert row.details["in_order"] >= in_order


# Files that are no recordings


@pytest.fixture
def snapshot():
    with gzip.open(recordings.path_of("nca-3")) as file:
        return pickle.load(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(device_traces=[[], []]), "no history of any device.*_record_memory_history"),
        (lambda s: s["device_traces"][0][3].update(action="migrate"), "'migrate'.*another release of torch.*record it"),
        (lambda s: s["segments"][0]["blocks"][0].pop("size"), "'size'.*another release of torch.*record it"),
        (lambda s: s.pop("device_traces"), "expected a dict with device_traces.*record it"),
        (lambda s: s["device_traces"][0].__delitem__(slice(-40, None)), "contradicts itself.*save the snapshot again"),
    ],
)
def test_a_snapshot_that_cannot_be_used_says_what_to_do(snapshot, change, said, tmp_path, capsys):
    change(snapshot)
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    for reading in (read_recording, read_recordings):
        with pytest.raises(InvalidInputError, match=said):
            reading(path)
    assert command.main([str(path)]) == 2
    assert f"{path}: " in capsys.readouterr().err


def test_a_truncated_file_is_refused_and_one_that_is_too_large(tmp_path, capsys, monkeypatch):
    packed = recordings.path_of("nca-3").read_bytes()
    for path, content in ((tmp_path / "a.pickle.gz", packed), (tmp_path / "a.pickle", gzip.decompress(packed))):
        for length in (0, 10, 500, -1):
            path.write_bytes(content[:length])
            assert command.main([str(path)]) == 2
            assert "again" in capsys.readouterr().err
    with pytest.raises(InvalidInputError):
        recordings.recordings(tmp_path / "none.gz")
    monkeypatch.setattr(recordings, "LARGEST", 1000)
    with pytest.raises(InvalidInputError, match="max_entries"):
        recordings.recordings(recordings.path_of("nca-3"))


# The command and its pages


def test_a_recording_of_ones_own_is_replayed(tmp_path, capsys):
    path = tmp_path / "run.pickle"
    path.write_bytes(gzip.decompress(recordings.path_of("nca-3").read_bytes()))
    assert command.main([str(path), "--json", str(tmp_path / "all.json"), "--out", str(tmp_path)]) == 0
    assert "run.pickle" in capsys.readouterr().out
    (row,) = read(tmp_path / "all.json").rows
    assert row.measured == row.predicted == 24_410_849_280
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json", "run.pickle"]


def test_a_replay_that_differs_is_told_by_the_exit_status(snapshot, tmp_path, capsys):
    snapshot["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:2"}
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    assert command.main([str(path)]) == 1
    assert " | no | no entry" in capsys.readouterr().out
