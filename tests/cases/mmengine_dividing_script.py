"""One of two processes whose runner's model is divided otherwise than as written (gloo, CPU).

Run by test_mmengine_dividing.py, once per rank. Each case trains as written, which tells what it takes, and then with a
little less memory.
"""

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
import mmengine_sharded_script  # noqa: E402, F401 - its policy, and FSDP on the CPU
import torch  # noqa: E402
from guard_arguments import in_advanced  # noqa: E402

RANK = int(os.environ["RANK"])


class Looks(cases.Hook):
    """What stands on the model while it trains."""

    found: dict[str, Any]

    def after_train_iter(self, runner: Any, *_args: Any, **_more: Any) -> None:
        layers = [part for part in runner.model.modules() if isinstance(part, cases.Residual)]
        self.found = {
            "checkpointed": ["forward" in vars(layer) for layer in layers],
            "kinds": sorted({type(one).__name__ for one in runner.optim_wrapper.optimizer.param_groups[0]["params"]}),
            "model": type(runner.model).__name__,
        }


def trained(root: Path, case: str, way: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kind = case.partition("+")[0]
    cfg = cases.load(root, "small.py", root.parent / f"{case}-{way}", vram_guard=in_advanced({"mode": way, **settings}))
    cfg.merge_from_dict({
        "model.width": 512, "train_dataloader.dataset.size": 16, "train_cfg.max_epochs": 1,
        "val_dataloader.dataset.size": 16, "env_cfg.dist_cfg.backend": "gloo",
        "optim_wrapper.optimizer": {"_delete_": True, "type": "SGD", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0},
    })  # fmt: skip
    cfg.param_scheduler = None
    cfg.launcher = "pytorch"
    cfg.runner_type = "vram_guard_mmengine.GuardRunner"
    if kind.startswith("fsdp"):
        del cfg.optim_wrapper["clip_grad"]
        for key in ("val_dataloader", "val_evaluator", "val_cfg"):
            cfg[key] = None
        cfg.merge_from_dict({"default_hooks.checkpoint.interval": -1, "default_hooks.checkpoint.save_last": False})
        wrapper: dict[str, Any] = {"auto_wrap_policy": {"type": "by_layers", "kinds": "layers"}}
        if kind.endswith("kept"):
            wrapper["sharding_strategy"] = "SHARD_GRAD_OP"
        cfg.strategy = {"type": "FSDPStrategy", "model_wrapper": wrapper}
        cfg.runner_type = "vram_guard_mmengine.GuardFlexibleRunner"
    else:
        cfg.model_wrapper_cfg = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}
    runner = cases.build(cfg)
    looks = Looks()
    runner.register_hook(looks)
    runner.train()
    return runner, looks.found


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.distributed.init_process_group("gloo")  # MMEngine's launcher asks for a GPU before it does so
    root = folder / f"configs{RANK}"
    cases.write_configs(root, cases.MMPRETRAIN)
    for case in names:
        _kind, allow = case.split("+")[:2]
        budget: Any = "8GiB"
        result: dict[str, Any] = {}
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for way in ("report", "fit"):
            settings = {"margin": 0, "allow": allow.split(","), "budget": budget, "remember": False}
            if allow == "checkpoint" and way == "fit":  # of this step the peak is elsewhere
                settings |= {"budget": "8GiB", "pin": {"checkpoint": 2}}
            runner, seen = trained(root, case, way, settings)
            plan = cases.guard(runner).plan
            assert plan is not None
            budget = int(plan.before.peak_reserved) - 1
            model = getattr(runner.model, "module", runner.model)
            weights = {name: one.detach().clone() for name, one in model.named_parameters()}
            kept[way] = weights
            result[way] = {
                "peak": plan.peak, "before": plan.before.peak_reserved, "fits": plan.fits,
                "changes": [list(one) for one in plan.changes()], "training": seen,
                "states": plan.estimate.breakdown.get("optimizer_states", 0), "losses": cases.diary(runner).losses,
                "kinds": sorted({type(one).__name__ for one in model.parameters()}),
                "checkpoint": next(map(str, sorted((root.parent / f"{case}-{way}").glob("*.pth"))), ""),
            }  # fmt: skip
        torch.save(kept, folder / f"{case}-{RANK}.pt")
        (folder / f"{case}-{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    os._exit(0)
