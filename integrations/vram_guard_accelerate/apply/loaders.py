"""The training's loader among a script's: recognised in the dry run, and again in the launch, by where it is made.

A script that trains several times over (the folds of a cross validation) makes its loaders anew each time, at the same
lines. So a place and, where loaders of several kinds are made at one place (in a comprehension), the number among them
are known again; a number among all loaders would be the first training's only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vram_guard_accelerate.launch_plan import LoaderPlace

if TYPE_CHECKING:
    from vram_guard.capture.loader import Sample


class LoadersMade:
    """The loaders that a script made itself, in order."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, str]] = []

    def add(self, loader: Any, frame: Any) -> None:
        """A loader, and the frame that made it."""
        self._all.append((loader, place_of(frame)))

    def place_of_training(self, sample: Sample) -> LoaderPlace | None:
        """The place where the loader of these samples, with their batch size, was made; None where there is none."""
        data = getattr(sample.loader, "dataset", None)
        batches = getattr(sample.loader, "batch_sampler", None)  # Accelerate hands it on to its own loader
        same = [one for one in self._all if batches is not None and one[0].batch_sampler is batches]
        for loader, place in same or [one for one in self._all if data is not None and one[0].dataset is data]:
            if loader.batch_size == sample.batch_size:
                there = [other for other, where in self._all if where == place]
                number = next(at for at, other in enumerate(there) if other is loader)
                return LoaderPlace(place, number, len(there))
        return None

    def made_again(self, loader: Any, place: LoaderPlace) -> bool:
        """True if a loader was made where the training's was: scripts that make one for each epoch."""
        batches = getattr(loader, "batch_sampler", None)
        there = [other for other, where in self._all if where == place.place]
        return any(
            number % place.of == place.number
            for number, other in enumerate(there)
            if other is loader or (batches is not None and other.batch_sampler is batches)
        )


class LoaderMatcher:
    """The loaders of the training again, as a script makes them."""

    def __init__(self, place: LoaderPlace) -> None:
        self._place = place
        self._made: Counter[str] = Counter()

    def matches(self, frame: Any) -> bool:
        """True for a training's loader; to be called once for every loader, with the frame that makes it now."""
        place = place_of(frame)
        number = self._made[place]
        self._made[place] += 1
        return place == self._place.place and number % self._place.of == self._place.number


def place_of(frame: Any) -> str:
    """The file and line that a frame stands at."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
