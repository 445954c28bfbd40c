"""A dry run leaves the disk as it was, also of scripts that write before ``prepare``; and trains nothing for real."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("accelerate")
if sys.platform != "linux":
    pytest.skip("an overlay needs Linux", allow_module_level=True)
for library in ("h5py", "pyarrow.parquet", "cv2", "PIL.Image", "tokenizers"):
    pytest.importorskip(library)

import accelerate_cases as cases  # noqa: E402 - what is tested has to be there
from ways_to_write import files_of_the_users, seen  # noqa: E402

from vram_guard.forks.side_effects import BEST_WAY  # noqa: E402

SCRIPT = cases.HERE / "accelerate_scripts" / "early_writes.py"
REFUSED = {
    "by_itself": "trains without Accelerate",
    "warms_up": "computes gradients before Accelerator.prepare",
}


@pytest.fixture(scope="module", params=["overlay", "landlock"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Any]:
    """The way in which dry runs write, their answers, and what is otherwise than before."""
    base = tmp_path_factory.mktemp("kept")
    (base / "home").mkdir()
    (base / "home" / ".netrc").write_text("kept")
    for name in ("writes", "writes_in_c", *REFUSED):
        for inner in ("before", "loop"):
            files_of_the_users(base / name / inner)
        (base / name / "old").mkdir()
        for kept in ("old/weights.bin", "log.txt", "settings.json", "table.h5", "checkpoint.pt"):
            (base / name / kept).write_text("kept")
    before = seen(base)
    asked = tmp_path_factory.mktemp("early") / "asked"
    for name in ("writes", "writes_in_c", *REFUSED):
        cases.request(asked / name, SCRIPT, name, base / name)
    temporary = tmp_path_factory.mktemp("temporary")
    variables = {"HOME": str(base / "home"), "TMPDIR": str(temporary), BEST_WAY: request.param}
    answers = dict(cases.dry_runs(asked, **variables))  # each is run when it is asked for
    after = seen(base)
    differ = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return request.param, answers, [*differ, *map(str, temporary.iterdir())]


def test_the_disk_is_as_it_was(ran: tuple[str, dict[str, Any], list[str]]) -> None:
    way, answers, differ = ran
    assert set(answers) == {"writes", "writes_in_c", *REFUSED}
    if way == "landlock":  # a program may still change times
        differ = [name for name in differ if not name.endswith("/there")]
    assert differ == []


def test_what_scripts_write_is_read_back_by_them(ran: tuple[str, dict[str, Any], list[str]]) -> None:
    """And what no overlay keeps from the disk is refused by name."""
    way, answers, _differ = ran
    if way == "overlay":
        assert answers["writes"].get("fits"), answers["writes"]
        assert answers["writes_in_c"].get("fits"), answers["writes_in_c"]
    else:
        assert "table.h5" in answers["writes_in_c"]["message"]
        assert "overlay" in answers["writes_in_c"]["message"]


@pytest.mark.parametrize("name", list(REFUSED))
def test_nothing_is_trained_for_real(ran: tuple[str, dict[str, Any], list[str]], name: str) -> None:
    assert REFUSED[name] in ran[1][name]["message"]
    assert "early_writes.py, line" in ran[1][name]["message"]
