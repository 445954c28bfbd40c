"""A launch plan on real objects of torch and Accelerate, in this process."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

import accelerate_cases as cases  # noqa: E402
from torch import nn  # noqa: E402 - what is tested has to be there
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from vram_guard.cli import EXIT_ENVIRONMENT  # noqa: E402
from vram_guard.codec import to_json  # noqa: E402
from vram_guard_accelerate.apply.applying import PlanInstaller  # noqa: E402
from vram_guard_accelerate.launch_plan import VARIABLE, LaunchPlan, LoaderPlace  # noqa: E402

WRAPPED = ("prepare", "prepare_model", "end_training", "save_state", "load_state")


@pytest.fixture
def carried_out(monkeypatch: Any) -> Iterator[Callable[..., PlanInstaller]]:
    """Install a plan for one test."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    for name in WRAPPED:
        monkeypatch.setattr(Accelerator, name, getattr(Accelerator, name))
    for kind in (LRScheduler, ReduceLROnPlateau, DataLoader):
        monkeypatch.setattr(kind, "__init__", kind.__init__)

    def install(**plan: Any) -> PlanInstaller:
        installer = PlanInstaller(LaunchPlan(**plan))
        installer.install()
        return installer

    yield install
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def sgd(lr: float = 0.1) -> Any:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr)


def rate(optimizer: Any) -> float:
    return float(optimizer.param_groups[0]["lr"])


def test_the_trainings_loaders_are_made_larger(carried_out: Any) -> None:
    line = inspect.currentframe().f_lineno + 6  # type: ignore[union-attr]
    place = LoaderPlace(f"{__file__}:{line}", 1, 2)
    carried_out(batch_size=4, grown_batch_size=8, loader=place)
    data: Any = range(16)
    made = []
    for size in (4, 4, 4, 3, 4, 4):
        made.append(DataLoader(data, size))  # noqa: PERF401 - one line, without a frame of its own
    elsewhere = DataLoader(data, batch_size=4)
    assert [loader.batch_size for loader in made] == [4, 8, 4, 3, 4, 8]
    assert elsewhere.batch_size == 4


def test_rates_of_all_that_is_prepared_are_scaled_once(carried_out: Any) -> None:
    from accelerate import Accelerator

    carried_out(learning_rate_factor=2.0)
    accelerator = Accelerator(cpu=True)
    first, second = sgd(), sgd(0.3)
    early = LambdaLR(first, lambda _: 1.0)
    accelerator.prepare(first)
    assert (rate(first), early.base_lrs) == (0.2, [0.2])
    late = LambdaLR(first, lambda _: 1.0)  # over rates that are scaled
    accelerator.prepare(second, late)
    assert (rate(first), rate(second), late.base_lrs) == (0.2, 0.6, [0.2])
    accelerator.prepare(nn.Linear(1, 1))
    assert (rate(first), rate(second), early.base_lrs, late.base_lrs) == (0.2, 0.6, [0.2], [0.2])


def test_a_schedule_that_was_made_before_and_is_prepared_later_is_scaled(carried_out: Any) -> None:
    from accelerate import Accelerator

    carried_out(learning_rate_factor=2.0)
    accelerator = Accelerator(cpu=True)
    optimizer = sgd()
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    schedule.optimizer = None  # it is not known whose it is
    accelerator.prepare(optimizer)
    assert schedule.base_lrs == [0.1]
    schedule.optimizer = optimizer
    accelerator.prepare(schedule)
    assert (rate(optimizer), schedule.base_lrs) == (0.2, [0.2])


def test_the_least_rate_of_a_measured_schedule_is_scaled_too(carried_out: Any) -> None:
    from accelerate import Accelerator

    carried_out(learning_rate_factor=2.0)
    optimizer = sgd()
    schedule = ReduceLROnPlateau(optimizer, min_lr=0.01, patience=0)
    Accelerator(cpu=True).prepare(optimizer)
    assert (rate(optimizer), schedule.min_lrs) == (0.2, [0.02])


def test_a_checkpoint_holds_rates_as_they_are_written(carried_out: Any, tmp_path: Path) -> None:
    from accelerate import Accelerator

    carried_out(learning_rate_factor=2.0)
    accelerator = Accelerator(cpu=True)
    optimizer = sgd()
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    accelerator.prepare(optimizer, schedule)
    folder = Path(accelerator.save_state(str(tmp_path / "saved")))
    assert torch.load(folder / "optimizer.bin")["param_groups"][0]["lr"] == 0.1
    assert torch.load(folder / "scheduler.bin")["base_lrs"] == [0.1]
    for _ in range(2):
        assert (rate(optimizer), schedule.base_lrs) == (0.2, [0.2])
        accelerator.load_state(str(folder))


@pytest.mark.parametrize("how", ["prepared", "registered", "made over the prepared optimizer"])
@pytest.mark.parametrize("factor", [4.0, 3.0])
def test_a_run_goes_on_from_a_checkpoint_with_or_without_the_guard_as_it_would_have(
    how: str, factor: float, carried_out: Any, tmp_path: Path
) -> None:
    """Rates after a checkpoint's next step, of a schedule that the Accelerator knows in one of three ways."""
    from accelerate import Accelerator

    def training() -> tuple[Any, Any, Any]:
        accelerator, optimizer = Accelerator(cpu=True), sgd()
        if how == "made over the prepared optimizer":
            prepared: Any = accelerator.prepare(optimizer)
            schedule = LambdaLR(prepared, lambda step: 1 / (1 + step))
            accelerator.prepare(schedule)
        else:
            schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
            accelerator.prepare(optimizer, *([schedule] if how == "prepared" else []))
        if how == "registered":
            accelerator.register_for_checkpointing(schedule)
        return accelerator, optimizer, schedule

    def step(optimizer: Any, schedule: Any) -> float:
        schedule.optimizer.step()
        schedule.step()
        return rate(optimizer)

    carried_out(learning_rate_factor=factor)
    accelerator, optimizer, schedule = training()
    before = step(optimizer, schedule)
    assert before == pytest.approx(factor * 0.1 / 2)
    folder = Path(accelerator.save_state(str(tmp_path / "saved")))
    assert rate(optimizer) == before  # to the last bit
    assert torch.load(folder / "optimizer.bin")["param_groups"][0]["lr"] == pytest.approx(0.1 / 2)
    again, other, its = training()
    again.load_state(str(folder))
    assert step(other, its) == pytest.approx(factor * 0.1 / 3)
    assert step(optimizer, schedule) == pytest.approx(factor * 0.1 / 3)
    state = "custom_checkpoint_0.pkl" if how == "registered" else "scheduler.bin"
    saved = torch.load(folder / state, weights_only=False)
    assert saved["base_lrs"] == pytest.approx([0.1])


def test_later_models_follow_the_plan_where_they_are_made_as_the_first(carried_out: Any) -> None:
    """Trainings one after the other (folds); whatever else a script prepares is as written."""
    from accelerate import Accelerator

    first, alike, larger, frozen, other, own = (
        nn.Sequential(nn.Sequential(nn.Linear(size, size), nn.ReLU())) for size in (1, 1, 2, 1, 1, 1)
    )
    first.sizes, alike.sizes, other.sizes = [1], [1], [2]  # type: ignore[assignment]
    frozen.requires_grad_(False).sizes = [1]  # type: ignore[assignment]
    own.sizes = lambda: 1  # type: ignore[assignment]
    carried_out(recipe=LaunchPlan().recipe.with_(checkpoint=("0",)))
    accelerator = Accelerator(cpu=True)
    treated = []
    for model in (first, alike, larger, frozen, other, own):
        accelerator.prepare(model)
        treated.append(type(model[0].forward).__name__ == "Checkpointed")
    assert treated == [True, True, False, False, False, False]


def test_each_of_several_models_has_its_own_part_of_the_plan(carried_out: Any) -> None:
    from accelerate import Accelerator

    carried_out(models=11, recipe=LaunchPlan().recipe.with_(checkpoint=("0.0", "10.1")))
    accelerator = Accelerator(cpu=True)
    treated = []
    for _number in range(11):
        model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1)))
        accelerator.prepare(model)
        treated.append([type(part.forward).__name__ == "Checkpointed" for part in model])
    assert treated == [[True, False], *[[False, False]] * 9, [False, True]]


def test_another_model_than_the_planned_one_ends_the_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))\n"
        "if torch.cuda.is_available():\n"
        "    model = nn.DataParallel(model)\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "print('trained')\n"
    )
    plan = LaunchPlan(by_itself=True, recipe=LaunchPlan().recipe.with_(checkpoint=("module.0",)))
    done = subprocess.run(
        [sys.executable, "-m", "vram_guard_accelerate", str(script)],
        env=cases.environment(**{VARIABLE: to_json(plan)}), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (EXIT_ENVIRONMENT, "")
    assert "'module.0'" in done.stderr
    assert "Traceback" not in done.stderr
