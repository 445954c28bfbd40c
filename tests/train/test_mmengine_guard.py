"""Configs on disk in mmpretrain's and mmsegmentation's styles, trained by real Runners with and without the guard."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import torch
from guard_arguments import in_advanced
from mmengine.config import Config
from mmengine.logging import HistoryBuffer

from vram_guard.apply.saved_rates import divided_optimizer, divided_schedulers
from vram_guard.errors import InvalidInputError, UnsupportedStepError

pytestmark = [
    # MMEngine loads checkpoints so; torch 2.4 and 2.5 warn of it, later ones load weights only.
    pytest.mark.filterwarnings("ignore:You are using `torch.load` with `weights_only=False`:FutureWarning"),
    # torch 2.4's own checkpointing, of itself
    pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning"),
]
WEIGHTS_ONLY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)

RUNNER = "vram_guard_mmengine.GuardRunner"
#: Two micro-batches, whatever the budget, where the search is not what a test is about.
PINNED: dict[str, Any] = {"budget": "1GiB", "allow": ["accumulate"], "pin": {"micro_batch_size": 4}}
IN_A_FILE = "budget='1GiB', margin=0, allow=['accumulate'], pin=dict(micro_batch_size=4)"
LEAVES = {"mmpretrain": (cases.MMPRETRAIN, "small.py"), "mmseg": (cases.MMSEG, "seg.py")}


class Style:
    """One style's configs, what its training does without the guard, and what it takes."""

    def __init__(self, name: str, folder: Path) -> None:
        files, self.leaf = LEAVES[name]
        self.folder = folder
        self.root = cases.write_configs(folder / "configs", files)
        self.plain = cases.train(self.cfg("plain"))
        whole = cases.train(self.guarded("whole", budget="1GiB"))
        self.whole = whole
        self.peak: int = cases.guard(whole).plan.before.peak_reserved

    @functools.cached_property
    def split(self) -> Any:
        """Trained in micro-batches, because the budget asks for it."""
        return cases.train(self.guarded("split", budget=self.peak - 1, allow=["accumulate"]))

    def cfg(self, work_dir: str, **changes: Any) -> Any:
        return cases.load(self.root, self.leaf, self.folder / work_dir, **changes)

    def guarded(self, work_dir: str, *, changes: dict[str, Any] | None = None, **settings: Any) -> Any:
        settings = {"margin": 0, **settings}
        return self.cfg(work_dir, runner_type=RUNNER, vram_guard=in_advanced(settings), **(changes or {}))


@pytest.fixture(scope="module")
def styles(tmp_path_factory: Any) -> Callable[[str], Style]:
    return functools.cache(lambda name: Style(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module", params=list(LEAVES))
def style(request: Any, styles: Callable[[str], Style]) -> Style:
    return styles(request.param)


@pytest.fixture(scope="module")
def pretrain(styles: Callable[[str], Style]) -> Style:
    return styles("mmpretrain")


def test_a_training_that_fits_is_bit_identical(style: Style) -> None:
    assert len(cases.diary(style.plain).rates) > 8
    assert cases.diary(style.plain).validated_at
    assert cases.diary(style.plain).saved_at
    cases.same(style.plain, style.whole, tolerance=0)
    assert torch.equal(cases.weights(style.plain), cases.weights(style.whole))


def test_accumulation_leaves_everything_as_it_was(style: Style) -> None:
    runner = style.split
    plan = cases.guard(runner).plan
    assert plan.fits
    assert plan.splits > 1
    cases.same(style.plain, runner)
    assert "train_step" not in vars(runner.model), "the model is given back as it came"


# --- growth -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [False, True])
def test_a_grown_training_is_the_one_written_so(pretrain: Style, enabled: bool) -> None:
    """Twice the batch and the rate, scaled once: by the guard, or by auto_scale_lr."""
    total = int(pretrain.peak * 2.4)
    options = {"auto_scale_lr.enable": enabled}
    runner = cases.train(
        pretrain.guarded(f"grown-{enabled}", changes=options, budget=total, grow=True, target_utilization=1.0)
    )
    plan = cases.guard(runner).plan
    assert plan.batch_size == 16
    by_hand = {"train_dataloader.batch_size": 16, **options}
    if not enabled:
        by_hand |= {"optim_wrapper.optimizer.lr": 2 * 5e-4 * 1024 / 512}
        by_hand |= {"param_scheduler.1.eta_min": 2e-5}
    cfg = pretrain.cfg(f"by-hand-{enabled}", **by_hand)
    same_run = cases.train(cfg)
    mine, theirs = cases.diary(runner).rates, cases.diary(same_run).rates
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    if not enabled:
        assert torch.allclose(cases.weights(runner), cases.weights(same_run), rtol=0, atol=1e-6)


def test_a_grown_training_resumes_with_its_rates(pretrain: Style) -> None:
    """Stopped in the middle and resumed: the rates are those of a run that was not stopped, scaled once."""
    settings = {"budget": int(pretrain.peak * 2.4), "grow": True, "target_utilization": 1.0}
    through = cases.train(pretrain.guarded("through", **settings))
    cases.train(
        pretrain.guarded("stopped", changes={"train_cfg.max_epochs": 2, "param_scheduler.1.end": 4}, **settings)
    )
    resumed = cases.train(pretrain.guarded("stopped", changes={"resume": True}, **settings))
    assert cases.diary(resumed).rates == cases.diary(through).rates[4:]
    # Resumed where there is no room to grow: the rates of the batch as it is written.
    smaller = cases.train(pretrain.guarded("stopped", changes={"resume": True, "load_from": str(
        pretrain.folder / "stopped" / "epoch_2.pth")}, budget="1GiB"))  # fmt: skip
    first, written = cases.diary(smaller).rates[0], cases.diary(through).rates[4]
    assert first == pytest.approx([rate / 2 for rate in written])


@pytest.mark.parametrize("contained", [1.0, 2.0], ids=["as written", "as the first releases saved them"])
def test_a_checkpoint_of_a_grown_run_resumed_without_growth(
    pretrain: Style, monkeypatch: Any, contained: float, tmp_path: Path
) -> None:
    """In every mode, with the guard off and without it: rates as written, or a warning by what factor they differ."""
    settings = {"budget": int(pretrain.peak * 2.4), "grow": True, "target_utilization": 1.0}
    changes = {"train_cfg.max_epochs": 2, "param_scheduler.1.end": 4}
    stopped = cases.train(pretrain.guarded(f"saved-{contained}", changes=changes, **settings))
    saved = tmp_path / "grown.pth"
    content = torch.load(pretrain.folder / f"saved-{contained}" / "epoch_2.pth", weights_only=False)
    assert content["meta"]["vram_guard"]["learning_rates_contain"] == 1.0
    if contained != 1.0:  # as they were saved
        content["optimizer"] = divided_optimizer(content["optimizer"], 1 / contained)
        states = divided_schedulers(stopped.param_schedulers, content["param_schedulers"], 1 / contained)
        content["param_schedulers"] = states
        content["meta"]["vram_guard"]["learning_rates_contain"] = contained
    torch.save(content, saved)
    groups = [*content["optimizer"]["param_groups"], content["optimizer"]["base_param_settings"]]
    now = [group["lr"] / contained for group in groups]
    assert now == pytest.approx([group["lr"] / 2 for group in stopped.optim_wrapper.param_groups])

    def resumed(name: str, **guard: Any) -> Any:
        # Rates that the schedules no longer touch, but for the factor.
        given = {"resume": True, "load_from": str(saved), "param_scheduler": []}
        make = functools.partial(pretrain.guarded, changes=given) if guard else functools.partial(pretrain.cfg, **given)
        return cases.train(make(f"{name}-{contained}", **guard))

    def found(runner: Any) -> list[float]:
        return list(cases.diary(runner).rates[0])

    grown = resumed("again", **settings)
    assert found(grown) == pytest.approx([2 * rate for rate in now])
    assert found(resumed("fit", budget="1GiB")) == pytest.approx(now)
    reported = resumed("report", budget="1GiB", mode="report")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", UserWarning)
        absent = resumed("absent")
        monkeypatch.setenv("VRAM_GUARD_DISABLE", "1")
        off = resumed("off", **settings)
    for runner in (reported, absent, off):
        assert found(runner) == pytest.approx([contained * rate for rate in now])
    for runner in (reported, off):
        log = next(Path(runner.log_dir).glob("*.log")).read_text()
        assert ("are 2 times those that were written" in log) is (contained != 1.0)


# --- resuming ---------------------------------------------------------------------------------------------------


def test_resuming_a_split_training(style: Style) -> None:
    """MMEngine's own resume, which torch's weights_only refuses without the guard, and no iteration more or less."""
    first = style.split
    checkpoint = min((style.folder / "split").glob("*_[0-9].pth"))
    before = int(checkpoint.stem.split("_")[1])
    resumed = cases.train(
        style.guarded("resumed-split", changes={"resume": True, "load_from": str(checkpoint)}, **PINNED)
    )
    rates = cases.diary(first).rates
    assert cases.diary(resumed).rates == rates[len(rates) - len(cases.diary(resumed).rates) :]
    assert 0 < len(cases.diary(resumed).rates) < len(rates)
    assert before
    assert torch.allclose(cases.weights(first), cases.weights(resumed), rtol=0, atol=1e-6)


@pytest.mark.skipif(not WEIGHTS_ONLY, reason="before torch 2.6, MMEngine's torch.load runs what it is given")
@pytest.mark.parametrize(
    "harm",
    [
        lambda path: _Harmful(open, path, "w"),
        lambda _: _Harmful(getattr, dict, "clear"),
        lambda _: _Harmful(getattr, HistoryBuffer, "update"),
    ],
)
def test_a_checkpoint_with_code_is_refused(pretrain: Style, tmp_path: Path, harm: Any) -> None:
    witness = tmp_path / "ran"
    torch.save({"meta": {}, "state_dict": {}, "message_hub": harm(str(witness))}, tmp_path / "harmful.pth")
    options = {"resume": True, "load_from": str(tmp_path / "harmful.pth")}
    with pytest.raises(Exception, match=r"weights_only|not MMEngine's"):
        cases.train(pretrain.guarded("harmful", changes=options, budget="1GiB"))
    assert not witness.exists()


class _Harmful:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


# --- three ways in ----------------------------------------------------------------------------------------------


def test_default_hooks_of_the_leaf(pretrain: Style) -> None:
    hook = f"\ndefault_hooks = dict(vram_guard=dict(type='vram_guard_mmengine.VramGuardHook', {IN_A_FILE}))\n"
    (pretrain.root / "hooked.py").write_text((pretrain.root / "small.py").read_text() + hook)
    runner = cases.train(cases.load(pretrain.root, "hooked.py", pretrain.folder / "hooked"))
    assert type(runner).__name__ == "Runner"
    assert cases.guard(runner).plan.splits > 1
    assert {"DefaultSampler"} == {type(runner.train_dataloader.sampler).__name__}
    cases.same(pretrain.plain, runner)


def test_new_style_configs(pretrain: Style) -> None:
    (pretrain.root / "__init__.py").write_text("")
    lazy = pretrain.folder / "lazy"
    cases.write_configs(lazy, {
        "_base_/schedule.py": cases.MMPRETRAIN["_base_/schedules/adamw_swin.py"]
        .replace("optim_wrapper = dict(", "optim_wrapper = dict(type=OptimWrapper, ")
        .replace("\n", "\nfrom mmengine.optim import OptimWrapper\n", 1),
        "_base_/runtime.py": cases.MMPRETRAIN["_base_/default_runtime.py"],
        "_base_/data.py": cases.MMPRETRAIN["_base_/datasets/blobs.py"],
        "_base_/model.py": cases.MMPRETRAIN["_base_/models/small.py"],
        "leaf.py": "from mmengine.config import read_base\nwith read_base():\n"
        "    from ._base_.model import *\n    from ._base_.data import *\n    from ._base_.schedule import *\n"
        "    from ._base_.runtime import *\n    from ._base_.vram_guard import *\n"
        f"vram_guard.update({IN_A_FILE})\n",
    })  # fmt: skip
    cases.write_base(lazy)
    runner = cases.train(cases.load(lazy, "leaf.py", pretrain.folder / "lazy-work"))
    assert cases.guard(runner).plan.splits > 1
    cases.same(pretrain.plain, runner)


# --- what is written down ---------------------------------------------------------------------------------------


def test_the_plan_is_kept_and_logged(style: Style) -> None:
    runner = style.split
    plan = cases.guard(runner).plan
    work_dir = style.folder / "split"
    dumped = Config.fromfile(str(work_dir / style.leaf))
    assert dumped.vram_guard_plan.micro_batch_size == plan.micro_batch_size
    assert dumped.vram_guard_plan.applied is True
    checkpoint = torch.load(min(work_dir.glob("*_[0-9]*.pth")), weights_only=False)
    assert checkpoint["meta"]["vram_guard"]["predicted_peak_reserved"] == plan.estimate.peak_reserved
    logs = Path(runner.log_dir)
    text = next(logs.glob("*.log")).read_text()
    lines = [json.loads(line) for line in (logs / "vis_data" / "scalars.json").read_text().splitlines()]
    logged = {line["predicted_memory"] for line in lines if "predicted_memory" in line}
    assert logged == {plan.estimate.peak_allocated // 2**20}
    assert f"predicted_memory: {plan.estimate.peak_allocated // 2**20}" in text


# --- techniques -------------------------------------------------------------------------------------------------


def test_a_fused_optimizer_leaves_the_training_as_it_was(pretrain: Style) -> None:
    runner = cases.train(pretrain.guarded("fused", budget="1GiB", pin={"optimizer": "fused"}))
    assert cases.guard(runner).plan.recipe
    assert runner.cfg.vram_guard_plan.techniques
    cases.same(pretrain.plain, runner)
    assert runner.optim_wrapper.param_groups[0]["fused"] is True


def test_an_optimizer_in_the_backward_pass_is_proven_and_trains_the_same(pretrain: Style) -> None:
    free, pin = {"optim_wrapper.clip_grad": None, "train_cfg.max_epochs": 1}, {"optimizer_in_backward": True}
    plain, guarded = pretrain.cfg("free", **free), pretrain.guarded("in-backward", changes=free, budget="1GiB", pin=pin)
    for config in (plain, guarded):
        config.default_hooks.pop("diary")  # a hook of the user's, which runs after the step
    written, runner = cases.train(plain), cases.train(guarded)
    assert cases.guard(runner).plan.recipe.optimizer_in_backward
    assert torch.allclose(cases.weights(written), cases.weights(runner), rtol=0, atol=1e-6)
    assert not any(getattr(weight, "_post_accumulate_grad_hooks", None) for weight in runner.model.parameters())
    clipped = cases.train(pretrain.guarded("clipped", budget="1GiB", pin=pin))
    assert cases.guard(clipped).plan is None or not cases.guard(clipped).plan.fits
    cases.same(pretrain.plain, clipped, tolerance=0)


def test_checkpointed_blocks_take_less_and_learn_the_same(pretrain: Style) -> None:
    options = {"model.depth": 8, "train_cfg.max_epochs": 1}
    plain = cases.train(pretrain.guarded("deep", changes=options, budget="1GiB"))
    peak = cases.guard(plain).plan.before.peak_reserved
    runner = cases.train(pretrain.guarded("deep-less", changes=options, budget=peak - 1, allow=["checkpoint"]))
    plan = cases.guard(runner).plan
    assert plan.fits
    assert plan.checkpointed_modules
    assert plan.estimate.peak_allocated < plan.before.peak_allocated
    cases.same(plain, runner)
    assert not any("forward" in vars(module) for module in runner.model.modules()), "taken off at the end"


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant:UserWarning")  # MMEngine leaves it open
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # and validates so
def test_the_configs_own_checkpointing_is_counted(pretrain: Style) -> None:
    blocks = [f"layers.{number}" for number in range(4)]
    options = {"activation_checkpointing": blocks}
    runner = cases.train(pretrain.guarded("own-checkpoints", changes=options, budget="1GiB", mode="report"))
    assert cases.guard(runner).plan.before.peak_allocated < cases.guard(pretrain.whole).plan.before.peak_allocated


# --- what is wrong is said before anything is built -------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buget": "1GiB"}, "did you mean 'budget'"),
        ({"budget": "-1GiB"}, "budget"),
        ({"budget": 0}, "at least one byte"),
        ({"gpu": "RTX 4091"}, "RTX 4090"),
        ({"priority": "VERY_HIHG"}, "did you mean 'VERY_HIGH'"),
        ({"mode": "fits"}, "mode"),
        ({"allow": ["acumulate"]}, "did you mean 'accumulate'"),
        ({"target_utilization": 0}, "target_utilization"),
        ({"lr_rule": "cubic"}, "lr_rule"),
    ],
)
def test_bad_settings(pretrain: Style, settings: dict[str, Any], message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(cases.SmallClassifier, "__init__", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(InvalidInputError, match=message):
        cases.build(pretrain.cfg("bad", runner_type=RUNNER, vram_guard=in_advanced(settings)))
    with pytest.raises(InvalidInputError, match=message):
        VramGuardHook(**in_advanced(settings))


def test_report_changes_nothing(style: Style) -> None:
    runner = cases.train(style.guarded("report", budget=style.peak - 1, mode="report", allow=["accumulate"]))
    assert cases.guard(runner).plan.changed
    cases.same(style.plain, runner, tolerance=0)


# --- pins -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        ({"optimizer_on_host": True}, "optimizer_on_host is pinned.*loads weights after the optimizer"),
        ({"parameters_on_host": True}, "parameters_on_host is pinned.*loads weights after the optimizer"),
        ({"precision": "bf16-true"}, "precision is pinned.*true half precision"),
        ({"checkpoint": "all"}, "checkpoint is pinned.*activation_checkpointing is set in the config"),
    ],
)
def test_what_cannot_be_pinned_here_is_refused_with_the_reason(pretrain: Style, pin: dict[str, Any], says: str) -> None:
    own = {"activation_checkpointing": ["layers.0"]} if "checkpoint" in pin else None
    with pytest.raises(UnsupportedStepError, match=says):
        cases.train(pretrain.guarded("refused", changes=own, budget="1GiB", pin=pin, mode="strict"))


def test_auto_scale_lr_is_left_alone_by_accumulation(pretrain: Style) -> None:
    options = {"auto_scale_lr.enable": True}
    plain = cases.train(pretrain.cfg("auto", **options))
    assert cases.diary(plain).rates != cases.diary(pretrain.plain).rates
    cases.same(plain, cases.train(pretrain.guarded("auto-split", changes=options, **PINNED)))


def test_a_grown_training_of_iterations_is_the_one_written_so(styles: Callable[[str], Style]) -> None:
    """PolyLR's absolute eta_min is scaled with the rest; max_iters and intervals count larger batches."""
    seg = styles("mmseg")
    settings = {"budget": int(seg.peak * 2.4), "grow": True, "target_utilization": 1.0}
    runner = cases.train(seg.guarded("grown", **settings))
    size = cases.guard(runner).plan.batch_size
    assert size > 8
    factor = size / 8
    by_hand = {"train_dataloader.batch_size": size, "optim_wrapper.optimizer.lr": 0.01 * factor,
               "param_scheduler.0.eta_min": 1e-4 * factor}  # fmt: skip
    other = cases.train(seg.cfg("by-hand", **by_hand))
    assert len(cases.diary(runner).rates) == 10
    for one, written in zip(cases.diary(runner).rates, cases.diary(other).rates, strict=True):
        assert one == pytest.approx(written, rel=1e-9)
    assert torch.allclose(cases.weights(runner), cases.weights(other), rtol=0, atol=1e-6)
    assert cases.diary(runner).validated_at == cases.diary(seg.plain).validated_at
    text = next(Path(runner.log_dir).glob("*.log")).read_text()
    assert f"max_iters, intervals and schedules count iterations of {size} samples" in text


def test_cfg_options(pretrain: Style) -> None:
    """As mmengine.config.DictAction reads them from the command line."""
    import argparse

    from mmengine.config import DictAction

    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    options = parser.parse_args(
        ["--cfg-options", f"runner_type={RUNNER}", "vram_guard.budget=1GiB", "vram_guard.margin=0",
         "vram_guard.allow=[accumulate]", "vram_guard.pin.micro_batch_size=4"]
    ).cfg_options  # fmt: skip
    runner = cases.train(pretrain.cfg("options", **options))
    assert cases.guard(runner).plan.splits > 1
    cases.same(pretrain.plain, runner)


def test_mixed_precision_on_a_pretend_gpu(pretrain: Style) -> None:
    batch = {"train_dataloader.batch_size": 16}  # of 8, mixed precision takes more: its copies, and workspaces
    plain = cases.train(pretrain.cfg("mixed-plain", **batch))
    runner = cases.train(pretrain.guarded("mixed", changes=batch, budget="80MiB", gpu="RTX 4090", allow=["precision"]))
    plan = cases.guard(runner).plan
    assert plan.precision == "bf16-mixed"
    assert type(runner.optim_wrapper).__name__ == "CpuMixedOptimWrapper"
    assert cases.diary(runner).rates == cases.diary(plain).rates
    assert cases.diary(runner).losses != cases.diary(plain).losses
    assert cases.diary(runner).losses == pytest.approx(cases.diary(plain).losses, abs=0.05)


def test_a_dataset_smaller_than_the_batch(pretrain: Style) -> None:
    options = {"train_dataloader.batch_size": 64, "train_dataloader.drop_last": True}
    with pytest.raises(InvalidInputError, match="no whole batch of 64"):
        cases.train(pretrain.guarded("small", changes=options, budget="1GiB"))


def test_impossible_budgets(pretrain: Style) -> None:
    runner = cases.train(pretrain.guarded("tiny", budget="1MiB", allow=["accumulate"]))
    assert not cases.guard(runner).plan.fits
    cases.same(pretrain.plain, runner, tolerance=0)
