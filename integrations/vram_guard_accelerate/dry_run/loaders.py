"""Which of a script's loaders is the training's: told in the dry run and found again in the launch, by its place.

A script that trains several times over (the folds of a cross validation) makes its loaders anew each time, at the same
lines. So a place and, where loaders of several kinds are made at one place (in a comprehension), the number among them
are known again; a number among all loaders would be the first training's only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram_guard.capture.loader import Sample


@dataclass(frozen=True)
class Which:
    """The loaders of the training.

    Attributes:
        place: the file and line where they are made.
        number: of a loader among those made there for one training, from 0.
        of: how many are made there for one training.
    """

    place: str = ""
    number: int = 0
    of: int = 1


class Made:
    """The loaders that a script made itself, in order."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, str]] = []

    def add(self, loader: Any, frame: Any) -> None:
        """A loader, and the frame that made it."""
        self._all.append((loader, place_of(frame)))

    def which(self, sample: Sample) -> Which | None:
        """The one that delivered these samples, made with their batch size; None where there is none."""
        batches = getattr(sample.loader, "batch_sampler", None)  # Accelerate hands it on to its own loader
        same = [one for one in self._all if batches is not None and one[0].batch_sampler is batches]
        for loader, place in same or [one for one in self._all if one[0].dataset is sample.loader.dataset]:
            if loader.batch_size == sample.batch_size:
                there = [other for other, where in self._all if where == place]
                number = next(at for at, other in enumerate(there) if other is loader)
                return Which(place, number, len(there))
        return None


class Found:
    """The loaders of the training again, as a script makes them."""

    def __init__(self, which: Which) -> None:
        self._which = which
        self._made: Counter[str] = Counter()

    def is_it(self, frame: Any) -> bool:
        """Whether the loader that this frame makes now is one; to be asked once for every loader."""
        place = place_of(frame)
        number = self._made[place]
        self._made[place] += 1
        return place == self._which.place and number % self._which.of == self._which.number


def place_of(frame: Any) -> str:
    """The file and line that a frame stands at."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
