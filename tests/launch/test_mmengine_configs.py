"""Other shapes of trainings: runners and registries, loaders' batches, several optimizers, load_from, two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import GuardRunner, VramGuardHook  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import two_ranks
import torch
from guard_arguments import in_advanced
from mmengine.config import Config
from mmengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.registry import DATASETS, FUNCTIONS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS, RUNNERS, Registry
from mmengine.runner import Runner

from vram_guard import cli
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard_mmengine import _optim
from vram_guard_mmengine._settings import of_config_and_hook

# MMEngine loads checkpoints so; torch 2.4 and 2.5 warn of it, later ones load weights only.
pytestmark = pytest.mark.filterwarnings("ignore:You are using `torch.load` with `weights_only=False`:FutureWarning")

RUNNER = "vram_guard_mmengine.GuardRunner"
#: Two micro-batches, whatever the budget: what is tested here is not the search.
SPLIT = {"budget": "1GiB", "margin": 0, "allow": ["accumulate"], "pin": {"micro_batch_size": 4}}
SMALL = {"train_dataloader.dataset.size": 16, "val_dataloader.dataset.size": 16, "train_cfg.max_epochs": 1,
         "param_scheduler.0.end": 1, "param_scheduler.1.begin": 1, "param_scheduler.1.end": 2,
         "train_cfg.val_interval": 1}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    return cases.write_configs(tmp_path_factory.mktemp("configs") / "configs", cases.MMPRETRAIN)


@pytest.fixture(scope="module")
def plain(root: Path) -> Any:
    return cases.train(config(root, "plain"))


def config(root: Path, name: str, **changes: Any) -> Any:
    return cases.load(root, "small.py", root.parent / name, **{**SMALL, **changes})


def log_of(runner: Any) -> str:
    return next(Path(runner.log_dir).glob("*.log")).read_text()


# --- runners and registries -------------------------------------------------------------------------------------


def test_a_repositorys_own_registry(root: Path, plain: Any) -> None:
    """mmseg builds by a registry of its own, whose parent is MMEngine's."""
    own = Registry("runner", parent=RUNNERS, scope="vram_guard_test_repository", locations=["vram_guard"])
    cfg = config(root, "own-registry", runner_type=RUNNER, vram_guard=SPLIT)
    runner = own.build(cfg)
    assert type(runner).__name__ == "GuardRunner"
    runner.train()
    assert cases.guard(runner).plan.splits == 2
    cases.same(runner, plain)


@pytest.mark.parametrize("door", ["runner_type", "default_hooks"])
def test_flexible_runner(root: Path, plain: Any, door: str) -> None:
    kind = "vram_guard_mmengine.GuardFlexibleRunner" if door == "runner_type" else "FlexibleRunner"
    cfg = config(root, f"flexible-{door}", runner_type=kind)
    if door == "runner_type":
        cfg.vram_guard = SPLIT
    else:
        cfg.default_hooks["vram_guard"] = {"type": "vram_guard_mmengine.VramGuardHook", **SPLIT}
    torch.manual_seed(0)
    runner = RUNNERS.build(cfg)
    runner.train()
    assert cases.guard(runner).plan.splits == 2
    assert runner.cfg.vram_guard_plan.micro_batch_size == 4
    assert cases.diary(runner).rates == cases.diary(plain).rates
    assert cases.diary(runner).losses == pytest.approx(cases.diary(plain).losses, abs=1e-5)


def test_a_strategy_that_is_not_followed_is_left_alone(root: Path) -> None:
    cfg = config(root, "sharded", runner_type="vram_guard_mmengine.GuardFlexibleRunner", vram_guard=SPLIT)
    runner = RUNNERS.build(cfg)
    type(runner.strategy).__name__, before = "DeepSpeedStrategy", type(runner.strategy).__name__
    try:
        runner.train()
    finally:
        type(runner.strategy).__name__ = before
    assert cases.guard(runner).plan is None
    assert "DeepSpeedStrategy shards or moves the model" in log_of(runner)


def test_mmpretrains_default_loader_settings(root: Path, plain: Any) -> None:
    """Its tools/train.py adds these to every dataloader that does not say otherwise."""
    loader = {"num_workers": 1, "persistent_workers": True, "pin_memory": False}
    changes = {f"train_dataloader.{key}": value for key, value in loader.items()}
    runner = cases.train(config(root, "workers", runner_type=RUNNER, vram_guard=SPLIT, **changes))
    cases.same(runner, plain)


def test_two_guards_are_one(root: Path, plain: Any) -> None:
    cfg = config(root, "twice", runner_type=RUNNER, vram_guard=SPLIT)
    cfg.custom_hooks = [{"type": "vram_guard_mmengine.VramGuardHook", **SPLIT} for _ in range(2)]
    runner = cases.train(cfg)
    assert log_of(runner).count("this plan is applied") == 1
    cases.same(runner, plain)


def test_a_second_training_of_the_same_process_is_not_guarded(root: Path, plain: Any) -> None:
    """The guard looks into Runner.train; runners that have no guard train as ever."""
    runner = Runner.from_cfg(config(root, "unguarded"))
    torch.manual_seed(0)
    runner.train()
    assert "vram_guard" not in log_of(runner)


def test_the_optimizers_options_may_come_from_the_constructor(root: Path) -> None:
    """paramwise_cfg is followed in the trace: as many groups, the same peak as a plain optimizer's."""
    wise = cases.train(config(root, "wise", runner_type=RUNNER, vram_guard={**SPLIT, "pin": None}))
    flat = cases.train(
        config(
            root, "flat", runner_type=RUNNER, vram_guard={**SPLIT, "pin": None}, **{"optim_wrapper.paramwise_cfg": None}
        )
    )
    assert len(wise.optim_wrapper.param_groups) > len(flat.optim_wrapper.param_groups)
    one, other = (cases.guard(runner).plan.before.breakdown["optimizer_states"] for runner in (wise, flat))
    assert one == other > 0


# --- what loaders deliver ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("collate", ["pseudo_collate", "default_collate"])
def test_collate_functions(root: Path, collate: str) -> None:
    changes = {"train_dataloader.collate_fn": {"type": collate}}
    plain = cases.train(config(root, f"plain-{collate}", **changes))
    runner = cases.train(config(root, collate, runner_type=RUNNER, vram_guard=SPLIT, **changes))
    assert cases.guard(runner).plan.splits == 2
    cases.same(runner, plain)


@MODELS.register_module(force=True)
class OfTuples(cases.SmallClassifier):
    """Takes what a plain dataset yields: (picture, label)."""

    def forward(self, picture: torch.Tensor, label: torch.Tensor, mode: str = "tensor") -> Any:
        scores = self.scores(picture.float())
        return {"loss_ce": torch.nn.functional.cross_entropy(scores, label)} if mode == "loss" else scores


@DATASETS.register_module(force=True)
class Tuples(torch.utils.data.TensorDataset):
    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        pictures = torch.randn(samples, 3, 16, 16, generator=generator)
        super().__init__(pictures, torch.arange(samples) % 2)


def tuple_config(root: Path, name: str, **changes: Any) -> Any:
    cfg = config(root, name, **changes)
    cfg.model = {"type": "OfTuples", "data_preprocessor": {"type": "BaseDataPreprocessor"}}
    cfg.train_dataloader.dataset = {"type": "Tuples", "samples": 20}
    for key in ("val_dataloader", "val_evaluator", "val_cfg"):
        cfg.pop(key)
    cfg.default_hooks.pop("diary")
    return cfg


def test_batches_of_tensors(root: Path) -> None:
    plain = cases.train(tuple_config(root, "plain-tuples"))
    runner = cases.train(tuple_config(root, "tuples", runner_type=RUNNER, vram_guard=SPLIT))
    assert cases.guard(runner).plan.splits == 2
    assert torch.allclose(cases.weights(runner), cases.weights(plain), rtol=0, atol=1e-6)


@FUNCTIONS.register_module(force=True)
def packed(samples: list[Any]) -> Any:
    pictures = torch.stack([picture for picture, _ in samples])
    return {"picture": pictures, "label": torch.stack([label for _, label in samples]),
            "packed": pictures.flatten()[: 7 * len(samples)]}  # fmt: skip


def test_what_cannot_be_split_is_refused_with_the_reason(root: Path) -> None:
    """A collate function that packs all pictures of a batch into one row."""

    cfg = tuple_config(root, "packed", runner_type=RUNNER, vram_guard={**SPLIT, "pin": None, "budget": "2MiB"})
    cfg.train_dataloader.collate_fn = {"type": "packed"}
    cfg.model.type = "OfPacked"
    runner = cases.train(cfg)
    assert "smaller micro-batches are not possible here: cannot split the batch" in log_of(runner)
    assert "batch['packed']" in log_of(runner)


@MODELS.register_module(force=True)
class OfPacked(OfTuples):
    def forward(self, picture: Any, label: Any, packed: Any, mode: str = "tensor") -> Any:
        return super().forward(picture, label, mode)


# --- optimizers -------------------------------------------------------------------------------------------------


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class ByParts:
    """A wrapper for each named part of the model."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        self.parts = optim_wrapper_cfg

    def __call__(self, model: Any) -> OptimWrapperDict:
        return OptimWrapperDict(**{
            name: OptimWrapper(torch.optim.SGD(getattr(model, name).parameters(), lr=part["optimizer"]["lr"]))
            for name, part in self.parts.items() if isinstance(part, dict)
        })  # fmt: skip


@MODELS.register_module(force=True)
class TwoOptimizers(cases.SmallClassifier):
    """As a GAN's would: each part has an optimizer of its own."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        data = self.data_preprocessor(data, True)
        loss = self(**data, mode="loss")["loss_ce"]
        loss.backward()
        for wrapper in optim_wrapper.values():
            wrapper.step()
            wrapper.zero_grad()
        return {"loss": loss}


def test_several_optimizers_are_left_alone(root: Path) -> None:
    one = {"optimizer": {"type": "SGD", "lr": 0.01}}
    cfg = config(root, "several", runner_type=RUNNER, vram_guard=SPLIT)
    cfg.model.type = "TwoOptimizers"
    cfg.default_hooks.pop("diary")
    cfg.optim_wrapper = {"constructor": "ByParts", "layers": one, "head": one}
    cfg.param_scheduler = None
    runner = cases.train(cfg)
    assert cases.guard(runner).plan is None
    assert "several optimizers" in log_of(runner)


def test_mixed_precision_as_mmengine_writes_it() -> None:
    """float16 with a dynamic loss scale (guide 004), bfloat16 without any; the rest of the config stays."""
    written = {"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-3}, "clip_grad": {"max_norm": 1.0}}
    half = _optim.in_precision(written, "16-mixed", "cuda")
    assert (half["type"], half["loss_scale"], half["dtype"]) == ("AmpOptimWrapper", "dynamic", "float16")
    assert half["clip_grad"] == {"max_norm": 1.0}
    brain = _optim.in_precision(written, "bf16-mixed", "cuda")
    assert (brain["loss_scale"], brain["dtype"]) == ({"enabled": False}, "bfloat16")
    assert written["type"] == "OptimWrapper", "the config that was given is left as it is"
    facts = _optim.read(half)
    assert (facts.kind, facts.precision, facts.clip_grad_norm) == (AmpOptimWrapper, "16-mixed", 1.0)
    assert _optim.read(brain).precision == "bf16-mixed"
    assert _optim.read(written).kind is OptimWrapper


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.torch.cuda.amp.:FutureWarning")  # MMEngine's own calls
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_on_a_gpu(root: Path, precision: str) -> None:
    pin = {"precision": precision}
    runner = cases.train(
        config(root, precision, runner_type=RUNNER, vram_guard={"budget": "1GiB", "pin": pin, "verbose": True})
    )
    assert isinstance(runner.optim_wrapper, AmpOptimWrapper)
    assert runner.optim_wrapper.loss_scaler.is_enabled() is (precision == "16-mixed")
    assert "peak allocated" in log_of(runner)


# --- checkpoints ------------------------------------------------------------------------------------------------


def test_load_from_starts_with_its_weights_and_nothing_else(root: Path, plain: Any) -> None:
    checkpoint = root.parent / "weights.pth"
    torch.save(
        {"state_dict": plain.model.state_dict(), "meta": {"vram_guard": {"learning_rates_contain": 7.0}}}, checkpoint
    )
    changes = {"load_from": str(checkpoint)}
    other = cases.train(config(root, "plain-loaded", **changes))
    runner = cases.train(config(root, "loaded", runner_type=RUNNER, vram_guard=SPLIT, **changes))
    assert cases.diary(runner).rates == cases.diary(plain).rates
    cases.same(runner, other)
    assert not torch.allclose(cases.weights(runner), cases.weights(plain), rtol=0, atol=1e-4)


def test_settings_are_only_read_by_the_hook_that_is_there() -> None:
    hook = VramGuardHook(**in_advanced(SPLIT))
    with pytest.raises(UnsupportedStepError):
        _optim.read({"one": {}, "other": {}})
    assert hook.plan is None


BEFORE_MMENGINE = """
model = dict(type="FasterRCNN", backbone=dict(type="ResNet", depth=50))
optimizer = dict(type="SGD", lr=0.02)
optimizer_config = dict(grad_clip=None)
runner = dict(type="EpochBasedRunner", max_epochs=12)
data = dict(samples_per_gpu=2, workers_per_gpu=2, train=dict(type="CocoDataset"))
fp16 = dict(loss_scale=512.0)
"""
LOADER = """
train_dataloader = dict(batch_size=2, num_workers=0, dataset=dict(type="{dataset}"),
                        sampler=dict(type="DefaultSampler", shuffle=True))
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.01))
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BEFORE_MMENGINE, "mmcv 1.x, from before MMEngine (data=, runner=, fp16=, optimizer=, optimizer_config=)"),
        ("model = dict(type='NoSuchNet')" + LOADER.format(dataset="X"), "NoSuchNet is not in the mmengine::model"),
        (
            "model = dict(type='BaseDataPreprocessor')" + LOADER.format(dataset="Nope"),
            "Nope is not in the mmengine::dataset",
        ),
        ("model = dict(type='torch.nn')" + LOADER.format(dataset="X"), 'name a class in it, type="torch.nn.CLASS"'),
    ],
)
def test_a_config_that_cannot_be_built_is_told_in_a_line(tmp_path: Path, capsys: Any, text: str, said: str) -> None:
    (tmp_path / "net.py").write_text(text)
    assert cli.main(["mmengine", "compare", str(tmp_path / "net.py"), "--gpu", "RTX 4090"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert "custom_imports" in told or "MMDetection 3" in told or "CLASS" in told


def test_a_runner_with_a_guard_refuses_configs_from_before_mmengine(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(BEFORE_MMENGINE)
    with pytest.raises(InvalidInputError, match=r"mmcv 1\.x"):
        GuardRunner.from_cfg(Config.fromfile(tmp_path / "net.py"))


def test_a_setting_that_a_config_has_twice_is_refused_before_anything_is_built() -> None:
    hook = {"type": "VramGuardHook", "budget": "200MiB", "allow": "accumulate"}
    config = {"vram_guard": {"budget": "20MiB", "allow": "accumulate"}, "custom_hooks": [hook]}
    with pytest.raises(InvalidInputError, match="budget twice: '20MiB' in vram_guard, '200MiB' in its VramGuardHook"):
        GuardRunner.from_cfg(config)
    assert of_config_and_hook({"budget": "1GiB"}, {"budget": "1GiB", "margin": 0}) == {"budget": "1GiB", "margin": 0}


# --- two processes ----------------------------------------------------------------------------------------------


def test_two_processes_hold_one_plan(tmp_path: Path) -> None:
    """gloo; the second process has less memory, which counts for both."""
    first, second = two_ranks.answers("mmengine_ddp_script.py", tmp_path, limit=280)
    assert first == second
    assert first["late"].startswith("UnsupportedStepError: the training step calls the other ranks itself")
    assert first["splits"] == 2
    assert first["difference"] < 1e-6
    assert first["groups"] == second["groups"] == 1, "the guard's own process group is destroyed"
