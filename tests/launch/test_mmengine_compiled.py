"""MMEngine's compiled ``train_step``: the forward, DistributedDataParallel's buckets and the optimizer's step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: I001, F401 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import mmengine_compiled_cases as compiled
import two_ranks
from compiled_cases import MISSING

from vram_guard.plan import plan
from vram_guard.plan.model import CompiledStep
from vram_guard.simulate.compiled import Compiler
from vram_guard.simulate.tracing.run import run_step
from vram_guard.timeline import Timeline
from vram_guard_mmengine._training import RunnerTraining

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason="this torch's compiler is not followed"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_configs(tmp_path_factory.mktemp("compiled") / "configs", cases.MMPRETRAIN)


@pytest.mark.parametrize("optimizer", [compiled.ADAMW, compiled.SGD], ids=lambda one: one["type"])
def test_a_step_has_the_graphs_that_the_real_training_compiles(root: Path, optimizer: Any, tmp_path: Path) -> None:
    _eager, traced = compiled.traced(compiled.cfg_of(root, tmp_path / "traced", optimizer))
    assert traced.compiled is not None
    # Of the forward and of the loss that is scaled, with their backwards; and the optimizer's.
    assert traced.compiled.graphs == compiled.in_copy(compiled.cfg_of(root, tmp_path / "real", optimizer)) == 5


def bytes_of(timeline: Timeline, category: str) -> int:
    sizes = timeline.sizes(compiled.SAMPLES)
    return sum(size for block, size in zip(timeline.blocks, sizes, strict=True) if block.category == category)


def test_the_optimizers_compiled_step_makes_no_tensor_of_its_own_but_counts_steps_on_the_gpu(
    root: Path, tmp_path: Path
) -> None:
    eager, traced = compiled.traced(compiled.cfg_of(root, tmp_path, compiled.ADAMW, width=512))
    weights, tensors = bytes_of(eager, "parameters"), sum(block.category == "parameters" for block in eager.blocks)
    # Dynamo sets ``capturable``, with which each parameter's count of steps lies beside it: 512 bytes of a block.
    assert bytes_of(eager, "optimizer_states") == 2 * weights
    counted = [block for block in traced.blocks if block.category == "optimizer_states"]
    assert len(counted) == 3 * tensors
    assert bytes_of(traced, "optimizer_states") == 2 * weights + 4 * tensors
    # Weights, gradients and two states; torch's own kernels over lists make one tensor more of each weight's size.
    all_of_it = 4 * weights + bytes_of(traced, "workspace")
    assert traced.at(compiled.SAMPLES).peak_allocated < 1.01 * all_of_it
    assert eager.at(compiled.SAMPLES).peak_allocated > all_of_it + weights


def test_loss_scaling_and_clipping_are_followed_around_the_compiled_step(root: Path, tmp_path: Path) -> None:
    step = captured(compiled.cfg_of(root, tmp_path, compiled.ADAMW)).step.with_(precision="16-mixed")
    made = Compiler(lambda size: run_step(step, size, (8, 0), compiled=True), 300)(compiled.SAMPLES)
    assert made.compiled is not None
    assert made.compiled.graphs >= 5
    assert len([block for block in made.blocks if block.category == "optimizer_states"]) > 0


def test_groups_that_a_config_makes_are_followed_just_where_torch_compiles_them(root: Path, tmp_path: Path) -> None:
    """MMEngine makes the groups of ``paramwise_cfg`` of its own kind of dict, at which torch 2.13's compiler stops."""

    def cfg(name: str) -> Any:
        optimizer = {**compiled.ADAMW, "weight_decay": 0.05}
        return compiled.cfg_of(root, tmp_path / name, optimizer, paramwise_cfg={"norm_decay_mult": 0.0})

    def trained() -> int | str:
        try:
            return compiled.in_copy(cfg("real"))
        except Exception as error:  # noqa: BLE001 - the compiler's own, which the training ends with
            return str(error)

    made, real = planned(cfg("traced")), trained()
    if isinstance(real, int):
        assert (made.why, made.graphs) == ("", real)
    else:
        why = made.why.partition(": ")[2]
        assert why
        assert why in real


def captured(cfg: Any) -> Any:
    cfg.compile = True
    return RunnerTraining(cases.build(cfg), whole_job=False).capture()


def planned(cfg: Any) -> CompiledStep:
    """What a plan says of the compiled step."""
    found = captured(cfg)
    with found.symbolic_run():
        made = plan(found.step, compiled.SAMPLES, "1GiB").compiled
    assert made is not None
    return made


def test_two_processes_compile_what_is_predicted(tmp_path: Path) -> None:
    """Dynamo leaves MMDistributedDataParallel alone, and ends a graph before it, after it and at each bucket's end."""
    first, second = two_ranks.answers("mmengine_compiled_script.py", tmp_path, limit=300)
    assert first == second
    # The batch is prepared, the loss is put together and scaled, and the optimizer steps: 6; two for each bucket.
    assert first["traced"] == first["real"] == 6 + 2 * 3
    assert first["smaller"]
