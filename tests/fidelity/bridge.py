"""Lightning's cases under MMEngine's Runner and in a loop with Accelerate.

A case that has only a loss, data and what is told after each batch needs no Trainer: the same module is trained as a
part of the other framework's model, by the same batches, and is compared in the same way.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from . import of_lightning
from .harness import Case
from .lightning import Base, Training, loader

#: Modules of such cases.
PLAIN = ("losses", "state", "blocks", "loaders", "unseen", "later", "hidden")
#: What a Trainer alone calls or gives. What happens after each batch is told by the other frameworks too.
_TRAINERS = {*dir(pl.LightningModule), *dir(pl.Callback)} - {*dir(nn.Module), "on_train_batch_end"}


def parts(case: Case) -> Training:
    """What a case trains, and by which batches."""
    made = case.make()
    run = made if isinstance(made, Training) else Training(made)
    run.data = loader() if run.data is None else run.data
    return run


@functools.cache
def bridged() -> list[Case]:
    """Those that need no Trainer."""
    return [case for name in PLAIN for case in of_lightning(name) if _is_plain(parts(case))]


def by_turns(number: int) -> list[Case]:
    """Every fourth of them, from this one on; all with ``VRAM_GUARD_FIDELITY=all``."""
    return bridged() if os.environ.get("VRAM_GUARD_FIDELITY") == "all" else bridged()[number::4]


def _is_plain(run: Training) -> bool:
    if run.trainer or run.resume_after or type(run.data) is not DataLoader:
        return False
    if isinstance(run.data.dataset, IterableDataset) or not hasattr(run.data.batch_sampler, "sampler"):
        return False
    return not any(_of_trainer(one) for one in (run.module, *run.callbacks))


def _of_trainer(one: Any) -> bool:
    """True where a case's own classes have, or read, what is a Trainer's."""
    own = [kind for kind in type(one).__mro__ if kind.__module__.startswith("fidelity") and kind is not Base]
    named = {name for kind in own for name in vars(kind) if not name.startswith("_")}
    codes = [getattr(value, "__code__", None) for kind in own for value in vars(kind).values()]
    return bool((named | {name for code in codes if code for name in code.co_names}) & _TRAINERS)


def told(run: Training, batch: Any, batch_idx: int) -> None:
    """What a case does after each batch."""
    run.module.on_train_batch_end(None, batch, batch_idx)
    for one in run.callbacks:
        one.on_train_batch_end(None, run.module, None, batch, batch_idx)
