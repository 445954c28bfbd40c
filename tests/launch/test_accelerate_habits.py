"""What scripts do beside a plain loop: they stop early, try again, profile, ask other programs, resume."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from each import each

pytest.importorskip("accelerate")
psutil = pytest.importorskip("psutil")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases  # noqa: E402 - what is tested has to be there
from accelerate_cases import ONE, TWO, difference, launch  # noqa: E402

from vram_guard.codec import from_plain, to_json  # noqa: E402
from vram_guard.errors import UnsupportedStepError  # noqa: E402
from vram_guard.techniques import Body, Slices  # noqa: E402
from vram_guard_accelerate import guard  # noqa: E402
from vram_guard_accelerate.dry_run.subprocess_policy import only_reads  # noqa: E402
from vram_guard_accelerate.launch_plan import VARIABLE, LaunchPlan  # noqa: E402

HABITS = cases.HERE / "accelerate_scripts" / "habits.py"
LOOPS = ("early_stopping", "retried", "folds", "profiled", "hooked", "with_modes", "tracked", "counted", "one_by_one")
#: Whose models do not say at the first batch that they train.
TOLD_LATE = ("ahead", "evaluated_first")
REFUSED = ("runs", "runs_in_a_shell", "starts")
SLICED = LaunchPlan(
    batch_size=8, grown_batch_size=8, recipe=LaunchPlan().recipe.with_(slices=Slices(Body("network", ("0",)), 3, 1))
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("habits")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, dict[str, Any]]:
    """Everything that is asked of dry runs here, answered in one process."""
    asked = folder / "asked"
    for name in (*LOOPS, *REFUSED, *TOLD_LATE, "in_evaluation_mode", "asks", "saves", "caches", "loaded_there"):
        cases.request(asked / name, HABITS, name, "--out", folder / name)
    for name in ("folds", "shuffled_by_hand"):
        cases.request(asked / f"{name}_grow", HABITS, name, budget="160MiB", grow=True, lr_rule="linear")
    cases.request(asked / "begins", HABITS, "resumes", "--out", folder / "nothing")
    return cases.dry_runs(asked, HF_HOME=str(folder / "home"))


@pytest.mark.parametrize("name", [*LOOPS, *TOLD_LATE, "asks", "saves", "caches", "loaded_there", "begins"])
def test_they_are_followed(answers: Any, name: str) -> None:
    answer = answers[name]
    assert "error" not in answer, answer
    assert answer["fits"]
    assert not answer["changed"]
    expected = {"retried": 2, "counted": 2, "ahead": 3}.get(name, 1)
    assert answer["plan"]["accumulate"]["before"] == expected


@pytest.mark.parametrize("name", TOLD_LATE)
def test_training_that_begins_in_evaluation_mode_is_measured_as_any_other(answers: Any, name: str) -> None:
    found, other = (answers[one]["plan"]["before"] for one in (name, "hooked"))
    assert found["peak_allocated"] == pytest.approx(other["peak_allocated"], rel=0.01)
    assert answers[name]["plan"]["batch_size"]["before"] == 8


def test_training_in_a_mode_that_was_set_for_evaluation_is_refused(answers: Any) -> None:
    answer = answers["in_evaluation_mode"]
    assert answer["error"] == "UnsupportedStepError"
    assert "habits.py, line " in answer["message"]


def test_nothing_is_saved_by_any_librarys_own_means(answers: Any, folder: Path) -> None:
    assert "error" not in answers["saves"]
    assert not [*folder.glob("saves*"), *folder.glob("caches*")]


# --- a larger batch -------------------------------------------------------------------------------------------


def test_the_loaders_of_every_training_in_a_script_grow(answers: Any, tmp_path: Path, cache: Path) -> None:
    """Rates are multiplied in all of them."""
    orders = answers["folds_grow"]["launch_plan"]
    assert orders["grown_batch_size"] == 16  # of the 20 samples of a fold
    assert orders["learning_rate_factor"] == 2
    out = tmp_path / "folds.pt"
    own = (*ONE, "-m", "vram_guard_accelerate", HABITS, "folds", "--out", out)
    done = launch(*own, cache=cache, guarded=False, **{VARIABLE: to_json(from_plain(LaunchPlan, orders))})
    assert done.returncode == 0, done.stderr
    found = torch.load(out)
    assert found["steps"] == [2, 2]  # as written: 3
    assert found["losses"] == [0.2]


def test_a_batch_that_no_loader_was_given_does_not_grow(answers: Any) -> None:
    answer = answers["shuffled_by_hand_grow"]
    assert "error" not in answer, answer
    assert not answer["changed"]
    assert any("batch sampler" in note for note in answer["notes"])


# --- programs that a script starts ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "command"), list(zip(REFUSED, ("touch", "echo touched", "ForkProcess"), strict=True)))
def test_a_program_that_may_change_something_ends_the_dry_run(
    answers: Any, folder: Path, name: str, command: str
) -> None:
    answer = answers[name]
    assert answer["error"] == "UnsupportedStepError"
    assert f"after Accelerator.prepare ({command}" in answer["message"]
    assert "habits.py, line " in answer["message"]
    assert not Path(f"{folder / name}.touched").exists()


def test_a_program_that_tells_something_runs(answers: Any) -> None:
    said = answers["asks"]["printed"].splitlines()
    assert any(line.startswith("runs on ") and line.endswith(" True") for line in said)


@each(
    ("command", "tells"),
    [
        (["git", "rev-parse", "HEAD"], True),
        (["/usr/bin/git", "-C", "/somewhere", "describe", "--always"], True),
        ("git status --short", True),
        (["git", "branch", "--show-current"], True),
        (["git", "config", "--get", "user.name"], True),
        (["git", "remote", "get-url", "origin"], True),
        (["git", "branch", "new"], False),
        (["git", "commit", "-m", "x"], False),
        (["git", "diff", "--output=patch"], False),
        (["git"], False),
        ([b"nvidia-smi", b"-q"], True),
        (Path("/usr/bin/nvidia-smi"), True),
        (["/usr/local/cuda/bin/nvcc", "--version"], True),
        (["gcc", "-shared", "x.c"], False),
        ([sys.executable, "-m", "pip", "freeze"], True),
        ([sys.executable, "-m", "pip", "install", "x"], False),
        ([sys.executable, "train.py"], False),
        (["rm", "-rf", "x"], False),
        ("touch x", False),
        ("'", False),
        ([], False),
        (None, False),
    ],
)
def test_which_programs_only_tell_something(command: Any, tells: bool) -> None:
    assert only_reads(command) is tells


@pytest.mark.parametrize("line", ["cat a > b", "git rev-parse HEAD; rm x", "ls | tee x", "echo $(rm x)", "echo `rm x`"])
def test_a_shell_can_do_more_than_its_first_word_says(line: str) -> None:
    assert not only_reads(line)
    assert not only_reads(["/bin/sh", "-c", line])
    assert only_reads(["/bin/sh", "-c", "git rev-parse HEAD"])


def test_what_a_script_leaves_behind_ends_with_its_dry_run(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "left"
    monkeypatch.chdir("/")  # programs may write temporary files unless the user works among them
    given = ("--dry-run", "--budget", "1GiB", HABITS, "leaves_one_behind", "--out", out)
    done = launch(*ONE, *given, cache=cache, libraries=())  # its own group of processes is what ends
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 100
    while _run_with(f"{out}.runs"):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.1)


def _run_with(word: str) -> bool:
    """Whether a process was given this word; one that has ended and that nobody has waited for yet has none."""
    return any(word in (one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))


# --- checkpoints ----------------------------------------------------------------------------------------------


def test_rates_of_a_larger_batch_come_back_to_the_scripts_own(tmp_path: Path, cache: Path) -> None:
    """Two steps with four times the rate and a checkpoint; two more under a plan that changes nothing."""
    grown = LaunchPlan(batch_size=8, grown_batch_size=8, learning_rate_factor=4.0)
    out = tmp_path / "project"
    out.mkdir()
    own = (*ONE, "--budget", "1GiB", HABITS, "resumes", "--out", out)
    guarded = (*ONE, "-m", "vram_guard_accelerate", HABITS, "resumes", "--out", out)
    first = launch(*guarded, cache=cache, guarded=False, **{VARIABLE: to_json(grown)})
    assert first.returncode == 0, first.stderr
    assert _rates(out) == pytest.approx([0.4 / 2, 0.4 / 3])
    again = launch(*own, cache=cache)
    assert again.returncode == 0, again.stderr
    assert _rates(out) == pytest.approx([0.1 / 4, 0.1 / 5])


def _rates(folder: Path) -> list[float]:
    return [float(word) for word in (folder / "rates.txt").read_text().split()]


# --- the same training in slices ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Any:
    """All loops as written, and in slices of 3 of 8 samples, in one process or two."""
    processes, results = ONE if request.param == 1 else TWO, []
    for own, more in (((), {}), (("-m", "vram_guard_accelerate"), {VARIABLE: to_json(SLICED)})):
        out = tmp_path_factory.mktemp("loops")
        given = {**more, "ACCELERATE_USE_CPU": "true"}
        done = launch(*processes, *own, HABITS, "all_loops", "--out", out, cache=cache, guarded=False, **given)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append({name: torch.load(out / f"{name}.pt") for name in LOOPS})
    return results


@pytest.mark.parametrize("name", LOOPS)
def test_slices_do_not_change_them(both: Any, name: str) -> None:
    as_written, sliced = both[0][name], both[1][name]
    rounded = 1e-3 if name == "hooked" and as_written["processes"] == 2 else 2e-6  # float16 between processes
    changed = difference(as_written, sliced)
    assert changed < rounded
    assert changed or name not in ("early_stopping", "folds")
    assert as_written["rates"] == sliced["rates"]
    assert as_written.get("steps") == sliced.get("steps")
    for close in ("losses", "norms"):
        assert sliced.get(close, []) == pytest.approx(as_written.get(close, []), rel=1e-4)


# --- settings -------------------------------------------------------------------------------------------------


def test_the_library_call_says_where_processes_cannot_be_copied(monkeypatch: Any) -> None:
    monkeypatch.delattr("os.fork")
    from accelerate import Accelerator

    model = torch.nn.Linear(2, 2)
    with guard(budget="1GiB"), pytest.raises(UnsupportedStepError):
        Accelerator(cpu=True).prepare(model)
