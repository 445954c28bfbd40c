"""Plans applied to compiled models in real processes: one, and two over gloo, whose blocks Accelerate compiles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("Accelerate launches one process", allow_module_level=True)

import accelerate_cases as cases
from compiled_cases import MISSING
from test_accelerate_compiled import FSDP2

from vram_guard.codec import to_json
from vram_guard.techniques import Recipe
from vram_guard_accelerate.launch_plan import LaunchPlan

pytestmark = pytest.mark.skipif(bool(MISSING), reason="this torch's compiler is not followed")

#: It divides graphs as Inductor does (by the minimal cut), and writes no C++.
BACKEND = "aot_eager"
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def trained(folder: Path, recipe: Recipe | None = None) -> dict[str, Any]:
    plan = "" if recipe is None else to_json(LaunchPlan(recipe=recipe))
    return cases.trained(folder, "compiled", "--regions", "--backend", BACKEND, plan=plan, **FSDP2)


@pytest.fixture(scope="module")
def as_written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("written"))


@pytest.mark.parametrize("recipe", [Recipe(checkpoint=BLOCKS)])
def test_compiled_blocks_under_fsdp2_train_under_a_plan_as_they_are_written(
    as_written: dict[str, Any], recipe: Recipe, tmp_path: Path
) -> None:
    found = trained(tmp_path, recipe)
    assert found["fsdp"]
    assert (found["forwards"] != as_written["forwards"]) is bool(recipe.checkpoint)
    assert found["losses"] == pytest.approx(as_written["losses"], rel=1e-6)
    for name, weight in as_written["weights"][0].items():
        torch.testing.assert_close(found["weights"][0][name], weight, rtol=1e-5, atol=1e-6)
