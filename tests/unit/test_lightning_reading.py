"""What is read of a Trainer before anything runs: which parts of a plan it does not go with, and what is recovered."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from each import each

pytest.importorskip("lightning")

import lightning_cases as cases

from vram_guard.techniques import Recipe, Sharding
from vram_guard_lightning import VramGuard
from vram_guard_lightning._recovery import why_not
from vram_guard_lightning._refusals import by_optimizer, refusals

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = cases.NAMESPACE
pl = importlib.import_module(NAMESPACE)
plugins = importlib.import_module(f"{NAMESPACE}.plugins")
TWO = {"devices": 2, "strategy": "ddp"}


def trainer_with(**settings: Any) -> Any:
    """A Trainer; where it has several processes, none of them has been started."""
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    return pl.Trainer(**{**quiet, **settings})


class Stepping(pl.LightningModule):  # type: ignore[misc, name-defined]
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class Clipping(pl.Callback):  # type: ignore[misc, name-defined]
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...


class Manual(pl.LightningModule):  # type: ignore[misc, name-defined]
    automatic_optimization = False


def changing() -> Any:
    return {"callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 1, 3: 2})]}


@each(
    ("technique", "settings", "module", "refused"),
    [
        ("precision", {}, None, False),
        ("precision", {"plugins": [type("Own", (plugins.Precision,), {})()]}, None, True),
        ("accumulate", {}, None, False),
        ("grow", {}, None, False),
        ("grow", {"fast_dev_run": True}, None, True),
        ("grow", {"overfit_batches": 2}, None, True),
        ("optimizer_in_backward", {}, None, False),
        ("optimizer_in_backward", {"callbacks": [pl.callbacks.Timer()]}, None, False),
        ("optimizer_in_backward", {"callbacks": [Clipping()]}, None, True),
        ("optimizer_in_backward", changing(), None, True),
        ("optimizer_in_backward", {"gradient_clip_val": 1.0}, None, True),
        ("optimizer_in_backward", {}, Stepping, True),
        ("optimizer_in_backward", {}, Manual, True),
        ("shard", {}, None, True),  # there is one process
        ("shard", TWO, None, False),
        ("offload_parameters", {}, None, True),
        ("offload_parameters", {**TWO, "allow": ["offload_parameters"]}, None, True),  # they would have to be divided
        ("offload_parameters", {**TWO, "allow": ["offload_parameters", "shard"]}, None, False),
        ("offload_parameters", {"allow": ["offload_parameters", "shard"]}, None, True),
    ],
)
def test_what_a_trainer_does_not_go_with(technique: str, settings: Any, module: Any, refused: bool) -> None:
    allow = settings.get("allow")
    trainer = trainer_with(**{name: value for name, value in settings.items() if name != "allow"})
    made = (module or pl.LightningModule)()
    found = {
        one.technique for one in refusals(trainer, made, VramGuard(allow=allow).settings, growable="") if one.reason
    }
    assert (technique in found) is refused


@each(
    ("traits", "precision", "before", "clip", "sharding", "technique"),
    [
        ({"Adam"}, "16-mixed", "32-true", None, None, None),
        ({"LBFGS"}, "16-mixed", "32-true", None, None, "precision"),
        ({"LBFGS"}, "bf16-mixed", "32-true", None, None, None),
        ({"LBFGS"}, "16-mixed", "16-mixed", None, None, None),
        ({"Adam", "fused"}, "16-mixed", "32-true", None, None, None),
        ({"Adam", "fused"}, "16-mixed", "32-true", 1.0, None, "precision"),
        ({"Adam"}, "16-mixed", "32-true", 1.0, None, None),
        ({"Lamb", "Adam"}, "32-true", "32-true", None, Sharding(fsdp2=True), "shard"),
        ({"Lamb", "Adam"}, "32-true", "32-true", None, Sharding(reshard=True), None),
        ({"Adam", "fused"}, "32-true", "32-true", None, Sharding(fsdp2=True), None),
        ({"LBFGS"}, "16-mixed", "32-true", None, Sharding(reshard=True), "precision"),
    ],
)
def test_what_of_a_plan_does_not_go_with_the_optimizer(
    traits: set[str], precision: str, before: str, clip: float | None, sharding: Any, technique: str | None
) -> None:
    plan: Any = SimpleNamespace(precision=precision, precision_before=before, recipe=Recipe(sharding=sharding))
    found = by_optimizer(trainer_with(gradient_clip_val=clip), traits | {"Optimizer", "object"}, plan)
    assert (None if found is None else found.technique) == technique


@each(
    ("strategy", "steps_itself", "recovered"),
    [(None, False, True), (pl.strategies.DDPStrategy(), False, False), (None, True, False)],
)
def test_one_process_that_frees_its_gradients_as_lightning_does_is_recovered(
    strategy: Any, steps_itself: bool, recovered: bool
) -> None:
    trainer = trainer_with(**({} if strategy is None else {"strategy": strategy}))
    module = pl.LightningModule()
    module.automatic_optimization = not steps_itself
    assert bool(why_not(trainer, module)) is not recovered
    if recovered:
        frees = type("Frees", (pl.LightningModule,), {"on_before_zero_grad": lambda _self, _optimizer: None})
        assert "on_before_zero_grad" in why_not(trainer, frees())
