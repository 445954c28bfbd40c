"""The suite for a real GPU: everything but the GPU, on recorded-format data and on the CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled_cases import MISSING

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import compare, margin, measure, pages, probes, table, worker
from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.history import AUTOGRAD_THREAD, MAIN_THREAD, compacted, expanded, library_workspaces
from benchmarks.gpu.loop import RealLoop
from benchmarks.gpu.records import (
    HISTORIES,
    RESULTS,
    Measured,
    Results,
    read_histories,
    read_results,
    write_histories,
    write_results,
)
from benchmarks.harness import records, workers
from benchmarks.harness.environment import Machine
from benchmarks.harness.networks import NETWORKS
from benchmarks.harness.records import Row
from vram_guard import trace
from vram_guard.allocator import AllocatorSettings, read_recording
from vram_guard.allocator import compare as follow
from vram_guard.errors import InvalidInputError
from vram_guard.report.snapshot import snapshot

GIB = 2**30
H100 = Machine(
    gpu="NVIDIA H100 80GB HBM3",
    torch="2.11.0+cu128",
    python="3.12.3",
    transformers="5.0.0",
    cuda="12.8",
    driver="570.86",
    cudnn=91002,
    compute_capability=[9, 0],
    multiprocessors=132,
    total=80 * GIB,
    free=79 * GIB,
    used_before=GIB // 2,
    context=GIB // 2,
)
FNO = Case("fno", 4, optimizer="adam", history=True)


def as_if_measured(case: Case, batch_size: int = 0, factor: float = 1.0):
    """What the GPU would have said if it took ``factor`` times the prediction; with the recorder's snapshot."""
    size = batch_size or case.batch_size
    timeline = trace(case.step(), compute_capability=(9, 0))
    found = timeline.at(size, settings=AllocatorSettings.from_conf(case.allocator))
    sizes = timeline.sizes(size)
    peaks = [int(found.peak_allocated * factor), int(found.peak_reserved * factor)]
    count = sum(event >= 0 and sizes[event] > 0 for event in timeline.events)
    measured = Measured(case, "ok", size, peaks=[[*peaks, count], [*peaks, count]], free=79 * GIB)
    return replace(measured, has_history=case.history), snapshot(timeline, size)


@pytest.fixture(autouse=True)
def _switches_as_they_were():
    """A worker, which runs one case, sets torch's switches for TF32 and leaves them."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.fixture(scope="module")
def fno():
    return as_if_measured(FNO)


@pytest.fixture
def folder(tmp_path, fno):
    measured, recorded = fno
    write_results(tmp_path, Results(H100, [measured]))
    write_histories(tmp_path, {FNO.name: compacted(recorded)})
    return tmp_path


# The cases


def test_names_are_unique_and_every_network_and_technique_is_there():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.network for case in CASES} == set(NETWORKS)
    assert {"32-true", "16-mixed", "bf16-mixed"} <= {case.precision for case in CASES}
    assert {"sgd", "adam", "adamw", "adamw_fused"} == {case.optimizer for case in CASES}
    for flag in ("tf32", "channels_last", "checkpointing", "save_on_cpu", "allocator"):
        assert any(getattr(case, flag) for case in CASES), flag
    assert any(0 < case.fill < 1 for case in CASES)
    assert any(case.fill > 1 for case in CASES)
    assert all(bool(case.batch_size) != bool(case.fill) for case in CASES)


def test_the_table_expects_to_stay_within_the_minutes_that_the_suite_takes():
    minutes = measure._options([]).minutes
    assert sum(case.seconds for case in CASES) < 60 * minutes - 60  # a minute for imports and probes


@pytest.mark.parametrize("network", ["small_cnn", "unet", "fno", "video", "lstm", "gru", "twins", "resnet50"])
def test_every_own_network_trains_on_the_cpu(network):
    loop = RealLoop(Case(network, 1, optimizer="adam").step(), 2 if network == "resnet50" else 1, "cpu")
    before = [p.detach().clone() for p in loop.model.parameters() if p.requires_grad]
    loop.run(1, lambda: None)
    after = [p for p in loop.model.parameters() if p.requires_grad]
    assert torch.isfinite(loop.loss)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        Case("unet", 2, precision="16-mixed", accumulate=2, clip=1.0, optimizer="adam"),
        Case("unet", 2, precision="bf16-mixed", channels_last=True, optimizer="sgd", zero_grad="before_forward"),
        Case("twins", 2, checkpointing=True, optimizer="adamw_fused", zero_grad="before_backward"),
        Case("fno", 2, save_on_cpu=True, optimizer="adamw"),
        Case("small_cnn", 2, precision="bf16-true", optimizer="adamw"),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")  # torch 2.4's own checkpoint, on the CPU
def test_techniques_train_and_are_predicted(case):
    loop = RealLoop(case.step(), case.batch_size, "cpu")
    loop.run(2, lambda: None)
    assert loop.updates == 2
    assert torch.isfinite(loop.loss)
    found = trace(case.step(), compute_capability=(9, 0)).at(case.batch_size)
    assert found.tier == "symbolic"
    assert found.peak_reserved >= found.peak_allocated > 0


def test_a_scaler_that_refuses_updates_is_waited_for():
    loop = RealLoop(Case("fno", 1, precision="16-mixed", optimizer="sgd").step(), 1, "cpu")
    steps = []
    scales = iter([4.0, 2.0, 2.0, 2.0, 2.0, 2.0])  # halved once: the first update was refused
    loop.scaler.get_scale = lambda: next(scales)
    loop.run(2, lambda: steps.append(loop.updates))
    assert (loop.updates, loop.skipped) == (2, 1)
    assert steps == [0, 1, 2]


# Measuring: the orchestration, on the CPU


def test_the_suite_runs_without_a_gpu_and_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    cases = [Case("fno", 2), Case("fno", 3, optimizer="wrong"), Case("unet", 2, allocator="max_split_size_mb:64")]
    monkeypatch.setattr(measure, "find_cases", lambda _: cases)
    assert measure.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "5"]) == 1
    (found,) = tmp_path.iterdir()
    results = read_results(found / RESULTS)
    assert [each.status for each in results.measured] == ["ok", "error", "ok"]
    assert "Traceback" in results.measured[1].message
    assert "case field 'optimizer' is 'wrong'" in results.measured[1].message
    assert "case field 'optimizer'" in capsys.readouterr().err
    assert results.machine.gpu == "cpu"


def test_cases_that_share_the_gpu_measure_memory_alone(tmp_path, monkeypatch):
    cases = [Case("fno", 2), Case("fno", 3)]
    monkeypatch.setattr(measure, "find_cases", lambda _: cases)
    monkeypatch.setattr(measure.worker, "case_of", _timed_case)
    assert measure.main(["--device", "cpu", "--out", str(tmp_path), "--shared", "--jobs", "2"]) == 0
    found = read_results(next(tmp_path.iterdir()) / RESULTS).measured
    assert {each.case.batch_size for each in found} == {2, 3}
    assert {(each.outside, *each.update_seconds) for each in found} == {(None,)}
    assert all(each.peaks == [[1, 2, 3]] for each in found)


def _timed_case(*_):
    measured = {"status": "ok", "batch_size": 1, "update_seconds": [1.0], "outside": 5, "peaks": [[1, 2, 3]]}
    return {"measured": measured, "history": None}


def test_what_the_minutes_do_not_suffice_for_is_recorded_as_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "find_cases", lambda _: [Case("fno", 2, seconds=4000)])
    assert measure.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "1"]) == 0
    (measured,) = read_results(next(tmp_path.iterdir()) / RESULTS).measured
    assert measured.status == "skipped"
    assert "1 minutes do not suffice" in measured.message


def sleepy():
    import threading

    threading.Event().wait()  # for ever: whoever comes back from waiting for it has ended it


def dying():
    import os

    os._exit(3)


def failing():
    raise ValueError("no such thing")


def test_a_job_that_fails_is_told_with_its_traceback():
    answer = workers.ask(failing, limit=60)
    assert answer.result is None
    assert "in failing" in answer.error
    with pytest.raises(RuntimeError, match="ValueError"):
        answer.checked()


def test_a_case_that_hangs_is_ended():
    answer = workers.ask(sleepy, limit=0.5)
    assert answer.timed_out
    assert answer.result is None
    assert answer.seconds >= 0.5


def test_a_case_that_dies_is_told():
    answer = workers.ask(dying, limit=60)
    assert (answer.result, answer.timed_out) == (None, False)
    assert "exit code 3" in answer.error


def test_the_batch_size_fills_what_it_should(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    case = Case("fno", fill=0.5, optimizer="adam")
    size = worker.size_that_fills(case, 2 * GIB, (9, 0))
    timeline = trace(case.step(), compute_capability=(9, 0))
    assert timeline.replay(size).peak_reserved <= GIB < timeline.replay(size + 1).peak_reserved


@pytest.fixture
def pretended_gpu(monkeypatch, fno):
    """The calls that the worker makes to CUDA, answered without one."""
    cuda = torch.cuda
    state = {"cleared": False}
    recorded = fno[1]
    workspace = {"action": "alloc", "addr": 1 << 40, "size": 8519680, "stream": 0, "frames": []}

    def taken():
        entries = [*recorded["device_traces"][0], workspace]
        if state["cleared"]:
            entries += [{**workspace, "action": name} for name in ("free_requested", "free_completed")]
        block = {"size": 10 * 2**20, "requested_size": 8519680, "state": "active_allocated"}
        own = {"address": 1 << 40, "stream": 0, "segment_type": "large", "device": 0, "blocks": [block]}
        return {**recorded, "segments": [*recorded["segments"], own], "device_traces": [entries]}

    for name, answer in {
        "init": None,
        "synchronize": None,
        "mem_get_info": (70 * GIB, 80 * GIB),
        "memory_reserved": 3 * GIB,
        "max_memory_allocated": 2 * GIB,
        "max_memory_reserved": 3 * GIB,
        "memory_stats": {"num_alloc_retries": 1, "allocation.all.allocated": 99},
    }.items():
        monkeypatch.setattr(cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(cuda, "Event", PretendedEvent)
    monkeypatch.setattr(cuda.memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(cuda.memory, "_snapshot", taken)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: state.update(cleared=True), raising=False)
    monkeypatch.setattr("benchmarks.harness.environment.device_used", lambda: 11 * GIB)
    flags = (torch.backends.cudnn, torch.backends.cuda.matmul)  # the worker sets them
    before = [flag.allow_tf32 for flag in flags]
    yield
    for flag, value in zip(flags, before, strict=True):
        flag.allow_tf32 = value


class PretendedLoop:
    updates = skipped = 0
    error: RuntimeError | None = None

    def __init__(self, step, batch_size, device):
        assert device == "cuda"

    def run(self, updates, after_update):
        for _ in range(updates):
            self.updates += 1
            after_update()
        if self.error is not None:
            raise self.error

    def place_batch(self):
        self.batches = getattr(self, "batches", 0) + 1

    def repeat(self):
        self.repeated = getattr(self, "repeated", 0) + 1


class PretendedEvent:
    """An event on a device that needs 2 ms between any two."""

    made = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        PretendedEvent.made += 1
        self.number = PretendedEvent.made

    def elapsed_time(self, end):
        return 2.0 * (end.number - self.number)


def test_a_case_on_the_gpu_records_everything(pretended_gpu, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.loop.RealLoop", PretendedLoop)
    data, history = worker.run_case(FNO, 4, "cuda", GIB)
    measured = Measured(FNO, seconds=1.23, **json.loads(json.dumps(data)))
    assert measured.status == "ok"
    assert measured.peaks == [[2 * GIB, 3 * GIB, 99]] * 3
    assert (measured.used_before, measured.used_context, measured.used_after) == (GIB, 11 * GIB, 11 * GIB)
    assert measured.outside == -3 * GIB  # the pretended device never fills
    assert measured.alloc_retries == 1
    (workspace,) = measured.workspaces
    assert (workspace["size"], workspace["thread"]) == (8519680, "autograd")
    assert measured.has_history
    assert measured.update_seconds == [0.002] * worker.MOST_TIMED
    assert len(measured.batch_seconds) == worker.TIMED_BATCHES
    assert len(measured.start_seconds) == worker.TIMED_STARTS
    assert history["size"][-1] == 8519680


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_timed_updates_run_on_the_batch_that_is_there(precision, monkeypatch):
    loop = RealLoop(Case("fno", 1, precision=precision, optimizer="sgd", accumulate=2).step(), 1, "cpu")
    loop.run(1, lambda: None)
    loop.place_batch()
    batch, before = loop.batch, [p.detach().clone() for p in loop.model.parameters()]

    def asked(*_):
        raise AssertionError("a batch was made, or the device was waited for")

    monkeypatch.setattr(loop, "place_batch", asked)
    if loop.scaler is not None:
        monkeypatch.setattr(loop.scaler, "get_scale", asked)
    loop.repeat()
    assert loop.batch is batch
    assert any(not torch.equal(old, new) for old, new in zip(before, loop.model.parameters(), strict=True))


def test_a_profiled_update_lists_what_ran_on_the_device(monkeypatch):
    class Seen:
        """The profiler of a device, which this machine does not have."""

        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            pass

        def events(self):
            for kind, name, microseconds in (
                ("CUDA", "gemm", 5),
                ("CUDA", "add", 2),
                ("CUDA", "add", 4),
                ("CPU", "x", 9),
            ):
                span = SimpleNamespace(elapsed_us=lambda microseconds=microseconds: microseconds)
                yield SimpleNamespace(device_type=getattr(torch.autograd.DeviceType, kind), name=name, time_range=span)

    monkeypatch.setattr(worker, "profile", Seen)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    loop = PretendedLoop(None, 1, "cuda")
    assert list(worker.kernels_of(loop).items()) == [("add", [2, 6e-06]), ("gemm", [1, 5e-06])]
    assert loop.repeated == 1


def test_what_fails_while_it_is_timed_has_measured_its_memory(pretended_gpu, monkeypatch):
    def fails(loop, cuda):
        raise torch.cuda.OutOfMemoryError("no room for another batch")

    monkeypatch.setattr("benchmarks.gpu.loop.RealLoop", PretendedLoop)
    monkeypatch.setattr(worker, "timed", fails)
    data, _ = worker.run_case(FNO, 4, "cuda", None)
    assert (data["status"], data["message"]) == ("ok", "not timed: no room for another batch")
    assert data["peaks"]


def test_running_out_of_memory_is_a_result(pretended_gpu, monkeypatch):
    monkeypatch.setattr(PretendedLoop, "error", torch.cuda.OutOfMemoryError("Tried to allocate 2 GiB"))
    monkeypatch.setattr("benchmarks.gpu.loop.RealLoop", PretendedLoop)
    data, _ = worker.run_case(FNO, 4, "cuda", None)
    assert data["status"] == "out of memory"
    assert data["message"] == "Tried to allocate 2 GiB"
    assert data["peaks"]


def test_the_probes_run(pretended_gpu, monkeypatch):
    monkeypatch.setattr(probes, "DEVICE", "cpu")
    monkeypatch.setattr(probes, "_DTYPES", {"float32": torch.float32, "float16": torch.float32})
    monkeypatch.setattr(probes, "_CONVOLUTIONS", ((4, 4, 3, 2, 8),))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: GIB)
    found = probes.all_probes()
    assert not [each for each in found if "error" in each]
    assert {each["extra"] for each in found if "extra" in each} == {GIB}  # the pretended peak less what is "allocated"
    assert len({each["probe"] for each in found}) == 8


# Histories


def test_a_history_survives_being_compacted(fno):
    _, recorded = fno
    history = json.loads(json.dumps(compacted(recorded)))
    settings = {"PYTORCH_CUDA_ALLOC_CONF": ""}
    assert read_recording(expanded(history, "x")) == read_recording({**recorded, "allocator_settings": settings})
    assert follow(read_recording(expanded(history, "x"))).same_segments


def test_whose_thread_asked_is_read_from_the_frames():
    loop = {"filename": "/copy/of/benchmarks/gpu/loop.py", "name": "_forward"}
    again = {"filename": "/torch/utils/checkpoint.py", "name": "recompute"}
    frames = [[loop], [], [again, loop], [again]]
    trace_ = [{"action": "alloc", "addr": n, "size": 512, "stream": 0, "frames": f} for n, f in enumerate(frames)]
    history = compacted({"segments": [], "device_traces": [trace_]})
    assert history["thread"] == [MAIN_THREAD, AUTOGRAD_THREAD, MAIN_THREAD, AUTOGRAD_THREAD]


def test_workspaces_are_the_blocks_that_clearing_frees():
    entries = [
        {"action": "alloc", "addr": 1, "size": 100, "stream": 0, "frames": [{"filename": "benchmarks/gpu/loop.py"}]},
        {"action": "free_completed", "addr": 1, "size": 100, "stream": 0},
        {"action": "alloc", "addr": 1, "size": 200, "stream": 0, "frames": []},  # the address again
        {"action": "alloc", "addr": 9, "size": 300, "stream": 0, "frames": []},
        {"action": "free_completed", "addr": 1, "size": 200, "stream": 0},
    ]
    found = library_workspaces({"device_traces": [entries]}, 4)
    assert found == [{"size": 200, "stream": 0, "thread": "autograd", "allocations_before": 1}]


# Comparing


def test_exact_measurements_compare_as_exact(folder, capsys):
    assert compare.main([str(folder), "--json", str(folder / "compared.json")]) == 0
    printed = capsys.readouterr().out
    assert "verdicts: 1 of 1 right" in printed
    assert "histories: 1 of 1 replayed segment by segment" in printed
    (row,) = records.read(folder / "compared.json").rows
    assert row.predicted == row.measured
    assert row.details["predicted_allocated"] == row.details["allocated"]
    history = row.details["history"]
    assert history["recorded_reserved"] == history["followed_reserved"] == history["replayed_reserved"]
    assert history["requests"].startswith("all ")


PAGE = """# A page

<!-- table: runs -->
<!-- end -->

<!-- table: summary -->

| kind | number | allocated | reserved | lowest |
| --- | --- | --- | --- | --- |
| old | 0 | - | - | - |

<!-- end -->
"""


def test_the_page_has_a_row_for_each_gpu_below_the_other(tmp_path, fno, monkeypatch):
    places = "".join(f"<!-- table: {name} -->\n| a | b |\n| --- | --- |\n<!-- end -->\n" for name in table.GROUPS)
    places += "<!-- table: guarded -->\n| a | b |\n| - | - |\n<!-- end -->\n<!-- table: histories -->\n<!-- end -->\n"
    page = tmp_path / "lab" / "measured.md"
    page.parent.mkdir()
    page.write_text(PAGE + places, encoding="utf-8")
    fno_1gib = {"name": "fno", "budget": "1GiB", "plan": "", "measured": [0, 100 * 2**20]}
    for gpu, size, others in (("H100", 99, [{"name": "gone", "budget": "2GiB", "error": "died"}]), ("H200", 100, [])):
        rows = [{**fno_1gib, "predicted": [0, size * 2**20]}, *others]
        run = {"environment": {"gpu": f"NVIDIA {gpu} 80GB"}, "rows": rows}
        (tmp_path / f"guarded-{gpu}.json").write_text(json.dumps(run))
    monkeypatch.setattr(pages, "GUARDED", tmp_path)
    measured = [replace(fno[0], case=replace(FNO, batch_size=size), batch_size=size) for size in (3, 4)]
    pages.write_page(compare.compare_results(Results(H100, measured)), tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "2 trainings" in text
    assert f"| `{FNO.name}` | 4 |" in text
    assert "| old |" not in text
    first, second = (
        f"| fno | 1GiB | {gpu} | as written | {size} | 100 |" for gpu, size in (("H100", 99), ("H200", 100))
    )
    assert f"{first} -1.00% |\n{second}" in text
    assert "gone" not in text
    assert "| all | 2 |" in text


def test_errors_have_their_sign_and_quantiles():
    sizes = [(1, 1.0), (2, 1.25), (3, 1.0), (4, 1.0)]
    measured = [
        as_if_measured(replace(FNO, batch_size=size, history=False), factor=factor)[0] for size, factor in sizes
    ]
    compared = compare.compare_results(Results(H100, measured))
    assert [round(row.error, 6) for row in compared.rows] == [0, -0.2, 0, 0]
    lines = "\n".join(table.summary(compared))
    assert "-20.00%  fno b2" in lines


def test_verdicts_are_taken_under_the_memory_that_was_free(fno):
    measured, _ = fno
    little = measured.peak_reserved // 2
    ran = replace(measured, free=little)
    failed = replace(measured, free=little, status="out of memory")
    wrong = replace(measured, status="out of memory", case=replace(FNO, batch_size=5), batch_size=5)
    compared = compare.compare_results(Results(H100, [ran, failed, wrong]))
    assert [(row.fits, row.ran) for row in compared.rows] == [
        (False, True),
        (False, False),
        (True, False),
    ]
    assert [row.right_verdict for row in compared.rows] == [False, True, False]
    assert compared.rows[0].error == 0  # told from a replay without the limit
    assert "verdicts: 1 of 3 right" in "\n".join(table.summary(compared))


def test_a_row_that_fails_is_told_and_the_rest_goes_on(folder, fno, capsys):
    broken = Measured(Case("nonsense", 4), "ok", 4, peaks=[[1, 1, 1]])
    left_out = Measured(Case("fno", 7), "skipped", message="no time")
    write_results(folder, Results(H100, [broken, left_out, fno[0]]))
    assert compare.main([str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: nonsense b4" in printed
    assert "case field 'network' is 'nonsense'" in printed
    assert "Traceback" in printed
    assert "skipped: no time" in printed
    assert "verdicts: 1 of 1 right" in printed


def test_a_history_that_differs_is_told(folder, fno):
    history = compacted(fno[1])
    taken = [n for n, action in enumerate(history["action"]) if action == "segment_alloc"]
    last = max(taken, key=lambda n: history["addr"][n])  # nothing lies above it
    history["size"][last] += 2**21
    segment = next(s for s in history["segments"] if s["address"] == history["addr"][last])
    segment["blocks"].append([2**21, 0, "inactive"])
    compared = compare.compare_results(Results(H100, [fno[0]]), {FNO.name: history}, predict=False)
    (row,) = compared.rows
    facts = row.details["history"]
    assert not facts["same_segments"]
    assert f"recorded segment_alloc {history['size'][last]} bytes" in facts["first_difference"]
    assert "histories: 0 of 1" in "\n".join(table.summary(compared))


COMPILED = Case("small_cnn", 4, optimizer="sgd", compiled="model")


@pytest.mark.skipif(bool(MISSING), reason="this torch's compiler is not followed")
def test_compiled_cases_are_predicted_as_compiled_for_one_batch_size():
    measured = Measured(COMPILED, "ok", 4, peaks=[[1, 1, 1]], free=79 * GIB)
    predictor = compare.Predictor("a card", (9, 0), 132)
    found = predictor.timeline(measured)
    assert found.compiled.graphs == 2
    assert found.multiprocessors == 132
    assert predictor.timeline(replace(measured, case=replace(COMPILED, history=True))) is found
    uncompiled = predictor.timeline(replace(measured, case=replace(COMPILED, compiled="")))
    assert uncompiled.compiled is None
    assert found.at(4).peak_allocated < uncompiled.at(4).peak_allocated
    assert predictor.timeline(replace(measured, batch_size=3)).at(3).peak_allocated < found.at(4).peak_allocated


def test_compiled_cases_that_could_not_be_compiled_are_told_and_not_compared(monkeypatch):
    monkeypatch.setattr(compare, "LONGEST_COMPILED", 0.01)
    measured = Measured(COMPILED, "ok", 4, peaks=[[1, 1, 1]], free=79 * GIB)
    lines = []
    compared = compare.compare_results(Results(H100, [measured]), tell=lines.append)
    assert (compared.rows, compared.failed) == ([], {})
    (reason,) = compared.not_reproduced.values()
    assert reason.startswith("not compiled: ")
    assert lines == [f"{COMPILED.name}: {reason}"]


# Files that are not what they should be


def change(path: Path, edit) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda d: d.update(version=2), "field 'version' is 2, this program reads 1"),
        (lambda d: d["machine"].update(colour="green"), "machine: unknown field 'colour'"),
        (lambda d: d["machine"].update(compute_capability=[9]), "machine: compute_capability"),
        (lambda d: d["measured"][0].update(status="fine"), r"measured\[0\]: status: 'fine' is not one of"),
        (lambda d: d["measured"][0]["case"].update(colour=1), r"measured\[0\]: case: unknown field 'colour'"),
        (lambda d: d["measured"][0].update(peaks=[[1, 2]]), r"measured\[0\]: peaks: expected three numbers"),
        (lambda d: d.pop("machine"), "missing field 'machine'"),
    ],
)
def test_results_that_are_wrong_are_refused_by_file_and_field(folder, edit, reason):
    change(folder / RESULTS, edit)
    with pytest.raises(InvalidInputError, match=reason) as refused:
        read_results(folder / RESULTS)
    assert RESULTS in str(refused.value)


@pytest.mark.parametrize("name", [RESULTS, HISTORIES])
def test_a_file_cut_off_anywhere_is_refused(folder, name):
    whole = (folder / name).read_bytes()
    read = read_results if name == RESULTS else read_histories
    for length in range(0, len(whole) - 1, max(1, len(whole) // 40)):
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(InvalidInputError, match=name):
            read(folder / name)


def test_without_folders_all_results_are_taken(tmp_path, fno, monkeypatch, capsys):
    monkeypatch.setattr(compare, "OWN_RESULTS", tmp_path)
    assert compare.main([]) == 2
    assert "holds no results" in capsys.readouterr().err
    for name in ("h100-2.11", "h100-2.12"):
        write_results(tmp_path / name, Results(H100, [fno[0]]))
        write_histories(tmp_path / name, {FNO.name: compacted(fno[1])})
    assert compare.main(["--no-predictions"]) == 0
    assert "histories: 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda h: h.update(colour=[]), "unknown field 'colour'"),
        (lambda h: h.pop("addr"), "missing field 'addr'"),
        (lambda h: h["size"].pop(), "size has .* not as many as action"),
        (lambda h: h.update(action=5), "action: expected a list"),
        (lambda h: h["segments"][0].update(colour=1), r"segments\[0\]: unknown field 'colour'"),
        (lambda h: h["segments"][0].update(blocks=[[1]]), r"segments\[0\].blocks"),
    ],
)
def test_a_history_that_is_wrong_is_told_by_case_and_field_and_the_rest_goes_on(fno, edit, reason):
    history = compacted(fno[1])
    edit(history)
    compared = compare.compare_results(Results(H100, [fno[0]]), {FNO.name: history}, where="h.gz", predict=False)
    (told,) = compared.failed.values()
    assert "h.gz" in told
    assert FNO.name in told
    with pytest.raises(InvalidInputError, match=reason):
        expanded(history, "h.gz")


def test_histories_that_would_become_too_large_are_left_out(tmp_path, fno, monkeypatch):
    monkeypatch.setattr(measure, "LARGEST_HISTORIES", 10)
    options = measure._options(["--out", str(tmp_path)])
    suite = measure.Suite(H100, options, 0.0)
    kept = suite._with_history(fno[0], compacted(fno[1]))
    assert not kept.has_history
    assert "left out" in kept.message
    assert suite.histories == {}


def test_histories_are_written_as_they_come(tmp_path, fno):
    suite = measure.Suite(H100, measure._options(["--out", str(tmp_path)]), 0.0)
    for number in range(measure.HISTORIES_BETWEEN_WRITES):
        assert not (suite.folder / HISTORIES).exists()
        case = replace(FNO, batch_size=number + 1)
        assert suite._with_history(replace(fno[0], case=case), compacted(fno[1])).has_history
    assert len(read_histories(suite.folder / HISTORIES)) == measure.HISTORIES_BETWEEN_WRITES


@pytest.mark.parametrize(
    "layout",
    [
        *("ddp x8", "zero1 x8", "fsdp1 x8"),
        *(
            pytest.param(each, marks=pytest.mark.torch_since(2, 6))
            for each in ("fsdp2 x8 bf16", "fsdp2 x8 bf16 on host")
        ),
    ],
)
def test_one_rank_of_a_layout_trains_on_the_cpu(layout):
    answer = workers.ask(worker.case_of, Case("vit", 1, layout=layout), 1, "cpu", None, limit=200)
    assert answer.checked()["measured"]["updates"] == 1


@pytest.mark.parametrize("technique", ["checkpoint", "activations on host", "optimizer in backward"])
def test_techniques_of_the_planner_train_on_the_cpu(technique):
    plain, changed = (
        RealLoop(Case("vit", 1, optimizer="sgd", technique=name).step(), 1, "cpu") for name in ("", technique)
    )
    changed.model.load_state_dict(plain.model.state_dict())
    before = plain.model.classifier.weight.detach().clone()
    for loop in (plain, changed):
        torch.manual_seed(0)
        loop.run(2, lambda: None)
    assert changed.step.recipe
    assert not torch.equal(plain.model.classifier.weight, before)
    for one, other in zip(plain.model.parameters(), changed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# The margin


def predicted(amount, tier="symbolic", source="", network=None):
    """A row of 100 measured bytes."""
    return Row(source, "a", 100, amount, tier, 0.1, network=network)


def measured_at(number, percent, **given):
    """The same for runs that differ: of 1,000 bytes more for each number."""
    whole = 100_000 * (number + 1)
    return replace(predicted(0, **given), measured=whole, predicted=whole * percent // 100)


def published(path, *rows, **changes):
    """A file as benchmarks/published writes it; each row is (predicted, measured)."""
    row = {"source": margin.COUNTED[0], "name": "a", "tier": "symbolic", "seconds": 0.1, "ran": None, "fits": None}
    row |= {"tools": {}, "verdicts": {}, "judged": True}
    listed = [{**row, "predicted": predicted, "measured": measured} for predicted, measured in rows]
    data = {"format": "vram_guard published rows", "version": 1, "not_reproduced": {}, "failed": {}, "made_with": {}}
    path.write_text(json.dumps({**data, "rows": listed, **changes}))
    return path


def test_margins_come_from_published_rows_and_from_comparisons(folder, tmp_path, capsys):
    path = published(tmp_path / "published.json", (97, 100), (103, 100), (50, 100))
    data = json.loads(path.read_text())
    data["rows"][2]["ran"] = False  # its "measured" is what had been reached by then
    path.write_text(json.dumps(data))
    assert compare.main([str(folder), "--json", str(folder / "c.json")]) == 0
    capsys.readouterr()
    assert margin.main([str(path), str(folder / "c.json"), str(folder / RESULTS)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    rows = len(margin.read_rows(folder / "c.json")) + 2  # the suite's own row is in both of its files
    assert first.startswith(f"symbolic, all networks: {rows} rows, 1 too low, p50 0.00%  p90 3.00%")


def test_the_default_margin_is_a_percentile_of_enough_rows():
    rows = [measured_at(each, 100 - each % 10, source="s") for each in range(50)]
    made = margin.as_json([*rows, predicted(40, "formula")], "2026-01-02")
    assert made["sources"] == {"s": 50}  # a lower bound promises nothing, so it asks for no margin
    found = {(each["tier"], each["network"]): each for each in made["margins"]}
    assert found["symbolic", None]["margin"] == pytest.approx(0.08)
    assert found["partly symbolic", None]["group"] == "all rows"
    with pytest.raises(InvalidInputError, match="10 rows are too few"):
        margin.as_json(rows[:10], "2026-01-02")


def test_each_kind_of_network_has_the_margin_of_its_own_rows_where_they_are_enough():
    convolutions, transformers = "convolutions in float32", "no convolutions, half precision"
    rows = [measured_at(each, 80, network=convolutions) for each in range(22)]
    rows += [measured_at(each, 100, network=transformers) for each in range(21)]
    found = {(each["tier"], each["network"]): each for each in margin.as_json(rows, "2026-01-02")["margins"]}
    own = found["symbolic", convolutions]
    assert (own["group"], own["margin"], own["rows"]) == (convolutions, pytest.approx(0.2), 22)
    few = found["symbolic", transformers]  # among 21 rows none may lie beyond the true percentile
    assert (few["group"], few["margin"], few["rows"], few["own_rows"]) == ("all networks", pytest.approx(0.2), 43, 21)
    other_tier = found["partly symbolic", convolutions]
    assert (other_tier["group"], other_tier["margin"], other_tier["own_rows"]) == (convolutions, pytest.approx(0.2), 0)
    repeated = margin.as_json([*rows, rows[-1]], "2026-01-02")["margins"]
    assert repeated == margin.as_json(rows, "2026-01-02")["margins"]
    more = [*rows, measured_at(99, 100, network=transformers)]
    found = {(each["tier"], each["network"]): each for each in margin.as_json(more, "2026-01-02")["margins"]}
    assert found["symbolic", transformers]["margin"] == 0


@pytest.mark.parametrize("tf32", [False, True])
def test_predictions_are_made_under_the_flags_that_were_measured(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeline may be traced anew for a batch size: the flags hold until the row is done."""
    seen: list[bool] = []

    def row(_self: object, measured: Measured) -> Row:
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        seen.extend((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return Row("", measured.case.name, 1, 1, "", None)

    monkeypatch.setattr(compare.Predictor, "row", row)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    case = replace(FNO, tf32=tf32)
    measured = Measured(case, "ok", 4, peaks=[[2, 2, 1]])
    compare.compare_results(Results(machine=H100, measured=[measured]))
    assert seen == [tf32, tf32]
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


def test_cudnn_is_asked_where_it_is_the_release_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "installed", lambda: Path("libcudnn.so.9"))
    monkeypatch.setattr(compare, "Library", lambda _path: SimpleNamespace(version=91002))
    assert compare._cudnn_of(H100) == "ask"
    assert compare._cudnn_of(replace(H100, cudnn=91900)) == "off"
    monkeypatch.setattr(compare, "installed", lambda: None)
    assert compare._cudnn_of(H100) == "off"
