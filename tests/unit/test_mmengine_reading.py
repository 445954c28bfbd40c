"""What is read of a runner and its config before anything is built: lengths, loops, loaders, wrappers, layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from each import each

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook, _optim  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import torch
import vram_guard_mmengine
from mmengine._strategy import FSDPStrategy
from mmengine.config import ConfigDict
from mmengine.dataset import InfiniteSampler
from mmengine.hooks import EMAHook, Hook, LoggerHook
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.optim import OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from mmengine.structures import BaseDataElement
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.simulate.parallel.groups import alone
from vram_guard_mmengine import _capture, _checkpoints, _compare, _dividing, _layouts, _recovery
from vram_guard_mmengine._evaluation import EvaluationLoop, is_endless, number_of_batches
from vram_guard_mmengine._refusals import refusals
from vram_guard_mmengine._settings import checked_priority
from vram_guard_mmengine.commands import write_base


class Stream(IterableDataset[int]):
    """Without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


# --- batches of an evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 16, 17, 24, 31, 40])
@pytest.mark.parametrize("most", [None, 1, 3, 8, 20])
@pytest.mark.parametrize("longest", [None, 8])
def test_batches_that_are_followed_stand_for_those_that_a_loader_delivers(
    samples: int, most: int | None, longest: int | None
) -> None:
    """As many, of the same sizes; the longest comes last, in place of one that is not the first."""
    loader = DataLoader(range(samples), batch_size=8)  # type: ignore[arg-type]
    delivered = [len(batch) for batch in DataLoader(range(samples), batch_size=min(8, most or 8))]  # type: ignore[arg-type]
    sample: Any = SimpleNamespace(batch_size=min(8, samples), make=lambda count: (count, "first"))
    padded: Any = None if longest is None else SimpleNamespace(batch_size=8, make=lambda count: (count, "longest"))
    found = EvaluationLoop(None, "val", sample, loader, None, len(loader), samples, padded).followed(most)
    kinds = [kind for (_size, kind), _count in found]
    assert kinds == ["first"] * (len(found) - bool(longest)) + ["longest"] * bool(longest)
    sizes = [size for (size, _kind), count in found for _ in range(count)]
    assert len(sizes) == len(delivered)
    if longest is None:
        assert sorted(sizes) == sorted(delivered)
        assert len(found) == min(3 if samples % delivered[0] else 2, len(delivered))


def test_a_loader_without_an_end_is_followed_for_two_batches() -> None:
    sample: Any = SimpleNamespace(batch_size=8, make=lambda count: count)
    rounds = EvaluationLoop(None, "val", sample, DataLoader(Stream(), 8), None, None, None)
    assert rounds.followed(None) == [(8, 1), (8, 1)]
    assert rounds.followed(3) == [(3, 1), (3, 1)]


def test_loaders_that_never_end_are_known_by_their_samplers() -> None:
    data: Any = list(range(8))
    ending, stream = DataLoader(data, 2), DataLoader(Stream(), 2)
    assert [is_endless(one) for one in (ending, stream, [1, 2])] == [False, True, False]
    assert is_endless(DataLoader(data, 2, sampler=InfiniteSampler(data)))
    assert [number_of_batches(one) for one in (ending, stream)] == [4, None]


# --- loops ------------------------------------------------------------------------------------------------------


class OwnLoop(EpochBasedTrainLoop):  # type: ignore[misc]
    """A repository's own."""


@pytest.mark.parametrize(
    ("loop", "kind"),
    [
        ({"by_epoch": True, "max_epochs": 3}, EpochBasedTrainLoop),
        ({"by_epoch": False, "max_iters": 3}, IterBasedTrainLoop),
        ({"type": "EpochBasedTrainLoop"}, EpochBasedTrainLoop),
        ({"type": OwnLoop, "by_epoch": False}, OwnLoop),
        (object.__new__(OwnLoop), OwnLoop),
    ],
)
def test_the_class_of_a_loop_is_known_before_it_is_built(loop: Any, kind: type) -> None:
    assert _capture._loop_class(SimpleNamespace(_train_loop=loop)) is kind


@pytest.mark.parametrize(
    ("loop", "loader", "length"),
    [
        ({"max_epochs": 3}, range(5), (3, 15)),
        ({"max_iters": 7}, range(5), (1, 7)),
        ({"max_epochs": None, "max_iters": 7}, range(5), (1, 7)),
        ({}, range(5), (1, 5)),
        (SimpleNamespace(max_epochs=2, max_iters=10), range(5), (2, 10)),
        ({"max_epochs": 3}, DataLoader(Stream()), (3, 3)),
    ],
)
def test_models_are_told_how_long_the_training_is(loop: Any, loader: Any, length: tuple[int, int]) -> None:
    assert _capture._length(SimpleNamespace(_train_loop=loop), loader) == length


@pytest.mark.parametrize(("loop", "builds"), [("EpochBasedTrainLoop", 1), (OwnLoop, 2)])
def test_a_loader_is_built_once_where_the_loop_takes_a_built_one(loop: Any, builds: int) -> None:
    """A loop of a repository's own may want the config."""
    made: list[Any] = []

    def build(config: Any, *, seed: int, diff_rank_seed: bool) -> Any:
        made.append((config, seed, diff_rank_seed))
        return DataLoader(range(4), config["batch_size"])  # type: ignore[arg-type]

    runner = SimpleNamespace(
        _train_loop={"type": loop}, _train_dataloader={"batch_size": 2}, seed=3, build_dataloader=build,
        _randomness_cfg={"diff_rank_seed": True},
    )  # fmt: skip
    for _ in range(2):
        assert _capture._loader(runner).batch_size == 2
    assert made == [({"batch_size": 2}, 3, True)] * builds


# --- wrappers, optimizers, checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "clips"),
    [
        ({"max_norm": 5}, (5.0, None)),
        ({"type": "value", "clip_value": 0.5}, (None, 0.5)),
        ({"type": "norm"}, (None, None)),
        (None, (None, None)),
    ],
)
def test_a_wrapper_in_a_config_says_how_it_clips(given: Any, clips: Any) -> None:
    facts = _optim.read({"optimizer": {"type": "SGD", "lr": 0.1}, "clip_grad": given, "accumulative_counts": 3})
    assert (facts.clip_grad_norm, facts.clip_grad_value) == clips
    assert (facts.accumulate, facts.precision, facts.built, facts.kind) == (3, "32-true", False, OptimWrapper)


def test_hooks_of_the_user_may_read_what_a_step_has_left() -> None:
    class Reads(Hook):
        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None: ...

    for hooks, read in (([LoggerHook(), Reads()], True), ([LoggerHook(), EMAHook()], False)):
        captured: Any = SimpleNamespace(runner=SimpleNamespace(hooks=hooks))
        assert _capture.CapturedRun.read_afterwards.fget(captured) == read


@pytest.mark.parametrize(("release", "only"), [("2.5.1", False), ("2.6.0", True), ("2.13.0+cu130", True)])
def test_torch_loads_weights_only_since_2_6(monkeypatch: pytest.MonkeyPatch, release: str, only: bool) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    assert _checkpoints.loads_weights_only() == only


def test_the_last_checkpoint_is_named_where_there_is_one() -> None:
    for info, path in (({"last_ckpt": "epoch_3.pth"}, "epoch_3.pth"), ({"last_ckpt": None}, ""), ({}, "")):
        runner = SimpleNamespace(message_hub=SimpleNamespace(runtime_info=info))
        assert _recovery._last_checkpoint(runner) == path


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_base_file_is_everyones_to_read(tmp_path: Path) -> None:
    assert write_base(tmp_path).stat().st_mode & 0o777 == 0o644


def test_a_base_file_of_somebody_else_is_replaced_by_force_alone(tmp_path: Path) -> None:
    path = write_base(tmp_path)
    written = path.read_text()
    assert write_base(tmp_path) == path, "the same contents are no obstacle"
    path.write_text("budget = 1")
    with pytest.raises(InvalidInputError, match="--force"):
        write_base(tmp_path)
    assert path.read_text() == "budget = 1"
    assert write_base(tmp_path, force=True).read_text() == written
    with pytest.raises(InvalidInputError, match="is not a folder"):
        write_base(tmp_path / "nowhere")


class OwnStep(OptimWrapper):  # type: ignore[misc]
    """A wrapper of the user's."""

    def backward(self, loss: Any, **kwargs: Any) -> None: ...


PLAIN = {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 1.0}}
MIXED = {**PLAIN, "type": "AmpOptimWrapper"}
OWN = {**PLAIN, "type": OwnStep}


@each(
    ("technique", "wrapper", "config", "pin", "refused"),
    [
        ("precision", PLAIN, {}, None, False),
        ("precision", "built", {}, None, True),
        ("precision", MIXED, {}, None, True),  # it stays so
        ("precision", MIXED, {}, {"precision": "bf16-mixed"}, False),
        ("precision", OWN, {}, None, True),
        ("optimizer_in_backward", PLAIN, {}, None, False),
        ("optimizer_in_backward", MIXED, {}, None, True),
        ("optimizer_in_backward", OWN, {}, None, True),
        ("accumulate", PLAIN, {}, None, False),
        ("accumulate", OWN, {}, None, True),
        ("checkpoint", PLAIN, {}, None, False),
        ("checkpoint", PLAIN, {"activation_checkpointing": ["layers"]}, None, True),
        ("8bit", PLAIN, {}, None, False),
        ("8bit", PLAIN, {"resume": True}, None, True),
        ("offload_frozen", PLAIN, {}, None, True),
        ("half", PLAIN, {}, None, True),
        ("shard", PLAIN, {}, None, True),  # there is one process
        ("grow", PLAIN, {}, None, True),
    ],
)
def test_what_a_runner_does_not_go_with(technique: str, wrapper: Any, config: Any, pin: Any, refused: bool) -> None:
    if wrapper == "built":
        wrapper = OptimWrapper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    runner = SimpleNamespace(
        model=nn.Linear(1, 1),
        cfg=ConfigDict({name: value for name, value in config.items() if name != "resume"}),
        world_size=1,
        optim_wrapper=wrapper,
        _resume=config.get("resume", False),
    )
    settings: Any = VramGuardHook(budget="1GiB", pin=pin).settings
    found = {one.technique for one in refusals(runner, _optim.read(wrapper), settings, growable="small") if one.reason}
    assert (technique in found) is refused


def test_the_wrapper_of_a_trace_takes_one_loss_a_step() -> None:
    recorder, loss = _capture.RecordingOptimWrapper(), torch.ones(())
    with pytest.raises(UnsupportedStepError):
        _ = recorder.loss
    recorder.update_params(loss)
    assert recorder.loss == loss
    with pytest.raises(UnsupportedStepError):
        recorder.update_params(loss)
    for name in ("backward", "step", "zero_grad", "scale_loss"):
        recorder.begin()
        with pytest.raises(UnsupportedStepError):
            getattr(recorder, name)(loss)


@pytest.mark.parametrize(("accumulate", "splits", "steps"), [(1, 1, 12), (4, 4, 12), (6, 2, 4)])
def test_optimizer_steps_are_counted_where_the_user_accumulates(accumulate: int, splits: int, steps: int) -> None:
    counted: list[int] = []
    hook: Any = VramGuardHook(budget="1GiB")
    hook.plan = SimpleNamespace(accumulate=accumulate, splits=splits)
    hook._guard = SimpleNamespace(measured=counted.append)
    for _iteration in range(12):
        hook.after_train_iter(None, 0)
    assert counted[-1] == steps


@pytest.mark.parametrize("priority", ["LOW", "very_high", 0, 50, 100])
def test_a_position_among_the_hooks(priority: str | int) -> None:
    assert checked_priority(priority) == priority


@pytest.mark.parametrize("priority", ["nowhere", -1, 101, True, 1.5, None])
def test_no_position_among_the_hooks(priority: object) -> None:
    with pytest.raises(InvalidInputError, match="from 0 to 100"):
        checked_priority(priority)


@pytest.mark.parametrize(
    ("model", "config", "why"),
    [
        (nn.Linear(1, 1), {}, ""),
        (nn.Linear(1, 1), {"sync_bn": "torch"}, "synchronised batch normalisation"),
        (nn.Sequential(nn.SyncBatchNorm(1)), {}, "synchronised batch normalisation"),
    ],
)
def test_several_ranks_are_recovered_where_they_can_agree(model: nn.Module, config: dict[str, Any], why: str) -> None:
    assert _recovery.why_not(OfTwo(model, **config)).startswith(why)
    assert bool(_recovery.why_not(OfTwo(model, **config))) == bool(why)
    single = OfTwo(model, **config)
    single.world_size = 1
    assert _recovery.why_not(single) == ""
    sharded: Any = SimpleNamespace(strategy=fully_sharded(None), world_size=1)
    assert "under FSDPStrategy" in _recovery.why_not(sharded)


@pytest.mark.parametrize(
    ("optimizer", "scaling", "rule", "rate"),
    [
        ({"type": "SGD", "lr": 0.1}, {}, "linear", 0.4),
        ({"type": "SGD", "lr": 0.1}, {}, "sqrt", 0.2),
        ({"type": "SGD", "lr": 0.1}, {}, "none", 0.1),
        ({"type": "SGD"}, {}, "linear", None),
        ({"type": "SGD", "lr": 0.1}, {"enable": True, "base_batch_size": 16}, "none", 0.1 * 32 * 2 / 16),
        ({"type": "SGD", "lr": 0.1}, {"enable": False, "base_batch_size": 16}, "none", 0.1),
    ],
)
def test_rates_at_another_batch_size_are_compared_as_they_would_be(
    optimizer: dict[str, Any], scaling: dict[str, Any], rule: str, rate: float | None
) -> None:
    runner = OfTwo(nn.Linear(1, 1), auto_scale_lr=scaling)
    runner.auto_scale_lr = None
    runner.optim_wrapper = {"optimizer": optimizer}
    assert _compare._learning_rate(runner, rule, 8, 32) == pytest.approx(rate)
    if "lr" in optimizer:
        runner.optim_wrapper = OptimWrapper(torch.optim.SGD(runner.model.parameters(), lr=optimizer["lr"]))
        assert _compare._learning_rate(runner, rule, 8, 32) == pytest.approx(rate)


# --- models divided over several processes ------------------------------------------------------------------------


def fully_sharded(strategy: str | None, **wrapper: Any) -> Any:
    """FlexibleRunner's strategy, which wants GPUs where it is made."""
    given = {**wrapper, **({} if strategy is None else {"sharding_strategy": strategy})}
    strategy_of_gpus = object.__new__(FSDPStrategy)
    strategy_of_gpus.model_wrapper = given or None
    return strategy_of_gpus


@pytest.mark.parametrize(
    ("written", "frees", "other"),
    [(None, True, "SHARD_GRAD_OP"), ("FULL_SHARD", True, "SHARD_GRAD_OP"), ("SHARD_GRAD_OP", False, "FULL_SHARD"),
     ("HYBRID_SHARD", True, "_HYBRID_SHARD_ZERO2"), ("NO_SHARD", True, None)],
)  # fmt: skip
def test_gathered_weights_are_planned_to_be_freed_or_kept_otherwise(
    monkeypatch: pytest.MonkeyPatch, written: str | None, frees: bool, other: str | None
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    strategy = fully_sharded(written, use_orig_params=True)
    runner = SimpleNamespace(strategy=strategy, world_size=4)
    layout = _layouts.layout_of(runner)
    assert layout is not None
    assert (layout.gpus, layout.node, layout.reshard) == (4, 2, frees)
    found = _layouts.shardings_of(runner, layout)
    assert [(way.reshard, one.reshard) for way, one in found.items()] == [(not frees, not frees)] * bool(other)
    for way in found:
        assert _layouts.changed_settings(strategy, way) == {
            "model_wrapper": {
                "type": "MMFullyShardedDataParallel", "use_orig_params": True, "sharding_strategy": other,
            }
        }  # fmt: skip
    assert _layouts.changed_settings(strategy, None) == {}


class OfTwo(Runner):  # type: ignore[misc]
    """A runner of two processes, of which nothing is built."""

    world_size = 2

    def __init__(self, model: nn.Module, hooks: tuple[Hook, ...] = (), **config: Any) -> None:
        self.model, self._hooks = model, list(hooks)
        self._resume, self._waiting = config.pop("resume", False), config.pop("waiting", None)
        self.cfg = config
        self.optim_wrapper = {"optimizer": {"type": config.pop("optimizer", "AdamW"), "lr": 0.1}}


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("runner", "why"),
    [
        (lambda: OfTwo(nn.Linear(2, 2)), ""),
        (lambda: OfTwo(normalised()), ""),
        (lambda: OfTwo(nn.Linear(2, 2), (LoggerHook(),)), ""),
        (lambda: OfTwo(nn.Linear(2, 2), (EMAHook(),)), "EMAHook copies whole weights"),
        (lambda: OfTwo(nn.Linear(2, 2), resume=True), "optimizer states are loaded whole"),
        (lambda: OfTwo(nn.Linear(2, 2), compile=True), "compiled train_step"),
        (lambda: OfTwo(nn.Linear(2, 2), find_unused_parameters=True), "find_unused_parameters=True"),
        (lambda: OfTwo(nn.Linear(2, 2), optimizer="LBFGS"), "LBFGS"),
        (lambda: OfTwo(normalised(), waiting=({"broadcast_buffers": True},)), "sends buffers in every forward"),
        (lambda: OfTwo(normalised(), waiting=({"broadcast_buffers": False},)), ""),
        (lambda: OfTwo(nn.Linear(2, 2), waiting=({"type": "Another"},)), "is not MMDistributedDataParallel"),
    ],
)
def test_a_model_is_not_divided_where_that_would_be_another_training(runner: Any, why: str) -> None:
    made = runner()
    found = _dividing.why_not(made, _optim.read(made.optim_wrapper))
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning")
def test_one_process_and_models_that_are_wrapped_already() -> None:
    from mmengine.model import MMDistributedDataParallel

    with alone():
        wrapped = OfTwo(MMDistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=7))
        facts = _optim.read(wrapped.optim_wrapper)
        assert _dividing.why_not(wrapped, facts) == ""
        assert _dividing._options(wrapped)["bucket_cap_mb"] == 7  # type: ignore[index]
        unused = OfTwo(MMDistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True))
        assert "find_unused_parameters" in _dividing.why_not(unused, facts)
        sending = OfTwo(MMDistributedDataParallel(normalised(), broadcast_buffers=True))
        assert "sends buffers" in _dividing.why_not(sending, facts)
    single = OfTwo(nn.Linear(2, 2))
    single.world_size = 1
    assert _dividing.why_not(single, facts) == "there is one process"
    assert _dividing.why_not(SimpleNamespace(world_size=2, strategy=fully_sharded(None)), facts) == (
        "FSDPStrategy wraps the model itself"
    )


class WritesLabels(BaseDataPreprocessor):  # type: ignore[misc]
    """Puts each label back into its sample, as those of mmpretrain do."""

    def forward(self, data: Any, training: bool = False) -> Any:
        inputs = torch.stack(self.cast_data(data["inputs"]))
        labels = torch.cat([sample.gt_label for sample in data["data_samples"]]).to(self.device)
        for sample, label in zip(data["data_samples"], labels.split(1), strict=True):
            sample.gt_label = label
        return {"inputs": inputs, "labels": labels}


class Labelled(BaseModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(data_preprocessor=WritesLabels())
        self.net = torch.nn.Linear(64, 10)

    def forward(self, inputs: Any, labels: Any, mode: str = "tensor") -> Any:
        return {"loss": torch.nn.functional.cross_entropy(self.net(inputs), labels)}


def test_a_preprocessor_may_write_into_the_samples_of_its_batch(tmp_path: Path) -> None:
    samples = []
    for number in range(16):
        sample = BaseDataElement()
        sample.gt_label = torch.tensor([number % 10])
        samples.append({"inputs": torch.zeros(64), "data_samples": sample})
    runner = vram_guard_mmengine.GuardRunner(
        Labelled(),
        str(tmp_path),
        train_dataloader={
            "batch_size": 8,
            "dataset": samples,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": {"type": "pseudo_collate"},
        },
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        cfg={"vram_guard": {"gpu": "RTX 4090", "mode": "report"}},
    )
    runner.train()
    (log,) = tmp_path.glob("*/*.log")
    assert "predicted_memory: " in log.read_text(encoding="utf-8")
