"""VramGuard on real Trainers: it changes what it says, and nothing else."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lightning")

import contextlib

import lightning_cases as cases
from guard_arguments import in_advanced

from vram_guard.errors import DoesNotFitError, NoDeviceError
from vram_guard.plan.descriptions import Why
from vram_guard_lightning import VramGuard

pytestmark = pytest.mark.filterwarnings("ignore", "error:vram_guard")
INSTALLED = cases.INSTALLED
#: Holds the step of the wide module below with micro-batches and not as written (see the ``tight`` fixture).
#: (SGD: where a gradient is all but zero, Adam's step is the sign of its rounding error.)
WIDE: dict[str, Any] = {"width": 512, "hidden": 2048, "optimizer": "sgd"}


def wide_loader(samples: int = 4096 * 3, batch_size: int = 4096, **options: Any) -> Any:
    return cases.loader(dataset=cases.Vectors(samples, WIDE["width"]), batch_size=batch_size, **options)


@pytest.fixture(scope="module")
def tight(tmp_path_factory: Any) -> int:
    """Bytes between the wide step's peak as written and its peak in micro-batches of half the batch."""
    guard = VramGuard(budget="64GiB", margin=0, mode="report")
    fit(
        tmp_path_factory.mktemp("tight"),
        guard,
        module=cases.make_module(**WIDE),
        data=wide_loader(),
        max_steps=1,
    )
    assert guard.plan is not None
    peak = guard.plan.before.peak_reserved
    probe = VramGuard(budget=peak - 1, margin=0, mode="report", allow=("accumulate",))
    fit(
        tmp_path_factory.mktemp("probe"),
        probe,
        module=cases.make_module(**WIDE),
        data=wide_loader(),
        max_steps=1,
    )
    assert probe.plan is not None
    assert probe.plan.fits
    return probe.plan.estimate.peak_reserved


def fit(root: Any, guard: Any, *, module: Any = None, data: Any = None, namespace: str = "", **how: Any) -> Any:
    """One training under a guard (or None); returns module and Trainer."""
    namespace = namespace or INSTALLED[0]
    module = module or cases.make_module(namespace, **how.pop("settings", {}))
    callbacks = [*([guard] if guard else []), *how.pop("callbacks", ())]
    trainer = cases.make_trainer(namespace, root, callbacks, **how)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    if hasattr(data, "train_dataloader") or data is None:
        trainer.fit(module, **({"datamodule": data} if data is not None else {"train_dataloaders": cases.loader(40)}))
    else:
        trainer.fit(module, train_dataloaders=data)
    return module, trainer


def assert_equal_training(one: Any, other: Any) -> None:
    assert one.rates == other.rates
    assert one.loaded == other.loaded
    torch.testing.assert_close(cases.weights(one), cases.weights(other), rtol=2e-5, atol=2e-6)


# --- report -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", INSTALLED)
def test_report_mode_is_bit_identical(tmp_path: Any, namespace: str, capsys: Any) -> None:
    data = {"dataset": cases.NoisyVectors(37)}
    results = []
    for guard in (None, VramGuard(budget="1MiB", mode="report")):
        settings = {"scheduler": "one_cycle", "dropout": 0.3}
        module, _ = fit(tmp_path, guard, namespace=namespace, settings=settings, data=cases.loader(**data))
        drawn = np.random.rand()
        results.append((cases.weights(module), module.rates, torch.get_rng_state(), random.getstate(), drawn))
    (one, rates, rng, python, numpy), (other, *rest) = results
    assert torch.equal(one, other)
    assert rest[0] == rates
    assert torch.equal(rng, rest[1])
    assert python == rest[2]
    assert numpy == rest[3]
    out = capsys.readouterr().out
    assert "not applied" in out or "nothing changes" in out or "oes not fit" in out


# --- fit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", INSTALLED)
def test_makes_it_fit_with_micro_batches_and_trains_the_same(tmp_path: Any, namespace: str, tight: int) -> None:
    how: dict[str, Any] = {"namespace": namespace, "max_epochs": 1}
    make = lambda: cases.make_module(namespace, scheduler="one_cycle", **WIDE)  # noqa: E731
    guard = VramGuard(budget=tight, margin=0, allow=("accumulate",))
    plain, _ = fit(tmp_path, None, module=make(), data=wide_loader(), **how)
    guarded, trainer = fit(tmp_path, guard, module=make(), data=wide_loader(), **how)
    assert guard.plan.fits
    assert guard.plan.splits > 1
    assert guard.plan.timeline is not None  # what pictures are drawn from
    assert guard.plan.timeline_before is not None
    assert max(guarded.seen) == guard.plan.micro_batch_size
    assert_equal_training(plain, guarded)
    assert vars(trainer.fit_loop.epoch_loop.automatic_optimization).keys().isdisjoint({"_make_closure"})


def test_mixed_precision_is_applied_and_taken_back(tmp_path: Any) -> None:
    seen = []

    class Look(importlib.import_module(INSTALLED[0]).Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.precision)

    probe = VramGuard(budget="64GiB", margin=0, mode="report")
    make = lambda: cases.make_module(width=64, hidden=4096)  # noqa: E731
    data = lambda: cases.loader(dataset=cases.Vectors(2048, 64), batch_size=1024)  # noqa: E731
    fit(tmp_path, probe, module=make(), data=data(), max_steps=1)
    guard = VramGuard(budget=probe.plan.before.peak_reserved - 1, margin=0)
    _, trainer = fit(tmp_path, guard, module=make(), data=data(), max_epochs=1, callbacks=[Look()])
    assert guard.plan.precision == "bf16-mixed"
    assert seen == ["bf16-mixed"]
    assert trainer.precision == "32-true"


def test_nothing_fits(tmp_path: Any) -> None:
    plain, _ = fit(tmp_path, None)
    guard = VramGuard(budget="1MiB")
    with pytest.warns(UserWarning, match=r"vram_guard: this training is not known to fit.*Closest: .* over budget"):
        guarded, _ = fit(tmp_path, guard)
    assert not guard.plan.fits
    assert torch.equal(cases.weights(plain), cases.weights(guarded))


def test_micro_batches_that_nothing_proves_are_proposed(tmp_path: Any, tight: int, capsys: Any) -> None:
    """The root of a mean is no mean; what the user says of it is done."""

    def guarded(**said: Any) -> VramGuard:
        guard = VramGuard(**in_advanced({"budget": tight, "margin": 0, "allow": ("accumulate",), **said}))
        fit(tmp_path, guard, module=cases.make_module(**WIDE, output="root"), data=wide_loader(), max_steps=1)
        return guard

    with pytest.warns(UserWarning, match="not known to fit"):
        plan = guarded().plan
    assert not plan.fits
    assert not plan.changed
    first, *others = plan.reason_values
    assert first.kind is Why.PROPOSED
    assert dict(first.values)["change"] == "2 micro-batches of 2048"
    assert not any(one.kind is Why.REFUSED_SEVERAL for one in others), "said already"
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(str(first)) == 1
    assert shown.partition("too much")[2].strip(" •-").startswith(str(first)), "right behind the verdict"
    assert guarded(loss_weight="mean").plan.splits == 2


def test_strict_raises_before_training_and_leaves_the_trainer_usable(tmp_path: Any) -> None:
    module = cases.make_module()
    before = cases.weights(module).clone()
    trainer = cases.make_trainer(INSTALLED[0], tmp_path, [VramGuard(budget="1MiB", mode="strict")])
    with pytest.raises(DoesNotFitError):
        trainer.fit(module, cases.loader(40))
    assert torch.equal(before, cases.weights(module))
    assert module.loaded == []
    assert "setup" not in vars(trainer.strategy)


# --- settings and devices ---------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_and_no_budget(tmp_path: Any) -> None:
    with pytest.raises(NoDeviceError, match="budget"):
        fit(tmp_path, VramGuard())
    with pytest.warns(UserWarning, match="no prediction for this training"):
        module, _ = fit(tmp_path, VramGuard(mode="report"))
    assert len(module.rates) == 15


def test_fit_twice_with_one_trainer(tmp_path: Any) -> None:
    guard = VramGuard(budget="64GiB")
    trainer = cases.make_trainer(INSTALLED[0], tmp_path, [guard], max_epochs=1)
    for _ in range(2):
        guard.plan = None
        trainer.fit(cases.make_module(), cases.loader(40))
        assert guard.plan is not None


# --- what it cannot do ------------------------------------------------------------------------------------


def base() -> Any:
    return type(cases.make_module())


def manual(**settings: Any) -> Any:
    """The module of these tests under manual optimization."""

    class Manual(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(**settings)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            x, y = self.unpack(batch)
            self.seen.append(len(x))
            loss = torch.nn.functional.mse_loss(self.net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    return Manual()


def test_manual_optimization_takes_what_automatic_optimization_takes(tmp_path: Any) -> None:
    found = []
    for module in (cases.make_module(**WIDE), manual(**WIDE)):
        guard = VramGuard(budget="64GiB", mode="report")
        fit(tmp_path, guard, module=module, data=wide_loader(), max_steps=1)
        found.append(guard.plan.before)
    automatic, own = found
    assert own.peak_reserved == automatic.peak_reserved
    assert own.peak_phase.name == automatic.peak_phase.name
    # Lightning lets go of the loss before its backward, which manual optimization does not; its storage is as large as
    # the losses of all samples.
    assert {**own.breakdown, "activations": 0} == {**automatic.breakdown, "activations": 0}
    assert 0 < own.breakdown["activations"] - automatic.breakdown["activations"] <= 8192 * 4


def test_a_batch_that_cannot_be_split_is_said_by_name(tmp_path: Any, capsys: Any, tight: int) -> None:
    class WithPrototypes(base()):  # type: ignore[misc]
        def unpack(self, batch: Any) -> Any:
            return batch["x"], batch["y"]

    def collate(samples: Any) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return {"x": x, "y": y, "prototypes": torch.zeros(3, 5)}

    guard = VramGuard(budget=tight, margin=0, allow=("accumulate",))
    with pytest.warns(UserWarning, match="not known to fit"):
        fit(tmp_path, guard, module=WithPrototypes(**WIDE), data=wide_loader(collate_fn=collate), max_steps=1)
    assert "batch['prototypes']" in capsys.readouterr().out


def test_unsupported_trainings_go_on_unchanged(tmp_path: Any) -> None:
    with pytest.warns(UserWarning, match=r"vram_guard: no prediction.*64-true"):
        module, _ = fit(tmp_path, VramGuard(budget="1GiB"), precision="64-true")
    assert len(module.rates) == 15


@pytest.mark.parametrize("verbose", [False, True])
def test_the_users_own_error_is_named_by_its_line_and_keeps_its_traceback(tmp_path: Any, verbose: bool) -> None:
    class Broken(base()):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]) @ torch.zeros(99, 1, device=self.device)

    module = Broken()
    before = cases.weights(module).clone()
    line = f"test_lightning_guard.py, line {Broken.training_step.__code__.co_firstlineno + 1} fails: RuntimeError: "
    # The copy that looked is warned of, the training raises.
    with pytest.warns(UserWarning, match=line) as told, pytest.raises(RuntimeError) as caught:
        fit(tmp_path, VramGuard(budget="1GiB", verbose=verbose), module=module)
    assert any(entry.name == "training_step" for entry in caught.traceback)
    (warning,) = (one for one in told if line in str(one.message))
    assert warning.filename == __file__
    assert ("in training_step" in str(warning.message)) is verbose
    assert torch.equal(before, cases.weights(module))


def test_batch_size_finder_keeps_the_guard_off(tmp_path: Any, capsys: Any, tight: int) -> None:
    finder = importlib.import_module(INSTALLED[0]).callbacks.BatchSizeFinder
    module = cases.make_module(**WIDE)
    module.batch_size = 4096
    module.train_dataloader = lambda: wide_loader(batch_size=module.batch_size)
    module.val_dataloader = lambda: wide_loader(4096, batch_size=module.batch_size, shuffle=False)
    # Validation takes whole batches of the same size, which fit in no plan.
    guard = VramGuard(budget=tight, margin=0, allow=("accumulate",), advanced={"whole_job": False})
    trainer = cases.make_trainer(
        INSTALLED[0], tmp_path, [guard, finder(max_trials=1, steps_per_trial=1, init_val=64)], max_steps=1
    )
    trainer.fit(module)
    assert "BatchSizeFinder" in capsys.readouterr().out
    assert guard.plan.splits > 1
    assert guard.plan.micro_batch_size not in module.seen


# --- the import -------------------------------------------------------------------------------------------


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


HIDE = """
import sys, importlib.abc
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {hidden!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Hide())
"""


def test_without_lightning_the_extra_is_named_and_the_core_imports() -> None:
    code = HIDE.format(hidden=("lightning", "pytorch_lightning"))
    done = run_python(f"{code}\nimport vram_guard\nfrom vram_guard_lightning import VramGuard")
    assert "ImportError: vram_guard_lightning needs Lightning" in done.stderr
    assert "pip install lightning" in done.stderr


@pytest.mark.parametrize(("hidden", "left"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning")])
def test_one_namespace_is_enough(hidden: str, left: str) -> None:
    if len(INSTALLED) < 2:
        pytest.skip("only one namespace is installed")
    code = HIDE.format(hidden=(hidden,))
    done = run_python(
        f"{code}\nfrom vram_guard_lightning import VramGuard\nprint([b.__module__.split('.')[0] for b in "
        "VramGuard.__mro__ if b.__name__ == 'Callback'])"
    )
    assert done.stdout.strip() == repr([left]), done.stderr


# --- batches that read in two ways at their own size ----------------------------------------------------------


def test_a_guard_that_is_handed_to_fabric_says_that_it_does_nothing() -> None:
    fabric = importlib.import_module("lightning.fabric").Fabric(
        accelerator="cpu", devices=1, callbacks=[VramGuard(budget="1GiB")]
    )
    fabric.launch()
    net = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.randn(2, 4)).sum())
    with pytest.warns(UserWarning, match="does nothing under Fabric"):
        optimizer.step()
    optimizer.step()  # a second warning would be an error


def test_registered_twice_works_once(tmp_path: Any, capsys: Any) -> None:
    first, second = VramGuard(budget="64GiB"), VramGuard(budget="1MiB")
    fit(tmp_path, first, callbacks=[second, first], max_steps=1)
    assert first.plan is not None
    assert second.plan is None
    assert capsys.readouterr().out.count("\nFull report") == 1


def test_fast_dev_run(tmp_path: Any, tight: int) -> None:
    guard = VramGuard(budget=tight, margin=0, allow=("accumulate",))
    module, _ = fit(tmp_path, guard, module=cases.make_module(**WIDE), data=wide_loader(), fast_dev_run=True)
    assert guard.plan.splits > 1
    assert len(module.rates) == 1
    grown = VramGuard(budget="64GiB", grow=True)
    module, _ = fit(tmp_path, grown, fast_dev_run=True)
    assert module.loaded == [8]


def test_manual_optimization_is_checkpointed_where_it_does_not_fit(tmp_path: Any) -> None:
    def deep() -> Any:
        torch.manual_seed(0)
        module = manual(**WIDE)
        blocks = (torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4))
        module.net = torch.nn.Sequential(*blocks, torch.nn.Linear(512, 2))
        return module

    report = VramGuard(budget="64GiB", mode="report")
    plain, _ = fit(tmp_path, report, module=deep(), data=wide_loader(), max_steps=2)
    guard = VramGuard(budget=report.plan.before.peak_reserved - 1, margin=0, allow=("checkpoint", "offload"))
    guarded, _ = fit(tmp_path, guard, module=deep(), data=wide_loader(), max_steps=2)
    assert guard.plan.fits
    assert guard.plan.changed
    assert_equal_training(plain, guarded)


def test_manual_optimization_is_reported_and_not_split(tmp_path: Any, capsys: Any) -> None:
    guard = VramGuard(budget="64GiB")
    module, _ = fit(tmp_path, guard, module=manual(), max_epochs=1)
    assert set(module.seen) == {8}
    assert guard.plan is not None
    out = capsys.readouterr().out
    assert "manual optimization" in out


def test_float16_whose_scaler_does_not_work_with_the_optimizer_is_never_planned(tmp_path: Any) -> None:
    """A GPU without bfloat16, on which only float16 would fit; its gradient scaler refuses LBFGS."""

    def of(optimizer: str, **settings: Any) -> VramGuard:
        guard = VramGuard(**in_advanced({"margin": 0, "allow": ["precision"], **settings}))
        module = cases.make_module(width=64, hidden=4096, optimizer=optimizer)
        data = cases.loader(dataset=cases.Vectors(4096, 64), batch_size=4096)
        with contextlib.suppress(UserWarning):
            fit(tmp_path, guard, module=module, data=data, max_steps=1)
        return guard

    from vram_guard import Budget

    for optimizer, planned in (("sgd", "16-mixed"), ("lbfgs", "32-true")):
        whole = of(optimizer, budget=Budget.resolve("4GiB", "T4", 0), mode="report").plan
        assert whole is not None
        tight = Budget.resolve(whole.before.peak_reserved - 1, "T4", 0)
        made = of(optimizer, budget=tight, mode="report").plan
        assert made is not None
        assert (made.precision, made.fits) == (planned, planned != "32-true")
        assert ("LBFGS does not work with the gradient scaling" in " ".join(made.reasons)) is (optimizer == "lbfgs")
