"""Parts of a dry run by themselves: who asks for batches, and what checkpoints hold."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

from vram_guard_accelerate.dry_run import _resuming  # noqa: E402 - what is tested has to be there
from vram_guard_accelerate.dry_run.phases import calls_next  # noqa: E402


def test_a_line_that_calls_next_is_known_from_a_loop_over_a_loader() -> None:
    seen: list[bool] = []
    names: dict[str, Any] = {"calls_next": calls_next, "seen": seen}
    # Of no file, as a library's iterator: the frame of the script is this one.
    library = (
        "    def __iter__(self):\n        return self\n    def __next__(self):\n        seen.append(calls_next())\n"
    )
    exec(f"class Batches:\n{library}", names)
    batches = names["Batches"]()
    for _batch in batches:
        break
    next(batches)
    [next(batches) for _number in range(2)]
    assert seen == [False, True, True, True]


def test_what_a_checkpoint_holds_is_loaded_to_where_it_is_wanted() -> None:
    loaded = {"step": 1, "state": [torch.ones(1)]}
    for place in (None, "cpu", torch.device("cpu")):
        assert _resuming._placed(loaded, place) is loaded
    moved = _resuming._placed(loaded, "meta")
    assert (moved["step"], moved["state"][0].device.type) == (1, "meta")
