"""``vram-guard mmengine`` on real configs: what it compares, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases

from vram_guard import cli


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = cases.MMPRETRAIN["_base_/datasets/blobs.py"].replace("size=64", "size=16")
    files = {**cases.MMPRETRAIN, "_base_/datasets/blobs.py": small}
    return cases.write_configs(tmp_path_factory.mktemp("configs"), files) / "small.py"


def compared(capsys: Any, config: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and the rows."""
    code = cli.main(["mmengine", "compare", str(config), "--budget", "1GiB", "--json", *options])
    found = json.loads(capsys.readouterr().out)
    return code, found["configurations"]


def test_batches_as_written_and_twice_that_are_compared(config: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    code, rows = compared(capsys, config)
    assert code == 0
    assert [row["batch_size"] for row in rows] == [8, 16]
    assert sys.path[0] == "", "the config's modules are found in the folder that it is started in"
    rates = [row["learning_rate"] for row in rows]
    assert rates[1] == pytest.approx(2 * rates[0])


def test_sizes_and_precisions_are_compared_once_each(config: Path, capsys: Any) -> None:
    options = ("--batch-size", "4", "4", "--precision", "32-true", "bf16-mixed", "--lr-rule", "sqrt")
    code, rows = compared(capsys, config, *options, "--cfg-options", "model.depth=1")
    assert code == 0
    assert [(row["batch_size"], row["name"].rpartition(" ")[2]) for row in rows] == [(4, "32-true"), (4, "bf16-mixed")]
    deeper = compared(capsys, config, "--batch-size", "4")[1]
    assert deeper[0]["peak_reserved"] >= rows[0]["peak_reserved"]


def test_what_does_not_fit_has_an_exit_code_of_its_own(config: Path, capsys: Any) -> None:
    assert cli.main(["mmengine", "compare", str(config), "--budget", "1MiB", "--batch-size", "8"]) == 1
    assert "batch 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (None, (), "there is no config"),
        ("model = dict(", (), "cannot be read: SyntaxError"),
        ("train_cfg = dict(by_epoch=True)\n", (), "has no model"),
        ("model = dict(type='SmallClassifier')\n", ("--precision", "quarter"), "precision 'quarter' is not known"),
    ],
)
def test_what_cannot_be_compared_is_told_in_a_line(
    tmp_path: Path, capsys: Any, text: str | None, options: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "net.py"
    if text is not None:
        path.write_text(text)
    assert cli.main(["mmengine", "compare", str(path), "--budget", "1GiB", *options]) == 2
    assert said in capsys.readouterr().err
