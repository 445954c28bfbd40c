"""Four real processes (gloo, CPU) under tensor parallelism; run by test_parallel_tensor.py."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from parallel_cases import LENGTH, WORDS, Transformer, loss
from torch import nn

from vram_guard import Parallel
from vram_guard.parallel.install import install
from vram_guard.parallel.meshes import make_mesh


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights after steps with one batch, which is the same on every rank."""
    # Not Adam, which makes a step of the noise that is the gradient of the keys' bias.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        loss(model, torch.randint(WORDS, (2, LENGTH), generator=generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}


def made(tied: bool) -> Transformer:
    torch.manual_seed(0)
    return Transformer(tied=tied)


def main(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    for tied in (False, True):
        wanted, start = trained(made(tied)), dict(made(tied).named_parameters())
        assert any((wanted[name] - start[name]).abs().max() > 1e-2 for name in wanted), "nothing was trained"
        for tensor in (4, 2):
            layout = Parallel(ranks, kind="fsdp2", tensor=tensor)
            model = install(made(tied), layout, make_mesh(layout, "cpu"))
            assert all(hasattr(parameter, "to_local") for parameter in model.parameters())
            assert (model.output.weight is model.tok_embeddings.weight) == tied
            for name, weight in trained(model).items():
                torch.testing.assert_close(
                    weight, wanted[name], rtol=0, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    context = torch.multiprocessing.get_context("fork")  # torch is imported once for all
    processes = [context.Process(target=main, args=(rank, 4, sys.argv[1])) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
