"""The MMEngine guard under settings from outside the config, and switched off, with real Runners."""

from __future__ import annotations

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases

from vram_guard import settings
from vram_guard.errors import DoesNotFitError

RUNNER = "vram_guard_mmengine.GuardRunner"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings.forget()
    yield cases.write_configs(tmp_path / "configs", cases.MMPRETRAIN)
    settings.forget()


def test_off_the_training_is_what_it_is_without_a_guard(root, tmp_path, monkeypatch):
    wanted = {"runner_type": RUNNER, "vram_guard": {"budget": "1KiB", "mode": "strict"}}
    with pytest.raises(DoesNotFitError):
        cases.train(cases.load(root, "small.py", tmp_path / "strict", **wanted))
    monkeypatch.setenv("VRAM_GUARD_DISABLE", "1")
    off = cases.train(cases.load(root, "small.py", tmp_path / "off", **wanted))
    plain = cases.train(cases.load(root, "small.py", tmp_path / "plain"))
    assert cases.guard(off).plan is None
    assert cases.weights(off).equal(cases.weights(plain))


def test_settings_of_the_project_count_where_the_config_says_nothing(root, tmp_path, monkeypatch):
    (tmp_path / "vram_guard.toml").write_text('budget = "1GiB"\nmargin = 0.5\nmode = "report"\n')
    monkeypatch.setenv("VRAM_GUARD_LR_RULE", "sqrt")
    runner = cases.train(
        cases.load(root, "small.py", tmp_path / "report", runner_type=RUNNER, vram_guard={"margin": 0.25})
    )
    guard = cases.guard(runner)
    assert (guard.settings.mode, guard.settings.lr_rule) == ("report", "sqrt")
    assert (guard.plan.budget.total, guard.plan.budget.margin) == (2**30, 0.25)
