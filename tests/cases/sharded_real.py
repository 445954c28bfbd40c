"""Training steps over several real processes (gloo, CPU), and what their allocator did, event by event.

``torch.profiler`` notes every block that PyTorch's CPU allocator hands out and takes back, with its size and address,
whoever asks for it: the recording knows nothing of the trace that it is compared with.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it: once, for all copies
import torch.distributed as dist
from forked_ranks import exit_codes
from torch import nn
from torch.distributed import _functional_collectives
from torch.profiler import ProfilerActivity, profile, record_function

from vram_guard import Parallel, TrainingStep
from vram_guard.parallel.data_parallel import divided_states, fullest_rank
from vram_guard.parallel.install import install

STEPS = 2
SAMPLES = 8
WIDTH = 48
COPIES = "what gloo is given"


class Block(nn.Module):
    """Odd sizes: 9 elements are no multiple of 2 or 4 ranks."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(9))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) * self.scale.sum()


def build():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 11))


def batch(samples):
    return torch.ones(samples, WIDTH)


def loss(model, inputs):
    return model(inputs).square().mean()


def optimizer(weights, foreach=True):
    return torch.optim.SGD(list(weights), lr=0.1, momentum=0.9, foreach=foreach)


def step_of(case):
    return TrainingStep(
        model=build, batch=batch, loss=loss, optimizer=case.optimizer, parallel=case.parallel, keeps="nothing"
    )


# --- what is applied, in the trace and in the real processes -------------------------------------------------


def fsdp2(model, mesh, reshard=True, reduce=None):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce) if reduce else MixedPrecisionPolicy()
    for block in list(model)[:-1]:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in list(model)[:-1]:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


@dataclass(frozen=True)
class Case:
    """One layout: what it is for the trace, and how it is applied."""

    parallel: Parallel
    foreach: bool = True

    def optimizer(self, weights):
        return optimizer(weights, self.foreach)

    @property
    def ranks(self):
        return self.parallel.gpus

    @property
    def rank(self):
        """The one that is traced: the first, or the one with most of the optimizer's states."""
        if self.parallel.kind != "zero1":
            return 0
        return fullest_rank([{"params": list(build().parameters())}], self.ranks)


CASES = {
    "fsdp2 x 4": Case(Parallel(gpus=4, apply=fsdp2)),
    "fsdp2 x 2, bfloat16": Case(Parallel(gpus=2, apply=lambda m, mesh: fsdp2(m, mesh, reduce=torch.float32))),
    "fsdp2 x 2 by blocks, kept": Case(Parallel(gpus=2, kind="fsdp2", blocks=("0", "1", "2"), reshard=False)),
    "ddp x 2": Case(Parallel(gpus=2, kind="ddp")),
    "zero1 x 2": Case(Parallel(gpus=2, kind="zero1")),
    "hsdp 2 x 2": Case(Parallel(gpus=4, node=2, replicate=2, apply=fsdp2)),
    "tensor 2": Case(Parallel(gpus=2, tensor=2, apply=tensor_parallel), foreach=False),
}


# --- a real process ------------------------------------------------------------------------------------------


def rank_of(case, rank, folder):
    """One rank: two training steps under the profiler; writes its events."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = CASES[case].ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}/{case}.store", rank=rank, world_size=ranks)
    dimensions = CASES[case].parallel.dimensions
    mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    torch.manual_seed(0)
    model = install(build(), CASES[case].parallel, mesh)
    made = CASES[case].optimizer(model.parameters())
    if CASES[case].parallel.kind == "zero1":
        made = divided_states(made, mesh)
    with gloo_apart(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = []
        for _ in range(STEPS):
            one_step(model, made, kept)
    events = recorded(profiled)
    (Path(folder) / f"{case}.{rank}.json").write_text(json.dumps(events))
    dist.barrier()
    dist.destroy_process_group()


def one_step(model, made, kept):
    """As a trace's loop: the old batch dies before the new one comes, the loss when the step is over."""
    kept.clear()
    kept.append(batch(SAMPLES))
    value = loss(model, kept[0])
    value.backward()
    made.step()
    del value
    made.zero_grad()


@contextlib.contextmanager
def gloo_apart():
    """Gloo is given copies: its threads let go of a tensor at some time after the collective, NCCL has none."""
    names = ("all_gather_single", "reduce_scatter_single", "all_reduce")
    before = {name: getattr(dist, name) for name in names}

    def on_copies(original):
        def collective(*args, async_op=False, **settings):
            with record_function(COPIES):
                given = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
                named = {k: one.clone() if isinstance(one, torch.Tensor) else one for k, one in settings.items()}
                original(*given, **named)
                for old, new in zip((*args, *settings.values()), (*given, *named.values()), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)

        return collective

    def waited(tensor):
        result = wait_tensor(tensor)
        time.sleep(0.005)  # called in C++, which cannot be given copies: time enough for gloo's thread to let go
        return result

    wait_tensor = _functional_collectives.wait_tensor
    _functional_collectives.wait_tensor = waited
    for name, original in before.items():
        setattr(dist, name, on_copies(original))
    try:
        yield
    finally:
        _functional_collectives.wait_tensor = wait_tensor
        for name, original in before.items():
            setattr(dist, name, original)


def recorded(profiled):
    """[bytes (negative: freed), address, path of operators] of this thread, in order."""
    found = []

    def visit(node, path, number):
        if node.tag.name == "Allocation":
            fields = node.extra_fields
            found.append((node.start_time_ns, number, fields.alloc_size, fields.ptr, path))
        else:
            path = [*path, f"{node.name}@{node.start_time_ns}"]
        for child in node.children:
            visit(child, path, number)

    roots = profiled.profiler.kineto_results.experimental_event_tree()
    for root in roots:
        visit(root, [], root.start_tid)
    main = max({number for _, number, *_ in found}, key=lambda one: sum(number == one for _, number, *_ in found))
    return [[size, address, path] for _, number, size, address, path in sorted(found) if number == main]


def main(folder):
    """Each case in turn, its ranks as forks of this process, which has imported torch once."""
    for case, layout in CASES.items():
        codes = exit_codes(layout.ranks, lambda rank, case=case: rank_of(case, rank, folder))
        if any(codes):
            print(f"{case}: exit codes {codes}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
