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
    trainer = cases.make_trainer(NAMESPACE, root, [guard, Stop()], max_steps=1)
    trainer.fit(module, train_dataloaders=data)
    assert trainer.global_step == 0
    assert guard.plan is not None
    return guard.plan


@pytest.mark.parametrize("hook", ["configure_model", "setup"])
def test_modules_compiled_in_a_hook_are_followed(tmp_path: Any, hook: str) -> None:
    check(planned(tmp_path, Module(hook)))


def test_a_module_compiled_as_a_whole_is_followed(tmp_path: Any) -> None:
    check(planned(tmp_path, torch.compile(Module())))


def check(plan: Any) -> None:
    assert plan.compiled is not None
    assert plan.compiled.why == ""
    assert plan.compiled.graphs >= 2
    assert plan.estimate.peak_allocated < plan.compiled.eager.peak_allocated
