"""Modules instead of scripts, and accelerate's config files: real launches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases  # noqa: E402 - what is tested has to be there
from accelerate_cases import difference, launch  # noqa: E402

from vram_guard.codec import to_json  # noqa: E402
from vram_guard.techniques import Body, Recipe, Slices  # noqa: E402
from vram_guard_accelerate.launch_plan import VARIABLE, LaunchPlan  # noqa: E402

MODULE = ("-m", "packaged.train")
CONFIG = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {kind}
dynamo_config:
  dynamo_backend: 'NO'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: {processes}
use_cpu: {cpu}
gpu_ids: all
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of their processes."""
    folder, written = tmp_path_factory.mktemp("configs"), {}
    for processes, kind, cpu in ((1, "'NO'", "true"), (2, "MULTI_GPU", "false")):
        written[processes] = folder / f"{processes}.yaml"
        written[processes].write_text(CONFIG.format(kind=kind, processes=processes, cpu=cpu))
    return written


@pytest.fixture(autouse=True)
def beside_the_package(monkeypatch: Any) -> None:
    monkeypatch.chdir(cases.HERE / "accelerate_scripts")


def run(configs: dict[int, Path], processes: int, out: Path, *own: str, guarded: bool = False, **more: str) -> Any:
    config = ("--config_file", configs[processes])
    done = launch(*config, *own, out, cache=out.parent, guarded=guarded, ACCELERATE_USE_CPU="true", **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return {**torch.load(out), "said": done.stderr}


@pytest.fixture(scope="module")
def plain(configs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(cases.HERE / "accelerate_scripts")
        return run(configs, 1, tmp_path_factory.mktemp("plain") / "plain.pt", *MODULE)


def test_a_module_of_a_package_runs_under_the_plan_as_its_config_file_says(
    configs: Any, plain: Any, tmp_path: Path
) -> None:
    options = ("--budget", "60MiB", "--margin", "0", "--allow", "slices")
    found = run(configs, 1, tmp_path / "guarded.pt", "-v", *options, *MODULE, guarded=True)
    assert "slices of the batch" in found["said"]
    assert (found["package"], found["precision"], found["processes"]) == ("packaged", "bf16", 1)
    assert 0 < difference(plain, found) < 1e-4  # gradients of bfloat16


def test_blocks_keep_results_as_the_plan_of_the_launch_says(configs: Any, plain: Any, tmp_path: Path) -> None:
    blocks = tuple(f"blocks.{number}" for number in range(3))
    for keeps in ((), ("addmm",)):
        plan = LaunchPlan(
            batch_size=16,
            grown_batch_size=16,
            recipe=Recipe(checkpoint=blocks, checkpoint_keeps=keeps),
        )
        planned = {VARIABLE: to_json(plan)}
        found = run(configs, 1, tmp_path / f"{len(keeps)}.pt", "-m", "vram_guard_accelerate", *MODULE, **planned)
        assert difference(plain, found) == 0


def test_a_module_behind_the_guards_own(configs: Any, tmp_path: Path) -> None:
    """``accelerate launch -m vram_guard_accelerate -m package.module``, two processes by the config file."""
    sliced = {VARIABLE: to_json(LaunchPlan(recipe=Recipe(slices=Slices(Body("", ("0",)), 2, 1))))}
    found = run(configs, 2, tmp_path / "out.pt", "-m", "vram_guard_accelerate", *MODULE, **sliced)
    assert (found["package"], found["precision"], found["processes"]) == ("packaged", "bf16", 2)
