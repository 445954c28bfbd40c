from __future__ import annotations

import json
from dataclasses import fields
from importlib.resources import files

import pytest
from each import each

from vram_guard.budget.catalogue import (
    GPU,
    catalogue,
    context_bytes,
    context_reports,
    find_gpu,
    match_gpu,
)
from vram_guard.errors import InvalidInputError

DATA = json.loads(files("vram_guard.budget").joinpath("catalogue.json").read_text(encoding="utf-8"))

#: FP32 lanes of one multiprocessor (CUDA C++ programming guide, arithmetic instructions table).
LANES = {(6, 0): 64, (6, 1): 128, (7, 0): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 9): 128}

each_gpu = each("gpu", catalogue())


def test_the_cards_people_train_on_are_there():
    assert len(catalogue()) >= 45


def test_names_and_aliases_are_unique():
    names = [name.lower() for gpu in catalogue() for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


@each_gpu
def test_every_figure_has_a_source(gpu: GPU):
    identity = {"name", "aliases", "architecture", "nominal_gb", "sources"}
    figures = {field.name for field in fields(gpu)} - identity - {"pcie_generation", "pcie_lanes"}
    known = {figure for figure in figures if getattr(gpu, figure) is not None}
    if gpu.pcie_bandwidth is not None:
        known.add("pcie")
    assert {figure for figure, _ in gpu.sources} == known
    for figure in known:
        assert len(gpu.source_of(figure)) > 10


def test_every_document_is_used_and_says_how_far_it_was_checked():
    used = {document for gpu in catalogue() for _, document in gpu.sources}
    assert used == set(DATA["documents"])
    assert {document["checked"] for document in DATA["documents"].values()} <= {
        "read",
        "cross-checked",
        "derived",
        "unread",
    }


@each_gpu
def test_memory_is_the_nominal_size_less_a_few_percent(gpu: GPU):
    # GDDR cards with ECC on give 1/16 to it; nothing reports more than it has.
    assert 1 - 1 / 16 - 0.01 < gpu.memory_bytes / (gpu.nominal_gb * 2**30) <= 1
    if gpu.cuda_memory_bytes is not None:
        assert 0.95 * gpu.memory_bytes < gpu.cuda_memory_bytes < gpu.memory_bytes
    assert gpu.driver_reserved + gpu.context_bytes < max(0.1 * gpu.memory_bytes, 0.45 * 2**30)


@each_gpu
def test_the_fp32_figure_implies_a_possible_clock(gpu: GPU):
    lanes = LANES.get(gpu.compute_capability, 128) * gpu.multiprocessors
    assert 1.0e9 < gpu.fp32_flops / (2 * lanes) < 2.9e9


@each_gpu
def test_tensor_figures_are_dense_and_match_the_capability(gpu: GPU):
    # bfloat16 and TF32 on tensor cores from capability 8.0 on, float16 from 7.0 on (CUDA C++ programming guide).
    assert (gpu.compute_capability >= (8, 0)) == (gpu.bf16_flops is not None) == (gpu.tf32_flops is not None)
    # The GTX 16 are Turing without tensor cores.
    assert (gpu.compute_capability >= (7, 0) and "GTX 16" not in gpu.name) == (gpu.fp16_flops is not None)
    if gpu.fp16_flops is not None:
        # 2 (GeForce) to 30 (B200) times FP32: a sparse figure would be double its architecture's most.
        most = {"Volta": 8.1, "Turing": 8.1, "Ampere": 16.1, "Ada": 4.1, "Hopper": 16, "Blackwell": 30.1}
        assert 1.9 <= gpu.fp16_flops / gpu.fp32_flops <= most[gpu.architecture]
    if gpu.bf16_flops is not None and gpu.tf32_flops is not None:
        assert gpu.bf16_flops == gpu.fp16_flops
        assert gpu.tf32_flops == pytest.approx(gpu.bf16_flops / 2, rel=0.03)


@each_gpu
def test_bandwidths_are_possible(gpu: GPU):
    assert 40e9 < gpu.memory_bandwidth <= 8000e9
    if gpu.pcie_bandwidth is not None:
        assert 3.9e9 < gpu.pcie_bandwidth < 64e9  # from four lanes of PCI Express 3.0 on


#: Width of the memory bus in bits and the rate of one line in Gb/s, from the same product pages and data sheets.
MEMORY_BUSES = {
    "GT 1030": (64, 6.008),
    "GTX 1070 Ti": (256, 8),
    "GTX 1630": (64, 12),
    "GTX 1650 Ti Laptop": (128, 12),
    "GTX 1660 Ti Laptop": (192, 12),
    "RTX 2050 Laptop": (64, 14),
    "RTX 2060 12GB": (192, 14),
    "RTX 2060 Laptop": (192, 14),
    "RTX 2080 Laptop": (256, 14),
    "RTX 3050 6GB": (96, 14),
    "RTX 3050 6GB Laptop": (96, 12),
    "RTX 3060 8GB": (128, 15),
    "RTX 3070 Ti Laptop": (256, 14),
    "RTX 3080 Ti Laptop": (256, 16),
    "GTX 1050": (128, 7),
    "GTX 1060 3GB": (192, 8),
    "GTX 1080 Ti": (352, 11),
    "GTX 1650": (128, 8),
    "GTX 1650 SUPER": (128, 12),
    "GTX 1660": (192, 8),
    "GTX 1660 SUPER": (192, 14),
    "GTX 1660 Ti": (192, 12),
    "RTX 3050 Laptop": (128, 12),
    "RTX 3060 Laptop": (192, 14),
    "RTX 3070 Laptop": (256, 14),
    "RTX 2080 Ti": (352, 14),
    "T4": (256, 10),
    "RTX 3060 12GB": (192, 15),
    "RTX 3080 10GB": (320, 19),
    "RTX 3090": (384, 19.5),
    "A10": (384, 12.5),
    "RTX A6000": (384, 16),
    "A100 SXM4 40GB": (5120, 2.43),
    "A100 SXM4 80GB": (5120, 3.186),
    "RTX 4070": (192, 21),
    "RTX 4080": (256, 22.4),
    "RTX 4090": (384, 21),
    "L4": (192, 12.5),
    "L40S": (384, 18),
    "RTX 6000 Ada": (384, 20),
    "H100 SXM": (5120, 5.23),
    "RTX 5080": (256, 30),
    "RTX 5050": (128, 20),
    "RTX 5050 Laptop": (128, 24),
    "RTX 5060 Laptop": (128, 24),
    "RTX 5070 Laptop 8GB": (128, 24),
    "RTX 5070 Ti Laptop": (192, 28),
    "RTX 5080 Laptop": (256, 28),
    "RTX 5090 Laptop": (256, 28),
    "RTX 5090": (512, 28),
}


@each("name", MEMORY_BUSES)
def test_bandwidth_is_the_width_of_the_bus_times_its_rate(name):
    bits, rate = MEMORY_BUSES[name]
    assert find_gpu(name).memory_bandwidth == pytest.approx(bits / 8 * rate * 1e9, rel=0.01)


@each_gpu
def test_every_card_has_a_link_to_its_host(gpu: GPU):
    assert gpu.host_bandwidth is not None
    assert gpu.host_bandwidth == (gpu.host_link_bandwidth or gpu.pcie_bandwidth)
    assert 3.9e9 < gpu.host_bandwidth < gpu.memory_bandwidth


def test_architecture_and_capability_go_together():
    majors = {gpu.architecture: set() for gpu in catalogue()}
    for gpu in catalogue():
        majors[gpu.architecture].add(gpu.compute_capability)
    assert majors == {
        "Pascal": {(6, 0), (6, 1)},
        "Volta": {(7, 0)},
        "Turing": {(7, 5)},
        "Ampere": {(8, 0), (8, 6)},
        "Ada": {(8, 9)},
        "Hopper": {(9, 0)},
        "Blackwell": {(10, 0), (10, 3), (12, 0)},
    }


@each_gpu
def test_every_name_and_alias_finds_its_card(gpu: GPU):
    for name in (gpu.name, *gpu.aliases, f"NVIDIA {gpu.name.upper()}", gpu.name.replace(" ", "-").lower()):
        assert find_gpu(name) == gpu


@each(
    ("written", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("GeForce RTX 4090 24GB", "RTX 4090"),
        ("RTX 4090 24 GiB", "RTX 4090"),
        ("GTX1080Ti", "GTX 1080 Ti"),
        ("RTX 3060", "RTX 3060 12GB"),
        ("3060", "RTX 3060 12GB"),
        ("3050", "RTX 3050 8GB"),
        ("2060", "RTX 2060"),
        ("NVIDIA GeForce GT 1030", "GT 1030"),
        ("1070 ti", "GTX 1070 Ti"),
        ("RTX 2050", "RTX 2050 Laptop"),
        ("GTX 1650", "GTX 1650"),
        ("RTX 3080", "RTX 3080 10GB"),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
        ("A100 40", "A100 PCIe 40GB"),
        ("A100 40GB", "A100 PCIe 40GB"),
        ("A100 80GB", "A100 PCIe 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("Tesla V100-SXM2-16GB", "Tesla V100 SXM2 16GB"),
        ("V100 16", "Tesla V100 PCIe 16GB"),
        ("V100 16GB", "Tesla V100 PCIe 16GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell"),
    ],
)
def test_names_are_found_as_people_and_drivers_write_them(written, name):
    assert find_gpu(written).name == name


@each("open_name", ["A100", "H100", "V100", "GTX 1060", "RTX 3080 Laptop", "RTX 4060 Ti", "RTX 6000", "RTX"])
def test_a_name_that_leaves_the_memory_open_is_refused_with_the_choices(open_name):
    with pytest.raises(InvalidInputError, match="could be several cards") as refused:
        find_gpu(open_name)
    named = str(refused.value).split('"')[1::2]
    assert len(named) >= 2
    assert find_gpu(named[0]) != find_gpu(named[1])


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(InvalidInputError, match='budget="24GiB"'):
        find_gpu("RTX 4900")
    for typed, meant in (("RTX 4009", "RTX 4090"), ("4O90", "RTX 4090"), ("H 100", "H100 SXM")):
        with pytest.raises(InvalidInputError, match=f"Did you mean '{meant}'"):
            find_gpu(typed)
    with pytest.raises(InvalidInputError, match=r"Did you mean 'RTX 6000 Ada'"):
        find_gpu("RTX 6000 Adda")


@each(
    "unknown",
    [
        *("", "NVIDIA", "Radeon 7900", "RTX 4070 Ti Laptop GPU", "RTX 4090 12GB", "x" * 100_000, "\x00", "4090" * 50),
        *("RTX 5070 Laptop 12GB", "RTX 5070 16GB"),
    ],
)
def test_other_cards_are_unknown(unknown):
    with pytest.raises(InvalidInputError, match="not in the catalogue") as refused:
        find_gpu(unknown)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("other", [4090, None, 1.5, b"RTX 4090"])
def test_a_name_is_text(other):
    with pytest.raises(InvalidInputError, match="by its name"):
        find_gpu(other)


def test_a_card_at_hand_is_told_apart_by_its_memory():
    assert match_gpu("NVIDIA GeForce RTX 3080", 12288 * 2**20) == find_gpu("RTX 3080 12GB")
    assert match_gpu("NVIDIA GeForce RTX 4060 Ti", 16380 * 2**20) == find_gpu("RTX 4060 Ti 16GB")
    assert match_gpu("NVIDIA GeForce RTX 3060", 8192 * 2**20) == find_gpu("RTX 3060 8GB")
    assert match_gpu("NVIDIA GeForce RTX 3060", 12288 * 2**20) == find_gpu("RTX 3060")
    assert match_gpu("NVIDIA GeForce RTX 2060", 12288 * 2**20) == find_gpu("RTX 2060 12GB")
    assert match_gpu("NVIDIA GeForce GT 1030", 2048 * 2**20) == find_gpu("GT 1030")
    assert match_gpu("NVIDIA GeForce RTX 3050", 4096 * 2**20) is None, "a 4 GB variant is not listed"
    assert match_gpu("NVIDIA GeForce RTX 4090 Laptop GPU", 16376 * 2**20) == find_gpu("RTX 4090 Mobile")
    assert match_gpu("NVIDIA GeForce RTX 3080 Laptop GPU", 16384 * 2**20) == find_gpu("RTX 3080 Laptop 16GB")
    assert match_gpu("NVIDIA GeForce GTX 1660 SUPER", 6144 * 2**20) == find_gpu("1660 super")
    assert match_gpu("NVIDIA GeForce RTX 3050 6GB Laptop GPU", 6144 * 2**20) == find_gpu("RTX 3050 6GB Laptop")
    assert match_gpu("NVIDIA GeForce RTX 3050 Laptop GPU", 4096 * 2**20) == find_gpu("RTX 3050 Laptop")
    assert match_gpu("NVIDIA GeForce RTX 5070 Laptop GPU", 8151 * 2**20) == find_gpu("RTX 5070 Laptop")
    assert match_gpu("NVIDIA GeForce RTX 5070 Laptop GPU", 12227 * 2**20) is None, "the 12 GB variant is not listed"
    assert match_gpu("NVIDIA GeForce RTX 5070 Ti Laptop GPU", 12227 * 2**20) == find_gpu("RTX 5070 Ti Laptop")
    assert match_gpu("NVIDIA H200 NVL", 143771 * 2**20) is None


def test_the_context_estimate_covers_every_report_and_little_more():
    reports = context_reports()
    assert len(reports) >= 10
    over = [context_bytes(count) - held for count, held in reports]
    assert min(over) == pytest.approx(0, abs=1), "the highest report lies on the line"
    assert max(over) < 200 * 2**20
    assert context_bytes(None) == max(held for _, held in reports)
    assert context_bytes(10) < context_bytes(200)


def test_what_the_driver_keeps_is_published_or_the_most_of_no_larger_cards():
    assert find_gpu("RTX 3060").driver_reserved == 12288 * 2**20 - 12622168064
    unpublished = find_gpu("RTX 4080")
    assert unpublished.cuda_memory_bytes is None
    smaller = [gpu for gpu in catalogue() if gpu.cuda_memory_bytes and gpu.nominal_gb <= 16]
    assert unpublished.driver_reserved == max(gpu.driver_reserved for gpu in smaller)


@pytest.mark.parametrize(
    "family",
    [
        ("GT 1030", "GTX 1050", "GTX 1050 Ti", "GTX 1060 6GB", "GTX 1070", "GTX 1070 Ti", "GTX 1080", "GTX 1080 Ti"),
        ("RTX 3060 12GB", "RTX 3070", "RTX 3080 10GB", "RTX 3080 Ti", "RTX 3090", "RTX 3090 Ti"),
        ("RTX 4060", "RTX 4070", "RTX 4070 Ti", "RTX 4080", "RTX 4080 SUPER", "RTX 4090"),
        ("RTX 5050", "RTX 5060", "RTX 5060 Ti 16GB", "RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090"),
        ("A30", "A100 PCIe 40GB", "H100 PCIe", "H100 SXM", "B200"),
        ("H100 SXM", "H200", "B200"),
    ],
)
def test_no_figure_falls_from_one_card_of_a_family_to_the_next(family):
    cards = [find_gpu(name) for name in family]
    for figure in ("memory_bandwidth", "fp32_flops", "fp16_flops"):
        figures = [getattr(card, figure) or 0 for card in cards]
        assert figures == sorted(figures), figure


def test_among_boards_of_one_memory_size_the_slowest_is_meant():
    assert find_gpu("A100 80GB").memory_bandwidth < find_gpu("A100 SXM4 80GB").memory_bandwidth


@each(
    ("unknown", "never"),
    [
        *(("RTX 5040", "RTX 5090"), ("RTX 3040 Laptop", "RTX 4090"), ("RTX 2070 Max-Q", "RTX 4070")),
        *(("RTX PRO 4000", "RTX 8000"), ("T1000", "A10"), ("MX450", "A40"), ("RTX 4080 Tii", "4080 Ti")),
    ],
)
def test_no_larger_card_is_offered_for_a_smaller_one(unknown, never):
    with pytest.raises(InvalidInputError, match="not in the catalogue") as refused:
        find_gpu(unknown)
    assert never not in str(refused.value).replace(unknown, "")


@each("name", ["3050", "3060", "3070", "4050", "4060", "4070", "4080", "4090", "5050", "5060"])
def test_a_laptop_card_is_not_the_desktop_card_of_its_number(name):
    laptop = find_gpu(f"NVIDIA GeForce RTX {name} Laptop GPU")
    assert laptop.name == f"RTX {name} Laptop"
    if name not in ("3060", "4050"):  # the former has more multiprocessors than the desktop card
        desktop = find_gpu(f"RTX {name}")
        assert laptop.memory_bytes <= desktop.memory_bytes
        assert laptop.fp32_flops < desktop.fp32_flops
