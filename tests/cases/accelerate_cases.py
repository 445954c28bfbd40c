"""Dry runs and launches for the tests of the Accelerate integration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import preloaded
from guard_arguments import in_advanced
from guard_imports import PLANS

from vram_guard.budget import Budget
from vram_guard.codec import to_json
from vram_guard_accelerate._settings import LaunchSettings
from vram_guard_accelerate.dry_run.side_effects import SILENT_ENVIRONMENT
from vram_guard_accelerate.launch_plan import VARIABLE
from vram_guard_accelerate.planning.requests import ANSWER, REQUEST, DryRunRequest

HERE = Path(__file__).parent
TRAINING = HERE / "accelerate_scripts" / "training.py"
TRAINER = HERE / "accelerate_scripts" / "trainer.py"
OPTIONS = HERE / "accelerate_scripts" / "options.py"
SHARDED = HERE / "accelerate_scripts" / "sharded.py"
EDITED = HERE / "accelerate_scripts" / "edited.py"

#: accelerate says which of these it was not given.
QUIET = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
ONE = ("--cpu", "--num_processes", "1", *QUIET)
TWO = ("--multi_gpu", "--num_processes", "2", *QUIET)

#: What processes of a launch import anyway (an optimizer needs the compiler), and those of a script with the Trainer.
LIBRARIES = ("torch", "torch._dynamo", "accelerate", "torch.distributed.tensor")
TRAINER_LIBRARIES = (*LIBRARIES, "transformers.trainer")


def environment(*, libraries: Sequence[str] = LIBRARIES, **more: str) -> dict[str, str]:
    """Variables of a launch whose processes begin with the libraries imported; without any they start as everywhere.

    A dry run begins without torch's compiler, which it takes care not to import.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "VRAM_GUARD_"))}
    variables = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    of_dry_runs = (*(name for name in libraries if name != "torch._dynamo"), *PLANS)
    worker = "vram_guard_accelerate.planning.worker"
    others = {worker: (*of_dry_runs, "vram_guard_accelerate.planning.followed_script")}
    return {**preloaded.environment(variables, *libraries, others=others if libraries else {}), **more}


def launch(
    *arguments: object,
    cache: Path,
    guarded: bool = True,
    timeout: float = 240,
    libraries: Sequence[str] = LIBRARIES,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """`vram-guard launch arguments`, or `accelerate launch arguments`."""
    command = [sys.executable, "-m", "vram_guard.cli", "launch"]
    if not guarded:
        command = [sys.executable, "-m", "accelerate.commands.launch"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env=environment(libraries=libraries, VRAM_GUARD_CACHE=str(cache), **more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def trained(
    folder: Path,
    *arguments: object,
    script: Path = SHARDED,
    plan: str = "",
    libraries: Sequence[str] = LIBRARIES,
    **variables: str,
) -> dict[str, Any]:
    """What two processes of a script over gloo have come to, under a launch plan or as written."""
    import torch

    how = {VARIABLE: plan} if plan else {}
    under = ("-m", "vram_guard_accelerate") if plan else ()
    words = (*arguments, "--samples", 16, "--out", folder / "out.pt")
    done = launch(*TWO, *under, script, *words, cache=folder, guarded=False, libraries=libraries, **how, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / "out.pt")
    assert found["processes"] == 2
    return found


def request(
    folder: Path,
    *command: object,
    budget: str = "1GiB",
    ranks: int = 1,
    local_ranks: int | None = None,
    gpu: str | None = None,
    **settings: Any,
):
    """What :mod:`vram_guard_accelerate.planning.worker` is to answer."""
    folder.mkdir(parents=True)
    given = Budget.resolve(budget, gpu, margin=0.0)
    given = replace(given, compute_capability=given.compute_capability or (8, 0))
    asked = DryRunRequest(
        tuple(map(str, command)),
        False,
        LaunchSettings.of(in_advanced(settings)),
        given,
        ranks,
        local_ranks=local_ranks or ranks,
    )
    (folder / REQUEST).write_text(to_json(asked), encoding="utf-8")


class DryRuns(Mapping[str, dict[str, Any]]):
    """The answers to the requests in a folder, each made when it is first asked for, from one process.

    Args:
        folder: of the requests.
        more: variables of the process.
    """

    def __init__(self, folder: Path, **more: str) -> None:
        self._folder = folder
        self._names = sorted(one.name for one in folder.iterdir() if (one / REQUEST).is_file())
        self._found: dict[str, dict[str, Any]] = {}
        self._said = folder.with_name(f"{folder.name}.log")
        silent = {**SILENT_ENVIRONMENT, "ACCELERATE_MIXED_PRECISION": "no"}
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "accelerate_dry_runs.py"), str(folder)],
                env=environment(libraries=TRAINER_LIBRARIES, **silent, **more),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        weakref.finalize(self, _end, self._process)

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._found:
            self._found[name] = self._answered(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _answered(self, name: str) -> dict[str, Any]:
        if name not in self._names:
            raise KeyError(name)
        one = self._folder / name
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"{name}\n", self._said.read_text()[-2000:]
        answer: dict[str, Any] = json.loads((one / ANSWER).read_text(encoding="utf-8"))
        answer["printed"] = (one / "log.txt").read_text(encoding="utf-8")
        return answer


def _end(process: subprocess.Popen[str]) -> None:
    """It ends when nobody asks any more."""
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def dry_runs(folder: Path, **more: str) -> Mapping[str, dict[str, Any]]:
    """Answer every request in the folder, from one process."""
    return DryRuns(folder, **more)


def wide_step(**settings: Any) -> Any:
    """The training of ``sharded.py`` as a step, spread or kept on the host as the settings say."""
    import torch
    from torch import nn

    from vram_guard.step import TrainingStep

    sys.path.insert(0, str(SHARDED.parent))
    try:
        from sharded import Wide
    finally:
        sys.path.pop(0)
    return TrainingStep(
        Wide(),
        lambda size: (torch.zeros(size, 8), torch.zeros(size, dtype=torch.long)),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.AdamW(parameters),
        clip_grad_norm=0.1,
        **settings,
    )


def difference(a: Any, b: Any) -> float:
    """The largest difference between the weights of two runs."""
    return max(
        float((one[name] - other[name]).abs().max())
        for one, other in zip(a["weights"], b["weights"], strict=True)
        for name in one
    )
