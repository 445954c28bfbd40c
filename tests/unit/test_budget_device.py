"""GPUs that this machine does not have, as a budget finds them."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pynvml
import pytest
from each import each
from pretended_nvml import GIB, MIB, NOT_SUPPORTED, Card, Library, Torch

from vram_guard.budget import Budget, GpuProcess, find_gpu, nvml, torch_cuda
from vram_guard.budget.catalogue import context_bytes
from vram_guard.budget.host import HostMemory
from vram_guard.errors import DeviceQueryError, InvalidInputError, NoDeviceError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch_cuda, "loaded_torch", lambda: None)


@pytest.fixture
def machine(monkeypatch):
    """Puts made-up GPUs (and a made-up torch) into this machine."""

    def build(*cards, torch=None, **library):
        made = Library(*cards, **library)
        monkeypatch.setattr(nvml, "load_library", lambda: made)
        monkeypatch.setattr(torch_cuda, "loaded_torch", lambda: torch)
        return made

    return build


def test_what_is_free_counts_and_not_the_total(machine):
    library = machine(Card(free=20 * GIB))
    budget = Budget.resolve(margin=0)
    assert budget.total == 24564 * MIB
    assert budget.free == 20 * GIB
    assert budget.usable == 20 * GIB - find_gpu("RTX 4090").context_bytes
    assert budget.gpu == find_gpu("RTX 4090")
    assert budget.compute_capability == (8, 9)
    assert budget.source == "device 0: NVIDIA GeForce RTX 4090"
    assert library.shut_down


def test_other_processes_are_named_with_their_bytes(machine):
    others = [
        SimpleNamespace(pid=11, usedGpuMemory=2 * GIB),
        SimpleNamespace(pid=12, usedGpuMemory=3 * GIB),
        SimpleNamespace(pid=13, usedGpuMemory=None),
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB),
    ]
    machine(Card(processes=others), names={11: b"/usr/bin/python3 train.py", 12: "/opt/game"})
    budget = Budget.resolve()
    assert budget.processes == (
        GpuProcess(12, "game", 3 * GIB),
        GpuProcess(11, "python3", 2 * GIB),
        GpuProcess(13, "unknown program", None),
    )
    assert "game (pid 12) holds 3.00 GiB" in budget.explain()
    assert "holds an unknown amount" in budget.explain()


def test_a_card_outside_the_catalogue_counts_as_measured(machine):
    machine(Card(name="NVIDIA RTX 9999", total=50 * GIB, free=49 * GIB, capability=(13, 0)))
    budget = Budget.resolve(margin=0)
    assert budget.gpu is None
    assert budget.compute_capability == (13, 0)
    assert budget.usable == 49 * GIB - context_bytes(None)


# --- NVML that is not there, or broken -------------------------------------------------------------------


def test_no_package_no_driver_no_gpu_all_work_without_and_say_so(machine, monkeypatch):
    cpu_torch = Torch(available=False, initialized=False, cuda=None)

    def missing():
        raise ImportError("pynvml")

    for code, reason in ((12, "no NVIDIA driver"), (9, "no NVIDIA driver")):
        machine(fails={"nvmlInit": code}, torch=cpu_torch)
        with pytest.raises(NoDeviceError, match=rf'{reason}.*CPU build.*budget="24GiB".*gpu="RTX 4090"'):
            Budget.resolve()
    machine(fails={"nvmlInit": 12}, torch=Torch(available=False, initialized=False))
    with pytest.raises(NoDeviceError, match="no NVIDIA driver") as refused:
        Budget.resolve()
    assert "CPU build" not in str(refused.value), "this torch is built for CUDA"
    machine(torch=cpu_torch)
    with pytest.raises(NoDeviceError):
        Budget.resolve()
    monkeypatch.setattr(nvml, "load_library", missing)
    with pytest.raises(NoDeviceError):
        Budget.resolve()
    assert Budget.resolve("24GiB").usable > 0, "an amount needs no GPU"
    assert Budget.resolve(gpu="RTX 4090").usable > 0


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (18, "restart the machine"),
        (4, "may not query"),
        (15, "restart"),
        (16, "reset"),
        (999, "run nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_clear_error(machine, code, advice):
    for function in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):
        machine(Card(), fails={function: code})
        with pytest.raises(DeviceQueryError, match=advice) as failed:
            Budget.resolve()
    assert 'budget="24GiB"' in str(failed.value)
    assert Budget.resolve("24GiB").usable > 0, "and an amount still works"


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceIsMigDeviceHandle",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlShutdown",
    ],
)
def test_what_the_driver_does_not_tell_is_worked_without(machine, function):
    machine(Card(), fails={function: NOT_SUPPORTED})
    assert Budget.resolve(margin=0).usable == 20 * GIB - find_gpu("RTX 4090").context_bytes


def test_without_nvml_torch_is_asked(machine):
    machine(fails={"nvmlInit": 12}, torch=Torch(free=10 * GIB, total=24217 * MIB, reserved=2 * GIB))
    budget = Budget.resolve(margin=0)
    assert budget.usable == 12 * GIB
    assert budget.context == 0, "this process's context is in the free figure already"
    assert budget.gpu == find_gpu("RTX 4090")


# --- MIG and unified memory ------------------------------------------------------------------------------


def mig_card(*sizes: int) -> Card:
    parent = Card("NVIDIA A100-SXM4-40GB", 40960 * MIB, 40 * GIB, capability=(8, 0), slices=[])
    for index, size in enumerate(sizes):
        name = f"{parent.name} MIG {index}"
        parent.slices.append(Card(name, size, size - MIB, f"MIG-{index}", parent=parent))
    return parent


def test_a_mig_slice_counts_with_its_own_size_never_the_parents(machine):
    machine(mig_card(4864 * MIB))
    budget = Budget.resolve(margin=0)
    assert budget.total == 4864 * MIB
    assert budget.usable == 4864 * MIB - MIB - context_bytes(14)
    assert budget.multiprocessors == 14, "the slice's, not the card's"
    assert budget.gpu is None, "the catalogue's entry is the whole card"
    assert budget.compute_capability == (8, 0), "which the slice shares"
    assert budget.device_memory == 4864 * MIB
    assert "MIG 0" in budget.source


def test_a_slice_is_named_by_its_uuid(machine, monkeypatch):
    machine(mig_card(4864 * MIB, 9856 * MIB), torch=Torch(uuid="aaaa-1111", free=9 * GIB))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert Budget.resolve().total == 9856 * MIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    with pytest.raises(DeviceQueryError, match="'MIG-7'"):
        Budget.resolve()


def test_mig_without_slices_is_a_clear_error(machine):
    machine(mig_card())
    with pytest.raises(DeviceQueryError):
        Budget.resolve()


@pytest.mark.parametrize("card", [Card(memory_error=NOT_SUPPORTED), Card(total=0, free=0)], ids=["untold", "zero"])
def test_unified_memory_is_the_hosts_and_labelled(machine, monkeypatch, card):
    card.name = "NVIDIA GB10"
    machine(card)
    host = HostMemory(120 * GIB, 100 * GIB, "physical memory")
    monkeypatch.setattr(nvml, "host_memory", lambda: host)
    budget = Budget.resolve(margin=0)
    assert (budget.total, budget.free) == (120 * GIB, 100 * GIB)
    assert budget.usable == 100 * GIB - context_bytes(None)


# --- which GPU ------------------------------------------------------------------------------------------


def three_equal_cards() -> list[Card]:
    """NVML's order is not the order of the bus here."""
    return [
        Card(uuid="GPU-cc", bus="00000000:C1:00.0", free=3 * GIB),
        Card(uuid="GPU-aa", bus="00000000:01:00.0", free=1 * GIB),
        Card(uuid="GPU-bb", bus="00000000:A1:00.0", free=2 * GIB),
    ]


@pytest.mark.parametrize(
    ("visible", "device", "free"),
    [
        (None, 0, 1),
        (None, 2, 3),
        ("2,0", 0, 3),
        ("2,0", 1, 1),
        (" 1 ", 0, 2),
        ("1,-1,0", 0, 2),
        ("GPU-bb", 0, 2),
        ("GPU-cc,GPU-aa", 1, 1),
        ("GPU-b", 0, 2),
        ("1gpu2,2ampere", 0, 2),
    ],
)
def test_the_gpu_is_the_one_that_cuda_means(machine, monkeypatch, visible, device, free):
    machine(*three_equal_cards())
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Budget.resolve(device=device).free == free * GIB


@pytest.mark.parametrize("visible", ["", "-1", "none", "0,0", "GPU-aa,GPU-aa"])
def test_hidden_gpus_are_a_clear_error(machine, monkeypatch, visible):
    machine(*three_equal_cards())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(NoDeviceError, match="CUDA_VISIBLE_DEVICES="):
        Budget.resolve()


@pytest.mark.parametrize(("visible", "problem"), [("GPU-zz", "no device has"), ("GPU-", "several devices")])
def test_a_uuid_that_names_no_gpu_is_a_clear_error(machine, monkeypatch, visible, problem):
    machine(*three_equal_cards())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceQueryError, match=problem):
        Budget.resolve()


@pytest.mark.parametrize(("visible", "device"), [(None, 3), ("1", 1), ("0,7,1", 1)])
def test_a_device_that_is_not_visible_is_refused(machine, monkeypatch, visible, device):
    machine(*three_equal_cards())
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(InvalidInputError, match=f"device {device} does not exist"):
        Budget.resolve(device=device)


def two_different_cards() -> list[Card]:
    slow = Card("NVIDIA GeForce GTX 1080", 8192 * MIB, 8 * GIB, "GPU-aa", "00000000:01:00.0", (6, 1))
    return [slow, Card(uuid="GPU-bb", bus="00000000:02:00.0")]


def test_different_gpus_need_an_order_because_cudas_own_is_not_known(machine, monkeypatch):
    machine(*two_different_cards())
    with pytest.raises(DeviceQueryError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        Budget.resolve()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert Budget.resolve().gpu == find_gpu("GTX 1080")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert Budget.resolve().gpu == find_gpu("RTX 4090")


def test_once_cuda_runs_it_tells_itself_which_gpu_it_means(machine):
    machine(*two_different_cards(), torch=Torch(uuid="bb", free=19 * GIB))
    assert Budget.resolve().gpu == find_gpu("RTX 4090")


def test_the_current_device_of_torch_is_the_default(machine):
    machine(*three_equal_cards(), torch=Torch(current=2, count=3, free=GIB))
    assert Budget.resolve().source.startswith("device 2:")


@each("device", ["cpu", -1, True, 1.0, "cuda:-1", "cuda:x", "1", ""])
def test_other_devices_are_refused(device):
    with pytest.raises(InvalidInputError, match="must be a CUDA device"):
        Budget.resolve(device=device)


# --- torch's own share ----------------------------------------------------------------------------------


def test_what_torch_holds_already_can_be_used_again(machine):
    machine(Card(free=15 * GIB), torch=Torch(free=15 * GIB, reserved=5 * GIB))
    budget = Budget.resolve(margin=0)
    assert budget.usable == 20 * GIB
    assert budget.context == 0


def test_a_memory_fraction_caps_the_budget_and_is_said(machine):
    machine(Card(), torch=Torch(free=20 * GIB, total=24 * GIB, fraction=0.5))
    budget = Budget.resolve(margin=0)
    assert budget.usable == 12 * GIB


def test_torch_that_has_not_started_cuda_is_left_alone(machine):
    machine(Card(), torch=Torch(initialized=False, mem_get_info=None))
    assert Budget.resolve(margin=0).context == find_gpu("RTX 4090").context_bytes


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_async_allocator_is_said_to_be_unsupported(machine, monkeypatch, variable):
    machine(Card())
    monkeypatch.setenv(variable, "expandable_segments:True,backend:cudaMallocAsync")
    assert "cudaMallocAsync allocator, which is not supported" in Budget.resolve().explain()
    monkeypatch.setenv(variable, "backend:native")
    assert "not supported" not in Budget.resolve().explain()


def test_the_package_calls_only_functions_that_nvml_has():
    """The made-up library stands for the real one: every function of it exists there."""
    made = [name for name in vars(Library) if name.startswith("nvml")]
    assert len(made) > 15
    assert [name for name in made if not hasattr(pynvml, name)] == []


def test_a_cpu_build_beside_a_gpu_is_said(machine):
    machine(Card(), torch=Torch(initialized=False, available=False, cuda=None))
    assert "this torch is a CPU build" in Budget.resolve().explain()
