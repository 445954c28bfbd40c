"""Layouts, and plans over several GPUs, leave what is learned as it was: real processes beside one plain process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import equal_weights_script as script
import pytest
import torch
from equal_weights_script import CASES, FAULTS, HALF, Case, Weights
from parallel_cases import loss

from vram_guard import Plan, TrainingStep, plan
from vram_guard.plan import PlanOptions

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copies (fork)"),
    pytest.mark.torch_since(2, 6),
]

ROOT = Path(__file__).parents[2]
#: The weights are at most about one, and float32 has 6e-8 of that.
NEAR = 1e-6
#: What a fault must make at least, so that it is told apart from rounding.
FAR = 1e-3

#: Batches that one of two ranks loads, and plans under budgets that they exceed: (layouts, budget, what may change).
LOADED = 512
PLANS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "all blocks": (("ddp",), "28MiB", ("accumulate", "checkpoint")),
    "some blocks, micro-batches of replicas": (("ddp",), "26MiB", ("accumulate", "checkpoint")),
    "some blocks": (("zero1",), "30MiB", ("checkpoint",)),
    "some blocks, micro-batches": (("fsdp2",), "30MiB", ("accumulate", "checkpoint")),
}
#: Batches that are loaded for an optimizer step, as written.
ACCUMULATED = 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the real processes have: in bfloat16, more threads add up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(folder: Path, cases: Mapping[str, Case], ranks: int) -> list[dict[str, dict[str, Any]]]:
    """What each rank of real processes under gloo ends with, by case."""
    (folder / "cases").write_bytes(pickle.dumps(dict(cases)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script.__file__, str(folder), "cases", str(ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"cases.{rank}") for rank in range(ranks)]


def distance(one: Weights, other: Weights) -> float:
    """The largest difference of a weight."""
    assert one.keys() == other.keys()
    assert all(weight.dtype == torch.float32 for weight in (*one.values(), *other.values()))
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def plain(case: Case) -> Weights:
    return script.as_written(case.model, case.samples, case.clip)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run(tmp_path_factory.mktemp("layouts"), {**CASES, **HALF, **FAULTS}, script.RANKS)


@pytest.mark.parametrize("name", CASES)
def test_four_real_processes_learn_what_one_learns_of_the_whole_batch(real: Any, name: str) -> None:
    wanted = plain(CASES[name])
    for rank in real:
        assert distance(rank[name]["weights"], wanted) < NEAR


@pytest.mark.parametrize("model", [script.net, script.Transformer, script.tied])
@pytest.mark.parametrize("clip", [None, script.CLIP])
def test_the_plain_training_moves_its_weights(model: Any, clip: float | None) -> None:
    """Else the tests above would compare what was never trained."""
    start = {name: parameter.detach() for name, parameter in script.built(model).named_parameters()}
    moved = [float((start[name] - now).abs().max()) for name, now in script.as_written(model, clip=clip).items()]
    assert sum(far > 2 * FAR for far in moved) >= len(moved) - 2  # a bias of keys changes no attention
    assert clip is None or distance(script.as_written(model, clip=clip), script.as_written(model)) > FAR


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(real: Any, name: Any) -> None:
    wanted = plain(FAULTS[name])
    assert all(distance(rank[name]["weights"], wanted) > FAR for rank in real)


def test_parts_in_bfloat16_are_those_of_one_process_in_bfloat16(real: Any) -> None:
    """Each rank rounds as one process does with that rank's samples; only what adds up the ranks' gradients differs."""
    wanted, exact = script.in_half_precision(), script.as_written()
    added, rounded = (real[0][name]["weights"] for name in HALF)
    assert distance(added, wanted) < NEAR
    # Rounding to eight bits is seen: nowhere, in the ranks alone, and in their sum as well.
    assert distance(added, exact) > FAR
    assert distance(rounded, wanted) > FAR


# --- plans ------------------------------------------------------------------------------------------------------------


def planned(layouts: tuple[str, ...], budget: str, allow: tuple[str, ...]) -> Plan:
    step = TrainingStep(
        model=script.deep_net,
        batch=lambda size: torch.zeros(size, script.LENGTH, dtype=torch.long),
        loss=loss,
        optimizer=script.optimizer,
        clip_grad_norm=script.CLIP,
        accumulate=ACCUMULATED,
    )
    return plan(step, LOADED, budget, gpus=2, options=PlanOptions(layouts=layouts), allow=allow, margin=0.0)


def applied(made: Plan) -> Case:
    """A plan as a training over two processes, without anything that it does not say."""
    assert made.spread is not None
    assert made.spread.layout is not None
    assert made.micro_batch_size * made.accumulate * made.spread.gpus == made.spread.samples
    return Case(
        made.spread.layout,
        script.deep_net,
        made.recipe,
        samples=made.spread.samples,
        accumulate=ACCUMULATED,
        splits=made.splits,
        clip=script.CLIP,
    )


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: planned(*wishes) for name, wishes in PLANS.items()}


@pytest.fixture(scope="module")
def followed(plans: dict[str, Plan], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What two processes learn under each plan, and under one whose samples are twice the same."""
    cases = {name: applied(made) for name, made in plans.items()}
    wrong = replace(next(iter(cases.values())), fault="other samples")
    return run(tmp_path_factory.mktemp("plans"), {**cases, "wrong": wrong}, 2)


def test_the_plans_change_what_they_are_about(plans: dict[str, Plan]) -> None:
    blocks = {f"blocks.{number}" for number in range(6)}
    for name, made in plans.items():
        assert made.fits
        assert not made.fits_as_written
        assert made.spread is not None
        assert made.spread.samples == 2 * LOADED * ACCUMULATED == made.effective_batch_size
        checkpointed = set(made.checkpointed_modules)
        assert checkpointed == blocks if "all" in name else checkpointed < blocks
        assert checkpointed
        assert (made.splits > 1) == ("micro-batches" in name)
    assert len({made.spread.layout for made in plans.values() if made.spread}) == 3


@pytest.mark.parametrize("name", PLANS)
def test_two_processes_under_a_plan_learn_what_the_training_as_written_learns(
    plans: dict[str, Plan], followed: Any, name: str
) -> None:
    made = plans[name]
    wanted = plain(applied(made))
    for rank in followed:
        assert distance(rank[name]["weights"], wanted) < NEAR
        forwards = script.STEPS * made.accumulate
        # The plan was really in force: what is checkpointed runs twice.
        assert rank[name]["ran"] == {
            f"blocks.{number}": forwards * (2 if f"blocks.{number}" in made.checkpointed_modules else 1)
            for number in range(6)
        }


def test_a_rank_with_other_samples_is_seen_under_a_plan(plans: dict[str, Plan], followed: Any) -> None:
    wanted = plain(applied(next(iter(plans.values()))))
    assert all(distance(rank["wrong"]["weights"], wanted) > FAR for rank in followed)
