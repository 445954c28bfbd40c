"""Runners whose memory is highest elsewhere than in the first steps: validation, resuming, later epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import torch
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.registry import DATASETS, HOOKS, LOOPS, METRICS, MODELS, OPTIM_WRAPPERS
from mmengine.runner import EpochBasedTrainLoop
from torch.utils import _pytree as pytree

from vram_guard.errors import DoesNotFitError, UnsupportedStepError
from vram_guard.guard.refusals import unproven_later
from vram_guard.forks.fork import run_in_fork
from vram_guard.guard.evaluation import foresee
from vram_guard.simulate import trace_at
from vram_guard_mmengine._capture import capture
from mmengine.optim import OptimWrapper

if TYPE_CHECKING:
    from vram_guard.plan import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using `torch.load` with `weights_only=False`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning"),
]

BATCH = 8


class Look:
    """What a runner is predicted to take."""

    def __init__(self, runner: Any, *, whole_job: bool = True) -> None:
        captured = capture(runner, whole_job=whole_job)
        with captured.symbolic_run():
            timeline = trace_at(captured.step, BATCH)
            taken = timeline.at(BATCH)
        self.peak, self.reserved = taken.peak_allocated, taken.peak_reserved
        self.peak_phase = taken.peak_phase
        self.phases = taken.phases
        self.leaks = taken.leaks
        split = cast("Plan", SimpleNamespace(splits=2, timeline=timeline, timeline_before=None))
        self.why_whole = getattr(unproven_later(split), "reason", "")
        self.notes = [*captured.notes, *map(str, taken.notes)]

    def phase(self, name: str, label: str = "") -> Any:
        """The highest of a name."""
        return max((one for one in self.phases if (one.name, one.label) == (name, label)), key=lambda one: one[3])

    def said(self, *parts: str) -> bool:
        """True if one note has all the parts."""
        return any(all(part in note for part in parts) for note in self.notes)


@pytest.fixture(scope="module")
def build(tmp_path_factory: Any) -> Callable[..., Any]:
    root = cases.write_configs(tmp_path_factory.mktemp("configs"), {**cases.MMPRETRAIN})

    def built(*hooks: dict[str, Any], **changes: Any) -> Any:
        changes = {"custom_hooks": list(hooks), "train_cfg.max_epochs": 6, **changes}
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        return cases.build(cases.load(root, "small.py", tmp_path_factory.mktemp("work"), **changes))

    return built


@pytest.fixture(scope="module")
def look(build: Callable[..., Any]) -> Callable[..., Look]:
    """In a copy of the process, as the guard looks."""

    def looked(*hooks: dict[str, Any], whole_job: bool = True, **changes: Any) -> Look:
        runner = build(*hooks, **changes)
        return run_in_fork(lambda _progress: Look(runner, whole_job=whole_job))

    return looked


@pytest.fixture(scope="module")
def plain(look: Callable[..., Look]) -> Look:
    return look()


# --- the cases ----------------------------------------------------------------------------------------------------


@HOOKS.register_module(force=True)
class Unfreeze(Hook):
    """Blocks that are trained from an epoch on."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.done: list[int] = []

    def before_train(self, runner: Any) -> None:
        runner.model.layers.requires_grad_(False)

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == self.epoch:
            runner.model.layers.requires_grad_(True)
            self.done.append(runner.epoch)


@HOOKS.register_module(force=True)
class PipelineSwitch(Hook):
    """As mmdet's PipelineSwitchHook and mmpretrain's: another pipeline from an epoch on."""

    def __init__(self, switch_epoch: int, size: int) -> None:
        self.switch_epoch, self.size = switch_epoch, size

    def before_train_epoch(self, runner: Any) -> None:
        loader = runner.train_dataloader
        if runner.epoch >= self.switch_epoch:
            loader.dataset.pipeline.transforms = [Paint(self.size)]
            if loader.persistent_workers:
                loader._DataLoader__initialized = False
                loader._iterator = None


class Paint:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, info: dict[str, Any]) -> dict[str, Any]:
        sample = cases.BaseDataElement(metainfo={})
        sample.gt_label = torch.tensor(info["label"])
        return {"inputs": torch.zeros(3, self.size, self.size, dtype=torch.uint8), "data_samples": sample}


@DATASETS.register_module(force=True)
class Piped(BaseDataset):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(pipeline=[Paint(64)], **kwargs)

    def load_data_list(self) -> list[dict[str, Any]]:
        return [{"label": number % 2} for number in range(20)]


@HOOKS.register_module(force=True)
class ExtraLoss(Hook):
    """As mmdet's YOLOXModeSwitchHook: a second loss in the last epochs."""

    def __init__(self, num_last_epochs: int) -> None:
        self.num_last_epochs = num_last_epochs

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch + 1 >= runner.max_epochs - self.num_last_epochs:
            runner.model.use_l1 = True


@MODELS.register_module(force=True)
class TwoLosses(cases.SmallClassifier):
    def __init__(self, initial_epoch: int = -1, every: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.use_l1, self.initial_epoch, self.every = False, initial_epoch, every

    def forward(self, inputs: torch.Tensor, data_samples: list[Any], mode: str = "tensor") -> Any:
        out = super().forward(inputs, data_samples, mode)
        epoch = MessageHub.get_current_instance().get_info("epoch")
        late = epoch >= self.initial_epoch if self.initial_epoch >= 0 else self.every and epoch % self.every == 2
        if mode == "loss" and (self.use_l1 or late):
            pairs = self.patches(inputs).flatten(1)[:, None] - self.patches(inputs).flatten(1)[None]
            out["loss_l1"] = pairs.abs().mean()
        return out


@HOOKS.register_module(force=True)
class Leaking(Hook):
    def before_train(self, runner: Any) -> None:
        self.kept: list[Any] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.kept.append(torch.zeros(1000, device=next(runner.model.parameters()).device))


@HOOKS.register_module(force=True)
class Gathering(Hook):
    """Puts its own copies of the weights into checkpoints."""

    def before_save_checkpoint(self, runner: Any, checkpoint: Any) -> None:
        checkpoint["copies"] = [one.clone() for one in runner.model.parameters()]


@HOOKS.register_module(force=True)
class Exchanging(Hook):
    """Puts another loader in place of the training's."""

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == 2:
            dataset = {"type": "Piped"}
            sampler = {"type": "DefaultSampler", "shuffle": True}
            loader = {"batch_size": 2 * BATCH, "num_workers": 0, "dataset": dataset, "sampler": sampler}
            runner.train_loop.dataloader = runner.build_dataloader(loader)


@HOOKS.register_module(force=True)
class UnfreezeInside(Hook):
    """Blocks that are trained from an iteration on."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train(self, runner: Any) -> None:
        runner.model.layers.requires_grad_(False)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        runner.model.layers.requires_grad_(runner.iter >= self.iteration)


@HOOKS.register_module(force=True)
class Evaluating(Hook):
    """Runs the model on a large batch after every epoch, and stops the training."""

    def after_train_epoch(self, runner: Any) -> None:
        for batch in runner.train_dataloader:
            assert len(batch["inputs"])
        with torch.no_grad():
            runner.model.scores(torch.zeros(128, 3, 64, 64, device=next(runner.model.parameters()).device))
        runner.train_loop.stop_training = True


@OPTIM_WRAPPERS.register_module(force=True)
class Remembering(OptimWrapper):
    """Keeps the gradients of the last step."""

    def step(self, **kwargs: Any) -> None:
        self.last = [one.grad.clone() for group in self.optimizer.param_groups for one in group["params"]]
        super().step(**kwargs)


@METRICS.register_module(force=True)
class Keeping(BaseMetric):
    """Collects a tensor of a thousand numbers of every sample on the GPU."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [sample["scores"].new_zeros(1000) for sample in data_samples]

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"kept": float(len(results))}


@MODELS.register_module(force=True)
class Scoring(cases.SmallClassifier):
    def forward(self, inputs: torch.Tensor, data_samples: list[Any], mode: str = "tensor") -> Any:
        if mode == "predict":
            return [{"scores": one} for one in self.scores(inputs)]
        return super().forward(inputs, data_samples, mode)


@HOOKS.register_module(force=True)
class Exchanged(Hook):
    """Validates with other weights in place of the model's, as averages are."""

    def before_val_epoch(self, runner: Any) -> None:
        self.own = runner.model.layers
        runner.model.layers = torch.nn.Sequential()

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        runner.model.layers = self.own


@MODELS.register_module(force=True)
class Unpredictable(cases.SmallClassifier):
    def forward(self, inputs: torch.Tensor, data_samples: list[Any], mode: str = "tensor") -> Any:
        if mode == "predict":
            raise RuntimeError("no prediction here")
        return super().forward(inputs, data_samples, mode)


MODEL = {"type": "SmallClassifier", "width": 64, "depth": 4}


def rounded(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes as the allocator rounds them."""
    return sum(-(-one.nbytes // 512) * 512 for one in tensors)


def bytes_of(model: torch.nn.Module) -> int:
    return rounded([*model.parameters(), *model.buffers()])


# --- validation ---------------------------------------------------------------------------------------------------


def test_validation_with_a_larger_batch_takes_more_than_training(plain: Look, look: Callable[..., Look]) -> None:
    larger = look(val_dataloader__batch_size=64, val_dataloader__dataset__samples=200)
    assert plain.peak_phase.name == "backward"
    assert larger.peak_phase.name == "validation", larger.notes
    assert larger.phase("validation").peak_allocated == larger.peak > plain.peak
    assert larger.phase("training").peak_allocated == plain.phase("training").peak_allocated


def test_what_a_metric_keeps_is_counted_for_every_batch(look: Callable[..., Look]) -> None:
    def kept(samples: int) -> int:
        found = look(
            model={**MODEL, "type": "Scoring"},
            val_evaluator={"type": "Keeping"},
            val_dataloader__dataset__samples=samples,
        )
        return int(found.phase("validation").peak_allocated)

    assert kept(8 * 200) - kept(8 * 100) == 800 * 4096
    assert kept(8 * 200 + 3) == kept(8 * 200), "a last round of three samples takes less than those before it"


def test_a_validation_loader_without_an_end_is_bounded_and_said(look: Callable[..., Look]) -> None:
    endless = look(val_dataloader__sampler={"type": "InfiniteSampler", "shuffle": False})
    assert endless.said("loader of an evaluation has no known end", "two of its batches")
    assert endless.phase("validation").peak_allocated


def test_a_validation_that_fails_is_left_out_and_said(plain: Look, look: Callable[..., Look]) -> None:
    found = look(model={**MODEL, "type": "Unpredictable"})
    assert found.said("validation cannot be followed", "RuntimeError: no prediction here")
    assert found.phase("training").peak_allocated == plain.phase("training").peak_allocated
    unreadable = look(val_dataloader__dataset={"type": "Missing", "_delete_": True})
    assert unreadable.said("validation is not included", "Missing")
    assert "validation" not in [phase.name for phase in unreadable.phases]


def test_what_a_hook_has_exchanged_for_a_validation_that_fails_is_put_back(look: Callable[..., Look]) -> None:
    found = look({"type": "Exchanged"}, model={**MODEL, "type": "Unpredictable"})
    trained = [phase.peak_allocated for phase in found.phases if phase.name == "training"]
    assert trained == [found.peak] * 2
    assert not found.said("the step differs")


# --- by itself ----------------------------------------------------------------------------------------------------


def test_a_test_is_told_before_it_begins(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def foreseen(*args: Any) -> Any:
        found.append(foresee(*args))
        return found[-1]

    monkeypatch.setattr("vram_guard_mmengine.hook.foresee", foreseen)

    def runner(samples: int, *, mode: str = "report", budget: str = "1GiB", size: int = 8, guard: Any = None) -> Any:
        own = {"type": "VramGuardHook", "budget": budget, "mode": mode, "margin": 0, "advanced": {"remember": False}}
        dataset = {"type": "Blobs", "serialize_data": False, "samples": samples, "size": 64}
        loader = {"batch_size": size, "num_workers": 0, "dataset": dataset, "sampler": {"type": "DefaultSampler"}}
        test = {"test_dataloader": loader, "test_cfg": {}, "test_evaluator": {"type": "Keeping"}}
        test["val_evaluator"] = test["test_evaluator"]
        return build(*([own] if guard is None else []), model={**MODEL, "type": "Scoring"}, **test)

    said: list[str] = []
    guarded = runner(8 * 20)
    monkeypatch.setattr(guarded.logger, "info", lambda text, *args: said.append(text % args))
    metrics = guarded.test()
    assert [one.partition(" fits: ")[0] for one in said if "vram_guard" in one] == ["vram_guard: Runner.test"]
    assert metrics == runner(8 * 20, guard=False).test()
    runner(8 * 50).test()
    few, many = (one.estimate for one in found)
    assert many.peak_allocated - few.peak_allocated == 30 * 8 * 4096
    assert [phase.name for phase in few.phases] == ["setup", "test"]
    with pytest.raises(DoesNotFitError, match=r"Runner\.test"):
        runner(64, mode="strict", budget="30MiB", size=64).test()
    trained = runner(8 * 20)
    trained.train()
    trained.test()
    states = 2 * sum(rounded([one]) for one in trained.model.parameters())  # of AdamW, not given back
    assert found[-1].estimate.peak_allocated == few.peak_allocated + states


# --- checkpoints and copies ---------------------------------------------------------------------------------------


def test_the_copy_of_an_average_that_begins_later_is_there_from_the_start(
    plain: Look, look: Callable[..., Look]
) -> None:
    average = look({"type": "EMAHook", "begin_epoch": 3})
    own = bytes_of(MODELS.build(MODEL))
    assert average.phase("setup").peak_allocated - plain.phase("setup").peak_allocated == own
    assert average.phase("training").peak_allocated - plain.phase("training").peak_allocated == own


def test_saving_takes_what_hooks_add_and_writes_nothing(build: Callable[..., Any], plain: Look) -> None:
    runner = build({"type": "EMAHook"}, {"type": "Gathering"})
    before = sorted(Path(runner.work_dir).rglob("*"))
    found = run_in_fork(lambda _progress: Look(runner))
    assert [phase.name for phase in found.phases] == ["setup", "training", "saving", "validation", "training"]
    saving, average = found.phase("saving").peak_allocated, bytes_of(runner.model)
    assert saving > found.phase("setup").peak_allocated + 2 * average, "optimizer states, and a copy on the GPU"
    assert not plain.phase("saving").operator, "copies to the host take nothing of the GPU"
    assert sorted(Path(runner.work_dir).rglob("*")) == before


def test_resuming_holds_the_checkpoint_beside_the_model(
    plain: Look, look: Callable[..., Look], build: Callable[..., Any]
) -> None:
    saved = build(train_cfg__max_epochs=1)
    saved.train()
    path = str(Path(saved.work_dir) / "epoch_1.pth")
    found = look(load_from=path, resume=True)
    loaded = torch.load(path, map_location="cpu", weights_only=False)
    tensors = [leaf for leaf in pytree.tree_leaves(loaded) if isinstance(leaf, torch.Tensor)]
    kept = found.phase("resuming").peak_allocated - plain.phase("setup").peak_allocated
    assert kept == rounded(tensors)
    states = rounded([one for one in tensors if one.numel() > 1]) - rounded(saved.model.state_dict().values())
    assert states == 2 * rounded(saved.model.parameters())
    assert found.peak == pytest.approx(plain.peak, abs=512 * len(tensors))  # counters are on the GPU, too
    gone = look(load_from=path + ".gone", resume=True)
    assert gone.said("resuming is not included", ".gone")
    with pytest.raises(UnsupportedStepError, match="is over"):
        look(load_from=path, resume=True, train_cfg__max_epochs=1)


# --- later steps --------------------------------------------------------------------------------------------------


def test_weights_that_a_hook_unfreezes_later_are_told_before_the_first_epoch(
    plain: Look, look: Callable[..., Look]
) -> None:
    frozen = look({"type": "Unfreeze", "epoch": 4})
    assert frozen.said("epoch 5", "24 more parameters are trained")
    assert frozen.phase("training").peak_allocated < plain.phase("training").peak_allocated
    assert frozen.phase("training", "epoch 5").peak_allocated == plain.phase("training").peak_allocated
    assert not frozen.why_whole, "the loss is the same"
    never = look({"type": "Unfreeze", "epoch": 99})
    assert not never.said("the step differs")


def test_a_pipeline_that_a_hook_exchanges_makes_larger_batches(look: Callable[..., Look]) -> None:
    hook = {"type": "PipelineSwitch", "switch_epoch": 2, "size": 128}
    found = look(hook, train_dataloader__dataset={"type": "Piped", "_delete_": True})
    assert found.said("epoch 3", "train_dataloader")
    assert found.phase("training", "epoch 3").peak_allocated > 2 * found.phase("training").peak_allocated


@pytest.mark.parametrize("by_epoch", [True, False])
def test_a_hook_that_changes_the_model_at_an_iteration(look: Callable[..., Look], plain: Look, by_epoch: bool) -> None:
    endless = {"type": "InfiniteSampler", "shuffle": True}
    counted = {"type": "IterBasedTrainLoop", "max_iters": 40, "val_interval": 10, "_delete_": True}
    found = look({"type": "UnfreezeInside", "iteration": 7}, **({} if by_epoch else {"train_cfg": counted,
                 "train_dataloader__sampler": endless}))  # fmt: skip
    names = [(phase.name, phase.label) for phase in found.phases]
    before = [(name, "") for name in ("setup", "training", "saving", "validation", "training")]
    assert names == [*before, ("training", "iteration 8")]
    assert found.phase("training", "iteration 8").peak_allocated == plain.peak


def test_what_hooks_between_epochs_take_is_a_phase_of_its_own(look: Callable[..., Look], plain: Look) -> None:
    found = look({"type": "Evaluating"})
    assert [phase.name for phase in found.phases[:5]] == ["setup", "training", "saving", "hooks", "validation"]
    assert found.phase("hooks").peak_allocated == found.peak > plain.peak
    assert found.phase("training").peak_allocated == plain.peak
    assert found.phases[-1].name == "hooks", "a hook that would stop the training is followed to its end"
    assert not found.said("cannot be followed")


def test_a_loader_that_a_hook_puts_in_place_of_the_trainings(look: Callable[..., Look], plain: Look) -> None:
    found = look({"type": "Exchanging"})
    assert found.phase("training").peak_allocated == plain.peak
    assert found.phase("training", "epoch 3").peak_allocated > 1.5 * plain.peak


def test_what_an_optimizer_wrapper_of_the_users_keeps_is_counted(look: Callable[..., Look], plain: Look) -> None:
    found = look(optim_wrapper__type="Remembering")
    assert found.peak - plain.peak == rounded(MODELS.build(MODEL).parameters())


def test_a_training_that_ends_with_its_first_steps_is_saved_and_validated(look: Callable[..., Look]) -> None:
    endless = {"type": "InfiniteSampler", "shuffle": True}
    counted = {"type": "IterBasedTrainLoop", "max_iters": 2, "val_interval": 10, "_delete_": True}
    names = [phase.name for phase in look(train_cfg=counted, train_dataloader__sampler=endless).phases]
    assert names == ["setup", "training", "saving", "validation"]
    assert [phase.name for phase in look(train_cfg__max_epochs=1).phases] == names


def test_a_loss_that_a_hook_switches_on(look: Callable[..., Look]) -> None:
    found = look({"type": "ExtraLoss", "num_last_epochs": 2}, model={**MODEL, "type": "TwoLosses"})
    assert found.said("epoch 4", "use_l1")
    assert found.peak_phase.label == "epoch 4"
    assert "pass loss_weight" in found.why_whole, "a proof by the first step says nothing of that loss"


def test_a_loss_by_the_epoch_that_the_model_asks_for(look: Callable[..., Look]) -> None:
    found = look(model={**MODEL, "type": "TwoLosses", "initial_epoch": 4})
    assert found.said("epoch 5", "the model asks")
    assert found.peak_phase.label == "epoch 5"
    assert found.why_whole


def test_what_a_hook_keeps_of_every_step_is_a_leak(plain: Look, look: Callable[..., Look]) -> None:
    assert not plain.leaks
    (leak,) = look({"type": "Leaking"}).leaks
    assert leak.bytes_per_step == 4096
    assert "test_mmengine_job.py" in leak.source


# --- the user's objects, the guard --------------------------------------------------------------------------------


def test_a_test_that_the_script_calls_after_its_training_is_a_phase_of_it(build: Callable[..., Any]) -> None:
    def runner(samples: int) -> Any:
        own = {
            "type": "VramGuardHook",
            "budget": "1GiB",
            "mode": "report",
            "margin": 0,
            "advanced": {"remember": False},
        }
        dataset = {"type": "Blobs", "serialize_data": False, "samples": samples, "size": 64}
        loader = {"batch_size": 8, "num_workers": 0, "dataset": dataset, "sampler": {"type": "DefaultSampler"}}
        test = {"test_dataloader": loader, "test_cfg": {}, "test_evaluator": {"type": "Keeping"}}
        test["val_evaluator"] = test["test_evaluator"]
        return build(own, model={**MODEL, "type": "Scoring"}, train_cfg__max_epochs=1, **test)

    def tested(samples: int) -> Any:
        made = runner(samples)
        made.train()
        made.test()
        return cases.guard(made).plan.before.phases[-1]

    few, many = tested(8 * 20), tested(8 * 50)
    assert few.name == "test"
    assert many.peak_allocated - few.peak_allocated == 30 * 8 * 4096


def test_an_optimizer_that_was_built_before_takes_what_one_of_a_config_takes(
    build: Callable[..., Any], plain: Look
) -> None:
    given = build()
    kind, settings = torch.optim.AdamW, dict(given.optim_wrapper["optimizer"])
    assert settings.pop("type") == "AdamW"
    made = kind(given.model.parameters(), **settings)
    for wrapper in (given.optim_wrapper | {"optimizer": made}, OptimWrapper(made)):
        given.optim_wrapper = wrapper
        found = Look(given, whole_job=False)
        assert found.peak == plain.phase("training").peak_allocated
        assert not made.state


@LOOPS.register_module(force=True)
class OneByOne(EpochBasedTrainLoop):
    """Leaves every epoch after a batch, and validates when all are over."""

    def run_epoch(self) -> None:
        self.runner.call_hook("before_train_epoch")
        self.runner.model.train()
        self.run_iter(0, next(iter(self.dataloader)))
        self.runner.call_hook("after_train_epoch")
        self._epoch += 1

    def run(self) -> None:
        self.runner.call_hook("before_train")
        while self._epoch < self._max_epochs:
            self.run_epoch()
        self.runner.val_loop.run()


def test_a_loop_of_the_users_that_leaves_its_epochs_early(look: Callable[..., Look], plain: Look) -> None:
    found = look(train_cfg={"type": "OneByOne", "max_epochs": 6, "_delete_": True})
    assert [phase.name for phase in found.phases][:2] == ["setup", "training"]
    assert found.peak == plain.peak
    assert "validation" in [phase.name for phase in found.phases]


def test_a_loop_that_leaves_its_epochs_early_saves_too(look: Callable[..., Look], plain: Look) -> None:
    found = look(train_cfg={"type": "OneByOne", "max_epochs": 6, "_delete_": True})
    names = [phase.name for phase in found.phases]
    assert names == ["setup", "training", "saving", "training", "validation"]
    assert found.phase("saving").peak_allocated == plain.phase("saving").peak_allocated


@LOOPS.register_module(force=True)
class Keeps(EpochBasedTrainLoop):
    """Keeps ``train_step`` since before the training."""

    def __init__(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(runner, *args, **kwargs)
        self.step = runner.model.train_step

    def run_iter(self, idx: int, data_batch: Any) -> None:
        where = {"batch_idx": idx, "data_batch": data_batch}
        self.runner.call_hook("before_train_iter", **where)
        outputs = self.step(data_batch, optim_wrapper=self.runner.optim_wrapper)
        self.runner.call_hook("after_train_iter", **where, outputs=outputs)
        self._iter += 1


def test_a_loop_that_has_asked_for_train_step_before(look: Callable[..., Look], plain: Look) -> None:
    found = look(train_cfg={"type": "Keeps", "max_epochs": 6, "_delete_": True})
    assert [phase[:4] for phase in found.phases] == [phase[:4] for phase in plain.phases]


@OPTIM_WRAPPERS.register_module(force=True)
class Rarely(OptimWrapper):
    """Counts its batches by itself."""

    def should_update(self) -> bool:
        return bool(self._inner_count % 6 == 0)


def test_a_wrapper_that_counts_its_batches_itself_is_refused_by_name(build: Callable[..., Any]) -> None:
    runner = build(optim_wrapper__type="Rarely")
    with pytest.raises(UnsupportedStepError, match="should_update of Rarely"):
        run_in_fork(lambda _progress: Look(runner))


@LOOPS.register_module(force=True)
class WithoutTrainStep(EpochBasedTrainLoop):
    """Computes the loss itself, and calls no hooks."""

    def run_iter(self, idx: int, data_batch: Any) -> None:
        model, wrapper = self.runner.model, self.runner.optim_wrapper
        losses = model(**model.data_preprocessor(data_batch, True), mode="loss")
        wrapper.update_params(model.parse_losses(losses)[0])
        self._iter += 1


def test_a_loop_that_calls_no_train_step_is_refused_by_name(build: Callable[..., Any]) -> None:
    runner = build(train_cfg={"type": "WithoutTrainStep", "max_epochs": 6, "_delete_": True})
    with pytest.raises(UnsupportedStepError, match="WithoutTrainStep"):
        run_in_fork(lambda _progress: Look(runner))
