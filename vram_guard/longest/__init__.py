"""The longest batch that a loader can make: a step that fits it fits every other one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vram_guard.checks import checked_count
from vram_guard.step import TrainingStep

__all__ = ["LongestBatch", "longest_batch"]


@dataclass(frozen=True)
class LongestBatch:
    """The longest batch of a loader, at any batch size: give it to a :class:`vram_guard.TrainingStep` as ``batch``."""

    make: Callable[[int], Any]
    """batch size -> a batch; a smaller one than the loader's is cut from it, and padded as it is."""
    size: int
    """Samples of it."""
    notes: tuple[str, ...]
    """What it is, and by what it was found; empty where all samples are alike."""

    def __call__(self, size: int) -> Any:
        """A batch of so many samples."""
        return self.make(size)


def longest_batch(
    loader: Any,
    *,
    seconds: float = 2.0,
    ranks: int = 1,
    step: TrainingStep | None = None,
) -> LongestBatch:
    """Find the longest batch that a DataLoader can make.

    The sizes of samples are the sampler's ``lengths`` or a column of the data set (an attribute such as ``lengths``,
    Arrow's), else those of samples that are read; the batches are its sampler's. This happens in a copy of the process
    where that is possible; here only the samples of the batch are read, and random generators are put back.

    Args:
        loader: a DataLoader, or anything that is iterated over batch by batch.
        seconds: that the search may take.
        ranks: processes among which the samples will be shared out.
        step: compares batches that are the largest in different ways (pictures and boxes) by tracing; its own batch
            does not count. None: the one that is the largest when it is padded.

    Raises:
        InvalidInputError: an argument makes no sense.
        UnsupportedStepError: batches of a known size cannot be had without disturbing the training.

    Example:
        >>> texts = [torch.ones(length) for length in (5, 9, 4, 7)]
        >>> pad = torch.nn.utils.rnn.pad_sequence
        >>> loader = torch.utils.data.DataLoader(texts, 2, collate_fn=lambda batch: pad(batch, batch_first=True))
        >>> batch = longest_batch(loader)
        >>> batch(2).shape, batch(1).shape
        (torch.Size([2, 9]), torch.Size([1, 9]))
        >>> batch.notes[0]
        'the longest batch is planned for: 2 samples of up to size 9; all 4 samples were read'
    """
    from vram_guard.capture.loader import read_loader
    from vram_guard.longest.choice import choose, peak_of
    from vram_guard.longest.planned_batch import PlannedBatch
    from vram_guard.plan.checks import check_seconds
    from vram_guard.state.random_generators import random_state_kept

    check_seconds("seconds", seconds)
    ranks = checked_count("ranks", ranks)
    with random_state_kept():
        sample = read_loader(loader)
    peak = None if step is None else peak_of(step.with_(batch=sample.make))
    chosen = choose(sample, PlannedBatch(seconds=seconds), ranks=ranks, peak=peak)
    return LongestBatch(chosen.make, chosen.batch_size, chosen.notes)
