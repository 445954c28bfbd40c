from __future__ import annotations

import math
import pickle

import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st

from vram_guard.budget import DEFAULT_MARGIN, Budget, catalogue, find_gpu, nvml
from vram_guard.errors import InvalidInputError, NoDeviceError
from vram_guard.guard.settings import PlanSettings

GIB = 2**30


def test_nothing_is_taken_off_an_explicit_amount_but_the_margin():
    budget = Budget.resolve("24GiB", margin=0)
    assert budget.total == budget.available == budget.usable == 24 * GIB
    assert (budget.context, budget.driver_reserved, budget.free) == (0, 0, None)
    assert budget.gpu is None
    assert budget.compute_capability is None
    assert Budget.resolve("24GB", margin=0).usable == 24 * 10**9
    assert Budget.of(110 * 2**20, margin=0).usable == 110 * 2**20
    assert Budget.of("110MiB", margin=0.25).usable == 110 * 2**20 * 3 // 4


def test_without_a_margin_the_default_one_is_stated():
    budget = Budget.of("24GiB")
    assert budget.margin == DEFAULT_MARGIN
    assert budget.usable == math.floor(24 * GIB * (1 - DEFAULT_MARGIN))
    assert f"margin of {100 * DEFAULT_MARGIN:g}%" in budget.explain()


def test_a_card_is_its_memory_less_driver_context_and_margin():
    card = find_gpu("RTX 4090")
    for budget in (
        Budget.of("NVIDIA GeForce RTX 4090", margin=0),
        Budget.resolve(gpu="rtx 4090", margin=0),
        Budget.resolve("RTX 4090", margin=0),
        Budget.resolve(gpu=card, margin=0),
        Budget.of(card, margin=0),
    ):
        assert budget.total == card.memory_bytes
        assert budget.usable == card.memory_bytes - card.driver_reserved - card.context_bytes
        assert budget.gpu == card
        assert budget.compute_capability == (8, 9)
        assert "RTX 4090" in budget.explain()


@each("gpu", catalogue())
def test_every_card_gives_a_sensible_budget(gpu):
    budget = Budget.resolve(gpu=gpu)
    assert 0.75 * gpu.memory_bytes < budget.usable < gpu.memory_bytes
    assert budget.explain().count("\n") == 0


def test_an_amount_can_be_part_of_a_card():
    budget = Budget.resolve("10GiB", gpu="RTX 4090", margin=0)
    assert budget.usable == 10 * GIB
    assert budget.compute_capability == (8, 9)
    assert budget.notes == ()


def test_a_whole_gpu_is_its_memory_less_the_context():
    budget = Budget.resolve(gpu_memory=24, margin=0)
    assert (budget.total, budget.usable) == (24 * 10**9, 24 * 10**9 - budget.context)
    card = Budget.resolve(gpu="RTX 4090", gpu_memory="20GiB", margin=0)
    assert card.compute_capability == (8, 9)
    assert card.usable == 20 * GIB - card.context
    for wrong in ({"budget": "1GiB"}, {"device": 0}):
        with pytest.raises(InvalidInputError):
            Budget.resolve(gpu_memory="24GiB", **wrong)
    for wrong in ("100MB", "x", True, -1, float("nan")):
        with pytest.raises(InvalidInputError):
            Budget.resolve(gpu_memory=wrong)


def test_the_memory_of_the_whole_card_is_known_beside_the_part_of_it():
    t4 = find_gpu("T4")
    assert Budget.of("T4").device_memory == t4.cuda_memory_bytes
    assert Budget.resolve("3GiB", gpu="T4").device_memory == t4.cuda_memory_bytes
    assert Budget.resolve(gpu_memory="8GiB").device_memory == 8 * GIB
    assert Budget.resolve(gpu="T4", gpu_memory="8GiB").device_memory == 8 * GIB
    assert Budget.of("3GiB").device_memory is None


def test_contradictions_are_refused():
    with pytest.raises(InvalidInputError, match="RTX 4090"):
        Budget.resolve("25GiB", gpu="RTX 4090")
    with pytest.raises(InvalidInputError, match="RTX 4080"):
        Budget.resolve("RTX 4080", gpu="RTX 4090")
    with pytest.raises(InvalidInputError):
        Budget.resolve("24GiB", device=0)


def test_a_budget_stays_what_it_is_and_takes_a_new_margin():
    budget = Budget.of("24GiB", margin=0.1)
    assert Budget.of(budget) is budget
    assert Budget.resolve(budget) is budget
    assert Budget.of(budget, margin=0).usable == 24 * GIB
    assert Budget.resolve(budget, margin=0.5).margin == 0.5
    assert pickle.loads(pickle.dumps(budget)) == budget


@each("margin", [True, False, -0.1, 1, 1.5, 5, math.nan, math.inf, -math.inf, "0.1", 1j])
def test_a_margin_is_a_fraction_below_one(margin):
    for make in (
        lambda: Budget.of("24GiB", margin=margin),
        lambda: Budget.resolve("24GiB", margin=margin),
        lambda: Budget.resolve(gpu="RTX 4090", margin=margin),
        lambda: Budget.of(Budget.of("24GiB"), margin=margin),
        # Before any device is asked: here there is none, and that is not what the message is about.
        lambda: Budget.resolve(margin=margin),
    ):
        with pytest.raises(InvalidInputError):
            make()


@each(
    "nonsense",
    [
        0,
        -1,
        True,
        1.5,
        math.nan,
        2**63,
        "",
        "inf",
        "nan",
        "-1GiB",
        "24X",
        "1e9",
        b"24GiB",
        [],
        object(),
    ],
)
def test_nonsense_amounts_are_refused(nonsense):
    for make in (Budget.of, Budget.resolve):
        with pytest.raises(InvalidInputError, match=r"24GiB"):
            make(nonsense)


def test_an_unknown_card_is_refused_with_the_nearest_names():
    for make in (Budget.of, lambda name: Budget.resolve(gpu=name)):
        with pytest.raises(InvalidInputError, match=r"'RTX 4090'"):
            make("RTX 4900")


@pytest.mark.parametrize("amount", ["24", " 80 ", "1048575"])
def test_a_small_number_without_a_unit_is_refused_with_one_that_was_meant(amount):
    with pytest.raises(InvalidInputError, match=rf'is {str(amount).strip()} bytes: .*"{str(amount).strip()}GiB"'):
        Budget.of(amount)
    assert Budget.of(4090).total == 4090, "an int is bytes"
    assert Budget.of("1048576").total == 2**20
    assert Budget.of("24kB").total == 24_000, "what has a unit is meant"
    with pytest.raises(InvalidInputError, match='"24GiB"'):
        PlanSettings(budget=24)


@given(st.integers(1, 2**50), st.floats(0, 0.999))
def test_usable_lies_between_nothing_and_all_and_grows_with_the_amount(amount, margin):
    budget = Budget.of(amount, margin=margin)
    assert 0 <= budget.usable <= amount
    assert budget.usable <= Budget.of(amount + 1, margin=margin).usable
    assert budget.usable <= Budget.of(amount, margin=margin / 2).usable


def test_without_gpu_and_without_an_amount_one_is_asked_for():
    # The real way, nothing made up: so only where there really is no GPU.
    try:
        nvml.read_device(0)
    except nvml.NvmlUnavailableError:
        pass
    else:
        pytest.skip("there is a GPU here")
    with pytest.raises(NoDeviceError, match='budget="24GiB"'):
        Budget.resolve()


@pytest.mark.gpu
def test_a_real_gpu_gives_what_torch_says_is_free():
    import torch

    free, total = torch.cuda.mem_get_info()
    budget = Budget.resolve(margin=0)
    assert budget.available == pytest.approx(free + torch.cuda.memory_reserved(), rel=0.02)
    assert budget.total == pytest.approx(total, rel=0.04)
    assert budget.compute_capability == torch.cuda.get_device_capability()


def test_the_placement_of_segments_is_known_for_the_cards_that_measurements_tell_of():
    known = {"H100 SXM": "below", "H200": "below", "T4": "below", "A100 80GB PCIe": None, "RTX 4090": None}
    for name, placement in known.items():
        assert Budget.of(name).placement == find_gpu(name).placement == placement
    assert Budget.resolve("10GiB", gpu="T4").placement == "below"
    assert Budget.of("10GiB").placement is None
