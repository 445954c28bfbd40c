"""A Trainer's validation in a trace: its own loop, over two batches of each loader in place of all."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard_lightning import _layouts, _namespaces
from vram_guard_lightning._sample import loaders_in, read

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from vram_guard.job import JobRun

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py


#: Batches of a loader without a length: those that are followed.
UNKNOWN = 2


@dataclass(frozen=True)
class Loader:
    """One validation loader: a batch as it delivers it, and the number of batches in one validation."""

    batch: Any
    batches: int


class _Batches:
    """The same batch, so many times."""

    def __init__(self, batch: Any, count: int) -> None:
        self._batch = batch
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return iter([self._batch] * self._count)

    def __len__(self) -> int:
        return self._count


@dataclass(frozen=True)
class Validation:
    """The batches of a Trainer's validation loaders, and remarks for a reader of the prediction."""

    loaders: tuple[Loader, ...]
    notes: tuple[str, ...]

    def play(self, run: JobRun, shadow: Any, start: Callable[[], Any], sanity: int | None = None) -> None:
        """Run the loop of a Trainer's copy over two batches of each loader, of which the second stands for the others.

        Args:
            run: of the trace.
            shadow: the copy.
            start: runs the loop.
            sanity: the most batches of each loader in a sanity check, which one batch stands for; None: it is none.
        """
        loop = shadow.fit_loop.epoch_loop.val_loop
        followed = [min(one.batches, 2 if sanity is None else 1) for one in self.loaders]
        left = [
            min(one.batches, sanity or one.batches) - count + 1
            for one, count in zip(self.loaders, followed, strict=True)
        ]
        combined = _namespaces.part(_namespaces.of(shadow), "utilities.combined_loader.CombinedLoader")
        given = [_Batches(one.batch, count) for one, count in zip(self.loaders, followed, strict=True)]
        loop._data_source = type(loop._data_source)(combined(given, "sequential"), "")
        loop._combined_loader = None
        shadow.limit_val_batches, shadow.overfit_batches, shadow.reload_dataloaders_every_n_epochs = 1.0, 0.0, 0
        loop.setup_data()
        loop._max_batches = [one.batches for one in self.loaders]  # as user code is told by trainer.num_val_batches
        seen = [0] * len(followed)
        own = loop._evaluation_step

        def step(batch: Any, batch_idx: int, dataloader_idx: int, *rest: Any) -> None:
            seen[dataloader_idx] += 1
            last = seen[dataloader_idx] == followed[dataloader_idx]
            with run.repeat(left[dataloader_idx]) if last else contextlib.nullcontext():
                own(batch, batch_idx, dataloader_idx, *rest)

        with replaced(loop, {"_evaluation_step": step}):
            start()


def read_validation(trainer: Trainer) -> Validation | None:
    """A batch of each validation loader; None where nothing is validated.

    The user's hook is asked once more. Call it inside :func:`vram_guard.state.random_generators.random_state_kept`.

    Raises:
        Exception: whatever the user's code raises, or the reason for which a loader's batches cannot be had.
    """
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    never = every is not None and epochs is not None and 0 <= epochs < every
    if not trainer.enable_validation or (never and not trainer.num_sanity_val_steps):
        return None
    source: Any = trainer.fit_loop.epoch_loop.val_loop._data_source
    made = source.dataloader()
    mode = getattr(made, "_mode", "sequential")
    found: list[Loader] = []
    notes: list[str] = []
    for loader in loaders_in(made) if mode == "sequential" else [made]:
        count = _count(trainer, loader, mode)
        if count == 0:
            continue
        sample = read(loader)
        found.append(Loader(sample.make(sample.batch_size), count or UNKNOWN))
        notes += [_("validation: {note}", note=note) for note in sample.notes]
        if count is None:
            notes.append(
                _(
                    "a validation loader has no length: what validation collects of its batches is counted for {count} "
                    "of them",
                    count=UNKNOWN,
                )
            )
    return Validation(tuple(found), tuple(dict.fromkeys(notes))) if found else None


def _count(trainer: Trainer, loader: Any, mode: str) -> int | None:
    """Batches of one validation on one process, as Lightning counts them; None where the loader has no length."""
    try:
        lengths = [len(one) for one in loaders_in(loader)]
    except (TypeError, NotImplementedError):
        length = math.inf
    else:
        shortest = min(lengths, default=0) if mode == "min_size" else max(lengths, default=0)
        length = math.ceil(shortest / _layouts.data_ranks(trainer))
    limit = trainer.limit_val_batches
    count = min(length, limit) if isinstance(limit, int) else length * limit
    return None if math.isinf(count) else int(count)
