"""MMEngine's compiled ``train_step``: the graphs of one step, as a trace follows it and as a Runner compiles it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mmengine_cases as cases
import torch
from compiled_cases import counting

from vram_guard.forks.fork import run_in_fork
from vram_guard.simulate.compiled import Compiler
from vram_guard.simulate.tracing.run import run_step
from vram_guard.timeline import Timeline
from vram_guard_mmengine._training import RunnerTraining

SAMPLES = 8
ADAMW = {"type": "AdamW", "lr": 0.001}
SGD = {"type": "SGD", "lr": 0.1, "momentum": 0.9}


def cfg_of(root: Path, work_dir: Path, optimizer: dict[str, Any], *, width: int = 32, **wrapper: Any) -> Any:
    """A training of one step."""
    cfg = cases.load(root, "small.py", work_dir)
    cfg.optim_wrapper = {
        "type": "OptimWrapper",
        "optimizer": dict(optimizer),
        "clip_grad": {"max_norm": 5.0},
        **wrapper,
    }
    cfg.model.update(width=width, depth=2)
    cfg.train_dataloader.dataset.update(samples=SAMPLES, size=8)
    cfg.train_cfg.update(max_epochs=1, val_interval=2)
    cfg.param_scheduler = []
    cfg.default_hooks.checkpoint = None
    return cfg


def traced(cfg: Any) -> tuple[Timeline, Timeline]:
    """Its steps uncompiled and compiled."""
    cfg.compile = True
    captured = RunnerTraining(cases.build(cfg), whole_job=False).capture()
    with captured.symbolic_run():
        eager = run_step(captured.step, SAMPLES, (8, 0))
        compiler = Compiler(lambda size: run_step(captured.step, size, (8, 0), steps=1, compiled=True), 300)
        return eager, compiler(SAMPLES)


def graphs_of_a_step(cfg: Any) -> int:
    """Graphs of a real Runner's step, forward and backward, beside those of NumPy (MMEngine's history of numbers)."""
    divided, graphs = counting()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        on_numpy = any("Wrapped function" in str(node.target) for node in graph.graph.nodes)
        return graph.forward if on_numpy else divided(graph, inputs)

    torch._dynamo.reset()
    cfg._cfg_dict["compile"] = {"backend": backend}
    cases.build(cfg).train()
    return len(graphs)


def in_copy(cfg: Any) -> int:
    """The same in a copy of this process, which goes on without the compiler."""
    return run_in_fork(lambda _say: graphs_of_a_step(cfg))
