"""Comparison of the graphs of a training's losses from batch to batch.

That micro-batches add up to their batch is proven for the loss that a training has when it begins. A later batch, a
callback or a counter may switch to another one. Autograd keeps what each loss is made of: its graph is read before the
backward pass, and one with operators that the graphs before it did not have, or that join others, is refused.

What is compared are pairs of operators, one of which takes what the other has made, so that loops of different
lengths (sentences, time steps) are alike. Nothing is computed and nothing waits for the GPU: about two microseconds for
each operator. Compiled code is one node, which stands for the operators that were compiled
(:mod:`vram_guard.techniques.compiled_graphs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vram_guard.errors import LossChangedError
from vram_guard.language import _
from vram_guard.limits import NAMED
from vram_guard.techniques.compiled_graphs import COMPILED, Node, operators_of, watch

if TYPE_CHECKING:
    import torch
    from torch import nn

#: What an operator's node keeps of how it was called that decides over which elements it goes.
_SETTINGS = (
    "_saved_dim",
    "_saved_dims",
    "_saved_dim0",
    "_saved_dim1",
    "_saved_keepdim",
    "_saved_reduction",
    "_saved_ignore_index",
    "_saved_training",
)
#: Of each class of nodes, those that it has.
_KEPT: dict[type, tuple[str, ...]] = {}
#: Kernels of one operator, of which torch chooses one by sizes and layouts.
_KERNELS = {
    "ScaledDotProductFlashAttentionBackward0": "ScaledDotProductAttention",
    "ScaledDotProductEfficientAttentionBackward0": "ScaledDotProductAttention",
    "ScaledDotProductCudnnAttentionBackward0": "ScaledDotProductAttention",
    "ScaledDotProductFlashAttentionForCpuBackward0": "ScaledDotProductAttention",
    "CudnnBatchNormBackward0": "NativeBatchNormBackward0",
    "MiopenBatchNormBackward0": "NativeBatchNormBackward0",
}
#: What wrappers put around a model's calls, in some steps and not in others: they hand on what they are given.
_WRAPPERS = frozenset(
    name + "Backward"
    for name in (
        *("_DDPSink", "RegisterPostBackwardFunction", "RegisterPreBackwardFunction"),
        *("PreBackwardFunctionForModule", "PostBackwardFunctionModule"),
    )
)


class LossGraphs:
    """The graphs of one training's losses.

    The first batch is what later ones are compared with. Where other weights are trained from some batch on (a layer
    is unfrozen), its graph has to contain that of the batches before it, or to lie within it.

    Args:
        model: whose trained weights are looked at.

    Example:
        >>> import torch
        >>> graphs, out = LossGraphs(torch.nn.Linear(1, 1)), torch.ones(4, requires_grad=True) * 2
        >>> graphs.check(out.square().mean())
        >>> graphs.next_batch()
        >>> graphs.check(out.square().mean().sqrt())
        Traceback (most recent call last):
        vram_guard.errors.LossChangedError: the loss is made in another way than in the batches before ...
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._known: set[tuple[Node, Node]] = set()
        self._trained = ""
        self._learning = True
        watch()

    def next_batch(self) -> None:
        """The next micro-batches are those of another batch."""
        self._learning = self._learning and not self._known

    def see(self, *made: torch.Tensor) -> None:
        """Take down the graph of a loss that is not cut, where no other one is known."""
        if not self._known:
            self._take(pairs_of(made), self._weights())
            self._learning = False

    def check(self, *made: torch.Tensor) -> None:
        """Compare the graph of a micro-batch's loss, or of what a loss is made of.

        Raises:
            LossChangedError: it has operators that those of the batches before did not have.
        """
        found, weights = pairs_of(made), self._weights()
        grown = weights != self._trained and found >= self._known
        if not (self._learning or grown or found <= self._known):
            raise _changed(found - self._known)
        self._take(found, weights)

    def _take(self, found: set[tuple[Node, Node]], weights: str) -> None:
        self._known |= found
        self._trained = weights

    def _weights(self) -> str:
        return "".join("01"[weight.requires_grad] for weight in self.model.parameters())


def pairs_of(made: Iterable[torch.Tensor]) -> set[tuple[Node, Node]]:
    """Pairs of operators in the graphs of tensors, one of which takes what the other has made.

    Args:
        made: tensors; those without a graph are passed over.
    """
    watch()  # where the compiler was not there when the training began
    roots = list(_within(tensor.grad_fn for tensor in made))
    kinds = {root: _kind(root) for root in roots}
    waiting, pairs = list(kinds), {((), kind) for kind in kinds.values()}
    while waiting:
        node = waiting.pop()
        if node.name() == COMPILED:
            pairs |= operators_of(node)
        for behind in _within(behind for behind, _output in node.next_functions):
            if behind not in kinds:
                kinds[behind] = _kind(behind)
                waiting.append(behind)
            pairs.add((kinds[node], kinds[behind]))
    return pairs


def _within(nodes: Iterable[Any]) -> Iterator[Any]:
    """These nodes; in place of wrappers' own, those behind them."""
    for node in nodes:
        if node is not None and node.name() in _WRAPPERS:
            yield from _within(behind for behind, _output in node.next_functions)
        elif node is not None:
            yield node


def _kind(node: Any) -> Node:
    name = node.name()
    if name == COMPILED:  # a class for each graph, which nothing must keep
        return (name,)
    kept = _KEPT.get(type(node))
    if kept is None:
        kept = _KEPT[type(node)] = tuple(one for one in _SETTINGS if hasattr(type(node), one))
    return (_KERNELS.get(name, name), *(getattr(node, one) for one in kept))


def _changed(new: set[tuple[Node, Node]]) -> LossChangedError:
    names = sorted({f"{one[0]}({behind[0]})" if one else str(behind[0]) for one, behind in new})
    reason = _(
        "the loss is made in another way than in the batches before ({names}), and micro-batches are proven for those "
        "alone",
        names=", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else ""),
    )
    message = _(
        "{reason}. Nothing of this batch was learned. Train without micro-batches (leave 'accumulate' out of what is "
        "allowed), or say what the loss is over the samples (loss_weight)",
        reason=reason,
    )
    return LossChangedError(message, reason)
