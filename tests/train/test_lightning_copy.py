"""The Lightning guard looks at a training in a copy of the process: the training itself is left as it is."""

from __future__ import annotations

import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning_cases as cases
import numpy as np
import pytest
import torch
from lightning import pytorch as lightning
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vram_guard.errors import UnsupportedStepError
from vram_guard.forks import fork
from vram_guard.forks.fork import can_fork
from vram_guard_lightning import VramGuard

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
forks = pytest.mark.skipif(not can_fork(), reason="copies of processes need Linux")


class Drawing(Dataset[Any]):
    """Draws from a generator of its own, counts, and writes down what it hands out."""

    def __init__(self, log: Path) -> None:
        self.own, self.numbers = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.python = random.Random(3)
        self.reads = 0
        self.log = log

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        noise = float(self.numbers.normal()) + self.python.random()
        return torch.randn(6, generator=self.own) + noise, torch.randn(2, generator=self.own)


class Counting:
    """A helper that no module knows."""

    steps = 0


class Small(lightning.LightningModule):
    def __init__(self, helper: Counting) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)
        self.helper = [helper]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.helper[0].steps += 1
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y) * (1 + 0.1 * self.helper[0].steps)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fitted(tmp_path: Path, guard: VramGuard | None, name: str, module: Any = None) -> tuple[torch.Tensor, Drawing, str]:
    torch.manual_seed(0)
    data, helper = Drawing(tmp_path / f"{name}.txt"), Counting()
    module = (module or Small)(helper)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[] if guard is None else [guard],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size=4))
    return cases.weights(module), data, " ".join(str(one.message) for one in caught)


@forks
@pytest.mark.parametrize("mode", ["fit", "report", "strict"])
def test_generators_counters_files_and_helpers_are_as_without_the_guard(mode: Any, tmp_path: Path) -> None:
    plain, data, _ = fitted(tmp_path, None, "plain")
    guarded, looked_at, _ = fitted(
        tmp_path, VramGuard(budget="1GiB", mode=mode, advanced={"remember": False}), "guarded"
    )
    assert torch.equal(plain, guarded)
    assert looked_at.reads == data.reads == 24
    assert torch.equal(looked_at.own.get_state(), data.own.get_state())
    assert looked_at.python.getstate() == data.python.getstate()
    assert (tmp_path / "plain.txt").read_text() == (tmp_path / "guarded.txt").read_text()


class Dying(Small):
    """Ends its process where it is looked at."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch[0].device.type != "cpu":
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().training_step(batch, batch_idx)


@forks
def test_a_copy_that_dies_is_said_and_the_training_goes_on_unguarded(tmp_path: Path) -> None:
    plain, _, _ = fitted(tmp_path, None, "plain")
    guard = VramGuard(budget="1GiB", advanced={"remember": False})
    weights, _, said = fitted(tmp_path, guard, "guarded", Dying)
    assert "killed by signal 11" in said
    assert "left unchanged" in said
    assert guard.plan is None
    assert torch.equal(plain, weights)
    with pytest.raises(UnsupportedStepError):
        fitted(tmp_path, VramGuard(budget="1GiB", mode="strict", advanced={"remember": False}), "strict", Dying)


def test_where_there_is_no_fork_it_is_said_what_is_not_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(fork, "can_fork", lambda: False)
    guard = VramGuard(budget="1GiB", advanced={"remember": False})
    fitted(tmp_path, guard, "guarded")
    out = " ".join(capsys.readouterr().out.split())
    assert "was looked at in its own process" in out
    assert "is not put back" in out
    assert guard.plan is not None


@forks
def test_what_a_used_gpu_forbids_in_a_copy_is_done_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Refusing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if os.getpid() != process and batch[0].device.type != "cpu":
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing")
            return super().training_step(batch, batch_idx)

    process = os.getpid()
    guard = VramGuard(budget="1GiB", advanced={"remember": False})
    fitted(tmp_path, guard, "guarded", Refusing)
    assert "was looked at in its own process (Cannot re-initialize CUDA" in " ".join(capsys.readouterr().out.split())
    assert guard.plan is not None
