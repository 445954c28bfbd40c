"""Blocks of which compiled code keeps less than uncompiled code, and whether this torch's compiler is followed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore

from vram_guard.forks.fork import run_in_fork
from vram_guard.parallel.install import install
from vram_guard.parallel.meshes import make_mesh
from vram_guard.parallel.spec import Parallel
from vram_guard.private_names import missing_names
from vram_guard.simulate.parallel.groups import alone
from vram_guard.simulate.private_api import COMPILER_NAMES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of imports
    MISSING = missing_names(COMPILER_NAMES)

WIDTH = 64


class Block(nn.Module):
    """A matrix product and a chain of pointwise operators, each of which keeps something in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).sin().tanh().exp()


def counting() -> tuple[Callable[..., Any], list[Any]]:
    """A backend that divides graphs as Inductor has it and compiles nothing; those that it has met, both ways."""
    graphs: list[Any] = []

    def counted(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=counted, bw_compiler=counted), graphs


def graphs_under_layout(made: Callable[[Callable[..., Any]], nn.Module], step: Any, layout: Parallel) -> int:
    """Graphs of two steps of a model on the CPU that torch divides over pretended processes, in a copy of this one.

    Args:
        made: a backend -> the model, whose blocks it compiles.
        step: the model -> its loss.
        layout: of the processes.
    """

    def work(_say: object) -> int:
        torch._dynamo.reset()
        backend, graphs = counting()
        dist.init_process_group("fake", rank=0, world_size=layout.gpus, store=FakeStore())
        model = install(made(backend), layout, make_mesh(layout, "cpu"))
        for _number in range(2):
            step(model).backward()
        return len(graphs)

    return run_in_fork(work)


def graphs_under_ddp(made: Callable[[Callable[..., Any]], nn.Module], step: Callable[[nn.Module], torch.Tensor]) -> int:
    """Graphs of a forward that Dynamo makes of a model in a real process group, in a copy of this process.

    The group's threads may hold locks: a copy that is made of this process later would wait for them for ever.

    Args:
        made: how to compile (``torch.compile`` with a backend) -> the model, in a DistributedDataParallel.
        step: the model -> its loss.
    """
    graphs: list[Any] = []

    def counting(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def work(_say: object) -> int:
        torch._dynamo.reset()
        with alone():
            step(made(lambda model: torch.compile(model, backend=counting))).backward()
        return len(graphs)

    return run_in_fork(work)
