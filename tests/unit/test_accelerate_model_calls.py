"""How the calls of a script's models are cut: read at several sizes, taken where two of them agree."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

from vram_guard.apply.microbatch import Layout  # noqa: E402 - what is tested has to be there
from vram_guard.errors import UnsupportedStepError  # noqa: E402
from vram_guard_accelerate.dry_run._model_calls import ModelCall, agreed_layouts, read_call  # noqa: E402

ROWS = Layout(rows=True)


def read(*calls: Any, models: int = 1) -> tuple[tuple[Layout | None, ...], str]:
    """Of functions batch size -> (the number of a model, what it is called with)."""
    return agreed_layouts(lambda size: [read_call(*call(size), size) for call in calls], models)


def test_a_list_of_as_many_samples_as_channels_is_one_of_samples() -> None:
    """At a size of 3 it reads as three columns."""
    assert read(lambda size: (0, {"0": [torch.zeros(3, 4)] * size})) == ((Layout(parts={"0": ROWS}),), "")


@pytest.mark.parametrize("length", [2, 3, 6, 16])
def test_time_is_never_taken_for_samples(length: int) -> None:
    layouts, why = read(lambda size: (0, {"0": torch.zeros(length, size, 4)}))
    assert layouts == ()
    assert why


def test_real_and_made_samples_may_be_judged_together() -> None:
    layout = Layout(parts={"x": ROWS})
    assert read(lambda size: (0, {"x": torch.zeros(2 * size, 4)})) == ((layout,), "")
    both = (lambda size: (0, {"x": torch.zeros(2 * size, 4)}), lambda size: (0, {"x": torch.zeros(size, 4)}))
    assert read(*both) == ((layout,), "")


def test_each_model_has_its_own_layout_and_none_where_it_is_called_in_several_ways() -> None:
    several = (lambda size: (1, {"0": torch.zeros(size)}), lambda size: (1, {"x": torch.zeros(size)}))
    found = read(lambda size: (0, {"0": torch.zeros(size), "1": torch.zeros(1)}), *several, models=3)
    assert found == ((Layout(parts={"0": ROWS, "1": Layout()}), None, None), "")


def test_keys_that_json_would_change_do_not_travel() -> None:
    assert read(lambda size: (0, {"0": {(1, 2): torch.zeros(size)}})) == ((None,), "")


def test_sizes_at_which_the_script_fails_are_passed_over() -> None:
    """But for those that the planner needs too."""

    def calls_at(size: int, *failing: int) -> list[ModelCall]:
        if size in failing:
            raise UnsupportedStepError("too small")
        return [read_call(0, {"0": [torch.zeros(3, 4)] * size}, size)]

    assert agreed_layouts(lambda size: calls_at(size, 5, 7), 1) == ((Layout(parts={"0": ROWS}),), "")
    with pytest.raises(UnsupportedStepError, match="too small"):
        agreed_layouts(lambda size: calls_at(size, 2), 1)


def test_calls_that_are_never_the_same_are_refused() -> None:
    def calls_at(size: int) -> list[ModelCall]:
        return [read_call(0, {f"x{size}": torch.zeros(size)}, size)]

    assert "differs from batch size to batch size" in agreed_layouts(calls_at, 1)[1]
