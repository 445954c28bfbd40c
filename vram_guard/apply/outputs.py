"""Outputs of micro-batches, whatever their structure, put together as those of the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch

from vram_guard.apply.loss_weight import weighted_sum
from vram_guard.apply.microbatch import MicroBatch, is_array
from vram_guard.language import _
from vram_guard.state.containers import children, mapped, rebuilt


def merged(
    outputs: Sequence[Any],
    parts: Sequence[MicroBatch],
    weights: Sequence[Any] | None = None,
    *,
    rows: bool = True,
    name: str = "",
) -> Any:
    """Outputs of micro-batches as they would have been returned for the whole batch.

    Mappings, tuples and data classes are merged part by part; a key that some micro-batches lack is merged over the
    others. Tensors and arrays with a row per sample are joined, and so are lists with an item per sample.
    Floating-point numbers become the mean over samples, and those whose name says that they are losses add up by
    their weights. Anything else that is the same in all micro-batches (text, an epoch's number) stays what it is.

    The rest cannot be known. Lists of the same length are merged item by item, whole numbers that differ, or that are
    the numbers of samples, are taken for counts and added up, and of other things the last micro-batch's is taken; the
    latter two with a warning.

    Args:
        outputs: of the micro-batches, without graphs.
        parts: the micro-batches.
        weights: what their losses were multiplied with; None: as means over samples.
        rows: whether tensors may have a row per sample; where not, tensors of all shapes are numbers.
        name: of the value in a mapping.

    Example:
        >>> halves = [MicroBatch(None, 3, 4), MicroBatch(None, 1, 4)]
        >>> merged([{"ids": ["a", "b", "c"], "error": 1.0}, {"ids": ["d"], "error": 5.0}], halves)
        {'ids': ['a', 'b', 'c', 'd'], 'error': 2.0}
    """
    return _Merge(parts, weights, rows).whole(outputs, name)


@dataclass(frozen=True)
class _Merge:
    """One call of :func:`merged`."""

    parts: Sequence[MicroBatch]
    weights: Sequence[Any] | None
    rows: bool

    def whole(self, outputs: Sequence[Any], name: str) -> Any:
        """The whole batch's output."""
        if len(outputs) == 1 or all(output is None for output in outputs):
            return outputs[0]
        if all(isinstance(output, list) for output in outputs):
            return self._of_lists(outputs, name)
        pieces = [children(output) for output in outputs]
        if all(isinstance(output, Mapping) for output in outputs) or _same_keys(pieces):
            return self._of_pieces(outputs, pieces, name)
        if all(isinstance(output, torch.Tensor) for output in outputs):
            if self.rows and _have_rows(outputs, self.parts):
                return torch.cat(list(outputs))
            if all(output.is_floating_point() and not (self.rows and output.ndim) for output in outputs):
                return weighted_sum(outputs, self._shares(name))
        elif all(isinstance(output, Real) and not isinstance(output, Integral) for output in outputs):
            return sum(output * float(share) for output, share in zip(outputs, self._shares(name), strict=True))
        elif all(is_array(output) and output.dtype.kind in "biuf" for output in outputs):
            joined = self.whole([torch.tensor(output) for output in outputs], name)
            return joined.numpy() if isinstance(joined, torch.Tensor) else joined
        return self._unknown(outputs, name)

    def _of_pieces(self, outputs: Sequence[Any], pieces: Sequence[Any], name: str) -> Any:
        """Containers of one kind, key by key."""
        whole = {}
        for key in dict.fromkeys(key for piece in pieces for key in piece):
            having = [at for at, piece in enumerate(pieces) if key in piece]
            weights = None if self.weights is None else [self.weights[at] for at in having]
            those = replace(self, parts=[self.parts[at] for at in having], weights=weights)
            whole[key] = those.whole([pieces[at][key] for at in having], key if isinstance(key, str) else name)
        return whole if type(outputs[-1]) is dict else rebuilt(outputs[-1], whole)

    def _of_lists(self, outputs: Sequence[list[Any]], name: str) -> Any:
        """Lists of samples, or of further outputs."""
        alike = len({len(output) for output in outputs}) == 1
        columns = list(zip(*outputs, strict=True)) if alike else []
        of_tensors = bool(columns) and all(_have_rows(column, self.parts) for column in columns)
        if not of_tensors and all(len(out) == part.samples for out, part in zip(outputs, self.parts, strict=True)):
            return [item for output in outputs for item in output]
        return [self.whole(column, name) for column in columns] if columns else self._unknown(outputs, name)

    def _unknown(self, outputs: Sequence[Any], name: str) -> Any:
        """Outputs that are neither rows nor fractions nor containers of them."""
        numbers = [out.item() if isinstance(out, torch.Tensor) and not out.ndim else out for out in outputs]
        counts = all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers)
        if _equal(outputs) and not (counts and numbers == [part.samples for part in self.parts]):
            return outputs[-1]
        said = _(
            "{name} of what the step returns ({kind}) cannot be put together from micro-batches for certain: {taken}",
            name=name or _("a part"),
            kind=type(outputs[-1]).__name__,
            taken=_("their sum is taken") if counts else _("the last one's is taken"),
        )
        warnings.warn(f"vram_guard: {said}", stacklevel=2)
        return sum(outputs) if counts else outputs[-1]

    def _shares(self, name: str) -> list[Any]:
        """The weights of numbers of this name: of losses those of the losses, of others shares of the samples."""
        if self.weights is not None and "loss" in name:
            return list(self.weights)
        samples = sum(part.samples for part in self.parts)
        return [part.samples / samples for part in self.parts]


def _have_rows(outputs: Sequence[Any], parts: Sequence[MicroBatch]) -> bool:
    return all(
        isinstance(output, torch.Tensor) and output.ndim and len(output) == part.samples
        for output, part in zip(outputs, parts, strict=True)
    )


def _same_keys(pieces: Sequence[dict[Any, Any] | None]) -> bool:
    first = pieces[0]
    return first is not None and all(piece is not None and piece.keys() == first.keys() for piece in pieces)


def _equal(outputs: Sequence[Any]) -> bool:
    """True if all are the same; things that cannot be compared are not."""
    try:
        return all(
            other is outputs[-1]
            or (torch.equal(other, outputs[-1]) if isinstance(other, torch.Tensor) else bool(other == outputs[-1]))
            for other in outputs[:-1]
        )
    except Exception:  # noqa: BLE001 - objects of the user's
        return False


def detached(out: Any) -> Any:
    """The same output without its graph, which would keep its activations alive."""
    return mapped(out, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
