"""Launches of several processes whose model Accelerate compiles, as a whole or block by block: DDP and FSDP2."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases
from compiled_cases import MISSING, graphs_under_ddp, graphs_under_layout

from vram_guard.parallel.spec import Parallel

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason="this torch's compiler is not followed"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, of its compiler
]

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def asked(folder: Any, **variables: str) -> dict[str, dict[str, Any]]:
    for name, more in (("whole", ()), ("regions", ("--regions",))):
        words = ("compiled", "--out", "never.pt", "--batch_size", 4096, "--samples", 16384, *more)
        cases.request(folder / name, cases.SHARDED, *words, ranks=2, whole_job=False)
    return cases.dry_runs(folder, **variables)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return asked(tmp_path_factory.mktemp("ddp") / "asked")


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return asked(tmp_path_factory.mktemp("fsdp2") / "asked", **FSDP2)


def followed(answer: dict[str, Any]) -> int:
    """Graphs of a forward."""
    assert "error" not in answer, answer
    compiled = answer["plan"]["compiled"]
    assert (compiled["followed"], compiled["why"], compiled["breaks"]) == (True, "", [])
    assert answer["plan"]["estimate"]["peak_reserved"] < compiled["eager"]["peak_reserved"]
    return int(compiled["graphs"]) // 2


@pytest.mark.parametrize("name", ["whole", "regions"])
def test_what_accelerate_compiles_under_ddp_is_divided_as_in_real_processes(
    replicated: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(cases.SHARDED.parent))
    wide = importlib.import_module("sharded").Wide()

    def made(compiler: Any) -> Any:
        if name == "regions":  # as Accelerate's compile_regions has it
            for parts in (wide.blocks._modules, wide._modules):
                parts.update({key: compiler(part) for key, part in parts.items() if part is not wide.blocks})
        replica = DistributedDataParallel(wide, bucket_cap_mb=2)
        return compiler(replica) if name == "whole" else replica

    assert followed(replicated[name]) == graphs_under_ddp(made, lambda model: model(torch.ones(4, 8)).sum())


@pytest.mark.parametrize("name", ["whole", "regions"])
def test_what_accelerate_compiles_under_fsdp2_is_divided_as_by_torch(
    divided: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Newer releases of torch compile its own modules too: the first and the last one here."""
    monkeypatch.syspath_prepend(str(cases.SHARDED.parent))
    wide = importlib.import_module("sharded").Wide()

    def made(compiler: Any) -> Any:  # compiled before it is divided, as Accelerate has it
        for part in (wide.first, *wide.blocks, wide.last) if name == "regions" else [wide]:
            part.compile(backend=compiler)
        return wide

    real = graphs_under_layout(made, lambda model: model(torch.ones(4, 8)).sum(), Parallel(2, kind="fsdp2"))
    assert 2 * followed(divided[name]) == real
