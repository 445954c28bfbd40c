"""A Trainer's evaluations in a trace: its own loops, over two batches of each loader in place of all."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.guard.evaluation_loader import EvaluationLoader
from vram_guard.language import _
from vram_guard.limits import ROUNDS_FOLLOWED
from vram_guard.longest.choice import longest_beside
from vram_guard.longest.planned_batch import PlannedBatch
from vram_guard.patching import replaced
from vram_guard_lightning import _layouts
from vram_guard_lightning._sample import loaders_in, read

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from vram_guard_lightning._followed import FollowedTrainer

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py


@dataclass(frozen=True)
class EvaluationBatches:
    """The batches of an evaluation's loaders, and remarks for a reader of the prediction."""

    loaders: Mapping[int, EvaluationLoader]
    """By their place among all loaders of the evaluation; those without batches are left out."""
    notes: tuple[str, ...]

    @property
    def batch_size(self) -> int:
        """Samples of the largest batch."""
        return max(one.size() for one in self.loaders.values())

    def of_at_most(self, size: int) -> Any:
        """A batch of the first loader."""
        first = next(iter(self.loaders.values()))
        return first.sample.make(first.size(size))

    def run(
        self,
        followed: FollowedTrainer,
        loop: Any,
        start: Callable[[], Any],
        *,
        sanity: int | None = None,
        most: int | None = None,
    ) -> None:
        """Run the loop over a few batches of each loader, which stand for all.

        Args:
            followed: the Trainer.
            loop: of the Trainer, which has been given :meth:`batches` of this.
            start: runs the loop.
            sanity: the most batches of each loader in a sanity check, which one batch stands for; None: it is none.
            most: samples of a batch; None: as many as the loaders deliver.
        """
        given = {place: one.followed(most, first=sanity) for place, one in self.loaders.items()}
        seen = dict.fromkeys(given, 0)
        name = "_evaluation_step" if hasattr(loop, "_evaluation_step") else "_predict_step"
        own = getattr(loop, name)

        def batches() -> Iterator[tuple[Any, int, int]]:
            for place, made in given.items():
                yield from ((batch, number, place) for number, (batch, _count) in enumerate(made))

        def step(batch: Any, batch_idx: int, dataloader_idx: int, *rest: Any) -> None:
            _batch, count = given[dataloader_idx][seen[dataloader_idx]]
            seen[dataloader_idx] += 1
            with followed.run.repeat(count) if count > 1 else contextlib.nullcontext():
                own(batch, batch_idx, dataloader_idx, *rest)

        followed.batches[loop] = batches
        with replaced(loop, {name: step}):
            start()


def read_validation(trainer: Trainer, planned_batch: PlannedBatch) -> EvaluationBatches | None:
    """A batch of each validation loader; None where nothing is validated.

    The user's hook is asked once more. Call it inside :func:`vram_guard.state.random_generators.random_state_kept`.

    Args:
        trainer: that validates.
        planned_batch: its longest batch.

    Raises:
        Exception: whatever the user's code raises, or the reason for which a loader's batches cannot be had.
    """
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    never = every is not None and epochs is not None and 0 <= epochs < every
    if not trainer.enable_validation or (never and not trainer.num_sanity_val_steps):
        return None
    source: Any = trainer.fit_loop.epoch_loop.val_loop._data_source
    return read_rounds(trainer, source.dataloader(), trainer.limit_val_batches, _("validation"), planned_batch)


def read_rounds(
    trainer: Trainer, made: Any, limit: float, what: str, planned_batch: PlannedBatch
) -> EvaluationBatches | None:
    """A batch of each loader of an evaluation; None where there are none.

    Args:
        trainer: that runs it.
        made: what the user's hook has returned.
        limit: of batches, as the Trainer has it.
        what: the evaluation, for a reader.
        planned_batch: its longest batch, where all batches are evaluated.
    """
    mode = getattr(made, "_mode", "sequential")
    found: dict[int, EvaluationLoader] = {}
    notes: list[str] = []
    for place, loader in enumerate(loaders_in(made) if mode == "sequential" else [made]):
        count = _count(trainer, loader, mode, limit)
        if count == 0:
            continue
        sample = read(loader)
        longest, said = None, sample.notes
        if type(limit) is float and limit == 1:
            longest, said = longest_beside(
                functools.partial(read, loader), planned_batch, ranks=_layouts.data_ranks(trainer)
            )
        found[place] = EvaluationLoader(sample, count, sample.dataset_size, longest)
        notes += [_("{phase}: {note}", phase=what, note=note) for note in said]
        if count is None:
            notes.append(
                _(
                    "a loader of {phase} has no length: what is collected of its batches is counted for {count} of "
                    "them",
                    phase=what,
                    count=ROUNDS_FOLLOWED,
                )
            )
    return EvaluationBatches(found, tuple(dict.fromkeys(notes))) if found else None


def _count(trainer: Trainer, loader: Any, mode: str, limit: float) -> int | None:
    """Batches of an evaluation on one process, as Lightning counts them; None where the loader has no length."""
    try:
        lengths = [len(one) for one in loaders_in(loader)]
    except (TypeError, NotImplementedError):
        length = math.inf
    else:
        shortest = min(lengths, default=0) if mode == "min_size" else max(lengths, default=0)
        length = math.ceil(shortest / _layouts.data_ranks(trainer))
    count = min(length, limit) if isinstance(limit, int) else length * limit
    return None if math.isinf(count) else int(count)
