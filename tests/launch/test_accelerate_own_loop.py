"""Scripts without Accelerate: followed, planned for, run under the plan where it is proven, or refused with words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases  # noqa: E402 - what is tested has to be there

from vram_guard import TrainingStep, trace  # noqa: E402
from vram_guard.budget import find_gpu  # noqa: E402
from vram_guard.codec import from_json, to_json  # noqa: E402
from vram_guard_accelerate.cli import launch as command  # noqa: E402
from vram_guard_accelerate.cli import launchers  # noqa: E402
from vram_guard_accelerate.launch_plan import VARIABLE  # noqa: E402
from vram_guard_accelerate.planning.prediction import Prediction, read_answer  # noqa: E402

SCRIPT = cases.HERE / "accelerate_scripts" / "own_loop.py"
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    tight = {"budget": "90MiB", "whole_job": False}
    for name in ("loader", "keeps_workers"):
        cases.request(folder / name, SCRIPT, name, "never.pt", **tight, allow=("checkpoint",))
    cases.request(folder / "compiles", SCRIPT, "compiles", "never.pt", **tight)
    for name in ("parallel", "casts", "by_hand", "cpu", "forks", "prefetches", "evaluates", "averages"):
        cases.request(folder / name, SCRIPT, name, "never.pt", whole_job=name == "parallel")
    cases.request(folder / "functions", SCRIPT, "functions", "never.pt", "--batch-size", "32")
    for name in ("spread", "casts", "divides"):
        cases.request(folder / f"{name}_over_4", SCRIPT, name, "never.pt", ranks=4, whole_job=False)
    sizes_itself = (SCRIPT, "sizes_itself", "never.pt")
    for name, gpu in (("on_t4", "T4"), ("on_4090", "RTX 4090")):
        cases.request(folder / name, *sizes_itself, gpu=gpu, whole_job=False)
    cases.request(folder / "on_budget", *sizes_itself, budget="20GiB", whole_job=False)
    cut = {**tight, "allow": ("slices",)}
    cases.request(folder / "spread_tight", SCRIPT, "spread", "never.pt", ranks=4, **cut)
    for name in ("random", "time_first", "default", "named"):
        cases.request(folder / name, SCRIPT, name, "never.pt", **cut)
    for name in ("waits", "listens", "reads_the_clock", "executes"):
        cases.request(folder / name, SCRIPT, name, "never.pt", start_seconds=0.5)
    return cases.dry_runs(folder)


def traced(precision: str = "32-true", ranks: int = 1, batch_size: int = 64) -> tuple[int, int]:
    """The script's training as a step: peak reserved and allocated."""
    source = SCRIPT.read_text(encoding="utf-8")
    names: dict[str, Any] = {"nn": torch.nn, "habit": ""}
    exec(source[source.index("class Block") : source.index("inputs, labels")], names)
    step = TrainingStep(
        names["Net"](),
        lambda size: (torch.zeros(size, 32, 64), torch.zeros(size, dtype=torch.long)),
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        precision=precision,
        data_parallel_ranks=ranks,
    )
    peak = trace(step, check_at=batch_size).at(batch_size)
    return peak.peak_reserved, peak.peak_allocated


@pytest.mark.torch_since(2, 6)
def test_the_prediction_is_that_of_the_same_step(answers: Any) -> None:
    assert "device: cuda" in answers["loader"]["printed"]
    before = answers["loader"]["plan"]["before"]
    assert (before["peak_reserved"], before["peak_allocated"]) == traced()
    assert before["breakdown"]["batch"] == 64 * (32 * 64 * 4 + 8)
    # DataParallel on one GPU, found by torch.accelerator, with its evaluation and the next epoch.
    parallel = answers["parallel"]["plan"]["estimate"]
    epoch = ["training", "validation"]
    assert [phase["name"] for phase in parallel["phases"]] == ["setup", *epoch, *epoch]
    assert max(phase["peak_allocated"] for phase in parallel["phases"]) == traced()[1]
    # autocast and GradScaler of the script's own.
    casts = answers["casts"]["plan"]["estimate"]
    assert (casts["peak_reserved"], casts["peak_allocated"]) == traced("16-mixed")


@pytest.mark.torch_since(2, 6)
def test_a_script_that_asks_for_its_gpus_memory_finds_that_of_the_gpu_that_is_planned_for(answers: Any) -> None:
    """A T4 was said to have 80 GiB, and a script that chooses its batch by that was planned with the wrong one."""
    t4, rtx_4090 = (find_gpu(name).cuda_memory_bytes for name in ("T4", "RTX 4090"))
    for name, memory, batch_size in (("on_t4", t4, 32), ("on_4090", rtx_4090, 64), ("on_budget", 80 * 2**30, 64)):
        answer = answers[name]
        assert "error" not in answer, answer
        assert f"memory: {memory} {memory} {memory}" in answer["printed"]
        assert answer["plan"]["micro_batch_size"]["before"] == batch_size


@pytest.mark.torch_since(2, 6)
def test_distributed_data_parallel_of_the_script_s_own_is_followed(answers: Any) -> None:
    spread = answers["spread_over_4"]
    assert "rank 0 of 4" in spread["printed"]
    found = spread["plan"]["estimate"]
    assert (found["peak_reserved"], found["peak_allocated"]) == traced(ranks=4)
    assert traced(ranks=4)[1] > traced()[1]  # the buckets
    assert spread["plan"]["effective_batch_size"] == {"before": 256, "after": 256}


@pytest.mark.torch_since(2, 6)
def test_a_default_device_is_as_one_that_is_named(answers: Any) -> None:
    """``torch.set_default_device("cuda")`` at the start of a script."""
    default, named = answers["default"], answers["named"]
    assert default["plan"]["before"]["breakdown"] == named["plan"]["before"]["breakdown"]
    for key in ("peak_reserved", "peak_allocated"):
        assert default["plan"]["before"][key] == named["plan"]["before"][key]


def test_a_loader_with_an_iteration_of_its_own_is_followed(answers: Any) -> None:
    as_any = answers["loader"]["plan"]["before"]
    own = answers["keeps_workers"]["plan"]["before"]
    assert own["breakdown"] == as_any["breakdown"]
    assert (own["batch_size"], own["peak_reserved"]) == (64, as_any["peak_reserved"])
    assert not any("without a DataLoader" in note for note in answers["keeps_workers"]["notes"])


def test_copies_of_a_model_on_the_gpu_lie_there_too(answers: Any) -> None:
    found = answers["averages"]["plan"]["estimate"]
    own = answers["evaluates"]["plan"]["estimate"]["breakdown"]["parameters"]
    assert found["breakdown"]["parameters"] == 2 * own
    assert found["peak_allocated"] >= traced()[1] + own


def test_an_evaluation_after_every_step_ends(answers: Any) -> None:
    """Its loader has the training's batch size, and is not the training's."""
    assert answers["evaluates"]["plan"]["estimate"]["peak_allocated"] >= traced()[1]


def test_a_loader_that_copies_on_a_stream_of_its_own_is_followed(answers: Any) -> None:
    """The stream is made before the first batch; while a step runs, the next batch is on the GPU already."""
    own = answers["prefetches"]["plan"]["estimate"]
    assert "device: cuda" in answers["prefetches"]["printed"]
    images, batch = 64 * 32 * 64 * 4, answers["loader"]["plan"]["before"]["breakdown"]["batch"]
    ahead = own["peak_allocated"] - traced()[1]
    assert batch < ahead <= 2 * (batch + images), own["breakdown"]


def test_a_loop_in_a_function_holds_no_more_than_its_names_do(answers: Any) -> None:
    """Its lines are watched for what it does now and then, and its variables looked at."""
    found = answers["functions"]["plan"]["estimate"]
    assert "phases" not in found  # the second epoch's loader is made anew, at the same line: no evaluation
    assert found["peak_allocated"] == traced(batch_size=32)[1]
    assert "leaks" not in found


@pytest.mark.torch_since(2, 6)
def test_a_loop_without_a_loader_is_followed_at_its_own_size(answers: Any) -> None:
    compiles, by_hand = answers["compiles"], answers["by_hand"]
    assert compiles["plan"]["before"]["batch_size"] == by_hand["plan"]["estimate"]["batch_size"] == 64
    assert compiles["plan"]["before"]["peak_allocated"] != answers["loader"]["plan"]["before"]["peak_allocated"]
    # It is followed compiled, and the report shows both.
    assert compiles["plan"]["compiled"]["followed"], compiles["plan"]["compiled"]["why"]
    assert compiles["plan"]["compiled"]["graphs"]
    # Weights that are updated without an optimizer have no states; the rest is as with one.
    before = answers["loader"]["plan"]["before"]
    without = before["peak_allocated"] - before["breakdown"]["optimizer_states"]
    assert by_hand["plan"]["estimate"]["peak_allocated"] == without
    for answer in (compiles, by_hand):
        assert any("without a DataLoader" in note for note in answer["notes"])


def trained(weights: Path, habit: str, plan: str = "") -> tuple[Any, str]:
    """The weights after a real run, and what it printed: as written, or under a plan."""
    python = [sys.executable]
    if habit == "spread":
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    guard = ["-m", "vram_guard_accelerate"] if plan else []
    done = subprocess.run(
        [*python, *guard, str(SCRIPT), habit, str(weights)],
        env=cases.environment(**({VARIABLE: plan} if plan else {})),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(weights), done.stdout


@pytest.mark.parametrize(
    ("name", "habit", "changed"),
    [
        ("loader", "loader", "changed: ['blocks.0', 'blocks.1'"),
        ("keeps_workers", "keeps_workers", "changed: ['blocks.0', 'blocks.1'"),
        ("spread_tight", "spread", "changed: ['module']"),
    ],
)
def test_a_proven_plan_is_carried_out(answers: Any, folder: Path, name: str, habit: str, changed: str) -> None:
    answer = answers[name]
    assert answer["fits"]
    assert not answer["only_told"]
    found = read_answer(folder / name)
    plain, said = trained(folder / f"{name}_plain.pt", habit)
    guarded, says = trained(folder / f"{name}_guarded.pt", habit, to_json(found.launch_plan))  # type: ignore[union-attr]
    assert "changed: []" in said
    assert changed in says
    assert cases.difference({"weights": [plain]}, {"weights": [guarded]}) < 1e-6


def test_a_loop_without_a_loader_is_not_cut(answers: Any) -> None:
    for name in ("random", "time_first"):
        refused = [said for said in answers[name]["plan"]["reasons"] if "slices of the batch are not" in said]
        assert not answers[name]["fits"]
        assert "without a DataLoader" in refused[0]


def test_what_is_not_proven_is_told_and_not_started(
    answers: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "compiles its model" in answers["compiles"]["only_told"]
    found: Any = read_answer(folder / "compiles")
    assert found == from_json(type(found), to_json(found))
    monkeypatch.setattr(command, "predict", lambda *_args, **_kwargs: Prediction(found, "log"))
    monkeypatch.setattr(launchers, "run", lambda *_args, **_how: pytest.fail("it was started"))
    for look in ([], ["--dry-run"]):  # what a check in CI looks at is what a launch would do
        assert command.launch([*look, *cases.ONE, "--budget", "90MiB", str(SCRIPT)]) == 1
        said = capsys.readouterr().err
        assert "only told" in said
        assert "as it is written it does not fit, and is not started" in said
    assert command.launch(["--dry-run", "--json", *cases.ONE, "--budget", "90MiB", str(SCRIPT)]) == 1
    assert "compiles its model" in json.loads(capsys.readouterr().out)["only_told"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cpu", "it trains without Accelerate, on the CPU"),
        ("cpu", "accelerator.prepare(model, optimizer, loader)\n"),
        ("casts_over_4", "without Accelerate and without DistributedDataParallel"),
        pytest.param(
            "divides_over_4",
            "divides its model over the processes without Accelerate",
            marks=pytest.mark.torch_since(2, 6),
        ),
        ("forks", "os.fork"),
        *((name, "it has not begun to train after 0.5 s") for name in ("waits", "listens", "reads_the_clock")),
        ("executes", "os.exec"),
    ],
)
def test_what_cannot_be_followed_says_where_and_what_to_do(answers: Any, name: str, says: str) -> None:
    message = answers[name]["message"]
    assert says in message
    assert "own_loop.py, line " in message


def test_nothing_was_written(answers: Any) -> None:
    assert dict(answers)  # all of them
    assert not os.path.lexists("never.pt")


LIGHTNING_ON_CPU = """
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

loader = DataLoader(TensorDataset(torch.zeros(32, 8)), batch_size=4)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Module(), loader)
"""

MMENGINE_ON_CPU = """
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from pathlib import Path

class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
    def forward(self, inputs, mode="tensor"):
        return {"loss": self.net(torch.stack(inputs)).mean()}

samples = [{"inputs": torch.zeros(8)}] * 32
loader = dict(dataset=samples, sampler=dict(type="DefaultSampler", shuffle=True), batch_size=4)
Runner(
    Model(), str(Path(__file__).parent / "work"), train_dataloader=loader, train_cfg=dict(by_epoch=True, max_epochs=1),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
).train()
"""


def test_a_loop_that_a_framework_runs_is_sent_to_its_own_guard(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("mmengine")
    loops = {
        "lightning": (LIGHTNING_ON_CPU, "Trainer(callbacks=[VramGuard()])"),
        "mmengine": (MMENGINE_ON_CPU, "runner_type=vram_guard_mmengine.GuardRunner vram_guard.budget=10GiB"),
    }
    for name, (source, advice) in loops.items():
        script = tmp_path / f"{name}_loop.py"
        script.write_text(source)
        done = cases.launch("--dry-run", "--budget", "1GiB", script, cache=tmp_path / "cache")
        assert done.returncode == 3, done.stderr
        assert advice in done.stderr
        assert "Accelerator()" not in done.stderr
