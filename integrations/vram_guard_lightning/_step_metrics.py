"""On-step values of torchmetrics' metrics: those of the whole batch, though they are called once per micro-batch.

``metric(prediction, target)`` returns the value of what it is given, which Lightning logs for the step, and adds to
the metric's own state, which is right whatever the pieces. So beside each call a copy of the metric, empty at the
beginning of the batch, is updated with the same micro-batch, and asked for the step's value after the last one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.apply.outputs import detached
from vram_guard.patching import replace_attributes
from vram_guard.tensors import tensors_of

if TYPE_CHECKING:
    import torch
    from torchmetrics import Metric

# ruff: noqa: SLF001 - every private name used here is listed in private_api.py


@dataclass(frozen=True, eq=False)
class Origin:
    """The call of a metric that a value came from."""

    beside: Metric
    """The copy that has the whole batch."""
    leaf: int
    """Of several tensors that the call returned."""

    def same(self, other: Origin | None) -> bool:
        """True if the other value came from the same call, perhaps in another micro-batch; metrics have no ``==``."""
        return other is not None and other.beside is self.beside and other.leaf == self.leaf

    def value(self) -> torch.Tensor:
        """The tensor that the call would have returned for the whole batch."""
        return tensors_of(self.beside.compute())[self.leaf].detach().clone().squeeze()  # as self.log takes it


class StepMetrics:
    """The metrics of one module during the micro-batches of one batch.

    A value that training_step computes from a metric's (``self.log("error", 1 - self.accuracy(...))``) is not known
    here, and becomes the mean over samples.

    Args:
        module: whose attributes the metrics are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._followed: list[_Followed] = []
        self._returned: dict[int, tuple[weakref.ref[torch.Tensor], Origin]] = {}
        """What the calls of this micro-batch returned, by ``id``."""

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside the block the metrics are followed; when it ends without an error, they hold the step's values."""
        from torchmetrics import Metric

        self._followed = [_Followed(part) for part in self._module.modules() if isinstance(part, Metric)]
        with contextlib.ExitStack() as undo:
            for one in self._followed:
                forward = functools.partial(self._forward, one, one.metric.forward)
                undo.callback(replace_attributes(one.metric, {"forward": forward}))
            yield
        for one in self._followed:
            if one.copies and one.metric._forward_cache is not None:
                one.metric._forward_cache = one.copies[-1].compute()

    def next_micro_batch(self) -> None:
        """Begin a micro-batch."""
        self._returned.clear()
        for one in self._followed:
            one.calls = 0

    def origin(self, value: Any) -> Origin | None:
        """The call that returned this very tensor in this micro-batch."""
        reference, origin = self._returned.get(id(value), (None, None))
        return origin if reference is not None and reference() is value else None

    def _forward(self, one: _Followed, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        beside = one.beside()
        value = own(*args, **kwargs)
        beside.update(*detached(args), **detached(kwargs))
        for leaf, tensor in enumerate(tensors_of(value)):
            self._returned[id(tensor)] = weakref.ref(tensor), Origin(beside, leaf)
        return value


class _Followed:
    """One metric, and copies of it for the first, second, ... call in each micro-batch; a metric is no key."""

    def __init__(self, metric: Metric) -> None:
        self.metric: Any = metric
        self.copies: list[Metric] = []
        self.calls = 0

    def beside(self) -> Metric:
        """The copy of the next call."""
        if len(self.copies) == self.calls:
            self.copies.append(_empty_copy(self.metric))
        self.calls += 1
        return self.copies[self.calls - 1]


def _empty_copy(metric: Metric) -> Metric:
    """A copy in the state of the beginning, which shares the weights of a network in it, and asks no other rank."""
    from torchmetrics import Metric

    shared: dict[int, Any] = {}
    for part in metric.modules():
        held = dict(vars(part))
        uncopied = (*tensors_of(held), held.get("forward"), held.get("process_group"))
        shared |= {id(value): value for value in uncopied}
    beside = copy.deepcopy(metric, shared)
    for part in beside.modules():
        vars(part).pop("forward", None)  # the one that is followed
        if isinstance(part, Metric):
            part.compute_on_cpu = False  # as in its own forward
            if not part.dist_sync_on_step:
                part.distributed_available_fn = lambda: False
    beside.reset()
    return beside
