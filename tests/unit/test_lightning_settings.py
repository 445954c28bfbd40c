"""The Lightning callback under settings from outside the code, and switched off, in real trainings."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

import lightning_cases as cases

from vram_guard import settings
from vram_guard.errors import DoesNotFitError, InvalidInputError
from vram_guard_lightning import VramGuard

pytestmark = pytest.mark.filterwarnings("ignore", "error:vram_guard")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings.forget()
    yield tmp_path
    settings.forget()


def trained(root, guard):
    """A short training with the guard; its module."""
    module = cases.make_module()
    trainer = cases.make_trainer("lightning.pytorch", root, callbacks=[guard], max_steps=2)
    trainer.fit(module, cases.loader())
    return module


def test_arguments_come_from_the_project_unless_they_are_given(project, monkeypatch):
    (project / "pyproject.toml").write_text(
        '[tool.vram_guard]\nbudget = "64GiB"\nmargin = 0.25\nmode = "report"\nallow = ["accumulate"]\n'
    )
    monkeypatch.setenv("VRAM_GUARD_LR_RULE", "sqrt")
    guard = VramGuard(margin=0.1)
    assert (guard.settings.budget, guard.settings.margin, guard.settings.mode) == ("64GiB", 0.1, "report")
    assert (guard.settings.allow, guard.settings.lr_rule) == ({"accumulate"}, "sqrt")
    assert VramGuard(gpu="RTX 4090").settings.budget is None
    trained(project, guard)
    assert guard.plan.budget.total == 64 * 2**30
    assert guard.plan.budget.margin == 0.1


def test_a_whole_gpu_by_its_memory(project):
    (project / "pyproject.toml").write_text("[tool.vram_guard]\ngpu_memory = 24\n")
    guard = VramGuard(mode="report")
    trained(project, guard)
    assert guard.plan.budget.total == 24 * 10**9
    assert 0 < guard.plan.budget.context < guard.plan.budget.total - guard.plan.budget.usable
    assert VramGuard(gpu="8GiB").settings.resolved_budget().total == 8 * 2**30
    assert VramGuard(budget="2GiB").settings.gpu_memory is None
    with pytest.raises(InvalidInputError):
        VramGuard(budget="2GiB", gpu="24GB")
    with pytest.raises(InvalidInputError, match=r"less than the .* of a CUDA context"):
        VramGuard(gpu="100MB")
    assert VramGuard(advanced={"gpu_memory": 24}).settings.resolved_budget().total == 24 * 10**9


def test_a_slip_in_the_settings_is_told_when_the_callback_is_made(monkeypatch):
    monkeypatch.setenv("VRAM_GUARD_MARGIN", "much")
    with pytest.raises(InvalidInputError, match="VRAM_GUARD_MARGIN"):
        VramGuard(budget="64GiB")


def test_switched_off_it_does_nothing_at_all(project, monkeypatch, capsys):
    guard = VramGuard(budget="1KiB", mode="strict")
    with pytest.raises(DoesNotFitError):
        trained(project, guard)
    capsys.readouterr()
    monkeypatch.setenv("VRAM_GUARD_DISABLE", "1")
    monkeypatch.setenv("VRAM_GUARD_MARGIN", "much")  # not even looked at
    off = VramGuard(budget="1KiB", mode="strict")
    module = trained(project, off)
    assert off.plan is None
    assert "vram_guard" not in capsys.readouterr().out.lower()
    assert module.trainer.global_step == 2
