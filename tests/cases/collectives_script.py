"""A process traces steps that call collectives, while the other one of its group (gloo) does nothing.

Run by test_collectives.py, once per rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn

from vram_guard import TrainingStep, trace

warnings.simplefilter("ignore")


def all_reduce(net: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = net(x).mean()
    dist.all_reduce(loss.detach(), async_op=True).wait()
    return loss


def all_gather(net: Any, x: torch.Tensor) -> torch.Tensor:
    out = net(x)
    everywhere = [torch.empty_like(out) for _ in range(2)]
    dist.all_gather(everywhere, out.detach())
    return torch.cat([out, everywhere[1]]).mean()


def objects(net: Any, x: torch.Tensor) -> torch.Tensor:
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, {"samples": 3})
    assert everywhere == [{"samples": 3}] * 2
    return net(x).mean()  # type: ignore[no-any-return]


def host(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A number in host memory is reduced; the other one of the ranks is asked to wait."""
    seen = torch.tensor(5.0)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    dist.barrier()
    assert seen == 5
    return net(x).mean()  # type: ignore[no-any-return]


def through(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat(differentiable.all_gather(net(x))).mean()


def mean(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net(x).mean()  # type: ignore[no-any-return]


STEPS = (all_reduce, all_gather, objects, host, through, mean)


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    done = out / "found.json"
    if rank == 1:
        while not done.exists():
            time.sleep(0.1)
        return
    found: dict[str, Any] = {}
    for kind in (*STEPS, "SyncBatchNorm", "metric", "mmengine"):
        net, loss = nn.Linear(8, 8), kind
        if kind == "SyncBatchNorm":
            net, loss = nn.Sequential(net, nn.SyncBatchNorm(8)), mean  # type: ignore[assignment]
        elif kind == "metric":
            loss = metric_of(net)
        elif kind == "mmengine":
            loss = reduced_by_mmengine
        timeline = trace(TrainingStep(net, torch.ones(4, 8), loss, torch.optim.SGD))  # type: ignore[arg-type]
        name = kind if isinstance(kind, str) else kind.__name__
        found[name] = [[one.name, one.phase] for one in timeline.collectives if one.step == 2]
        assert timeline.tier == "symbolic", timeline.notes
    (out / "part").write_text(json.dumps(found))
    (out / "part").rename(done)


def metric_of(net: nn.Module) -> Any:
    import torchmetrics

    net.metric = torchmetrics.MeanMetric(dist_sync_on_step=True)

    def step(net: Any, x: torch.Tensor) -> torch.Tensor:
        out = net(x)
        net.metric(out.detach())
        return out.mean()  # type: ignore[no-any-return]

    return step


def reduced_by_mmengine(net: Any, x: torch.Tensor) -> torch.Tensor:
    import mmengine.dist

    out: torch.Tensor = net(x).mean()
    mmengine.dist.all_reduce(out.detach().clone())
    mmengine.dist.all_gather_object({"samples": 3})
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
