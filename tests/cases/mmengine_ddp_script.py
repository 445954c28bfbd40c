"""One of two processes under MMEngine's launcher (gloo, CPU). Run by test_mmengine_configs.py, once per rank."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
import vram_guard_mmengine  # noqa: E402

vram_guard_mmengine.GuardRunner  # noqa: B018 - imports MMEngine
import mmengine_cases as cases  # noqa: E402
import torch  # noqa: E402
from mmengine.registry import DATA_SAMPLERS, MODELS  # noqa: E402

from vram_guard.watch.process_groups import end_process_groups  # noqa: E402

RANK = int(os.environ["RANK"])


@MODELS.register_module()
class CallsOthers(cases.SmallClassifier):
    """Calls the other rank in forward where it is told to."""

    calls = False

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.calls:
            torch.distributed.barrier()
        return super().scores(inputs)


class CallingLate(cases.Hook):
    """The second batch of an epoch does, of eight samples on the first rank and of one on the second."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        del data_batch
        runner.model.module.calls = batch_idx == 1


@DATA_SAMPLERS.register_module()
class UnevenBatches(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """Batches of eight samples; the second rank's second one has a single sample."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        self.sampler, self.batch_size = sampler, batch_size

    def __iter__(self) -> Any:
        yield list(range(8))
        yield list(range(8, 16 if RANK == 0 else 9))

    def __len__(self) -> int:
        return 2


def error_of_late_call(root: Path, name: str) -> str:
    uneven = {"train_dataloader.batch_sampler": {"type": "UnevenBatches"}, "model.type": "CallsOthers"}
    pinned = {"budget": "1GiB", "loss_weight": "mean", "pin": {"micro_batch_size": 4}}
    try:
        train(root, name, runner_type="vram_guard_mmengine.GuardRunner", vram_guard=pinned, **uneven)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to know
        return f"{type(error).__name__}: {error}"
    return ""


def train(root: Path, name: str, **changes: Any) -> Any:
    cfg = cases.load(root, "small.py", root.parent / name, **changes)
    cfg.merge_from_dict({
        "train_dataloader.dataset.size": 64, "val_dataloader.dataset.size": 16, "train_cfg.max_epochs": 2,
        "param_scheduler.0.end": 1, "param_scheduler.1.begin": 1, "param_scheduler.1.end": 2,
        "env_cfg.dist_cfg.backend": "gloo",
    })  # fmt: skip
    cfg.launcher = "pytorch"
    cfg.model_wrapper_cfg = {"type": "MMDistributedDataParallel", "device_ids": None}  # else a GPU
    runner = cases.build(cfg)
    if "late" in name:
        runner.register_hook(CallingLate())
    runner.train()
    return runner


def main() -> None:
    """Plain, split, and broken on one rank."""
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")  # MMEngine's launcher asks for a GPU before it does so
    root = folder / f"configs{RANK}"
    cases.write_configs(root, cases.MMPRETRAIN)
    # The second process has less memory: what it can hold is what both do.
    settings = {"margin": 0, "allow": ["accumulate"], "budget": "1GiB", "loss_weight": "mean"}
    guarded = {"runner_type": "vram_guard_mmengine.GuardRunner"}
    plain = train(root, "plain", **guarded, vram_guard=settings)  # it fits: nothing is changed
    peak = cases.guard(plain).plan.before.peak_reserved
    small = {**settings, "budget": peak - 1 if RANK == 1 else "1GiB"}
    split = train(root, "split", **guarded, vram_guard=small)
    answer = {
        "late": error_of_late_call(root, "late"),
        "splits": cases.guard(split).plan.splits,
        "difference": float((cases.weights(split) - cases.weights(plain)).abs().max()),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
    }
    (folder / f"{RANK}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
    end_process_groups()  # no SIGABRT after the work (PyTorch's issue 190489)
