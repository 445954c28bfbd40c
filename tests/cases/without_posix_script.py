"""A process on Windows or macOS, as far as Python shows it; run by test_without_posix.py: SYSTEM WORK,... FOLDER."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import without_posix
from guard_arguments import in_advanced


def imports(_folder: Path) -> Any:
    """Every module of the packages that run there; the errors."""
    failed = {}
    for package in ("vram_guard", "vram_guard_lightning", "vram_guard_mmengine"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if module.name.rpartition(".")[2] == "__main__":
                continue
            try:
                importlib.import_module(module.name)
            except Exception:  # noqa: BLE001 - each one is told
                failed[module.name] = traceback.format_exc()
    return failed


def lightning(folder: Path) -> Any:
    """A Trainer whose plan changes something, which validates and keeps checkpoints."""
    import lightning_cases as cases

    from vram_guard_lightning import VramGuard

    said = io.StringIO()
    plans = []
    for settings in ({"budget": "64GiB"}, {"budget": 0}):
        if not settings["budget"]:
            settings["budget"] = plans[0].before.peak_reserved - 1
        guard = VramGuard(**in_advanced({**settings, "margin": 0, "remember": False}))
        module = cases.make_module("lightning.pytorch", width=512, hidden=2048, optimizer="sgd")
        trainer = cases.make_trainer("lightning.pytorch", folder, [guard], max_epochs=1)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            trainer.fit(module, cases.loader(dataset=cases.Vectors(4096 * 2, 512), batch_size=4096))
        plans.append(guard.plan)
    return {"changes": bool(plans[1].changes), "fits": plans[1].fits, "steps": trainer.global_step}


def mmengine(folder: Path) -> Any:
    """A Runner whose plan changes something."""
    import mmengine_cases as cases

    root = cases.write_configs(folder / "configs", cases.MMPRETRAIN)
    runner, budget = "vram_guard_mmengine.GuardRunner", "1GiB"
    for _turn in range(2):
        settings = {"budget": budget, "margin": 0, "advanced": {"remember": False}}
        with contextlib.redirect_stdout(io.StringIO()):
            trained = cases.train(
                cases.load(root, "small.py", folder / "work", runner_type=runner, vram_guard=settings)
            )
        plan = cases.guard(trained).plan
        budget = plan.before.peak_reserved - 1
    return {"changes": bool(plan.changes), "fits": plan.fits, "steps": trained.iter}


def alive(_folder: Path) -> Any:
    """Trainings that say that they run, and a process that has ended."""
    from vram_guard.watch.running import running, running_here, started

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = running_here(1, 1)
    known = list(running())
    own.forget()
    return {"known": known == [own.pid], "ended": started(ended.pid)}


def commands(folder: Path) -> Any:
    """Exit code, standard output and standard error of commands."""
    from vram_guard.cli import main

    (folder / "steps.py").write_text(
        "import torch\nfrom vram_guard import TrainingStep\n"
        "def build(batch_size=4):\n"
        "    net = torch.nn.Linear(64, 64)\n"
        "    return TrainingStep(net, torch.ones(batch_size, 64), lambda net, x: net(x).sum())\n"
    )
    (folder / "train.py").write_text("")
    step = ["--step", f"{folder / 'steps.py'}:build", "--batch", "4", "--gpu", "RTX 4090"]
    found = {}
    for words in (
        ["plan", *step],
        ["estimate", *step],
        ["gpus"],
        ["launch", "--gpu", "RTX 4090", "--cpu", str(folder / "train.py")],
    ):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: Any = main(words)
            except SystemExit as left:
                code = left.code
        found[words[0]] = [code, out.getvalue(), err.getvalue()]
    return found


if __name__ == "__main__":
    without_posix.take_away(sys.argv[1])
    found = {work: globals()[work](Path(sys.argv[3])) for work in sys.argv[2].split(",")}
    print(json.dumps(found))
