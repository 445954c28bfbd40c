"""Lightning's compiled models: the step is followed as the compiler makes it, and the training compiles as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning_cases as cases
from compiled_cases import MISSING, WIDTH
from lightning_compiled_cases import NAMESPACE, Module, Stop

from vram_guard_lightning import VramGuard

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason="this torch's compiler is not followed"),
    pytest.mark.filterwarnings("ignore"),
]


def planned(root: Any, module: Any, guard: VramGuard | None = None) -> Any:
    guard = guard or VramGuard(budget="1GiB", mode="report")
    data = cases.loader(dataset=cases.Vectors(4096, WIDTH), batch_size=4096)
    trainer = cases.make_trainer(NAMESPACE, root, [guard, stop := Stop()], max_steps=1)
    trainer.fit(module, train_dataloaders=data)
    assert trainer.global_step == 0
    assert guard.plan is not None
    # Put in force before the first step, and taken back after the training.
    assert stop.budget == (guard.plan.recipe.activation_memory_budget or 1.0)
    assert torch._functorch.config.activation_memory_budget == 1.0
    return guard.plan


@pytest.mark.parametrize("hook", ["configure_model", "setup"])
def test_modules_compiled_in_a_hook_are_followed(tmp_path: Any, hook: str) -> None:
    check(planned(tmp_path, Module(hook)))


def test_a_module_compiled_as_a_whole_is_followed(tmp_path: Any) -> None:
    check(planned(tmp_path, torch.compile(Module())))


def test_compiled_code_saves_less_where_that_is_allowed_and_needed(tmp_path: Any) -> None:
    as_written = planned(tmp_path, Module("setup", count=6))
    limit = as_written.estimate.peak_reserved - 1
    guard = VramGuard(budget=limit, margin=0, allow=["activation_memory_budget"])
    plan = planned(tmp_path, Module("setup", count=6), guard)
    assert plan.fits
    assert plan.recipe.activation_memory_budget is not None
    check(plan)


def check(plan: Any) -> None:
    assert plan.compiled is not None
    assert plan.compiled.why == ""
    assert plan.compiled.graphs >= 2
    assert plan.estimate.peak_allocated < plan.compiled.eager.peak_allocated
