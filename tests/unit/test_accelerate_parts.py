"""Parts of a dry run by themselves: who asks for batches, and what checkpoints hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

from vram_guard_accelerate.dry_run import _counted_rounds, _resuming  # noqa: E402 - what is tested has to be there
from vram_guard_accelerate.dry_run._script_lines import ScriptLines, asker  # noqa: E402


def test_a_loop_that_asks_for_batches_by_itself_says_how_often_it_runs() -> None:
    seen: list[int | None] = []
    names: dict[str, Any] = {"asker": asker, "seen": seen}
    # Of no file, as a library's iterator: the frame of the script is this one.
    exec("class Batches:\n    def __next__(self):\n        seen.append(asker().rounds)\n", names)
    batches = names["Batches"]()
    for _step in _counted_rounds._Range(3):
        next(batches)
    for _step in (0, 1):
        next(batches)
    assert seen == [3, 3, 3, None, None]
    trange = _counted_rounds._bar_of(pytest.importorskip("tqdm").trange)
    for _step in trange(2, disable=True):
        next(batches)
    assert seen[5:] == [2, 2]


def test_a_branch_that_is_entered_before_its_time_runs_from_its_first_statement() -> None:
    entered: list[int] = []
    lines = ScriptLines(lambda _branch, period: entered.append(period))
    ran: list[str] = []

    def batches() -> Iterator[int]:
        for number in range(600):
            if number == 1:
                lines.enters = True
            elif number == 3:
                lines.rest()
            yield number

    every, loader = 500, batches()
    for step in range(600):
        if step == 0:
            lines.find_branches(loader)
        next(loader)
        if (step + 1) % every == 0:
            ran.append(f"{step}: begins")
            ran.append(f"{step}: ends")
    assert entered == [500]
    assert ran == ["1: begins", "1: ends", "499: begins", "499: ends"]


def test_what_a_checkpoint_holds_is_loaded_to_where_it_is_wanted() -> None:
    loaded = {"step": 1, "state": [torch.ones(1)]}
    for place in (None, "cpu", torch.device("cpu")):
        assert _resuming._placed(loaded, place) is loaded
    moved = _resuming._placed(loaded, "meta")
    assert (moved["step"], moved["state"][0].device.type) == (1, "meta")
