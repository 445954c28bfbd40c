"""Smaller validation batches in a Trainer: applied where a run on a few samples proves them, else proposed, and why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

pytest.importorskip("lightning")

from vram_guard.plan.model import SmallerEvaluation
from vram_guard.proof import evaluations
from vram_guard.techniques.recipe import AS_WRITTEN
from vram_guard_lightning import VramGuard, _capture, _namespaces

pytestmark = pytest.mark.filterwarnings("ignore")
lightning = importlib.import_module(_namespaces.installed()[0].__name__)

LARGE, SMALL, SAMPLES = 2**13, 2**10, 10_000
PLAIN = {"precision": "32-true", "precision_before": "32-true", "splits": 1}
_OFF = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
QUIET: dict[str, Any] = {
    **dict.fromkeys(_OFF, False),
    "max_epochs": 1,
    "accelerator": "cpu",
    "num_sanity_val_steps": 1,
}


class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Its validation is that of a test."""

    def __init__(self, validate: Callable[[Any, torch.Tensor, int], object], end: Callable[[Any], object]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        self.validate, self.end = validate, end

    def training_step(self, batch: Any, _batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def on_validation_epoch_start(self) -> None:
        self.values: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validate(self, self.net(batch[0]).square(), batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.end(self)
        self.values = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def logs_mean(net: Any, out: torch.Tensor, _index: int) -> None:
    net.log("value", out.mean())


def collects(net: Any, out: torch.Tensor, _index: int) -> None:
    net.values.append(out.mean())


def logs_mean_of_means(net: Any) -> None:
    net.log("value", torch.stack(net.values).mean())


def nothing(*_arguments: Any) -> None: ...


def fitted(
    validate: Callable[..., object] = logs_mean,
    end: Callable[..., object] = nothing,
    *,
    size: int = LARGE,
    samples: int = SAMPLES,
    **settings: Any,
) -> SimpleNamespace:
    sizes: list[int] = []

    def collated(rows: Any) -> Any:
        sizes.append(len(rows))
        return default_collate(rows)

    guard = VramGuard(margin=0, remember=False, recover=False, **{"allow": ["evaluation"], **settings})
    made = lightning.Trainer(callbacks=[guard], **QUIET)
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(samples, 64))
    held_out = DataLoader(rows, size, collate_fn=collated)
    made.fit(Net(validate, end), DataLoader(TensorDataset(rows.tensors[0][:64]), 16), held_out)
    value = made.callback_metrics.get("value")
    return SimpleNamespace(plan=guard.plan, sizes=sizes, value=value, loader=held_out, trainer=made)


@pytest.fixture(scope="module")
def budget() -> int:
    """Between those of the smaller batch and of twice as many samples."""
    low, high = (
        fitted(size=size, samples=size, budget="1GiB", mode="report").plan.before.peak_reserved
        for size in (SMALL, 2 * SMALL)
    )
    assert low < high
    return (low + high) // 2


def test_smaller_batches_are_applied_where_what_is_logged_stays(budget: int) -> None:
    """Of the same samples, in the sanity check too; afterwards everything is as it was."""
    found, as_written = fitted(budget=budget), fitted(budget=budget, mode="report")
    assert found.plan.evaluation == SmallerEvaluation("validation", LARGE, SMALL)
    assert found.plan.fits
    assert not found.plan.fits_as_written
    assert found.sizes == [SMALL] * 8 + [SMALL] * 9 + [SAMPLES % SMALL]  # the sanity check comes first
    assert as_written.sizes == [LARGE, LARGE, SAMPLES % LARGE]
    assert abs(float(found.value) - float(as_written.value)) < 1e-5 * float(as_written.value)
    assert (found.loader.batch_size, found.trainer.num_sanity_val_steps) == (LARGE, 1)
    assert as_written.plan.evaluation == found.plan.evaluation  # in mode "report" it is only said
    assert ("batch size of validation", str(LARGE), str(SMALL)) in found.plan.changes()
    assert found.plan.verdict() == "batch size of validation: 1024"


def test_a_mean_over_batches_stays_only_where_they_are_equal(budget: int) -> None:
    assert fitted(collects, logs_mean_of_means, samples=LARGE, budget=budget).plan.evaluation is not None
    found = fitted(collects, logs_mean_of_means, budget=budget)
    assert (found.plan.fits, found.plan.evaluation, found.sizes) == (False, None, [LARGE, LARGE, SAMPLES % LARGE])
    said = "\n".join(found.plan.reasons)
    assert "With batches of 1024 in place of 8192" in said
    assert "run on 7 samples, the logged value value is" in said


def of_first_batch(net: Any, out: torch.Tensor, index: int) -> None:
    if index == 0:
        net.log("value", out.mean())


def with_noise(net: Any, out: torch.Tensor, _index: int) -> None:
    net.log("value", (out + torch.randn_like(out)).mean())


def never_right(net: Any, out: torch.Tensor, _index: int) -> None:
    net.log("value", (out > 1e9).float().mean())


def logs_each(net: Any, out: torch.Tensor, _index: int) -> None:
    net.log("value", out.mean(), on_step=True, on_epoch=True)


class Watches(lightning.Callback):  # type: ignore[misc, name-defined]
    def on_validation_batch_end(self, *_arguments: Any, **_named: Any) -> None: ...


CUT = SmallerEvaluation("validation", 16, 8)


def unproven(validate: Callable[..., object] = logs_mean, *callbacks: Any, samples: int = 20, **trainer: Any) -> str:
    """Why batches of 8 in place of 16 are not applied, at the point at which the guard asks; "" where they are."""
    found: list[str] = []

    class StoppedError(Exception):
        pass

    class Asks(lightning.Callback):  # type: ignore[misc, name-defined]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            def setup(trainer: Any) -> None:
                captured = _capture.capture(trainer, pl_module)
                refused = captured.objection(cast("Any", SimpleNamespace(evaluation=CUT, recipe=AS_WRITTEN, **PLAIN)))
                found.append(refused.reason if refused is not None else proven(captured))
                raise StoppedError

            trainer.strategy.setup = setup

    def proven(captured: Any) -> str:
        rehearse, sizes = captured.rehearse_evaluation, captured.evaluated_samples
        return evaluations.prove_evaluation(rehearse, CUT, sizes, lacking=lambda *_arguments: "", seconds=20)[1]

    made = lightning.Trainer(callbacks=[Asks(), *callbacks], **{**QUIET, **trainer})
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(samples, 64))
    with pytest.raises(StoppedError):
        made.fit(Net(validate, nothing), DataLoader(rows, 4), DataLoader(rows, 16))
    return found[0]


@pytest.mark.parametrize(
    ("arguments", "trainer", "why"),
    [
        ((logs_mean,), {}, ""),
        ((of_first_batch,), {}, "validation_step looks at the number of a batch"),
        ((with_noise,), {}, "it draws random numbers"),
        ((never_right,), {}, "is 0 for some of the 31 samples as for all"),
        ((nothing,), {}, "it logs nothing that could be compared"),
        ((logs_each,), {}, "value_step"),
        ((logs_mean, Watches()), {}, "on_validation_batch_end of Watches is called for every batch"),
        ((logs_mean,), {"limit_val_batches": 1}, "limit_val_batches counts batches"),
        ((logs_mean,), {"overfit_batches": 1}, "limit_val_batches counts batches"),
    ],
)
def test_smaller_batches_are_not_applied_where_they_are_not_proven(
    arguments: tuple[Any, ...], trainer: dict[str, Any], why: str
) -> None:
    found = unproven(*arguments, **trainer)
    assert why in found
    assert bool(why) == bool(found)


def test_files_that_validation_writes_are_compared(tmp_path: Path) -> None:
    def writes(net: Any, out: torch.Tensor, index: int) -> None:
        logs_mean(net, out, index)
        (tmp_path / "predictions.txt").write_text(str(len(out)))

    assert "predictions.txt ran 4 times instead of 2 times" in unproven(writes)


def test_without_a_proof_they_are_proposed(budget: int) -> None:
    for settings, why in (
        ({"proof_seconds": 0}, "proof_seconds is 0"),
        ({"allow": ["foreach"]}, "'evaluation' is not among the techniques that this plan may use"),
    ):
        found = fitted(budget=budget, **cast("Any", settings))
        assert (found.plan.fits, found.plan.evaluation) == (False, None)
        assert f"It is not applied: {why}." in "\n".join(found.plan.reasons)


@pytest.mark.parametrize(
    ("sizes", "few"),
    [((32,), (8, 4)), ((40,), (6, 4)), ((41,), (7, 4)), ((32, 41), (7, 4))],
)
def test_the_few_samples_end_with_a_short_batch_where_the_data_set_does(
    sizes: tuple[int, ...], few: tuple[int, int]
) -> None:
    assert evaluations._few(SmallerEvaluation("validation", 16, 8), sizes, 2) == few
