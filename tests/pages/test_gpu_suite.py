"""The suite for a real GPU: everything but the GPU, on recorded-format data and on the CPU."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_cases import MISSING
from each import each

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import compare, margin, measure, pages, table, worker
from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.history import compacted, expanded
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


def as_if_measured(case: Case, factor: float = 1.0):
    """What the GPU would have said if it took ``factor`` times the prediction; with the recorder's snapshot."""
    size = case.batch_size
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
    own = tmp_path / "own"
    write_results(own, Results(H100, [measured]))
    write_histories(own, {FNO.name: compacted(recorded)})
    return own


# The cases


def test_the_suite_has_every_network_under_names_that_are_unique_and_fits_into_its_minutes():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.network for case in CASES} == set(NETWORKS)
    assert all(bool(case.batch_size) != bool(case.fill) for case in CASES)
    minutes = measure._options([]).minutes
    assert sum(case.seconds for case in CASES) < 60 * minutes - 60  # a minute for imports


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")  # torch 2.4's own checkpoint, on the CPU
@each(
    "case",
    [
        *(Case(network, 1, optimizer="adam") for network in ("fno", "video", "lstm", "gru", "small_cnn")),
        Case("resnet50", 2, optimizer="sgd"),
        Case("unet", 2, precision="16-mixed", accumulate=2, clip=1.0, optimizer="adam"),
        Case("unet", 2, precision="bf16-mixed", channels_last=True, optimizer="sgd", zero_grad="before_forward"),
        Case("twins", 2, checkpointing=True, optimizer="adamw_fused", zero_grad="before_backward"),
        Case("fno", 2, save_on_cpu=True, optimizer="adamw"),
        Case("small_cnn", 2, precision="bf16-true", optimizer="adamw"),
        *(Case("vit", 1, optimizer="sgd", technique=name) for name in ("checkpoint", "optimizer in backward")),
    ],
)
def test_cases_train_on_the_cpu(case):
    loop = RealLoop(case.step(), case.batch_size, "cpu")
    before = [p.detach().clone() for p in loop.model.parameters() if p.requires_grad]
    loop.run(1, lambda: None)
    after = [p for p in loop.model.parameters() if p.requires_grad]
    assert loop.updates == 1
    assert torch.isfinite(loop.loss)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.torch_since(2, 6)
@each("layout", ["ddp x8", "zero1 x8", "fsdp1 x8", "fsdp2 x8 bf16", "fsdp2 x8 bf16 on host"])
def test_one_rank_of_a_layout_trains_on_the_cpu(layout):
    answer = workers.ask(worker.case_of, Case("vit", 1, layout=layout), 1, "cpu", None, limit=200)
    assert answer.checked()["measured"]["updates"] == 1


def test_a_scaler_that_refuses_updates_is_waited_for():
    loop = RealLoop(Case("fno", 1, precision="16-mixed", optimizer="sgd").step(), 1, "cpu")
    scales = iter([4.0, 2.0, 2.0, 2.0, 2.0, 2.0])  # halved once: the first update was refused
    loop.scaler.get_scale = lambda: next(scales)
    loop.run(2, lambda: None)
    assert (loop.updates, loop.skipped) == (2, 1)


# Measuring: the orchestration, on the CPU


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


def test_the_suite_runs_without_a_gpu_and_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    cases = [Case("fno", 2), Case("fno", 3, optimizer="wrong"), Case("unet", 2, allocator="max_split_size_mb:64")]
    monkeypatch.setattr(measure, "find_cases", lambda _: [*cases, Case("fno", 4, seconds=4000)])
    assert measure.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "5"]) == 1
    (found,) = tmp_path.iterdir()
    results = read_results(found / RESULTS)
    assert [each.status for each in results.measured] == ["ok", "error", "ok", "skipped"]
    assert "case field 'optimizer' is 'wrong'" in results.measured[1].message
    assert "Traceback" in capsys.readouterr().err
    assert "5 minutes do not suffice" in results.measured[3].message
    assert results.machine.gpu == "cpu"


def failing():
    raise ValueError("no such thing")


def sleepy():
    threading.Event().wait()  # for ever: whoever comes back from waiting for it has ended it


def dying():
    os._exit(3)


def test_a_job_that_fails_hangs_or_dies_is_told():
    failed, hung, died = (workers.ask(job, limit=limit) for job, limit in ((failing, 60), (sleepy, 0.5), (dying, 60)))
    assert [each.result for each in (failed, hung, died)] == [None] * 3
    assert [each.timed_out for each in (failed, hung, died)] == [False, True, False]
    assert "in failing" in failed.error
    assert "exit code 3" in died.error
    with pytest.raises(RuntimeError, match="ValueError"):
        failed.checked()


def test_the_batch_size_fills_what_it_should(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    case = Case("fno", fill=0.5, optimizer="adam")
    size = worker.size_that_fills(case, 2 * GIB, (9, 0))
    timeline = trace(case.step(), compute_capability=(9, 0))
    assert timeline.replay(size).peak_reserved <= GIB < timeline.replay(size + 1).peak_reserved


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


@pytest.fixture
def _pretended_gpu(monkeypatch, fno):
    """The calls that the worker makes to CUDA, answered without one."""
    for name, answer in {
        "init": None,
        "synchronize": None,
        "mem_get_info": (70 * GIB, 80 * GIB),
        "memory_reserved": 3 * GIB,
        "max_memory_allocated": 2 * GIB,
        "max_memory_reserved": 3 * GIB,
        "memory_stats": {"num_alloc_retries": 1, "allocation.all.allocated": 99},
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "Event", PretendedEvent)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: fno[1])
    monkeypatch.setattr("benchmarks.harness.environment.device_used", lambda: 11 * GIB)
    monkeypatch.setattr("benchmarks.gpu.loop.RealLoop", PretendedLoop)


@pytest.mark.usefixtures("_pretended_gpu")
def test_a_case_on_the_gpu_records_everything(fno):
    data, history = worker.run_case(FNO, 4, "cuda", GIB)
    measured = Measured(FNO, seconds=1.23, **json.loads(json.dumps(data)))
    assert measured.status == "ok"
    assert measured.peaks == [[2 * GIB, 3 * GIB, 99]] * 3
    assert (measured.used_before, measured.used_context, measured.used_after) == (GIB, 11 * GIB, 11 * GIB)
    assert measured.outside == -3 * GIB  # the pretended device never fills
    assert measured.update_seconds == [0.002] * worker.MOST_TIMED
    assert len(measured.batch_seconds) == worker.TIMED_BATCHES
    assert len(measured.start_seconds) == worker.TIMED_STARTS
    assert history == compacted(fno[1])


@pytest.mark.usefixtures("_pretended_gpu")
def test_what_fails_while_it_is_timed_has_measured_its_memory(monkeypatch):
    def fails(loop, cuda):
        raise torch.cuda.OutOfMemoryError("no room for another batch")

    monkeypatch.setattr(worker, "timed", fails)
    data, _ = worker.run_case(FNO, 4, "cuda", None)
    assert (data["status"], data["message"]) == ("ok", "not timed: no room for another batch")
    assert data["peaks"]


@pytest.mark.usefixtures("_pretended_gpu")
def test_running_out_of_memory_is_a_result(monkeypatch):
    monkeypatch.setattr(PretendedLoop, "error", torch.cuda.OutOfMemoryError("Tried to allocate 2 GiB"))
    data, _ = worker.run_case(FNO, 4, "cuda", None)
    assert data["status"] == "out of memory"
    assert data["message"] == "Tried to allocate 2 GiB"
    assert data["peaks"]


# Histories


def test_a_history_survives_being_compacted(fno):
    _, recorded = fno
    history = json.loads(json.dumps(compacted(recorded)))
    settings = {"PYTORCH_CUDA_ALLOC_CONF": ""}
    assert read_recording(expanded(history, "x")) == read_recording({**recorded, "allocator_settings": settings})
    assert follow(read_recording(expanded(history, "x"))).same_segments


# Comparing


def test_exact_measurements_compare_as_exact(folder, capsys, monkeypatch):
    monkeypatch.setattr(compare, "OWN_RESULTS", folder.parent)
    assert compare.main(["--json", str(folder / "compared.json")]) == 0
    printed = capsys.readouterr().out
    assert "verdicts: 1 of 1 right" in printed
    assert "histories: 1 of 1 replayed segment by segment" in printed
    (row,) = records.read(folder / "compared.json").rows
    assert row.predicted == row.measured
    assert row.details["predicted_allocated"] == row.details["allocated"]
    history = row.details["history"]
    assert history["recorded_reserved"] == history["followed_reserved"] == history["replayed_reserved"]
    assert history["requests"].startswith("all ")


def test_the_page_has_a_row_for_each_gpu_below_the_other(tmp_path, fno):
    names = ("runs", "summary", "histories", *table.GROUPS)
    page = tmp_path / "lab" / "measured.md"
    page.parent.mkdir()
    page.write_text("".join(f"<!-- table: {name} -->\n| a |\n| - |\n| old |\n<!-- end -->\n" for name in names))
    measured = [replace(fno[0], case=replace(FNO, batch_size=size), batch_size=size) for size in (3, 4)]
    every = compare.compare_results(Results(H100, measured))
    every.add(compare.compare_results(Results(replace(H100, gpu="NVIDIA H200"), measured)))
    pages.write_page(every, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "4 trainings" in text
    assert "on an NVIDIA H100 80GB HBM3 and an NVIDIA H200" in text
    rows = re.findall(rf"^\| `{re.escape(FNO.name)}` \| (\d) \| (\w+) \|", text, re.MULTILINE)
    assert rows == [("4", "H100"), ("4", "H200")]
    assert "| all | 4 |" in text
    assert "old" not in text


def test_verdicts_are_taken_under_the_memory_that_was_free(fno):
    measured, _ = fno
    little = measured.peak_reserved // 2
    ran = replace(measured, free=little)
    failed = replace(measured, free=little, status="out of memory")
    wrong = replace(measured, status="out of memory", case=replace(FNO, batch_size=5), batch_size=5)
    compared = compare.compare_results(Results(H100, [ran, failed, wrong]))
    assert [(row.fits, row.ran) for row in compared.rows] == [(False, True), (False, False), (True, False)]
    assert compared.rows[0].error == 0  # told from a replay without the limit
    assert "verdicts: 1 of 3 right" in "\n".join(table.summary(compared))


def test_a_row_that_fails_is_told_and_the_rest_goes_on(folder, fno, capsys):
    broken = Measured(Case("nonsense", 4), "ok", 4, peaks=[[1, 1, 1]])
    left_out = Measured(Case("fno", 7), "skipped", message="no time")
    low, _ = as_if_measured(replace(FNO, batch_size=2, history=False), factor=1.25)
    write_results(folder, Results(H100, [broken, left_out, low, fno[0]]))
    assert compare.main([str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: nonsense b4" in printed
    assert "case field 'network' is 'nonsense'" in printed
    assert "skipped: no time" in printed
    assert "-20.00%  fno b2" in printed
    assert "verdicts: 2 of 2 right" in printed


def test_a_history_that_differs_or_is_none_is_told(fno):
    history = compacted(fno[1])
    compared = compare.compare_results(Results(H100, [fno[0]]), {FNO.name: {**history, "colour": []}}, where="h.gz")
    (told,) = compared.failed.values()
    assert f"h.gz: {FNO.name}: unknown field 'colour'" in told
    taken = [n for n, action in enumerate(history["action"]) if action == "segment_alloc"]
    last = max(taken, key=lambda n: history["addr"][n])  # nothing lies above it
    history["size"][last] += 2**21
    segment = next(s for s in history["segments"] if s["address"] == history["addr"][last])
    segment["blocks"].append([2**21, 0, "inactive"])
    compared = compare.compare_results(Results(H100, [fno[0]]), {FNO.name: history})
    (row,) = compared.rows
    assert not row.details["history"]["same_segments"]
    assert f"recorded segment_alloc {history['size'][last]} bytes" in row.details["history"]["first_difference"]
    assert "histories: 0 of 1" in "\n".join(table.summary(compared))


@pytest.mark.skipif(bool(MISSING), reason="this torch's compiler is not followed")
def test_compiled_cases_are_predicted_as_compiled_for_one_batch_size():
    case = Case("small_cnn", 4, optimizer="sgd", compiled="model")
    measured = Measured(case, "ok", 4, peaks=[[1, 1, 1]], free=79 * GIB)
    predictor = compare.Predictor("a card", (9, 0), 132)
    found = predictor.timeline(measured)
    assert found.compiled.graphs == 2
    assert predictor.timeline(replace(measured, case=replace(case, compiled=""))).compiled is None


@pytest.mark.parametrize("tf32", [False, True])
def test_predictions_are_made_under_the_flags_that_were_measured(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeline may be traced anew for a batch size: the flags hold until the row is done."""
    seen: list[bool] = []

    def row(_self: object, measured: Measured) -> Row:
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        seen.extend((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return Row("", measured.case.name, None, None, "", None, details={"batch_size": 4})

    monkeypatch.setattr(compare.Predictor, "row", row)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    measured = Measured(replace(FNO, tf32=tf32), "ok", 4, peaks=[[2, 2, 1]])
    assert len(compare.compare_results(Results(machine=H100, measured=[measured])).rows) == 1
    assert seen == [tf32, tf32]
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


# Files that are not what they should be


@each(("name", "read"), [(RESULTS, read_results), (HISTORIES, read_histories)])
def test_a_file_cut_off_anywhere_is_refused(folder, name, read):
    whole = (folder / name).read_bytes()
    for length in range(0, len(whole) - 1, max(1, len(whole) // 40)):
        (folder / f"cut-{name}").write_bytes(whole[:length])
        with pytest.raises(InvalidInputError, match=name):
            read(folder / f"cut-{name}")


# The margin


def shortfall_of(number, percent, tier="symbolic", network=None):
    """A row of 1,000 bytes more for each number, of which so many percent were predicted."""
    whole = 100_000 * (number + 1)
    return Row(margin.COUNTED[0], "a", whole, whole * percent // 100, tier, 0.1, network=network)


def test_margins_come_from_published_rows_and_from_comparisons(folder, tmp_path, capsys):
    rows = [shortfall_of(number, 97) for number in range(22)]
    others = [replace(rows[0], ran=False), replace(rows[0], source="Liger-Kernel's operators"), rows[0]]
    records.write(records.Results([*rows, *others]), tmp_path / "published.json")
    assert compare.main([str(folder), "--json", str(folder / "c.json")]) == 0
    capsys.readouterr()
    assert margin.main([str(tmp_path / "published.json"), str(folder / "c.json"), str(folder / RESULTS)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("symbolic: all networks | 23 | 3.0% | 3.0% | ")  # the suite's own row is in both files
    assert margin.main([str(folder / RESULTS)]) == 2
    assert "1 rows are too few" in capsys.readouterr().err


def test_each_kind_of_network_has_the_margin_of_its_own_rows_where_they_are_enough(tmp_path):
    convolutions, transformers = "convolutions in float32", "no convolutions, half precision"
    rows = [shortfall_of(each, 80, network=convolutions) for each in range(22)]
    rows += [shortfall_of(each, 100, network=transformers) for each in range(30, 51)]
    rows.append(shortfall_of(60, 1, "formula"))  # a lower bound promises nothing, so it asks for no margin
    made = margin.as_json([*rows, rows[0]], "2026-01-02")
    assert made["sources"] == {margin.COUNTED[0]: 43}
    found = {(each["tier"], each["network"]): each for each in made["margins"]}
    own = found["symbolic", convolutions]
    assert (own["group"], own["margin"], own["rows"]) == (convolutions, pytest.approx(0.2), 22)
    few = found["symbolic", transformers]  # among 21 rows none may lie beyond the true percentile
    assert (few["group"], few["margin"], few["rows"], few["own_rows"]) == ("all networks", pytest.approx(0.2), 43, 21)
    other_tier = found["partly symbolic", convolutions]
    assert (other_tier["group"], other_tier["margin"], other_tier["own_rows"]) == (convolutions, pytest.approx(0.2), 0)
    page = tmp_path / "lab" / "accuracy.md"
    page.parent.mkdir()
    page.write_text("<!-- table: margin -->\n| a |\n| - |\n<!-- end -->\n")
    margin.write_page(made, tmp_path)
    assert "| symbolic: convolutions in float32 | 22 | 20.0% | 20.0% | **20.0%** |" in page.read_text()
