"""Whether the samples of a batch stay apart on their way through a loss's graph.

A graph tells the sizes of what each operation made. Compared at two sizes of batches, they show along which dimension
the samples lie; an operation that joins them (a mean over the batch, a matrix of all pairs, a softmax from sample to
sample) makes something without that dimension, with two of them, or works along it. Statistics of normalisation layers
are left out: what they do to micro-batches is known and said elsewhere.

Nothing is said about what has no graph: what happens to a batch before the first parameter, and factors that are
computed of its labels. Before torch 2.5, nodes do not tell sizes: only what depends on the batch is seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from vram_guard.language import _

#: A node as plain values: its name, the sizes of what it made, number and output of the nodes behind it (-1: none),
#: the dimensions that it works along (of an index: what picks in each dimension), and sizes of what it saved.
Step = Sequence[Any]

_INTEGERS, _MASK = "integers", "mask"

#: Operations along dimensions that their node names; none of them may be that of the samples.
_ALONG = frozenset(
    re.findall(
        r"\w+",
        "Softmax SafeSoftmax LogSoftmax Logcumsumexp Cumsum Cumprod Cummax Cummin Sort Topk Kthvalue Gather Flip Roll "
        "IndexSelect Select Slice Split SplitWithSizes Unbind Glu Renorm ScatterAdd Scatter Unfold",
    )
)
#: Operations that take the samples from their first dimension, and nothing else from there.
_FIRST = re.compile(
    r"Conv|Pool|Upsample|GridSampler|Pad|GroupNorm|BatchNorm|PixelShuffle|PixelUnshuffle|ChannelShuffle"
)
_PRODUCTS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Addmv")
#: Views and copies; reductions, which show in the sizes of what they make; functions of each element, sample or row.
_OTHERS = frozenset(
    re.findall(
        r"\w+",
        "View UnsafeView ReshapeAlias Transpose T Permute Squeeze Unsqueeze Expand Cat Stack Repeat Clone Alias ToCopy "
        "Identity Contiguous AsStrided RepeatInterleave Detach Copy CopySlices "
        "Sum Mean Nansum Nanmean Norm LinalgVectorNorm Var Std VarMean StdMean Logsumexp Max Min Amax Amin Prod Median "
        "Trace Dot "
        "LogSigmoidForward LogSigmoid PreluKernel Hardswish Dropout NativeDropout FusedDropout Embedding RmsNorm "
        "NativeLayerNorm FusedRmsNorm Where MaskedFill MaskedSelect MaskedScatter Index IndexPut CtcLoss CudnnCtcLoss "
        "MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits NllLoss NllLoss2D NllLossNd "
        "SoftMarginLoss MultiMarginLoss MultilabelMarginLoss Zeros Ones",
    )
)
_ATTENTION = re.compile(r"ScaledDotProduct|EfficientAttention|FlashAttention")
_RECURRENT = re.compile(r"RnnLayer|CudnnRnn|MiopenRnn")


def kind_of(node: Any) -> str:
    """The operation that a node belongs to: Div for DivBackward0."""
    name: str = node.name()
    return name.rpartition("Backward")[0]


class StepRecorder:
    """Writes down the graph behind the terms of one loss, each node once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: dict[Any, int] = {}

    def behind(self, root: Any) -> tuple[Step, ...] | None:
        """The nodes behind one that are not written down yet, itself first; None where there are too many."""
        waiting, found = [root], []
        self._numbers.setdefault(root, len(self._numbers))
        while waiting:
            node = waiting.pop()
            if len(self._numbers) > self._most:
                return None
            edges = []
            for other, output in node.next_functions:
                if other is not None and other not in self._numbers:
                    self._numbers[other] = len(self._numbers)
                    waiting.append(other)
                edges.append((-1 if other is None else self._numbers[other], output))
            found.append(
                (self._numbers[node], node.name(), _made(node), tuple(edges), tuple(_along(node)), tuple(_saved(node)))
            )
        return tuple(found)


def _made(node: Any) -> tuple[tuple[int, ...], ...]:
    """Sizes of what a node made; none before torch 2.5.

    What it saved is not looked at: activation checkpointing would compute it again for it.
    """
    if node.name().endswith("AccumulateGrad"):
        return (tuple(map(int, node.variable.shape)),)
    return tuple(tuple(map(int, one.shape)) for one in getattr(node, "_input_metadata", ()))


def _saved(node: Any) -> Iterator[tuple[object, ...]]:
    """Sizes of what a node saved, where it does not tell those of what it made (torch before 2.5)."""
    if hasattr(node, "_input_metadata"):
        return
    for name in dir(node):
        saved = getattr(node, name) if name.startswith("_saved_") else None
        if isinstance(saved, torch.Tensor):
            yield (name, *saved.shape)
        elif isinstance(saved, (list, tuple)) and name.endswith("_sizes"):
            yield (name, *saved)


def _along(node: Any) -> Iterator[Any]:
    kind = kind_of(node)
    if kind in ("Index", "IndexPut"):
        for index in node._saved_indices:  # noqa: SLF001 - autograd's own
            if index is None:
                yield None
            elif index.dtype in (torch.bool, torch.uint8):
                yield from [_MASK] * index.dim()
            else:
                yield _INTEGERS
    elif kind in _ALONG:
        dims = getattr(node, "_saved_dim", None)
        dims = getattr(node, "_saved_dims", ()) if dims is None else dims
        # Negative dimensions are shown as unsigned numbers.
        yield from (dim - 2**64 if dim >= 2**63 else dim for dim in (dims if isinstance(dims, tuple) else (dims,)))
    elif _RECURRENT.search(kind):
        yield 0 if getattr(node, "_saved_batch_first", False) else 1
    elif kind == "NativeLayerNorm":
        yield len(node._saved_normalized_shape)  # noqa: SLF001 - the same


class Comparison:
    """The graphs behind the terms of a loss, at two sizes of its batch.

    Args:
        one: nodes of every term, of a batch of ``samples``.
        samples: see ``one``.
        other: the same for another size.
        other_samples: see ``other``.
        reduced: whether each begins with the mean or sum that ends its term; False: with an output for each sample.
    """

    def __init__(
        self,
        one: Sequence[Sequence[Step]],
        samples: int,
        other: Sequence[Sequence[Step]],
        other_samples: int,
        *,
        reduced: bool = True,
    ) -> None:
        self._ratio = (samples, other_samples)
        self._steps = {step[0]: step for steps in one for step in steps}
        self._twins = {step[0]: step for steps in other for step in steps}
        self._roots = {steps[0][0] for steps in one if steps and reduced}
        self._depends: dict[int, bool] = {}
        self._picked: dict[int, bool] = {}
        self.why = ""
        """Why samples are joined; "" where they are not."""
        self._compare()

    def depends(self, steps: Sequence[Step]) -> bool:
        """Check whether a term depends on the batch."""
        return self._depends.get(steps[0][0], True)

    def picked(self, steps: Sequence[Step]) -> bool:
        """Check whether a term is taken over what a mask has picked."""
        return self._picked.get(steps[0][0], False)

    def _compare(self) -> None:
        if self._steps.keys() != self._twins.keys():
            self.why = _("it has different parts at different batch sizes")
            return
        # A node's number is smaller than those of some of the nodes behind it, not of all: inputs come first.
        for number in self._inputs_first():
            self.why = self._look(number)
            if self.why:
                return

    def _inputs_first(self) -> Iterator[int]:
        done: set[int] = set()
        for root in self._steps:
            waiting = [(root, False)]
            while waiting:
                number, ready = waiting.pop()
                if ready:
                    yield number
                elif number not in done:
                    done.add(number)
                    waiting.append((number, True))
                    waiting += [(at, False) for at, _output in self._steps[number][3] if at >= 0]

    def _look(self, number: int) -> str:
        step, twin = self._steps[number], self._twins[number]
        _number, name, made, edges, along, saved = step
        if name != twin[1] or [tuple(edge) for edge in edges] != [tuple(edge) for edge in twin[3]]:
            return _("it has different parts at different batch sizes")
        kind = name.rpartition("Backward")[0]
        behind = [at for at, _output in edges if at >= 0]
        outputs = [_differing(one, two) for one, two in zip(made, twin[2], strict=False)]
        from_batch = any(self._depends[at] for at in behind) or any(outputs) or saved != twin[5]
        # What has no graph may be the batch's, and be as large for all sizes of it.
        unknown = kind in _PRODUCTS and any(at < 0 for at, _output in edges[-2:])
        self._depends[number] = from_batch or unknown
        self._picked[number] = (
            any(self._picked[at] for at in behind) or kind == "MaskedSelect" or (kind == "Index" and _MASK in along)
        )
        if any(at in self._roots and self._depends[at] for at in behind):
            return _("a {reduction} in it is used again", reduction=self._steps[next(iter(behind))][1])
        if number in self._roots or not from_batch or not made:
            return ""
        return self._joined(number, kind, outputs, list(along))

    def _joined(self, number: int, kind: str, outputs: list[set[int]], along: list[Any]) -> str:
        """Why a node that depends on the batch joins samples; "" where it does not."""
        joins = _("{operation} in it joins samples of the batch", operation=self._steps[number][1])
        made, other = self._steps[number][2], self._twins[number][2]
        if not _known(kind):
            return _("it passes through {operation}, of which nothing is known", operation=self._steps[number][1])
        if not any(outputs) or any(len(dims) > 1 for dims in outputs):
            return joins
        if not self._picked[number]:
            for dims, one, two in zip(outputs, made, other, strict=False):
                if any(one[dim] * self._ratio[1] != two[dim] * self._ratio[0] for dim in dims):
                    return joins
        inputs = self._inputs(number)
        wrong = (
            (_FIRST.search(kind) and any(dims - {0} for dims in (*outputs, *_differences(inputs[:1]))))
            or (_RECURRENT.search(kind) and outputs[0] != set(along))
            or (_ATTENTION.search(kind) and any(len(one) - 2 in _differing(one, two) for one, two in inputs[:3] if one))
            or (kind in _PRODUCTS and _inner_differs(inputs[-2:]))
            or (kind in _ALONG and _works_along(kind, inputs, made, along))
            or (kind == "AsStrided" and any(math.prod(one or ()) != math.prod(made[0]) for one, _two in inputs))
            or (kind == "NativeLayerNorm" and any(dim >= len(made[0]) - along[0] for dim in outputs[0]))
            or (kind in ("Index", "IndexPut") and _picks_samples(inputs[0], made, along))
        )
        return joins if wrong else ""

    def _inputs(self, number: int) -> list[tuple[Any, Any]]:
        """Sizes of every input in both graphs; two times None for one without a graph."""
        found = []
        for at, output in self._steps[number][3]:
            sizes = (self._steps[at][2], self._twins[at][2]) if at >= 0 else ((), ())
            known = output < min(map(len, sizes))
            found.append((tuple(sizes[0][output]), tuple(sizes[1][output])) if known else (None, None))
        return found


@cache
def _known(kind: str) -> bool:
    """Check that an operation is of each element, or one that :class:`Comparison` understands."""
    if not kind or kind in _OTHERS or kind in _ALONG or kind in _PRODUCTS:  # "" accumulates gradients
        return True
    if any(pattern.search(kind) for pattern in (_FIRST, _ATTENTION, _RECURRENT)):
        return True
    operator = getattr(torch.ops.aten, re.sub(r"(?<=[a-z0-9])(?=[A-Z])(?<!\d)", "_", kind).lower(), None)
    return operator is not None and any(
        torch.Tag.pointwise in getattr(operator, overload).tags for overload in operator.overloads()
    )


def _differing(one: Sequence[int], two: Sequence[int]) -> set[int]:
    """Dimensions of two sizes that differ; all, where they have not as many."""
    if len(one) != len(two):
        return set(range(max(len(one), len(two), 2)))
    return {at for at, (size, other) in enumerate(zip(one, two, strict=True)) if size != other}


def _differences(inputs: list[tuple[Any, Any]]) -> list[set[int]]:
    return [_differing(one, two) for one, two in inputs if one is not None]


def _inner_differs(operands: list[tuple[Any, Any]]) -> bool:
    """Check whether the dimension over which a product of matrices sums is that of the samples."""
    left, right = operands
    if left[0] is not None:
        return bool(left[0][-1] != left[1][-1])
    if right[0] is not None:
        at = -2 if len(right[0]) > 1 else -1
        return bool(right[0][at] != right[1][at])
    return False


def _works_along(kind: str, inputs: list[tuple[Any, Any]], made: Any, along: list[Any]) -> bool:
    for one, two in inputs[:1]:
        if one is None:
            continue
        dims = {dim % max(1, len(one)) for dim in along}
        samples = _differing(one, two)
        whole = kind == "Slice" and tuple(one) == tuple(made[0])
        if (not dims or dims & samples) and samples and not whole:
            return True
    return False


def _picks_samples(source: tuple[Any, Any], made: Any, along: list[Any]) -> bool:
    """Check whether an index takes samples from elsewhere than from their own places.

    A mask leaves each in its place; so does one number of every sample, of as many as there are (``x[arange(n), y]``).
    """
    if source[0] is None:
        return False
    samples = _differing(*source)
    integers = {at for at, what in enumerate(along) if what == _INTEGERS}
    if not samples & integers:
        return False
    return not (integers == {0, 1} and len(along) == 2 and made[0] and made[0][0] == source[0][0])
