"""One of two processes under FlexibleRunner's FSDPStrategy (gloo, CPU).

Run by test_mmengine_layouts.py, once per rank.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
import vram_guard_mmengine  # noqa: E402

vram_guard_mmengine.GuardFlexibleRunner  # noqa: B018 - imports MMEngine
import mmengine_cases as cases  # noqa: E402
import torch  # noqa: E402
from mmengine.registry import FUNCTIONS  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402

from vram_guard.guard import evaluation  # noqa: E402
from vram_guard.watch.process_groups import end_process_groups  # noqa: E402
from vram_guard_mmengine import hook  # noqa: E402

RANK = int(os.environ["RANK"])

as_written = FullyShardedDataParallel.__init__


def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
    """FullyShardedDataParallel runs on the CPU where it is told to, and MMEngine tells it the number of a GPU."""
    if isinstance(kwargs.get("device_id"), int):
        kwargs["device_id"] = torch.device("cpu")
    as_written(self, *args, **kwargs)


FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]


@FUNCTIONS.register_module()
def by_layers(module: Any, recurse: bool, nonwrapped_numel: int, kinds: str) -> Any:
    """A policy with an argument, as configs have them: MMEngine takes its dict apart."""
    known = {cases.Residual} if kinds == "layers" else set()
    return functools.partial(ModuleWrapPolicy(known))(module, recurse, nonwrapped_numel)


def configured(root: Path, name: str, **changes: Any) -> Any:
    cfg = cases.load(root, "small.py", root.parent / name, **changes)
    cfg.merge_from_dict({
        "train_dataloader.dataset.size": 64, "train_cfg.max_epochs": 1, "param_scheduler": None,
        "env_cfg.dist_cfg.backend": "gloo", "default_hooks.checkpoint.interval": -1,
        # A process whose threads have saved a sharded checkpoint cannot be copied once more.
        "default_hooks.checkpoint.save_last": False,
    })  # fmt: skip
    del cfg.optim_wrapper["clip_grad"]
    cfg.launcher = "pytorch"
    cfg.strategy = {
        "type": "FSDPStrategy",
        "model_wrapper": {"auto_wrap_policy": {"type": "by_layers", "kinds": "layers"}},
    }
    cfg.runner_type = "vram_guard_mmengine.GuardFlexibleRunner"
    return cfg


def train(root: Path, name: str, **changes: Any) -> Any:
    cfg = configured(root, name, **changes)
    for key in ("val_dataloader", "val_evaluator", "val_cfg", "param_scheduler"):
        cfg[key] = None
    runner = cases.build(cfg)
    runner.train()
    return runner


def validate(root: Path) -> dict[str, Any]:
    """The prediction of a validation that begins by itself, and whether it then ran."""
    predicted: list[Any] = []

    def foresee(*args: Any) -> Any:
        predicted.append(evaluation.foresee(*args))
        return predicted[-1]

    cfg = configured(root, "validated", vram_guard={"margin": 0, "budget": "1GiB"})
    cfg.train_dataloader = cfg.train_cfg = cfg.optim_wrapper = None
    runner = cases.build(cfg)
    hook.foresee = foresee
    metrics = runner.val()
    (found,) = predicted
    phases = {} if found is None else {phase.name: phase.peak_allocated for phase in found.estimate.phases}
    return {"phases": phases, "notes": [] if found is None else list(found.notes), "metrics": list(metrics)}


def shards(runner: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in runner.model.parameters()])


def answer_of(runner: Any) -> dict[str, Any]:
    plan = cases.guard(runner).plan
    if plan is None:
        return {"plan": None}
    before = plan.before
    return {
        "splits": plan.splits,
        "usable": plan.budget.usable,
        "reserved": before.peak_reserved,
        "breakdown": dict(before.breakdown),
        "gpus": plan.timeline_before.parallel.gpus if RANK == 0 else None,  # it has planned for both
    }


def main() -> None:
    """Plain, and in micro-batches."""
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")  # MMEngine's launcher asks for a GPU before it does so
    root = folder / f"configs{RANK}"
    cases.write_configs(root, cases.MMPRETRAIN)
    settings = {"margin": 0, "allow": ["accumulate"], "budget": "1GiB", "loss_weight": "mean"}
    plain = train(root, "plain", vram_guard={**settings, "mode": "report"})
    peak = cases.guard(plain).plan.before.peak_reserved
    small = {**settings, "budget": peak - 1 if RANK == 1 else "1GiB"}
    split = train(root, "split", vram_guard=small)
    twice = train(root, "twice", vram_guard={**settings, "mode": "report"}, **{"optim_wrapper.accumulative_counts": 2})
    answer = {
        "plain": answer_of(plain),
        "split": answer_of(split),
        "twice": answer_of(twice),
        "validated": validate(root),
        "weights": sum(one.numel() for one in plain.model.parameters()),
        "difference": float((shards(split) - shards(plain)).abs().max()),
        "losses": [cases.diary(plain).losses, cases.diary(split).losses],
    }
    (folder / f"{RANK}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
    end_process_groups()  # no SIGABRT after the work (PyTorch's issue 190489)
