"""One training under Lightning's callback: reported, refused, made to fit, saved, resumed, out of memory on its way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

import lightning.pytorch as pl
import lightning_cases as cases
import oom_cases
from lightning.pytorch.callbacks import ModelCheckpoint

from vram_guard.errors import DoesNotFitError
from vram_guard_lightning import VramGuard

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, BATCH = 32, 4096


class Regression(pl.LightningModule):
    """Wide enough that its activations are what it takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(4))
        self.net = nn.Sequential(*blocks, nn.Linear(WIDTH, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Overflowing(Regression):
    """There is memory for half a batch, from the fourth batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step >= 3 and len(batch[0]) > BATCH // 2:
            raise oom_cases.no_memory()
        return super().training_step(batch, batch_idx)


def trained(root: Any, guard: VramGuard | None, *, kind: Any = Regression, resume: str | None = None) -> torch.Tensor:
    """The weights after two epochs of three batches each; a checkpoint lies beside each epoch."""
    made = kind()
    keep = ModelCheckpoint(dirpath=root, filename="{epoch}", save_top_k=-1)
    callbacks = [keep, *([guard] if guard else [])]
    trainer = cases.make_trainer("lightning.pytorch", root, callbacks, max_epochs=2, enable_checkpointing=True)
    torch.manual_seed(3)
    data = cases.loader(dataset=cases.Vectors(3 * BATCH, WIDTH), batch_size=BATCH, shuffle=False)
    trainer.fit(made, data, ckpt_path=resume)
    return cases.weights(made)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return trained(tmp_path_factory.mktemp("plain"), None)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A budget that is large enough; the weights that came of it."""
    guard = VramGuard(budget="8GiB", margin=0, mode="report")
    return guard, trained(tmp_path_factory.mktemp("report"), guard)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, reported: Any) -> Any:
    """Under a budget that the step as written just does not fit."""
    root = tmp_path_factory.mktemp("fit")
    tight = reported[0].plan.before.peak_reserved - 1
    guard = VramGuard(budget=tight, margin=0, allow=("accumulate",))
    return guard, trained(root, guard), root


def test_a_report_says_what_it_takes_and_changes_nothing(reported: Any, plain: torch.Tensor) -> None:
    guard, weights = reported
    assert guard.plan.fits, guard.plan.reasons
    assert not guard.plan.changed
    assert torch.equal(weights, plain)


def test_strict_refuses_before_anything_is_trained(tmp_path: Any, reported: Any) -> None:
    guard = VramGuard(budget=reported[0].plan.before.peak_reserved - 1, margin=0, mode="strict")
    with pytest.raises(DoesNotFitError):
        trained(tmp_path, guard)
    assert not list(tmp_path.glob("*.ckpt"))


def test_it_fits_in_micro_batches_and_learns_the_same(fitted: Any, plain: torch.Tensor) -> None:
    guard, weights, _ = fitted
    assert guard.plan.fits, guard.plan.reasons
    assert guard.plan.splits > 1
    torch.testing.assert_close(weights, plain, rtol=2e-5, atol=2e-6)


def test_it_resumes_from_its_checkpoint(fitted: Any, tmp_path: Any) -> None:
    guard, weights, root = fitted
    # Less than before: where optimizer states are there before the first step, two segments fewer are taken.
    again = VramGuard(budget=guard.plan.before.peak_reserved - 2**22, margin=0, allow=("accumulate",))
    assert torch.equal(trained(tmp_path, again, resume=str(root / "epoch=0.ckpt")), weights)


def test_the_batch_that_ran_out_of_memory_runs_again_in_smaller_ones(plain: torch.Tensor, tmp_path: Any) -> None:
    guard = VramGuard(budget="8GiB", margin=0, allow=("accumulate",), loss_weight="mean")
    weights = trained(tmp_path, guard, kind=Overflowing)
    torch.testing.assert_close(weights, plain, rtol=2e-5, atol=2e-6)
