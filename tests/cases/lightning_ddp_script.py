"""Two real processes under DDP (gloo, CPU); run by test_lightning_ddp.py, once per rank by Lightning itself."""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_cases as cases
import torch
from compiled_cases import WIDTH
from lightning.pytorch.strategies import DDPStrategy
from lightning_compiled_cases import Module, Stop

from vram_guard.guard import settling
from vram_guard.watch.process_groups import end_process_groups
from vram_guard_lightning import VramGuard

warnings.simplefilter("ignore")


def budget(case: str, rank: int) -> Any:
    """What this rank is told it may use."""
    tight = int(os.environ.get("TIGHT", "0"))
    if case == "least":
        return tight if rank == 1 else "64GiB"
    return "64GiB" if case in ("fits", "compiled") else tight


def broken_plan(*_: Any, **__: Any) -> Any:
    raise ValueError("this rank cannot think")


def main(case: str, out: Path) -> None:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if case == "one fails" and rank == 0:  # which plans for both
        settling.planned = broken_plan
    guard = (
        VramGuard(budget=budget(case, rank), margin=0, allow=("accumulate",), loss_weight="mean")
        if case != "plain"
        else None
    )
    module = cases.make_module("lightning.pytorch", scheduler="one_cycle", width=512, hidden=2048, optimizer="sgd")
    data = cases.loader(dataset=cases.Vectors(4096 * 2 + 333, 512), batch_size=2048)
    callbacks: list[Any] = [guard] if guard else []
    if case == "compiled":
        module, callbacks = Module("setup"), [*callbacks, Stop()]
        data = cases.loader(dataset=cases.Vectors(8192, WIDTH), batch_size=4096)
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=200))
    trainer = cases.make_trainer("lightning.pytorch", out, callbacks, devices=2, strategy=strategy, max_epochs=2)
    pl.seed_everything(7)
    result: dict[str, Any] = {}
    try:
        trainer.fit(module, data)
    except Exception as error:  # noqa: BLE001 - whatever it was, the test wants to know
        result["error"] = f"{type(error).__name__}: {error}"
    if case == "compiled":
        assert guard is not None
        plan: Any = guard.plan
        result |= {"why": plan.compiled.why, "graphs": plan.compiled.graphs}
        result |= {"peaks": [plan.estimate.peak_allocated, plan.compiled.eager.peak_allocated]}
        (out / f"result-{rank}.json").write_text(json.dumps(result))
        return
    vector = cases.weights(module).double()
    result |= {
        "rates": module.rates,
        "loaded": module.loaded,
        "largest": max(module.seen, default=0),
        "norm": vector.norm().item(),
        "plan": None if guard is None or guard.plan is None else [guard.plan.micro_batch_size, guard.plan.splits],
        "usable": None if guard is None or guard.plan is None else guard.plan.budget.usable,
        "peak": None if guard is None or guard.plan is None else guard.plan.before.peak_reserved,
    }
    torch.save(vector, out / f"weights-{rank}.pt")
    (out / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    end_process_groups()  # no SIGABRT after the work (PyTorch's issue 190489)
