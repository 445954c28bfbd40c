"""Real processes (gloo, CPU) that train under a layout, as the package puts it on; run by test_parallel_equal.py.

Every rank writes the whole weights that it ends with. The training as written, in one process with the samples of all
ranks, is here too: :func:`as_written`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from forked_ranks import exit_codes
from parallel_cases import LENGTH, WORDS, Net, Transformer, loss
from torch import nn

from vram_guard import Parallel
from vram_guard.apply.microbatch import split
from vram_guard.parallel.data_parallel import divided_states
from vram_guard.parallel.install import install
from vram_guard.parallel.meshes import make_mesh
from vram_guard.techniques import AS_WRITTEN, Recipe, optimizer_for
from vram_guard.techniques import install as install_techniques

STEPS, SAMPLES, RANKS = 3, 16, 4
#: Below the norm of every step's gradients: each is scaled.
CLIP = 0.1
#: Rows of 30, 60 and 48 numbers: those of 30 do not divide over four ranks, and their shards are padded.
WIDTH = 30

Weights = dict[str, torch.Tensor]
Fault = Literal["other samples", "other rate", "other scale", "not clipped", "not reduced", "forgotten micro-batch"]


def net() -> nn.Module:
    return Net(width=WIDTH)


def deep_net() -> nn.Module:
    """With blocks enough that a plan under a tight budget checkpoints some."""
    return Net(blocks=6, width=WIDTH)


def tied() -> nn.Module:
    """Its scores are made with the weight that embeds its words."""
    return Transformer(tied=True)


def optimizer(parameters: Iterable[nn.Parameter], rate: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW that sees how large gradients are.

    With torch's own ``eps`` it takes a step of the same size whatever their scale, so that sums in place of means would
    not be noticed; and it would make a step of the last bits of a gradient that is nearly zero.
    """
    return torch.optim.AdamW(parameters, lr=rate, eps=1e-3)


def batches(samples: int) -> Iterator[torch.Tensor]:
    """The samples of each optimizer step, for all ranks together; no two are alike."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randint(WORDS, (samples, LENGTH), generator=generator)


def built(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


@functools.cache
def as_written(model: Callable[[], nn.Module] = net, samples: int = SAMPLES, clip: float | None = None) -> Weights:
    """The weights that a plain training of one process with whole batches ends with."""
    made = built(model)
    stepper = optimizer(made.parameters())
    for words in batches(samples):
        loss(made, words).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(made.parameters(), clip)
        stepper.step()
        stepper.zero_grad()
    return {name: parameter.detach() for name, parameter in made.named_parameters()}


def in_half_precision() -> Weights:
    """The same with a forward and backward in bfloat16 for the samples of each rank, whose gradients are averaged."""
    made = built(net)
    stepper = optimizer(made.parameters())
    for words in batches(SAMPLES):
        for part in words.chunk(RANKS):
            halves = {name: parameter.bfloat16() for name, parameter in made.named_parameters()}

            def model(given: torch.Tensor, halves: Weights = halves) -> torch.Tensor:
                return torch.func.functional_call(made, halves, given)

            # A power of two: nothing is rounded, and the gradients are those of the part's own mean.
            (loss(model, part) / RANKS).backward()
        stepper.step()
        stepper.zero_grad()
    return {name: parameter.detach() for name, parameter in made.named_parameters()}


@dataclass(frozen=True)
class Case:
    """A training over several processes: its layout, what else is changed, and what is done wrong on purpose."""

    layout: Parallel
    model: Callable[[], nn.Module] = net
    recipe: Recipe = AS_WRITTEN
    samples: int = SAMPLES
    """Of an optimizer step, over all ranks."""
    accumulate: int = 1
    """Batches that a rank loads for an optimizer step."""
    splits: int = 1
    """Micro-batches of each of them."""
    clip: float | None = None
    fault: Fault | None = None


FSDP2 = Parallel(RANKS, kind="fsdp2")
LAYOUTS = {
    "ddp": Parallel(RANKS, kind="ddp"),
    "zero1": Parallel(RANKS, kind="zero1"),
    "fsdp1": Parallel(RANKS, kind="fsdp1"),
    "fsdp1, kept": Parallel(RANKS, kind="fsdp1", reshard=False),
    "fsdp2": FSDP2,
    "fsdp2, kept": FSDP2.with_(reshard=False),
    "fsdp2, kept over 2": FSDP2.with_(reshard=2),
    "fsdp2, on the host": FSDP2.with_(offload=True),
    "hsdp 2 x 2": Parallel(RANKS, node=2, kind="hsdp"),
}
CASES = {
    **{name: Case(layout) for name, layout in LAYOUTS.items()},
    **{
        f"{name}, clipped micro-batches": Case(LAYOUTS[name], splits=2, clip=CLIP)
        for name in ("ddp", "zero1", "fsdp1", "fsdp2", "fsdp2, kept", "hsdp 2 x 2")
    },
    "tensor 2 x 2": Case(FSDP2.with_(tensor=2), Transformer, clip=CLIP),
    "tensor 2 x 2, tied": Case(FSDP2.with_(tensor=2), tied, clip=CLIP),
    "tensor 4 x 1": Case(FSDP2.with_(tensor=RANKS), Transformer, clip=CLIP),
    "tensor 4 x 1, tied": Case(FSDP2.with_(tensor=RANKS), tied, clip=CLIP),
    "tensor 4": Case(Parallel(RANKS, kind="ddp", tensor=RANKS), Transformer, splits=2),
}
#: The parts of the batch are computed in bfloat16, and their gradients are added in float32 or in bfloat16.
HALF = {
    name: Case(FSDP2.with_(param_dtype="bf16", reduce_dtype=reduce))
    for name, reduce in {"reduced in float32": "fp32", "reduced in bfloat16": "bf16"}.items()
}
#: Each is as one of the cases above but for the fault.
FAULTS: dict[Fault, Case] = {
    "other samples": Case(FSDP2, fault="other samples"),
    "other rate": Case(LAYOUTS["zero1"], fault="other rate"),
    "other scale": Case(FSDP2, splits=2, fault="other scale"),
    "not clipped": Case(LAYOUTS["hsdp 2 x 2"], clip=CLIP, fault="not clipped"),
    "not reduced": Case(LAYOUTS["ddp"], fault="not reduced"),
    "forgotten micro-batch": Case(LAYOUTS["fsdp1"], splits=2, fault="forgotten micro-batch"),
}


# --- a real process ---------------------------------------------------------------------------------------------------


def trained(case: Case, rank: int) -> dict[str, Any]:
    """One rank of a case: the weights that it ends with, and how often each block's forward ran."""
    layout = case.layout
    mesh = make_mesh(layout, "cpu")
    plain = built(case.model)
    ran = counted(plain)
    install_techniques(plain, case.recipe)
    model = install(plain, layout, mesh)
    if layout.tensor > 1 and layout.kind == "fsdp2":
        assert all(hasattr(parameter, "to_local") for parameter in model.parameters())
        assert (model.output.weight is model.tok_embeddings.weight) == (case.model.__name__ == "tied")
    stepper = optimizer_for(optimizer(model.parameters()), case.recipe)
    if layout.kind == "zero1":
        stepper = divided_states(stepper, mesh)
    if case.fault == "other rate":
        stepper.param_groups[0]["lr"] *= 1.01
    for words in batches(case.samples):
        one_step(case, model, stepper, part_of(case, words, rank))
    return {"weights": whole_weights(model, layout), "ran": ran}


def part_of(case: Case, words: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank loads; ranks that share a layer load the same."""
    reader = rank // case.layout.tensor
    if case.fault == "other samples" and rank == case.layout.gpus - 1:
        reader -= 1
    return words.chunk(case.layout.data_ranks)[reader]


def one_step(case: Case, model: nn.Module, stepper: torch.optim.Optimizer, words: torch.Tensor) -> None:
    alone: Any = model.no_sync if case.fault == "not reduced" else contextlib.nullcontext
    for loaded in words.chunk(case.accumulate):
        size = len(loaded)
        parts = split(loaded, size, size // case.splits)
        assert len(parts) == case.splits
        for part in parts[: 1 if case.fault == "forgotten micro-batch" else None]:
            weight = 1.0 if case.fault == "other scale" else part.weight / case.accumulate
            with alone():
                (loss(model, part.data) * weight).backward()
    if case.clip is not None and case.layout.kind == "fsdp1":
        # torch.nn.utils knows the gradients of this rank alone.
        model.clip_grad_norm_(case.clip)
    elif case.clip is not None and case.fault != "not clipped":
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    stepper.step()
    stepper.zero_grad()


def counted(model: nn.Module) -> dict[str, int]:
    """How often the forward of each block runs from now on, by the block's name."""
    ran: dict[str, int] = {}
    for name, module in model.named_modules():
        if name.endswith(".up"):
            block = name.removesuffix(".up")
            ran[block] = 0

            def count(*_: object, block: str = block) -> None:
                ran[block] += 1

            module.register_forward_pre_hook(count)
    return ran


def whole_weights(model: nn.Module, layout: Parallel) -> Weights:
    """Whole weights by the names that the plain model has for them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    gathered: Any = contextlib.nullcontext()
    if layout.kind == "fsdp1":
        gathered = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    with gathered:
        found = {}
        for name, parameter in model.named_parameters():
            plain = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
            found[plain] = (
                (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
            )
    return found


#: What torch would import at the first use, in each process for itself.
IMPORTED_LATE = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
)


def main(folder: Path, name: str, ranks: int) -> int:
    """The cases that lie in a file, one after the other, in so many processes; each is a fork of this one."""
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    cases = pickle.loads((folder / name).read_bytes())

    def work(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.store", rank=rank, world_size=ranks)
        torch.save({key: trained(case, rank) for key, case in cases.items()}, folder / f"{name}.{rank}")
        dist.barrier()
        dist.destroy_process_group()

    return sum(code != 0 for code in exit_codes(ranks, work))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
