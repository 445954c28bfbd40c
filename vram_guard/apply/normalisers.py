"""Number that a loss is divided by, counted in its batch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import nn

from vram_guard.language import _
from vram_guard.state.containers import attributes


@dataclass(frozen=True)
class Normaliser:
    """Count that a loss divides by: a loss weight whose micro-batches add up to their batch exactly.

    A lower bound on the count (``clamp(min=1)``) is no part of it: it acts on a batch or slice that counts nothing,
    and such a slice has no weight.

    Attributes:
        path: to the part of the batch, by keys, indexes, fields and attributes; None is each item of a list.
        counts: "others": its values other than ``ignored``; "sum": their sum; "positive": those above zero.
        ignored: the value that does not count; NaN where those are left out.
        shifted: whether the first value along the last dimension is left out, as by a causal language model.
        weights: where "others" weighs each label by its class, the name of the model's buffer of the weights, which is
            read at each batch, from the model that :meth:`bound` is given.

    Example:
        >>> Normaliser(("labels",), ignored=0)({"labels": torch.tensor([[3, 0], [1, 2]])})
        tensor(3)
    """

    path: tuple[Any, ...]
    counts: Literal["others", "sum", "positive"] = "others"
    ignored: float = -100
    shifted: bool = False
    weights: str | None = None

    def __call__(self, batch: Any) -> torch.Tensor:
        """The count in a batch or a part of it, as a tensor where the batch is.

        Raises:
            RuntimeError: it weighs by a buffer, and is bound to no model.
        """
        if self.weights is not None:
            raise RuntimeError("class weights of a buffer are read from a model, see bound")
        return self.counted(self.values(batch)).sum()

    def bound(self, model: nn.Module) -> Normaliser:
        """The same, which reads weights of classes from this model's buffer, where it weighs by one."""
        if self.weights is None:
            return self
        return _Weighted(**{one.name: getattr(self, one.name) for one in fields(Normaliser)}, model=model)

    def values(self, batch: Any) -> torch.Tensor:
        """The part of the batch that is counted in."""
        if None not in self.path:
            return self._values_at(batch, self.path)
        at = self.path.index(None)
        samples = (attributes(_at(batch, self.path[:at])) or {}).values()
        return torch.cat([self._values_at(one, self.path[at + 1 :]).flatten() for one in samples])

    def _values_at(self, part: Any, path: tuple[Any, ...]) -> torch.Tensor:
        values = torch.as_tensor(_at(part, path)).detach()
        return values[..., 1:] if self.shifted else values

    def counted(self, values: torch.Tensor) -> torch.Tensor:
        """How much each value counts."""
        if self.counts == "sum":
            return values
        if self.counts == "positive":
            return values > 0
        return ~values.isnan() if math.isnan(self.ignored) else values != self.ignored

    def words(self) -> str:
        """The count in the reader's language."""
        where = _named(self.path) + ("[..., 1:]" if self.shifted else "")
        ignored = f"{self.ignored:.12g}"
        if self.counts == "sum":
            return _("the sum of {where}", where=where)
        if self.counts == "positive":
            return _("the number of values above zero in {where}", where=where)
        if self.weights is not None:
            return _(
                "the class weights (buffer {name}) of the labels other than {ignored} in {where}",
                name=self.weights,
                ignored=ignored,
                where=where,
            )
        return _("the number of values other than {ignored} in {where}", ignored=ignored, where=where)


@dataclass(frozen=True)
class _Weighted(Normaliser):
    """A count that weighs each label by what a buffer holds when the batch is counted; it stays in this process."""

    model: nn.Module = field(kw_only=True, compare=False, repr=False)

    def __call__(self, batch: Any) -> torch.Tensor:
        values = self.values(batch)
        counted = values != self.ignored
        buffer: Any = functools.reduce(getattr, str(self.weights).split("."), self.model)
        weights = buffer.detach().flatten().to(values.device, torch.float64)
        return torch.where(counted, weights[torch.where(counted, values, 0).long()], 0.0).sum()


@dataclass(frozen=True)
class EveryLabel:
    """Number of samples: the weight of a loss that adds means over samples and over labels.

    These are the same as long as every label counts. A batch in which one does not is not to be cut.

    Attributes:
        labels: of which the means are taken.

    Example:
        >>> weight = EveryLabel((Normaliser(("y",)),))
        >>> weight({"y": torch.tensor([3, 1])}), weight.why_whole({"y": torch.tensor([3, -100])})
        (2, "a label in batch['y'] is -100, and the loss has means over samples as well")
    """

    labels: tuple[Normaliser, ...]

    def __call__(self, batch: Any) -> int:
        """The samples of a batch or a part of it."""
        return len(self.labels[0].values(batch))

    def why_whole(self, batch: Any) -> str:
        """The reason why this batch must not be cut; "" for none."""
        for one in self.labels:
            if bool((one.values(batch) == one.ignored).any()):
                where = _named(one.path)
                return _(
                    "a label in {where} is {ignored}, and the loss has means over samples as well",
                    where=where,
                    ignored=f"{one.ignored:.12g}",
                )
        return ""


def _at(part: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        part = (attributes(part) or {})[key]
    return part


def _named(path: tuple[Any, ...]) -> str:
    return "batch" + "".join("[...]" if key is None else f"[{key!r}]" for key in path)
