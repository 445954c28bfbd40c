"""Checkpoints, copies, shards and rehearsals of MMEngine's adapter, by themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import torch
from mmengine.logging import HistoryBuffer
from mmengine.optim import OptimWrapper
from torch import nn

from vram_guard.errors import InvalidInputError
from vram_guard.simulate.parallel.groups import alone
from vram_guard.techniques import Sharding
from vram_guard_mmengine import _checkpoints, _dividing, _job, _optim, _rehearsal, _shadow


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_history_names_its_own_methods_only() -> None:
    assert _checkpoints._statistic(HistoryBuffer, "mean") is HistoryBuffer.mean
    for owner, name in ((HistoryBuffer, "__init__"), (dict, "mean"), (HistoryBuffer, "update"), (list, "max")):
        with pytest.raises(InvalidInputError, match="is not MMEngine's"):
            _checkpoints._statistic(owner, name)


@pytest.mark.parametrize(
    ("resume", "load_from", "found", "notes"),
    [
        (False, None, False, 0),
        (False, "here", True, 0),
        (True, "here", True, 0),
        ("here", None, True, 0),
        (False, "nowhere", False, 0),
        (True, "nowhere", False, 1),
        (True, None, True, 0),
        (True, "broken", False, 1),
    ],
)
def test_the_checkpoint_that_a_training_begins_with_is_opened(
    tmp_path: Any, resume: Any, load_from: Any, found: bool, notes: int
) -> None:
    """Sizes of its tensors, and numbers as they are; that of ``resume=True`` is the latest of the folder."""
    torch.save({"weight": torch.ones(3), "step": torch.tensor(7.0), "one": torch.ones(1)}, tmp_path / "here")
    (tmp_path / "last_checkpoint").write_text(str(tmp_path / "here"))
    (tmp_path / "broken").write_text("nothing")
    said: list[str] = []
    runner = SimpleNamespace(
        work_dir=str(tmp_path),
        _resume=str(tmp_path / resume) if isinstance(resume, str) else resume,
        _load_from=load_from and str(tmp_path / load_from),
    )
    checkpoint = _job.checkpoint_of(runner, said)
    assert (checkpoint is not None, len(said)) == (found, notes)
    if checkpoint is not None:
        assert checkpoint.path == str(tmp_path / "here")
        assert (checkpoint.content["weight"].shape, checkpoint.content["weight"].device.type) == ((3,), "meta")
        assert [float(checkpoint.content[name]) for name in ("step", "one")] == [7.0, 1.0]


# --- copies and dividing ----------------------------------------------------------------------------------------------


class Part:
    """Of a loader, with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_the_copy_of_a_loader_may_get_another_pipeline() -> None:
    transform = Part(size=4)
    data = Part(pipeline=Part(transforms=[transform]), samples=[1, 2], datasets=[transform])
    loader = Part(dataset=data, other=transform)
    copied = _shadow._apart(loader)
    copied.dataset.pipeline.transforms[0].size = 8
    copied.dataset.pipeline = None
    assert (data.pipeline.transforms, transform.size) == ([transform], 4)
    assert copied.dataset.samples is data.samples, "what it holds of data is shared"
    assert copied.other is transform
    assert _shadow._apart(Part) is Part
    for data in (torch.ones(4), type("Rows", (dict,), {})()):
        assert _shadow._apart(Part(dataset=data)).dataset is data, "data that is no object of Python's own is shared"
    assert _shadow._apart(3) == 3


def test_metrics_of_a_trace_collect_apart_and_compute_nothing() -> None:
    metric = cases.Right()
    metric.results, metric.of = [1.0], {"a": 1}
    evaluator = SimpleNamespace(metrics=[metric])
    (copied,) = _shadow.copied_evaluator(evaluator).metrics
    copied.results.append(2.0)
    copied.of["b"] = 2
    assert (metric.results, metric.of) == ([1.0], {"a": 1})
    assert copied.compute_metrics([]) == {}
    assert copied.results == [2.0]


def test_buckets_of_the_wrapper_are_those_of_the_replica_that_is_divided() -> None:
    runner = SimpleNamespace(
        model=nn.Linear(2, 2), world_size=2, cfg={}, _waiting=({"bucket_cap_mb": 7, "broadcast_buffers": False},)
    )
    made = _dividing.shardings_of(runner)()
    assert made
    for layout in made.values():
        assert (layout.gpus, layout.kind, layout.init, layout.offload) == (2, None, "cuda", False)
        assert (
            vars(layout.apply)["_options"] == {"bucket_cap_mb": 7}
            or {"bucket_cap_mb": 7} in vars(layout.apply).values()
        )
    runner.cfg, runner._waiting = {"find_unused_parameters": True}, None
    assert _dividing._options(runner) == {"broadcast_buffers": False, "find_unused_parameters": True}
    runner.cfg = {}
    assert _dividing._options(runner) == {"broadcast_buffers": False, "find_unused_parameters": False}


def test_the_class_of_an_optimizer_is_known_however_it_is_given() -> None:
    weight = nn.Parameter(torch.ones(1))
    built = SimpleNamespace(optim_wrapper=OptimWrapper(torch.optim.SGD([weight], lr=1.0)))
    assert _dividing._optimizer_class(built, _optim.read(built.optim_wrapper)) is torch.optim.SGD
    for kind, found in (("Adam", torch.optim.Adam), (torch.optim.SGD, torch.optim.SGD)):
        config = {"optimizer": {"type": kind, "lr": 1.0}}
        runner = SimpleNamespace(optim_wrapper=config)
        assert _dividing._optimizer_class(runner, _optim.read(config)) is found
    alone_ = {"constructor": "Own"}
    assert _dividing._optimizer_class(SimpleNamespace(optim_wrapper=alone_), _optim.read(alone_)) is type(None)


@pytest.mark.torch_since(2, 6)
def test_shards_are_updated_in_the_groups_of_their_parameters() -> None:
    """One process: after dividing, the optimizer has the model's new parameters, each in the group it was in."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    whole = {name: one.detach().clone() for name, one in module.named_parameters()}
    optimizer = torch.optim.SGD([{"params": [module[1].bias]}, {"params": [module[0].weight], "lr": 2.0}], lr=1.0)
    with alone():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        put_together = _dividing.divided(module, optimizer, Sharding(fsdp2=True), torch.device("cpu"), mesh)
        assert all(isinstance(one, DTensor) for one in module.parameters())
        assert optimizer.param_groups[0]["params"][0] is module[1].bias
        assert optimizer.param_groups[1]["params"][0] is module[0].weight
        put_together([optimizer])
    assert all(one.equal(whole[name]) for name, one in module.named_parameters())
    assert not any(isinstance(one, DTensor) for one in module.parameters())


# --- rehearsals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["config", "built", "mixed"])
def test_a_rehearsal_is_in_its_own_precision(wrapper: str) -> None:
    weight = nn.Parameter(torch.ones(1))
    if wrapper == "built":
        given: Any = OptimWrapper(torch.optim.SGD([weight], lr=1.0), accumulative_counts=9)
        made = _rehearsal._plain_wrapper(given)
        assert made is given
        assert made._accumulative_counts == 2
        return
    kind = {"type": "AmpOptimWrapper", "loss_scale": "dynamic", "dtype": "float16"} if wrapper == "mixed" else {}
    given = {**kind, "optimizer": {"type": "SGD", "lr": 1.0}, "clip_grad": None}
    made = _rehearsal._plain_wrapper(given)
    assert made == {
        **({"type": OptimWrapper} if kind else {}), "optimizer": given["optimizer"], "clip_grad": None,
        "accumulative_counts": 1,
    }  # fmt: skip


def test_a_quiet_runner_has_nothing_to_do_but_steps() -> None:
    strategy = SimpleNamespace(_wrap_model=lambda model: "wrapped")
    runner = SimpleNamespace(_hooks=[VramGuardHook(budget="1GiB"), cases.Diary()], strategy=strategy, _waiting=(None,))
    _rehearsal.quiet(runner)
    assert [type(hook) for hook in runner._hooks] == [cases.Diary]
    assert (runner._val_loop, runner._load_from, runner._resume, runner._waiting) == (None, None, False, None)
    assert runner._init_model_weights() is None
    assert runner.strategy._wrap_model("model") == "model"
    assert _rehearsal.doubled(torch.ones(1)).dtype == torch.float64
    assert _rehearsal.doubled(torch.ones(1, dtype=torch.int64)).dtype == torch.int64
