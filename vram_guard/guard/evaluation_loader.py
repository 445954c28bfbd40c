"""The batches of an evaluation that are followed in place of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram_guard.capture.loader import Sample


@dataclass(frozen=True)
class EvaluationLoader:
    """A loader of an evaluation.

    Attributes:
        sample: of its batches, as it delivers them.
        batches: that it delivers; None where it has no known end.
        samples: of its data set, in this process; None where that does not tell. A sampler may draw more.
        longest: of a batch that is longer than those that come first; None: there is none, or that is not known.

    Example:
        >>> from vram_guard.capture.loader import read_loader
        >>> sample = read_loader(torch.utils.data.DataLoader(torch.ones(70, 3), batch_size=8))
        >>> [(len(batch), count) for batch, count in EvaluationLoader(sample, 9, 70).followed()]
        [(8, 1), (8, 7), (6, 1)]
    """

    sample: Sample
    batches: int | None
    samples: int | None = None
    longest: Sample | None = None

    def size(self, most: int | None = None) -> int:
        """Samples of a batch, of which there may be so many at most; None: as many as it delivers."""
        own = self.sample.batch_size
        return own if most is None else min(own, most)

    def followed(self, most: int | None = None, *, first: int | None = None) -> list[tuple[Any, int]]:
        """Batches, and how many of its batches each stands for; the longest comes last, beside all that is collected.

        Args:
            most: samples of a batch; None: as many as the loader delivers.
            first: of the batches, which one stands for (0: of all batches); None: all are evaluated.
        """
        sizes, repeated = self._sizes(self.size(most))
        if first is not None:
            count = len(sizes) + repeated - 1
            return [(self.sample.make(sizes[0]), min(count, first or count))]
        found = [(self.sample.make(size), repeated if number == 1 else 1) for number, size in enumerate(sizes)]
        if self.longest is not None:
            batch, count = found.pop(min(1, len(found) - 1))
            if count > 1:
                found.insert(1, (batch, count - 1))
            found.append((self.longest.make(min(self.longest.batch_size, most or self.longest.batch_size)), 1))
        return found

    def _sizes(self, size: int) -> tuple[tuple[int, ...], int]:
        """Of the first batch, of that of those that follow, and of a shorter last one; how many the second stands for.

        Args:
            size: of a batch.
        """
        if self.batches is None:
            return (size, size), 1
        own = self.sample.batch_size
        evaluated = self.batches * own
        if self.samples is not None and self.samples > evaluated - own:
            evaluated = min(self.samples, evaluated)
        batches = -(-evaluated // size)
        last = evaluated - (batches - 1) * size
        if batches == 1:
            return (last,), 1
        if last == size:
            return (size, size), batches - 1
        return ((size, size, last), batches - 2) if batches > 2 else ((size, last), 1)
