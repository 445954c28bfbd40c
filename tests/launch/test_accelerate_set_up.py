"""The order in which a script sets up its training, and what lies on the GPU before it: under ``vram-guard launch``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("safetensors")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases

SCRIPT = cases.HERE / "accelerate_scripts" / "set_up.py"
MIB = 2**20
ORDERS = (
    "after",
    "prepared",
    "first",
    "first_prepared",
    "first_data",
    "one_by_one",
    "first_one_by_one",
    "plain",
    "plain_data",
)
LOADS = (
    "loads",
    "plain_loads",
    "plain_loads_mapped",
    "plain_loads_function",
    "loads_safetensors",
    "reads_safetensors",
    "reads",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    asked = tmp_path_factory.mktemp("asked")
    subprocess.run([sys.executable, str(SCRIPT), "write", str(asked)], check=True, timeout=120)
    for name in (*ORDERS, "holder", "first_holder", *LOADS, "plain_loads_deletes", "plain_parts"):
        cases.request(asked / name, SCRIPT, name, asked, budget="1GiB", whole_job=False)
    grows = cases.HERE / "accelerate_scripts" / "grows.py"
    for name, *words in (
        ("grows_long", "loader", 1000),
        ("grows_short", "loader", 40),
        ("grows_unknown", "none", 1000),
    ):
        cases.request(asked / name, grows, *words, budget="100MiB", whole_job=name == "grows_long")
    return cases.dry_runs(asked)


def estimate(answers: Any, name: str) -> dict[str, Any]:
    assert "error" not in answers[name], answers[name]
    found: dict[str, Any] = answers[name]["plan"]["estimate"]
    return found


@pytest.mark.parametrize("order", ORDERS[1:])
def test_every_order_is_the_same_training(answers: Any, order: str) -> None:
    usual, found = estimate(answers, ORDERS[0]), estimate(answers, order)
    assert found["breakdown"]["optimizer_states"] == usual["breakdown"]["optimizer_states"] > 4 * MIB
    assert found["peak_reserved"] == usual["peak_reserved"]


def test_a_model_that_its_holder_moves_is_the_one_that_is_trained(answers: Any) -> None:
    usual, before, after = (estimate(answers, name) for name in (ORDERS[0], "holder", "first_holder"))
    assert before["peak_reserved"] == after["peak_reserved"] == usual["peak_reserved"] + 2 * MIB  # the averaged weights
    assert after["breakdown"]["parameters"] == before["breakdown"]["parameters"]


@pytest.mark.parametrize("how", [*LOADS, "plain_parts"])
def test_what_is_loaded_onto_the_gpu_counts_until_it_is_freed(answers: Any, how: str) -> None:
    usual, found = estimate(answers, "plain" if "plain" in how else ORDERS[0]), estimate(answers, how)
    assert found["peak_allocated"] - usual["peak_allocated"] >= (32 if how == "plain_parts" else 6) * MIB


def test_what_was_freed_does_not_count(answers: Any) -> None:
    usual, found = estimate(answers, "plain"), estimate(answers, "plain_loads_deletes")
    assert found["peak_allocated"] == usual["peak_allocated"]


def test_what_grows_with_every_step_has_to_fit_for_as_many_steps_as_there_are(answers: Any) -> None:
    for name, fits in (("grows_long", False), ("grows_short", True), ("grows_unknown", True)):
        (leak,) = estimate(answers, name)["leaks"]
        assert leak["bytes_per_step"] == 128 * 256 * 4
        assert leak["source"].endswith("grows.py:16")
        assert answers[name]["plan"]["fits"] is answers[name]["fits"] is fits
        brief = answers[name]["brief"].splitlines()
        told, table = (next(at for at, line in enumerate(brief) if part in line) for part in ("grows.py", "budget  "))
        assert told < table  # under the verdict
