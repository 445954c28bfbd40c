"""What frameworks' loops keep alive of an iteration, in their real loops and in the traces of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import Watch
from torch import nn
from torch.nn import functional as F

from vram_guard import Timeline, TrainingStep
from vram_guard.simulate.tracing.run import run_step

WORDS, LENGTH, SIZE = 5000, 32, 8
LOGITS = SIZE * LENGTH * WORDS * 4

# --- the plain API ------------------------------------------------------------------------------------------------


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 64), nn.Linear(64, WORDS))


def tokens(size: int) -> torch.Tensor:
    return torch.zeros(size, LENGTH, dtype=torch.long)


def loss_and_logits(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch)
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten()), logits


def traced(**settings: Any) -> Timeline:
    settings = {"loss": loss_and_logits, **settings}
    return run_step(TrainingStep(language_model, tokens, optimizer=torch.optim.SGD, **settings), SIZE, (8, 0))


def alive(timeline: Timeline, phase: str, step: int = 2) -> int:
    """Bytes that are alive where a phase begins."""
    start = next(found.start for found in timeline.phases if (found.name, found.step) == (phase, step))
    blocks: set[int] = set()
    for event in timeline.events[:start]:
        blocks.add(event) if event >= 0 else blocks.discard(~event)
    return sum(timeline.blocks[block].size.base for block in blocks)


def test_logits_that_a_name_keeps_are_alive_in_the_next_forward() -> None:
    loss, outputs, nothing = (traced(keeps=kept) for kept in ("loss", "outputs", "nothing"))
    assert alive(outputs, "forward") - alive(loss, "forward") == LOGITS
    assert alive(loss, "forward") - alive(nothing, "forward") == 4  # the loss itself
    # The name holds them through the backward pass as well, where the peak is.
    assert outputs.at(SIZE).peak_allocated - loss.at(SIZE).peak_allocated == LOGITS
    assert alive(nothing, "optimizer") == alive(outputs, "optimizer") == alive(loss, "optimizer") + LOGITS


def test_old_outputs_die_as_the_model_returns_and_not_once_the_loss_is_there() -> None:
    timeline = traced(keeps="outputs", zero_grad="before_backward")
    forward = next(found.start for found in timeline.phases if (found.name, found.step) == ("forward", 2))
    begun = max(event for event in timeline.events[:forward])
    of_size = [index for index, block in enumerate(timeline.blocks) if block.size.base == LOGITS]
    old, new, softmax = (
        next(index for index in of_size if index > after and operator in timeline.blocks[index].operator)
        for after, operator in (
            (0, "addmm"),
            (begun, "addmm"),
            (begun, "softmax"),
        )
    )
    order = [timeline.events.index(event) for event in (new, ~old, softmax)]
    assert order == sorted(order)


FORMS = {
    "pair": loss_and_logits,
    "dict": lambda model, batch: dict(zip(("loss", "logits"), loss_and_logits(model, batch), strict=True)),
    "object": lambda model, batch: _Output(*loss_and_logits(model, batch)),
}


class _Output:
    def __init__(self, loss: torch.Tensor, logits: torch.Tensor) -> None:
        self.loss, self.logits = loss, logits


@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_kept_in_every_form_that_a_loss_may_return(form: str) -> None:
    kept = traced(loss=FORMS[form], keeps="outputs")
    assert alive(kept, "forward") - alive(traced(loss=FORMS[form]), "forward") == LOGITS


def test_micro_batches_hand_their_names_on() -> None:
    def forwards(timeline: Timeline) -> list[int]:
        starts = [phase.start for phase in timeline.phases if (phase.name, phase.step) == ("forward", 2)]
        found = []
        for start in starts:
            blocks: set[int] = set()
            for event in timeline.events[:start]:
                blocks.add(event) if event >= 0 else blocks.discard(~event)
            found.append(sum(timeline.blocks[block].size.base == LOGITS for block in blocks))
        return found

    assert forwards(traced(keeps="outputs", accumulate=2)) == [1, 1]
    assert forwards(traced(keeps="nothing", accumulate=2)) == [0, 0]


# --- Lightning ----------------------------------------------------------------------------------------------------

WATCH = Watch()


class WatchedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            WATCH.steps()
            return super().step()

        def watched() -> Any:
            result = closure()
            WATCH.steps()
            return result

        return super().step(watched)


def lightning_module(form: str) -> Any:
    cases = pytest.importorskip("lightning_cases")
    pl = importlib.import_module(cases.NAMESPACE)

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 1000)
            self.automatic_optimization = form != "manual"

        def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
            return [tensor.clone() for tensor in batch]  # as a move to a GPU makes them

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            WATCH.begins()
            inputs = batch[0]
            logits = self.net(inputs)
            loss = logits.square().mean()
            WATCH.made(batch=inputs, logits=logits, loss=loss)
            if form == "logged":
                self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            if form == "attribute":
                self.last = logits
            if form == "manual":
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                return {"logits": logits}
            return {"loss": loss, "logits": logits} if form == "dict" else loss

        def configure_optimizers(self) -> Any:
            return WatchedSGD(self.parameters(), lr=0.01)

    return Module()


LIGHTNING = {
    "loss": ({}, {"batch", "loss"}),
    "logged": ({}, {"batch", "loss"}),
    "dict": ({}, {"batch", "logits", "loss"}),
    "attribute": ({"logits": 4 * 4000}, {"batch", "logits", "loss"}),
    "manual": ({}, {"batch", "logits", "loss"}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("form", LIGHTNING)
def test_lightning_keeps_what_its_trace_keeps(form: str, accumulate: int, tmp_path: Any) -> None:
    if form == "manual" and accumulate == 2:
        pytest.skip("Lightning does not accumulate in manual optimization")
    lightning = pytest.importorskip("test_lightning_capture")
    global WATCH  # noqa: PLW0603 - a trace puts back what a module holds
    WATCH = Watch()
    data = lightning.cases.loader(40, batch_size=4)
    step = lightning.captured(
        tmp_path, lightning_module(form), data, max_steps=3, accumulate_grad_batches=accumulate
    ).capture
    real, WATCH = WATCH, Watch()
    with step.symbolic_run():
        run_step(step.step.with_(job=None), 4, (8, 0))  # with a job, what the step keeps would be put back
    between, during = LIGHTNING[form]
    # The first iteration of each has none before it; the real ones come after three traces of two steps.
    assert (real.alive[-1], WATCH.alive[-1]) == (between, between)
    if accumulate == 1:  # Lightning divides the loss even by one: what it steps with is another tensor of four bytes
        assert set(real.at_steps[-1]) == during - ({"loss"} if form != "manual" else set())
        assert set(WATCH.at_steps[-1]) == during


# --- scripts ------------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parents[1] / "cases" / "accelerate_scripts" / "kept.py"
BATCH = 8 * 32 * 4

#: Loop -> what is alive when the forward of a second step, or of its second micro-batch, begins.
SCRIPTS = {
    "plain": [{"logits": BATCH, "loss": 4}],
    "loss_only": [{"loss": 4}],
    "in_a_function": [{}],
    "trainer": [{}],
    # Trainer loads all batches of an optimizer step before the first forward.
    "trainer_twice": [{}, {"batch": BATCH}],
}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    for needed in ("accelerate", "transformers"):
        pytest.importorskip(needed)
    if sys.platform == "win32":
        pytest.skip("a dry run copies its process (fork)")
    import accelerate_cases as cases

    asked = tmp_path_factory.mktemp("kept") / "asked"
    for loop in SCRIPTS:
        cases.request(asked / loop, SCRIPT, loop)
    return cases.dry_runs(asked)


def _said(printed: str) -> list[dict[str, int]]:
    lines = [line.split()[1:] for line in printed.splitlines() if line.startswith("alive:")]
    return [{name: int(size) for name, size in (one.split("=") for one in line)} for line in lines]


@pytest.mark.parametrize("loop", SCRIPTS)
def test_a_scripts_loop_keeps_what_its_dry_run_keeps(loop: str, dry: Any, tmp_path: Path) -> None:
    assert "error" not in dry[loop], dry[loop]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), loop, "--real"],
        cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    micro = len(SCRIPTS[loop])
    real, traced = _said(done.stdout), _said(dry[loop]["printed"])
    assert real[-micro:] == SCRIPTS[loop]
    # The dry run's first trace has the script's own batch: its second step comes after the first one's micro-batches.
    assert traced[micro : 2 * micro] == SCRIPTS[loop]
