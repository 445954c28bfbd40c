"""Times of the host are read off the seconds of whole updates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_host
from benchmarks.bench_host import Setup, counts, read_off, setups

OPERATOR, CALL, SELECTED = 22e-6, 0.93e-3, 52e-6


def updates(network: str) -> list[dict[str, object]]:
    """Seconds of a network's updates on a host that takes exactly these times."""
    rows: list[dict[str, object]] = []
    for one in setups("cpu"):
        if one.network == network:
            found = counts(one.network, one.precision, one.technique, "cpu")
            host = found.trained * OPERATOR + found.calls * CALL + found.selected * SELECTED
            rows.append({"name": one.name, "seconds": host + found.other})
    return rows


def test_what_a_host_takes_is_read_off_its_updates() -> None:
    rows = updates("distilbert")
    told = {what: seconds for _name, what, seconds in read_off(rows, "cpu")}
    assert told == {
        name: pytest.approx(each) for name, each in (("operator", OPERATOR), ("call", CALL), ("selected", SELECTED))
    }


def test_a_row_whose_step_as_written_is_missing_tells_nothing() -> None:
    assert not list(read_off(updates("distilbert")[1:], "cpu"))


def test_six_blocks_are_called_once_in_each_update() -> None:
    found = counts("distilbert", "32-true", "keep attention", "cpu")
    assert found.calls == 6
    assert 0 < found.selected < 2 * found.trained


def test_what_was_measured_is_printed_with_its_medians(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_host, "UNTIMED", 0)
    monkeypatch.setattr(bench_host, "TIMED", 1)
    file = tmp_path / "host.json"
    bench_host.main(["--json", str(file), "--only", "=distilbert 32-true", "=distilbert 32-true checkpoint"])
    printed = capsys.readouterr().out
    assert printed.count("median") == 2
    names = [row["name"] for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    assert names == ["distilbert 32-true", "distilbert 32-true checkpoint"]
    bench_host.main(["--against", str(file)])
    assert capsys.readouterr().out == printed


def test_names_are_unique() -> None:
    names = [one.name for one in setups("cuda")]
    assert len(names) == len(set(names))
    assert Setup("t5", "32-true", "").name == "t5 32-true"
