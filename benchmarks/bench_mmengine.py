"""The time that the guard adds to an iteration of MMEngine, once training has started.

A training whose step is almost nothing shows what an iteration costs around it, to the microsecond: with no guard,
with the guard, with the guard and ``recover=True``. Put beside a real iteration (the bird's-eye view example, on this
CPU), that is the share. Processor time of the best of several rounds. Exits with 1 where the guard's share is above
--limit.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# ruff: noqa: ARG002 - MMEngine decides what hooks and models are given

EXAMPLE = Path(__file__).parents[1] / "examples" / "mmengine_bev"
LIMIT = 0.1
"""Percent of an iteration."""
VARIANTS: dict[str, dict[str, Any]] = {
    "no guard": {},
    "guard": {"budget": "8GiB", "margin": 0},
    "guard, recover=True": {"budget": "8GiB", "margin": 0, "recover": True},
}
#: Milliseconds of iterations for which the share is printed as well.
OTHERS = (50.0, 200.0)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000, help="in each round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="the best counts (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="percent of an iteration (default: %(default)s)")
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLE))
    best = {name: float("inf") for name in VARIANTS}
    for _ in range(options.rounds):  # in turns, so that other load on this machine affects all of them
        for name, settings in VARIANTS.items():
            best[name] = min(best[name], _iteration(_tiny(options.iterations), settings))
    real = _iteration(_real(), {})
    share = _print(best, real)
    print(f"\nreal: one iteration of the bird's-eye view example on this CPU, {1000 * real:.0f} ms")
    return int(share > options.limit)


def _print(best: dict[str, float], real: float) -> float:
    columns = ("of the real one", *(f"of {other:.0f} ms" for other in OTHERS))
    print(f"{'':20}  {'iteration':>10}  {'added':>9}  " + "  ".join(f"{name:>15}" for name in columns))
    plain = best["no guard"]
    for name, seconds in best.items():
        added = seconds - plain
        shares = [added / real, *(1000 * added / other for other in OTHERS)]
        figures = "  ".join(f"{share:>15.4%}" for share in shares)
        print(f"{name:20}  {1e6 * seconds:>7.0f} us  {1e6 * added:>+6.1f} us  {figures}")
    return 100 * max(0.0, best["guard"] - plain) / real


def _iteration(config: Any, settings: dict[str, Any]) -> float:
    """Processor seconds of one iteration, the first ones left out."""
    from mmengine.hooks import Hook

    from vram_guard_mmengine import VramGuardHook

    class Clock(Hook):  # type: ignore[misc]
        """Reads the clock after the first tenth of the training, and at its end."""

        priority = "LOWEST"
        start = seconds = 0.0

        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            if runner.iter + 1 == runner.max_iters // 10:
                self.start = time.process_time()
            if runner.iter + 1 == runner.max_iters:
                self.seconds = (time.process_time() - self.start) / (runner.max_iters - runner.max_iters // 10)

    from mmengine.runner import Runner

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), _silence():
        config.work_dir, config.launcher = folder, "none"
        config.experiment_name = f"bench_{time.time_ns()}"
        runner = Runner.from_cfg(config)
        runner.register_hook(clock)
        if settings:
            runner.register_hook(VramGuardHook(**settings))
        runner.train()
        for handler in runner.logger.handlers:
            handler.close()
    return clock.seconds


@contextlib.contextmanager
def _silence() -> Any:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _tiny(iterations: int) -> Any:
    """A training whose step is almost nothing."""
    import torch
    from mmengine.config import Config
    from mmengine.model import BaseModel
    from torch.utils.data import Dataset

    class Point(BaseModel):  # type: ignore[misc]
        """Four numbers to one."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, numbers: Any, mode: str = "tensor") -> Any:
            return {"loss": self.layer(numbers).square().mean()}

    class Numbers(Dataset[Any]):
        """Always the same four."""

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return {"numbers": torch.ones(4)}

    return Config(
        {
            "model": {"type": Point},
            "train_dataloader": {
                "batch_size": 4,
                "num_workers": 0,
                "dataset": Numbers(),
                "sampler": {"type": "InfiniteSampler", "shuffle": False},
                "collate_fn": {"type": "default_collate"},
            },
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.01}},
            "train_cfg": {"type": "IterBasedTrainLoop", "max_iters": iterations, "val_interval": 10 * iterations},
            "default_scope": "mmengine",
            "default_hooks": {"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 10 * iterations}},
            "log_processor": {"by_epoch": False},
        },
        format_python_code=False,
    )


def _real() -> Any:
    """The bird's-eye view example, ten iterations of it."""
    from mmengine.config import Config

    cfg = Config.fromfile(str(EXAMPLE / "configs" / "lift_splat_small_scenes.py"))
    cfg.merge_from_dict(
        {"train_cfg.max_iters": 20, "train_cfg.val_interval": 100, "train_dataloader.dataset.scenes": 8}
    )
    for key in ("runner_type", "val_dataloader", "val_evaluator", "val_cfg"):
        cfg.pop(key)
    return cfg


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
