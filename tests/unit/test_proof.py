"""Plans that cut batches or checkpoint blocks are applied where they are known to leave what is learned as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_arguments import in_advanced
from lightning import pytorch as lightning
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from vram_guard.errors import LossChangedError
from vram_guard.forks.fork import can_fork
from vram_guard_lightning import VramGuard

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="copies of processes need Linux"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

SAMPLES, WIDTH, CLASSES = 48, 8, 5


class Net(lightning.LightningModule):
    """Blocks and a head, under a loss that is handed in."""

    def __init__(self, loss: Callable[[Net, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.loss = loss
        self.counter = 0
        self.register_buffer("rarity", torch.linspace(0.5, 2, CLASSES))
        self.average = self.head.weight.detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        return self.loss(self, self.head(self.blocks(inputs)), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def mean(_net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels)


def weighted(net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels, weight=net.rarity)


def ignoring(_net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels, ignore_index=0)


def with_dropout(_net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.dropout(scores, 0.5), labels)


def root(_net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(scores[:, 0], labels.to(scores)).sqrt()


def contrastive(_net: Net, scores: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    views = F.normalize(scores, dim=1)
    return F.cross_entropy(views @ views.T / 0.1, torch.arange(len(views), device=views.device))


def counting(net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    net.counter += 1
    return F.cross_entropy(scores, labels)


def two_normalisers(_net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels, ignore_index=0) + scores.square().mean()


def over_active(_net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over the margins that are exceeded: all of them at first, of which four samples tell nothing."""
    margins = F.relu(1.0 - scores.gather(1, labels[:, None]) + scores)
    return margins.sum() / ((margins > 0).sum() + 1e-9)


def initialising(net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if net.counter == 0:
        net.counter = 1
        net.head.bias.data.copy_(-scores.detach().mean(0))
    return F.cross_entropy(scores, labels)


def turned_around(_net: Net, scores: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    return (scores - scores.detach().flip(0)).square().mean()


def of_a_mask(_net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return scores.square().mean(1)[labels != 0].mean()


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)


def trainer_for(guard: VramGuard | None, folder: Any, steps: int) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[] if guard is None else [guard],
    )


def trained(loss: Any, guard: VramGuard | None, tmp_path: Any) -> tuple[dict[str, torch.Tensor], str]:
    """The weights after three steps, and the warnings."""
    torch.manual_seed(0)
    net, loader = Net(loss), data()
    trainer = trainer_for(guard, tmp_path, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(net, loader)
    return dict(net.state_dict()), "\n".join(str(one.message) for one in caught)


def pinned(**settings: Any) -> VramGuard:
    return VramGuard(**in_advanced({"budget": "1GiB", "pin": {"micro_batch_size": 4}, "remember": False, **settings}))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one)


@pytest.mark.parametrize("loss", [mean, weighted, ignoring], ids=lambda loss: loss.__name__)
def test_a_proven_cut_is_applied_and_trains_equally(loss: Any, tmp_path: Any) -> None:
    plain, _ = trained(loss, None, tmp_path)
    guard = pinned()
    guarded, _ = trained(loss, guard, tmp_path)
    assert guard.plan is not None
    assert guard.plan.splits == 2
    assert close(plain, guarded)


def test_random_draws_of_samples_are_no_difference(tmp_path: Any, capsys: Any) -> None:
    guard = pinned()
    trained(with_dropout, guard, tmp_path)
    assert guard.plan is not None
    assert guard.plan.splits == 2
    assert "proven by the loss graph" in capsys.readouterr().out


def test_as_the_user_says_it_is_cut(tmp_path: Any, capsys: Any) -> None:
    plain, _ = trained(root, None, tmp_path)
    guarded, _ = trained(root, pinned(loss_weight="mean"), tmp_path)
    out = capsys.readouterr().out
    assert "as you said (loss_weight)" in out
    assert not close(plain, guarded)


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (root, "aten.sqrt"),
        (contrastive, "aten.mm"),
        (two_normalisers, "means over different counts"),
        (counting, "the step itself changes counter, which would be once per micro-batch"),
        (initialising, "the step itself changes head.bias, which would be once per micro-batch"),
        (turned_around, "aten.flip joins samples"),
        (of_a_mask, "picks by a mask"),
        (over_active, "loss_weight"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_not_proven_is_not_cut_and_is_named(loss: Any, named: str, tmp_path: Any) -> None:
    plain, _ = trained(loss, None, tmp_path)
    guarded, said = trained(loss, pinned(), tmp_path)
    assert named in said
    assert same(plain, guarded)


def test_logged_values_that_are_no_means_are_said(tmp_path: Any, capsys: Any) -> None:
    def keeping(net: Net, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        net.kept = scores.detach()  # as long as the batch: a callback's, and no state
        net.log("spread", scores.std().item())
        return F.cross_entropy(scores, labels)

    guard = pinned()
    trained(keeping, guard, tmp_path)
    assert guard.plan is not None
    assert guard.plan.splits == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "may be others in micro-batches: spread" in said


def test_the_next_plan_is_taken_where_a_cut_differs(tmp_path: Any) -> None:
    """Contrastive learning at nine tenths of its peak: it is not cut, whatever else is found."""

    class Wide(Net):
        def __init__(self) -> None:
            super().__init__(contrastive)
            self.blocks = nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, 4096), nn.Tanh(), nn.Linear(4096, WIDTH)) for _ in range(4))
            )

    torch.manual_seed(0)
    probe = VramGuard(budget="8GiB", mode="report", advanced={"remember": False})
    big = DataLoader(TensorDataset(torch.randn(4096, WIDTH), torch.zeros(4096, dtype=torch.long)), batch_size=2048)

    def fit(guard: VramGuard) -> None:
        trainer_for(guard, tmp_path, 1).fit(Wide(), big)

    fit(probe)
    assert probe.plan is not None
    tight = VramGuard(budget=int(probe.plan.before.peak_reserved * 0.9), margin=0, advanced={"remember": False})
    fit(tight)
    assert tight.plan is not None
    assert tight.plan.splits == 1
    assert tight.plan.changed


# --- what waits on the host -------------------------------------------------------------------------------------


class Updating(nn.Module):
    """A teacher whose forward moves its weights, which nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    @torch.no_grad()
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.line.weight.mul_(0.5)
        return self.line(inputs)


class Overwriting(torch.autograd.Function):
    """Its backward spoils what it has saved, behind autograd's back."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors[0].data.zero_()
        return gradient


class Spoiling(nn.Module):
    """The tensor that :class:`Overwriting` spoils is one that another operator has saved too."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(self.line(inputs))
        return found + Overwriting.apply(found)


class WithTeacher(Net):
    def __init__(self, teacher: nn.Module, block: type[nn.Module] | None = None) -> None:
        super().__init__(mean)
        self.teacher = teacher
        if block is not None:
            self.blocks = nn.Sequential(*(block() for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        taught = self.teacher(batch[0])
        return super().training_step(batch, batch_idx) + F.mse_loss(self.blocks(batch[0]), taught)


HOSTED = {
    "frozen": ({"frozen_on_host": ("teacher",)}, {}),
    "moving": ({"frozen_on_host": ("teacher",)}, {"teacher": Updating}),
    "activations": ({"offload_activations": "all"}, {}),
    "spoiled": ({"offload_activations": "all"}, {"block": Spoiling}),
}
NAMED = {
    "moving": "offload_frozen is not possible here: the step itself writes to teacher.line.weight",
    "spoiled": "offload_activations is not possible here: nothing is known of the backward pass of",
}


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


@pytest.mark.parametrize("name", HOSTED)
def test_what_waits_on_the_host_comes_back_as_it_was(name: str, tmp_path: Any) -> None:
    pins, about = HOSTED[name]

    def fitted(guard: VramGuard | None) -> tuple[dict[str, torch.Tensor], str]:
        torch.manual_seed(0)
        net, loader = WithTeacher(about.get("teacher", frozen)(), about.get("block")), data()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer_for(guard, tmp_path, 3).fit(net, loader)
        return dict(net.state_dict()), "\n".join(str(one.message) for one in caught)

    guard = VramGuard(budget="1GiB", pin=pins, advanced={"remember": False})
    plain, _ = fitted(None)
    guarded, said = fitted(guard)
    assert same(plain, guarded)
    if name in NAMED:
        assert NAMED[name] in said
        return
    assert guard.plan is not None
    assert guard.plan.changed


# --- other forms of the optimizer --------------------------------------------------------------------------------

SAID_BY_SMALL_STEPS = "the optimizer: 3 steps of small weights were run, and their updates are equal"


@pytest.mark.parametrize("form", ["for-loop", "fused"])
def test_another_form_of_the_optimizer_is_proven_by_small_steps(form: str, tmp_path: Any, capsys: Any) -> None:
    plain, _ = trained(mean, None, tmp_path)
    guarded, _ = trained(
        mean, VramGuard(budget="1GiB", pin={"optimizer": form}, advanced={"remember": False}), tmp_path
    )
    assert SAID_BY_SMALL_STEPS in " ".join(capsys.readouterr().out.split())
    assert close(plain, guarded)


def test_a_form_that_updates_otherwise_is_refused(tmp_path: Any, monkeypatch: Any) -> None:
    as_it_is = torch.optim.SGD.step

    def slipping(optimizer: Any, closure: Any = None) -> Any:
        for group in optimizer.param_groups:
            group["lr"] *= 1.001 if group["fused"] else 1
        return as_it_is(optimizer, closure)

    plain, _ = trained(mean, None, tmp_path)
    monkeypatch.setattr(torch.optim.SGD, "step", slipping)
    guarded, said = trained(
        mean, VramGuard(budget="1GiB", pin={"optimizer": "fused"}, advanced={"remember": False}), tmp_path
    )
    assert "3 steps of small weights were run, and updates differed by 0.25%" in said
    assert same(plain, guarded)


# --- what is compared while training ----------------------------------------------------------------------------


class Late(Net):
    """From its third batch on, whatever tells it, another loss."""

    def __init__(self) -> None:
        super().__init__(mean)
        self.batches: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if len(LATE) < 2 else loss.sqrt()


class Telling(lightning.Callback):
    """Tells it where nobody looks."""

    def on_train_batch_end(self, *_given: Any) -> None:
        LATE.append(len(LATE))


LATE: list[int] = []


@pytest.mark.parametrize("recover", [True, False])
def test_a_loss_that_becomes_another_one_is_not_cut(recover: bool, tmp_path: Any) -> None:
    """With recovery the batch runs again as written, as do the next ones; without, it stops before it is learned."""

    def fitted(guard: VramGuard | None, steps: int) -> tuple[dict[str, torch.Tensor], str]:
        LATE.clear()
        torch.manual_seed(0)
        net = Late()
        trainer = trainer_for(guard, tmp_path, steps)
        trainer.callbacks.append(Telling())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(net, data())
        return dict(net.state_dict()), "\n".join(str(one.message) for one in caught)

    guard = pinned(recover=recover)
    if not recover:
        with pytest.raises(LossChangedError, match="SqrtBackward0"):
            fitted(guard, 4)
        return
    guarded, said = fitted(guard, 4)
    assert said.count("is rolled back and runs again whole") == 1
    assert guard.plan is not None
    assert guard.plan.splits == 2
    assert close(fitted(None, 4)[0], guarded)
