"""Parts of a dry run by themselves: who asks for batches, and what copies of the script answer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

from vram_guard.errors import UnsupportedStepError  # noqa: E402 - what is tested has to be there
from vram_guard.plan.source import TraceRequest  # noqa: E402
from vram_guard.techniques.recipe import Recipe  # noqa: E402
from vram_guard_accelerate.dry_run import _counted_rounds, _resuming, forked_traces  # noqa: E402
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


def failing(monkeypatch: pytest.MonkeyPatch, why: str) -> forked_traces.ForkedTraces:
    """Traces of a script in batches of four samples, each of which fails."""

    def failed(*_arguments: Any) -> Any:
        raise UnsupportedStepError(why)

    first: Any = SimpleNamespace(sample=SimpleNamespace(batch_size=4), precision="32-true", models=())
    traces = forked_traces.ForkedTraces(first)
    monkeypatch.setattr(traces, "_fork", lambda *_task: None)
    monkeypatch.setattr(forked_traces, "_answer_of", failed)
    return traces


@pytest.mark.parametrize(
    ("precision", "whole_job", "fails"),
    [("32-true", False, True), ("32-true", True, False), ("16-mixed", False, False)],
)
def test_only_the_loop_as_written_can_fail_at_another_batch_size(
    monkeypatch: pytest.MonkeyPatch, precision: str, whole_job: bool, fails: bool
) -> None:
    traces = failing(monkeypatch, "its layers have a fixed size")
    with pytest.raises(UnsupportedStepError):
        traces._answer(TraceRequest(3, precision), whole_job=whole_job)
    assert (traces.why_not_sliced, traces.why_not_sharded) == ("", "")
    assert traces.fails_at_others == ("with batches of 3 samples, its layers have a fixed size" if fails else "")


@pytest.mark.parametrize(("slices", "on_host"), [(2, ()), (1, ("0",)), (2, ("0",))])
def test_why_a_copy_in_slices_or_on_the_host_failed_is_kept(
    monkeypatch: pytest.MonkeyPatch, slices: int, on_host: tuple[str, ...]
) -> None:
    traces = failing(monkeypatch, "it was lost")
    request = TraceRequest(4, "32-true", recipe=Recipe(parameters_on_host=on_host), slices=slices, sliced_by="model")
    with pytest.raises(UnsupportedStepError):
        traces._answer(request)
    assert traces.why_not_sliced == ("it was lost" if slices > 1 else "")
    assert traces.why_not_sharded == ("it was lost" if on_host else "")
    assert traces.fails_at_others == ""


def test_what_a_checkpoint_holds_is_loaded_to_where_it_is_wanted() -> None:
    loaded = {"step": 1, "state": [torch.ones(1)]}
    for place in (None, "cpu", torch.device("cpu")):
        assert _resuming._placed(loaded, place) is loaded
    moved = _resuming._placed(loaded, "meta")
    assert (moved["step"], moved["state"][0].device.type) == (1, "meta")
