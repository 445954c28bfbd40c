"""A training through very many out-of-memory errors, at random operators and ranks, and the undisturbed one.

``python tests/cases/oom_storm.py 1000`` runs it in one process and in two (gloo, CPU) and compares the ends;
test_oom_storm.py does so with fewer errors.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

BATCH, LAYERS, OPERATORS = 8, 5, 12
RANK = int(os.environ.get("LOCAL_RANK", "0"))


class Error(NamedTuple):
    """Where one is raised: on some ranks, in one of an attempt's micro-batches, at an operator or in backward."""

    ranks: tuple[int, ...]
    micro_batch: int
    operator: int | None
    layer: int


def planned(errors: int, ranks: int) -> list[dict[int, Error]]:
    """For each batch, the errors by the micro-batch size of the attempt that they break; the same on every rank."""
    draw, plan, left = random.Random(5), [], errors
    while left:
        broken: dict[int, Error] = {}
        for size in (8, 4, 2)[: min(left, draw.randrange(4))]:
            both = draw.random() < 0.1
            where = tuple(range(ranks)) if both else (draw.randrange(ranks),)
            operator = draw.randrange(OPERATORS) if draw.random() < 0.5 else None
            broken[size] = Error(where, draw.randrange(BATCH // size), operator, draw.randrange(LAYERS))
            left -= 1
        plan.append(broken)
    return plan


class Counter:
    """The module's own counts, in a helper object."""

    def __init__(self) -> None:
        self.samples = {"seen": [0]}


class Storm:
    """Raises the planned errors; nothing of it can be reached from the module, so that nothing is taken back."""

    plan: list[dict[int, Error]]
    batch, size, micro_batch, raised = -1, 0, 0, 0

    @classmethod
    def next_forward(cls, samples: int) -> Error | None:
        """The error of this micro-batch on this rank."""
        if samples != cls.size:
            cls.size, cls.micro_batch = samples, 0
        error = cls.plan[cls.batch].get(samples)
        found = error is not None and error.micro_batch == cls.micro_batch and RANK in error.ranks
        cls.micro_batch += 1
        cls.raised += found
        return error if found else None


def make_module(disturbed: bool) -> Any:
    import lightning.pytorch as pl
    import oom_cases

    class Module(pl.LightningModule):  # type: ignore[misc]
        """Everything in float64, so that rounding cannot hide a batch that was lost."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(LAYERS))
            self.register_buffer("total", torch.zeros(6, dtype=torch.float64))
            self.counter = Counter()

        def on_train_batch_start(self, *_: Any) -> None:
            Storm.batch += 1
            Storm.size = 0
            for callback in self.trainer.callbacks if disturbed else ():
                callback._recovery.batches.schedule.size = None  # as long as memory is not really short

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            error = Storm.next_forward(len(x)) if disturbed else None
            self.total += x.sum(0)
            self.counter.samples["seen"][0] += len(x)
            if error is not None and error.operator is not None:
                with oom_cases.BreaksAtOperator(error.operator):
                    return self.loss(x, y, None)
            loss = self.loss(x, y, None if error is None else error.layer)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def loss(self, x: torch.Tensor, y: torch.Tensor, broken: int | None) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                if number == broken:
                    x = oom_cases.breaks_in_backward(x)
            return nn.functional.mse_loss(x, y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Module()


def train(out: Path, errors: int, ranks: int, *, disturbed: bool) -> None:
    """One training of this rank; what it ends with is written down."""
    import lightning_cases as cases
    from lightning.pytorch.strategies import DDPStrategy

    from vram_guard.errors import UnsupportedStepError
    from vram_guard_lightning import VramGuard, _training

    def refuse(*_: Any) -> Any:
        raise UnsupportedStepError("the prediction is not what this is about")

    _training.capture = refuse
    Storm.plan, Storm.batch, Storm.raised = planned(errors, ranks), -1, 0
    guard = VramGuard(budget="64GiB", allow=("accumulate",), remember=False, max_recoveries=errors, loss_weight="mean")
    draw = torch.Generator().manual_seed(3)
    samples = torch.randn(len(Storm.plan) * BATCH * ranks, 6, dtype=torch.float64, generator=draw)
    data = torch.utils.data.TensorDataset(samples, samples.flip(1).tanh())
    trainer = cases.make_trainer(
        "lightning.pytorch",
        out,
        [guard] if disturbed else [],
        devices=ranks,
        max_epochs=1,
        **({"strategy": DDPStrategy(process_group_backend="gloo")} if ranks > 1 else {}),
    )
    module = make_module(disturbed)
    trainer.fit(module, cases.loader(dataset=data, batch_size=BATCH))
    ends = {"loss": float(trainer.callback_metrics["loss"]), "seen": module.counter.samples["seen"][0]}
    ends |= {"steps": trainer.global_step, "raised": Storm.raised}
    name = f"{'disturbed' if disturbed else 'plain'}-{RANK}"
    torch.save(module.state_dict(), out / f"{name}.pt")
    (out / f"{name}.json").write_text(json.dumps(ends))


def storm(out: Path, errors: int, ranks: int, patience: float) -> dict[str, Any]:
    """Both trainings in so many processes: how many errors were raised, and by how much their ends differ."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
    command = [sys.executable, __file__, str(errors), "--worker", str(out), str(ranks)]
    workers = []
    for rank in range(ranks):
        with (out / f"{rank}.log").open("w") as log:
            settings = {"OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank), **(address if ranks > 1 else {})}
            workers.append(
                subprocess.Popen(command, env={**os.environ, **settings}, stdout=subprocess.DEVNULL, stderr=log)
            )
    try:
        for worker in workers:
            worker.wait(patience)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    found: dict[str, Any] = {"errors": 0, "difference": 0.0}
    for rank in range(ranks):
        ends = [out / f"{kind}-{rank}" for kind in ("disturbed", "plain")]
        if not all(end.with_suffix(".json").exists() for end in ends):
            raise RuntimeError((out / f"{rank}.log").read_text()[-3000:])
        mine, plain = (json.loads(end.with_suffix(".json").read_text()) for end in ends)
        weights, theirs = (torch.load(end.with_suffix(".pt"), weights_only=True) for end in ends)
        apart = [abs(mine[name] - plain[name]) for name in ("loss", "seen", "steps")]
        apart += [float((weights[name] - theirs[name]).abs().max()) for name in theirs]
        found["difference"] = max(found["difference"], *apart)
        found["errors"] += mine["raised"]
        found["steps"], found["loss"] = mine["steps"], mine["loss"]
    return found


def main(errors: int) -> None:
    """The trainings of the command line."""
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            found = storm(Path(folder), errors, ranks, patience=3600)
            print(f"{ranks} process(es): {found}, {time.monotonic() - began:.0f} s", flush=True)
            assert found["difference"] < 1e-9, found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--worker" in sys.argv:
        for kind in (True, False):
            train(Path(sys.argv[3]), int(sys.argv[1]), int(sys.argv[4]), disturbed=kind)
        os._exit(0)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
