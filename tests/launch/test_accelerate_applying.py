"""A launch plan on real objects of torch and Accelerate, in this process."""

from __future__ import annotations

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

from vram_guard.cli import EXIT_ENVIRONMENT  # noqa: E402
from vram_guard.codec import to_json  # noqa: E402
from vram_guard_accelerate.apply.applying import PlanInstaller  # noqa: E402
from vram_guard_accelerate.launch_plan import VARIABLE, LaunchPlan  # noqa: E402


@pytest.fixture
def carried_out(monkeypatch: Any) -> Iterator[Callable[..., PlanInstaller]]:
    """Install a plan for one test."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    for name in ("prepare", "prepare_model"):
        monkeypatch.setattr(Accelerator, name, getattr(Accelerator, name))

    def install(**plan: Any) -> PlanInstaller:
        installer = PlanInstaller(LaunchPlan(**plan))
        installer.install()
        return installer

    yield install
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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
