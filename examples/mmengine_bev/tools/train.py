"""Trains what a config describes. As OpenMMLab's repositories have it: no word about the guard in here."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mmengine.config import Config, DictAction
from mmengine.registry import RUNNERS
from mmengine.runner import Runner


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a segmentor")
    parser.add_argument("config", help="train config file path")
    parser.add_argument("--work-dir", help="where logs and checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in the work dir")
    parser.add_argument("--amp", action="store_true", help="automatic mixed precision")
    parser.add_argument("--cfg-options", nargs="+", action=DictAction, help="settings of the config, as KEY=VALUE")
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none", help="job launcher")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    return args


def main() -> None:
    """Load, merge, build, train."""
    args = parse_args()
    cfg = Config.fromfile(args.config)
    cfg.launcher = args.launcher
    if args.cfg_options is not None:
        cfg.merge_from_dict(args.cfg_options)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get("work_dir") is None:
        cfg.work_dir = str(Path("work_dirs") / Path(args.config).stem)
    if args.amp:
        cfg.optim_wrapper.type = "AmpOptimWrapper"
        cfg.optim_wrapper.loss_scale = "dynamic"
    cfg.resume = args.resume
    runner = RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)
    runner.train()


if __name__ == "__main__":
    main()
