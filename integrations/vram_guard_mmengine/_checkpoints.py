"""Resuming with MMEngine on a torch that loads weights only.

MMEngine 0.10.7 calls ``torch.load`` without ``weights_only``, which torch 2.6 and later take as "yes",
and then refuses what MMEngine itself saves besides the weights: its history of logged numbers. Those are plain numbers
in NumPy arrays. While the guard's training loads, exactly these classes are allowed; code in a checkpoint is refused as
before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

#: Methods by whose names a history is summed up; it carries a table of them.
STATISTICS = ("min", "max", "current", "mean")


def _statistic(owner: object, name: object) -> Any:
    """Stands in for ``getattr`` in a pickle, by which a history names its own methods; it permits nothing else."""
    if owner is HistoryBuffer and name in STATISTICS:
        return getattr(HistoryBuffer, str(name))
    raise InvalidInputError(
        _(
            "the checkpoint asks for the attribute {name} of {owner}: that is not MMEngine's",
            name=repr(name),
            owner=repr(owner),
        )
    )


def own_classes() -> list[Any]:
    """The classes that MMEngine saves in every checkpoint, as ``torch.serialization.safe_globals`` takes them."""
    rebuild: Callable[..., Any] = np.array(0.0).__reduce__()[0]  # type: ignore[assignment]
    scalar: Callable[..., Any] = np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(kind)) for kind in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")}
    # numpy 1 and 2 have the functions in modules of different names, and checkpoints of both are about.
    older = [(function, f"numpy.core.multiarray.{function.__name__}") for function in (rebuild, scalar)]
    arrays = [np.ndarray, np.dtype, *sorted(dtypes, key=str), rebuild, scalar, *older]
    return [HistoryBuffer, (_statistic, "builtins.getattr"), *arrays]


def loads_weights_only() -> bool:
    """True if ``torch.load`` of this release loads weights only by default."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Inside the block, ``torch.load`` takes MMEngine's own checkpoints with ``weights_only``."""
    if not loads_weights_only():
        yield
        return
    with torch.serialization.safe_globals(own_classes()):
        yield
