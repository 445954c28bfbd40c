"""Checkpointed blocks: their second forward is compared with the first, and a training that would be another stops."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import recomputed_kinds as kinds
import torch
from guard_arguments import in_advanced
from recomputed_kinds import BATCH, EQUAL, STOPS, data, made, same, state
from torch.utils.data import DataLoader, TensorDataset

from vram_guard.errors import RecomputationError
from vram_guard.forks.fork import can_fork
from vram_guard.techniques import Recipe, install, step_where

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
#: What a framework's training is tried with: the trace of a plan sees some of the others, and refuses them.
TRIED = (
    *("an adapter switched between two forwards", "a scale in a context", "a global of the module"),
    *("a context variable", "functional_call with modulated weights", "an inner step of MAML"),
    *("a hook removed before the backward pass", "weights that move through .data", "the time", "nothing"),
)
#: Those of them that are trained under each framework: what is told apart is told apart by the blocks alone.
UNDER_FRAMEWORKS = (TRIED[0], TRIED[3], TRIED[7], TRIED[9])
forking = pytest.mark.skipif(not can_fork(), reason="copies of processes need Linux")


class Trained:
    """A plain loop, until something stops it."""

    def __init__(self, kind: type[kinds.Model], recipe: Recipe | None = None, **changes: Any) -> None:
        self.stopped: Exception | None = None
        self.model = made(kind)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.batches = list(zip(*(part.split(BATCH) for part in data()), strict=True))
        undo = install(self.model, recipe) if recipe else lambda: None
        try:
            self.run(**changes)
        except RecomputationError as stopped:
            self.stopped = stopped
        finally:
            undo()
        self.left = state(self.model)

    def run(self) -> None:
        for inputs, targets in self.batches:
            self.optimizer.zero_grad()
            self.model.loss(inputs, targets).backward()
            self.optimizer.step()


@pytest.mark.parametrize("name", [*STOPS, *EQUAL])
def test_a_plain_loop_learns_the_same_or_stops_before_the_first_step_that_would_be_another(name: str) -> None:
    kind = (STOPS | EQUAL)[name]
    checkpointed = Trained(kind, Recipe(checkpoint=BLOCKS))
    if name in EQUAL:
        assert checkpointed.stopped is None
        assert same(Trained(kind).left, checkpointed.left)
        return
    assert re.match(r"blocks\.[012]", str(checkpointed.stopped))
    begun = state(made(kind))
    if name == "weights that move through .data":
        begun.update({each: 0.9 * one for each, one in begun.items() if each.endswith("line.weight")})
    assert same(begun, checkpointed.left)


class Accumulated(Trained):
    """Three backward passes for a step."""

    def run(self) -> None:
        for number, (inputs, targets) in enumerate(self.batches):
            (self.model.loss(inputs, targets) / 3).backward()
            if number % 3 == 2:
                self.optimizer.step()
                self.optimizer.zero_grad()


class Closed(Trained):
    """Forward and backward run within the step, as a closure."""

    optimizer_class: Any = torch.optim.SGD

    def run(self) -> None:
        optimizer = self.optimizer_class(self.model.parameters(), lr=0.05)
        for inputs, targets in self.batches:

            def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
                optimizer.zero_grad()
                loss = self.model.loss(inputs, targets)
                loss.backward()
                return loss

            optimizer.step(closure=closure) if len(inputs) % 2 else optimizer.step(closure)


class Newton(Closed):
    optimizer_class = torch.optim.LBFGS


class Scaled(Trained):
    """A GradScaler steps."""

    def run(self) -> None:
        scaler = torch.amp.GradScaler("cpu")
        for inputs, targets in self.batches:
            self.optimizer.zero_grad()
            scaler.scale(self.model.loss(inputs, targets)).backward()
            scaler.step(self.optimizer)
            scaler.update()


class Several(Trained):
    """An optimizer of its own for the head, which steps first."""

    def run(self) -> None:
        parts = [self.model.head, self.model.blocks]
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]
        for inputs, targets in self.batches:
            self.model.zero_grad()
            self.model.loss(inputs, targets).backward()
            for optimizer in optimizers:
                optimizer.step()


class InBackward(Trained):
    """Each parameter steps in the backward pass. The head has, rightly, when the last block is found to differ."""

    def run(self) -> None:
        step_where([self.optimizer], Recipe(optimizer_in_backward=True))
        for inputs, targets in self.batches:
            self.model.loss(inputs, targets).backward()


class ByHand(Trained):
    """No optimizer at all: what differs is found out at the next forward."""

    def run(self) -> None:
        for inputs, targets in self.batches:
            self.model.zero_grad()
            self.model.loss(inputs, targets).backward()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.sub_(0.05 * parameter.grad)


class Copied(Trained):
    """A copy of the model trains, as an average of weights is one."""

    def run(self) -> None:
        import copy

        self.model = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        super().run()


@pytest.mark.parametrize("loop", [Accumulated, Closed, Newton, Scaled, Several, InBackward, ByHand, Copied])
def test_whatever_steps(loop: type[Trained]) -> None:
    differing, pure = STOPS["a scale in a context"], EQUAL["nothing"]
    assert same(loop(pure).left, loop(pure, Recipe(checkpoint=BLOCKS)).left)
    assert loop(differing).stopped is None
    stopped = loop(differing, Recipe(checkpoint=BLOCKS))
    assert isinstance(stopped.stopped, RecomputationError)
    if loop is not ByHand:
        rightly: tuple[str, ...] = ("head.",) if loop is InBackward else ()
        begun = state(made(differing))
        assert same({name: one for name, one in begun.items() if not name.startswith(rightly)}, stopped.left)


RECIPES = {
    "selective": Recipe(checkpoint=BLOCKS, checkpoint_keeps=("addmm", "mm")),
    "one within another": Recipe(checkpoint=(*BLOCKS, "blocks.1.line")),
    "beside offloaded ones": Recipe(checkpoint=BLOCKS[1:], offload_activations=BLOCKS[:1]),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", [TRIED[1], TRIED[7], "nothing", "dropout, Python's and NumPy's numbers"])
def test_other_ways_to_checkpoint(recipe: Recipe, name: str) -> None:
    checkpointed = Trained((STOPS | EQUAL)[name], recipe)
    if checkpointed.stopped is None:  # products that are kept are those of the weights before they moved
        assert name in EQUAL or recipe.checkpoint_keeps
        assert same(Trained((STOPS | EQUAL)[name]).left, checkpointed.left)
    else:
        assert name in STOPS


# --- under a framework ----------------------------------------------------------------------------------------------


#: Of a guard: blocks are checkpointed.
GUARDED = {"budget": "1GiB", "pin": {"checkpoint": tuple("net." + name for name in BLOCKS)}, "remember": False}


def check(name: str, written: dict[str, torch.Tensor], guarded: dict[str, torch.Tensor], stopped: object) -> None:
    """Equal to what was written, or stopped where it began."""
    if stopped is None:
        assert same(written, guarded), name
    else:
        assert name in STOPS
        assert isinstance(stopped, RecomputationError), name
        moved = {one for one in guarded if name == "weights that move through .data" and one.endswith("line.weight")}
        begun = state(made(STOPS[name]))
        assert same({one: value for one, value in begun.items() if one not in moved}, guarded), name


@forking
def test_lightning(tmp_path: Path) -> None:
    from lightning import pytorch as lightning

    from vram_guard_lightning import VramGuard

    class Module(lightning.LightningModule):
        def __init__(self, kind: type[kinds.Model]) -> None:
            super().__init__()
            self.net = made(kind)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net.loss(*batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def fitted(kind: type[kinds.Model], guard: Any) -> tuple[dict[str, torch.Tensor], Exception | None]:
        module = Module(kind)
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=[guard] if guard else [], default_root_dir=tmp_path, **quiet
        )
        stopped = None
        try:
            trainer.fit(module, DataLoader(TensorDataset(*data()), batch_size=BATCH))
        except RecomputationError as error:
            stopped = error
        return state(module.net), stopped

    seen = set()
    for name in UNDER_FRAMEWORKS:
        kind = (STOPS | EQUAL)[name]
        guarded, stopped = fitted(kind, VramGuard(**in_advanced(GUARDED)))
        check(name, fitted(kind, None)[0], guarded, stopped)
        seen.add(stopped is None)
    assert seen == {True, False}


@forking
def test_mmengine(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own, which MMEngine imports
        pytest.importorskip("mmengine")
        from mmengine.config import Config
        from mmengine.model import BaseModel
        from mmengine.runner import Runner

        from vram_guard_mmengine import VramGuardHook

    class Wrapped(BaseModel):
        def __init__(self, kind: type[kinds.Model]) -> None:
            super().__init__()
            self.net = made(kind)

        def forward(self, inputs: Any, targets: Any, mode: str = "loss") -> Any:
            return {"loss": self.net.loss(inputs, targets)}

    def fitted(name: str, guard: Any) -> tuple[dict[str, torch.Tensor], Exception | None]:
        inputs, targets = data()
        samples = [{"inputs": one, "targets": other} for one, other in zip(inputs, targets, strict=True)]
        model = Wrapped((STOPS | EQUAL)[name])
        config: dict[str, Any] = {
            "train_cfg": {"by_epoch": True, "max_epochs": 1},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.05}},
            "default_hooks": {"logger": None, "checkpoint": None},
        }
        loader = DataLoader(samples, batch_size=BATCH)  # type: ignore[arg-type] - a list is a data set
        runner = Runner(
            model=model,
            work_dir=str(tmp_path),
            experiment_name=re.sub(r"\W", "_", f"{name} {guard is None}"),
            log_level="ERROR",
            train_dataloader=loader,
            cfg=Config(config),
            custom_hooks=[guard] if guard else None,
            **config,
        )
        stopped = None
        try:
            runner.train()
        except RecomputationError as error:
            stopped = error
        return state(model.net), stopped

    seen = set()
    for name in UNDER_FRAMEWORKS:
        guarded, stopped = fitted(name, VramGuardHook(**in_advanced(GUARDED)))
        check(name, fitted(name, None)[0], guarded, stopped)
        seen.add(stopped is None)
    assert seen == {True, False}


@forking
def test_a_launched_script(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate_cases import HERE, ONE, launch

    from vram_guard.codec import to_json
    from vram_guard_accelerate.launch_plan import VARIABLE, LaunchPlan

    names = tuple(f"{number}.{block}" for number in range(len(TRIED)) for block in BLOCKS)
    plan = LaunchPlan(recipe=Recipe(checkpoint=names), models=len(TRIED))
    script = HERE / "accelerate_scripts" / "recomputed.py"
    found = []
    for guard, more in (((), {}), (("-m", "vram_guard_accelerate"), {VARIABLE: to_json(plan)})):
        out = tmp_path / f"{len(found)}.pt"
        done = launch(*ONE, *guard, script, out, *TRIED, cache=tmp_path / "cache", guarded=False, **more)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(torch.load(out))
    for name in TRIED:
        (written, _none), (guarded, stopped) = found[0][name], found[1][name]
        check(name, written, guarded, RecomputationError() if stopped == "RecomputationError" else None)
    assert {stopped for _left, stopped in found[1].values()} == {"", "RecomputationError"}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_where_one_rank_differs_the_other_does_not_wait_for_ever(tmp_path: Path) -> None:
    """The rank that differs ends before its step; the other one finds it gone, as after any error."""
    script = Path(__file__).parents[1] / "cases" / "recomputed_ranks.py"
    ranks = [subprocess.Popen([sys.executable, script, str(rank), tmp_path / "store"]) for rank in range(2)]
    try:
        first, second = (process.wait(timeout=300) for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    assert second == 3
    assert first not in (0, 3)
