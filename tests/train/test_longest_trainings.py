"""The longest batch in real Trainers and Runners: planned for where the first batches are short."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest
import torch
from guard_arguments import in_advanced
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from vram_guard import estimate
from vram_guard.guard.settings import GuardSettings
from vram_guard.step import TrainingStep
from vram_guard_lightning import VramGuard

LENGTHS = [8 + number % 5 for number in range(300)]
LENGTHS[217] = 700
WIDTH = 32

#: Lightning keeps a copy of the loss beside its graph.
LOSS_COPY = 512


class Tokens(Dataset):
    def __init__(self, lengths=LENGTHS):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.ones(self.lengths[index], dtype=torch.long)


def padded(batch):
    return pad_sequence(batch, batch_first=True)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, WIDTH)
        self.head = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, 1)
        )

    def forward(self, tokens):
        return self.head(self.embedding(tokens)).mean((1, 2))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Network()
        self.shapes = []

    def training_step(self, batch, batch_idx):
        self.shapes.append(tuple(batch.shape))
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fitted(guard, tmp_path, loader=None, module=None, validation=None, **arguments):
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        callbacks=[guard],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    module = module or Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader or DataLoader(Tokens(), 4, shuffle=True, collate_fn=padded), validation)
    return module


def step_of(shape):
    return TrainingStep(
        Network,
        lambda size: torch.ones(size, shape[1], dtype=torch.long),
        lambda net, batch: net(batch).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        zero_grad="before_backward",
        keeps="nothing",
        device="cpu",
    )


def test_a_trainer_is_planned_for_its_longest_batch(tmp_path, capsys):
    guard = VramGuard(budget="1GiB", mode="report")
    module = fitted(guard, tmp_path)
    assert (4, 700) in module.shapes
    assert guard.plan.before.peak_allocated == estimate(step_of((4, 700)), 4).peak_allocated + LOSS_COPY
    said = "the longest batch is planned for: 4 samples of up to lengths 700"
    assert said in capsys.readouterr().out
    first = VramGuard(budget="1GiB", mode="report", longest="first")
    fitted(first, tmp_path, limit_train_batches=1)
    assert first.plan.before.peak_allocated == estimate(step_of((4, 11)), 4).peak_allocated + LOSS_COPY
    assert "longest batch" not in capsys.readouterr().out


class Validated(Module):
    """Collects a number for every token of its validation."""

    def __init__(self, collects=False):
        super().__init__()
        self.collects, self.outputs = collects, []

    def validation_step(self, batch, batch_idx):
        scores = self.net.head(self.net.embedding(batch))
        if self.collects:
            self.outputs.append(scores.flatten())

    def on_validation_epoch_end(self):
        if self.collects:
            torch.cat(self.outputs)
        self.outputs.clear()


def validation_peak(tmp_path, lengths, *, collects=False, **arguments):
    guard = VramGuard(**in_advanced({"budget": "1GiB", "mode": "report", **arguments}))
    short = DataLoader(Tokens([8] * 16), 4, collate_fn=padded)
    fitted(guard, tmp_path, short, Validated(collects), DataLoader(Tokens(lengths), 4, collate_fn=padded))
    return max(phase.peak_allocated for phase in guard.plan.before.phases if phase.name == "validation")


def test_the_longest_batch_of_a_validation_is_one_of_its_rounds(tmp_path, capsys):
    short, long = [8] * 46, [2000]
    found = validation_peak(tmp_path, [*short, *long, 8])
    assert "validation: the longest batch is planned for: 4 samples of up to lengths 2000" in capsys.readouterr().out
    assert found == validation_peak(tmp_path, [*long, 8, 8, 8])
    assert found - validation_peak(tmp_path, short) > 2 * 4 * (2000 - 8) * 4 * WIDTH * 4 - 2**20
    assert validation_peak(tmp_path, [*short, *long, 8], longest="first") == validation_peak(tmp_path, short)
    few, many = (validation_peak(tmp_path, [*short * times, *long], collects=True) for times in (2, 40))
    assert (
        many - few == 38 * 46 // 4 * 512
    )  # the others are not as long: 32 numbers of a batch take a block of 512 bytes


def test_micro_batches_are_those_of_the_longest_batch(tmp_path):
    """Cut by sample, the padding of the batch stays: what is planned for one micro-batch holds for all."""
    amount = estimate(step_of((2, 700)), 2).peak_reserved
    guard = VramGuard(budget=amount, margin=0, allow=["accumulate"], loss_weight="mean")
    module = fitted(guard, tmp_path)
    assert (guard.plan.fits, guard.plan.splits) == (True, guard.plan.batch_size // guard.plan.micro_batch_size)
    assert guard.plan.splits > 1
    assert (guard.plan.micro_batch_size, 700) in module.shapes
    assert (4, 700) not in module.shapes


def test_two_loaders_are_each_at_their_longest(tmp_path, capsys):
    loaders = [DataLoader(Tokens(), 4, shuffle=True, collate_fn=padded) for _ in range(2)]

    class Both(Module):
        def training_step(self, batch, batch_idx):
            return sum(self.net(part).square().mean() for part in batch)

    guard = VramGuard(budget="1GiB", mode="report")
    trainer = pl.Trainer(default_root_dir=tmp_path, max_steps=1, callbacks=[guard], accelerator="cpu", logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Both(), loaders)
    assert guard.plan.before.breakdown["batch"] == 2 * 512 * -(-4 * 700 * 8 // 512)  # in blocks of 512 bytes
    assert "up to lengths 700" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["longer", 0, 0.99])
def test_settings_that_make_no_sense_are_refused_before_any_work(wrong):
    with pytest.raises(Exception, match="longest must be"):
        GuardSettings(longest=wrong)
