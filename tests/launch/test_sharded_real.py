"""Real processes (gloo, on the CPU) allocate and free what one traced rank does, event by event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_real
from sharded_real import CASES, COPIES, SAMPLES

from vram_guard.simulate import trace_at

ROOT = Path(__file__).parents[2]

#: What a path of operators may contain that is the collective's own work: gloo's buffers, and the copies it is given.
#: On a GPU, NCCL has buffers of its own outside the allocator.
OUTSIDE = ("c10d::", COPIES)
#: Operators that are called anew by what is between them and the allocator's caller: DTensor, modes.
BETWEEN = ("PythonSubclass", "PythonDispatchMode")
#: Where DistributedDataParallel's Reducer makes its lists of indices, a few bytes on the host and on the device, which
#: it broadcasts in C++: when gloo's threads have let go of them is a matter of time.
LISTS = ["DistributedDataParallel.forward", "aten::empty"]
#: Bytes of a Python number that C++ wraps into a tensor; such a tensor is on the host on a GPU as well.
NUMBER = 8


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """The folder with the events of every rank of every case."""
    folder = tmp_path_factory.mktemp("real")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, sharded_real.__file__, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def operator(path):
    """The outermost operator whose kernel may take temporaries of its own; None outside any."""
    inner = [number for number, name in enumerate(path) if name.startswith(BETWEEN)]
    names = path[inner[-1] + 1 :] if inner else path
    return next((name for name in names if name.startswith(("aten::", "fsdp::"))), None)


def real_events(recording):
    """("+", bytes) and ("-", which, bytes) of a rank, without what a GPU takes elsewhere or not at all.

    Left out are blocks of the collective itself, temporaries that a CPU kernel takes and gives back within one
    operator, and wrapped numbers.
    """
    alive, ends = {}, {}
    for index, (size, address, _path) in enumerate(recording):
        if size > 0:
            alive[address] = index
        elif address in alive:
            ends[alive.pop(address)] = index
    begins = {end: begin for begin, end in ends.items()}
    numbers, found = {}, []
    for index, (size, _address, _path) in enumerate(recording):
        begin = index if size > 0 else begins.get(index)
        if begin is None or not counts(recording, begin, ends.get(begin)):
            continue
        if size > 0:
            numbers[begin] = len(numbers)
            found.append(("+", size))
        else:
            found.append(("-", numbers[begin], -size))
    return found


def is_list(event):
    return [name.partition("@")[0] for name in event[2]] == LISTS


def counts(recording, begin, end):
    size, _address, path = recording[begin]
    if size == NUMBER or is_list(recording[begin]) or any(name.startswith(OUTSIDE) for name in path):
        return False
    return end is None or operator(path) is None or operator(path) != operator(recording[end][2])


def traced_events(case, lists):
    """The same of the traced rank, without workspaces and scratch of CUDA kernels, and lists of these sizes."""
    timeline = trace_at(sharded_real.step_of(case), SAMPLES, compute_capability=(9, 0))
    sizes = timeline.sizes(SAMPLES)
    start = next(phase.start for phase in timeline.phases if phase.step == 1)
    numbers, found = {}, []
    for event in timeline.events[start:]:
        index = event if event >= 0 else ~event
        block = timeline.blocks[index]
        if block.scratch is not None or block.category == "workspace":
            continue
        if sizes[index] in lists and block.operator.startswith("aten.empty"):
            continue
        if event >= 0:
            numbers[index] = len(numbers)
            found.append(("+", sizes[index]))
        elif index in numbers:
            found.append(("-", numbers[index], sizes[index]))
    return found


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize("name", CASES)
def test_a_real_rank_allocates_and_frees_what_is_traced_in_the_same_order(name, recordings):
    case = CASES[name]
    recording = json.loads((recordings / f"{name}.{case.rank}.json").read_text())
    real = real_events(recording)
    traced = traced_events(case, {event[0] for event in recording if is_list(event)})
    assert len(real) > 150
    first = next((at for at, (one, other) in enumerate(zip(real, traced, strict=False)) if one != other), None)
    around = slice(0, 0) if first is None else slice(max(first - 3, 0), first + 5)
    assert real == traced, f"event {first}: real {real[around]}, traced {traced[around]}"


def test_the_comparison_sees_a_block_that_lives_longer():
    path = ["aten::add@1"]
    recording = [[64, 1, path], [32, 2, ["aten::mul@2"]], [-64, 1, []], [-32, 2, []]]
    later = [recording[0], recording[1], recording[3], recording[2]]
    assert real_events(recording) == [("+", 64), ("+", 32), ("-", 0, 64), ("-", 1, 32)]
    assert real_events(later) != real_events(recording)


def test_only_what_is_the_cpus_or_the_collectives_own_is_left_out():
    def kept(path, end):
        return real_events([[64, 1, path], [-64, 1, end]])

    assert kept(["FSDP::all_gather", "aten::empty@1"], ["FSDP::all_gather"])
    assert not kept(["aten::mm@1", "aten::clone@2"], ["aten::mm@1"]), "a temporary of one kernel"
    assert kept(["aten::mm@1"], ["aten::mm@2"]), "another call frees it"
    assert kept(["aten::addmm@1", "PythonSubclass@2", "aten::div@3"], ["aten::addmm@1", "PythonSubclass@2"])
    assert not kept(["FSDP::all_gather", "c10d::_allgather_base_@1", "aten::empty@2"], [])
    assert not real_events([[NUMBER, 1, []], [-NUMBER, 1, []]])
