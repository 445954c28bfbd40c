"""Where tensors are while a script sets up, which a dry run follows for real on the CPU: on a GPU that is not there."""

from __future__ import annotations

import copy
import sys
import weakref
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

from torch import nn  # noqa: E402 - what is tested has to be there

from vram_guard.forks.fork import run_in_fork  # noqa: E402
from vram_guard_accelerate.dry_run.cuda_shim import CudaShim  # noqa: E402


def places() -> dict[str, Any]:
    """In a copy of this process, which the simulated GPU does not leave again."""
    shim = CudaShim((8, 0), 80 * 2**30)
    shim.begin()
    on_gpu, on_host = torch.ones(4).to("cuda"), torch.zeros(4)
    on_host.copy_(on_gpu)
    model, loaded = nn.Linear(4, 4).cuda(), nn.Linear(4, 4)
    loaded.load_state_dict(model.state_dict())
    taken_back = copy.deepcopy(model).cpu()
    first, rest = torch.split(on_gpu, [1, 3])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_gpu.record_stream(torch.cuda.current_stream())
    where = {
        "moved": on_gpu,
        "computed": on_gpu.float() / 255,
        "joined": torch.cat([on_gpu, on_gpu]),
        "like": torch.zeros_like(on_gpu),
        "first part": first,
        "other part": rest,
        "copied model": copy.deepcopy(model).weight,
        "copied statistics": copy.deepcopy(nn.BatchNorm1d(4).cuda()).running_mean,
        "by number": torch.ones(2, device=0),
        "moved by number": torch.ones(2).cuda(0),
        "drawn by number": torch.randperm(4, device=0),
        "written from": on_host,
        "loaded from": loaded.weight,
        "pinned": torch.ones(2).pin_memory("cuda"),
        "back": on_gpu.cpu(),
        "back as another type": on_gpu.to("cpu", torch.float64),
        "model that was taken back": taken_back.weight,
    }
    found: dict[str, Any] = {name: shim.holds(tensor) for name, tensor in where.items()}
    found["said"] = (str(on_gpu.device), on_gpu.is_cuda, on_gpu.is_cpu, on_gpu.get_device(), str(on_host.device))
    found["sum"] = on_gpu.sum().item()
    computed = weakref.ref((on_gpu * 3).untyped_storage())
    found["let go"] = computed() is None and shim.used
    found["streams"] = isinstance(stream, torch.cuda.Stream)
    shim.end()
    return found


def test_what_is_made_of_tensors_on_the_gpu_lies_there_and_what_is_moved_back_does_not() -> None:
    found = run_in_fork(lambda _progress: places())
    on_host = {"written from", "loaded from", "pinned", "back", "back as another type", "model that was taken back"}
    assert found.pop("said") == ("cuda:0", True, False, 0, "cpu")
    assert found.pop("sum") == 4  # its values are there
    assert found.pop("streams")
    assert found.pop("let go")
    assert found == {name: name not in on_host for name in found}
