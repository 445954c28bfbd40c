"""How operators hand on what their operands were computed of.

One table for each way in which an operator treats dimensions; an operator that is in none of them joins the samples
that reach it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from vram_guard.apply.loss_weight import IGNORED
from vram_guard.apply.normalisers import EveryLabel, Normaliser
from vram_guard.language import _
from vram_guard.proof._labels import (
    NONE,
    Label,
    MismatchError,
    Part,
    Term,
    added,
    along,
    compressed,
    constant,
    joined,
    key_of,
    met,
    nothing,
    reshaped,
    weights_of,
    without,
)
from vram_guard.state.forwards import NORMALISATION

_MEAN, _SUM = 1, 2


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


#: Functions of each element that torch does not mark as such, or only in some of their overloads.
POINTWISE = names(
    "where masked_fill masked_fill_ log_sigmoid_forward log_sigmoid_backward _prelu_kernel _prelu_kernel_backward "
    "clamp_min clamp_max "
    "native_dropout native_dropout_backward _fused_dropout fill zero bernoulli "
    "one_hot lerp nan_to_num rrelu_with_noise isfinite isinf copysign logit logit_backward polar complex "
    "ones_like zeros_like "
    "_thnn_fused_gru_cell nextafter frexp isclose bitwise_not logical_not logical_and logical_or logical_xor rsub "
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward "
    "soft_margin_loss_backward nll_loss_backward infinitely_differentiable_gelu_backward pow masked_fill.Tensor "
    "addcmul addcdiv xlogy remainder fmod floor_divide"
)
#: Operators that leave values as they are.
IDENTITY = names(
    "clone detach detach_ alias _to_copy to contiguous lift lift_fresh lift_fresh_copy view_as_real view_as_complex "
    "_conj resolve_conj resolve_neg _neg_view positive requires_grad_ _autocast_to_reduced_precision "
    "_autocast_to_full_precision pin_memory view.dtype"
)
#: Views of the same elements in another shape.
RESHAPES = names(
    "view _unsafe_view reshape _reshape_alias flatten unflatten squeeze squeeze_ unsqueeze unsqueeze_ view_copy "
    "reshape_copy ravel"
)
#: Views of the same elements along dimensions that move as a whole.
MOVES = names("permute transpose t swapaxes swapdims expand")
#: Parts of a tensor along one dimension.
PARTS = names("select slice split split_with_sizes chunk unbind unsafe_split unsafe_chunk unsafe_split_with_sizes")
VIEWS = MOVES | PARTS | {"diagonal"}
#: Operators along a dimension, which give every element a value of its whole line.
ALONG = names(
    "_softmax _log_softmax softmax log_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort topk kthvalue "
    "glu _softmax_backward_data _log_softmax_backward_data glu_backward _safe_softmax _fft_r2c _fft_c2r _fft_c2c"
)
#: Reductions that torch marks as such, and others; their argument "dim", all dimensions without it.
REDUCTIONS = names(
    "sum mean nansum nanmean amax amin max min prod any all var std var_mean std_mean logsumexp norm "
    "linalg_vector_norm argmax "
    "argmin median nanmedian mode count_nonzero aminmax"
)
#: Those that are the same over any number of copies.
_OF_COPIES = names("mean nanmean any all amax amin max min argmax argmin median nanmedian mode aminmax")
#: Losses with a reduction of their own, over what is computed of each element.
LOSSES = names(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "soft_margin_loss kl_div multi_margin_loss"
)
#: Operators in which each entry of the first dimension goes its own way, and nothing else does.
FIRST = names(
    "convolution _convolution cudnn_convolution cudnn_convolution_transpose mkldnn_convolution conv_transpose2d "
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d avg_pool1d max_pool1d max_pool2d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_max_pool2d adaptive_max_pool3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_trilinear3d "
    "upsample_linear1d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact2d "
    "_upsample_nearest_exact1d _upsample_nearest_exact3d "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
    "grid_sampler_2d grid_sampler_3d cudnn_grid_sampler affine_grid_generator pixel_shuffle pixel_unshuffle "
    "channel_shuffle native_channel_shuffle im2col col2im native_group_norm cudnn_affine_grid_generator "
    "_conv_depthwise2d conv_depthwise3d"
)
#: Normalisation over the batch: what modules of it do to micro-batches is known and said elsewhere.
BATCH_NORMS = names(
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update batch_norm"
)
ATTENTION = names(
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math "
    "_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention"
)
RECURRENT = names("_cudnn_rnn miopen_rnn")
#: Tensors that are made of nothing but sizes, with one value everywhere.
UNIFORM = names(
    "zeros ones full empty new_zeros new_ones new_full new_empty new_empty_strided empty_strided zeros_like ones_like "
    "full_like empty_like scalar_tensor empty_permuted"
)
#: Random numbers, one for each element.
DRAWS = names(
    "rand randn randint rand_like randn_like randint_like normal normal_ uniform_ bernoulli_ random_ exponential_ "
    "log_normal_ cauchy_ geometric_ normal_functional"
)
#: Answers that are shapes, types and devices.
FACTS = names("sym_size sym_stride sym_numel sym_storage_offset is_same_size size stride dim numel")
#: Operators whose numbers are sizes of what they make.
SIZES = RESHAPES | UNIFORM | DRAWS | names("expand repeat")
#: Arguments that are the share of what is left out: nothing is drawn where it is zero.
_SHARES = ("p", "dropout_p", "dropout")
#: Functions of which the results are not below zero.
_NATURAL = names(
    "rand randint randperm bernoulli multinomial "
    "eq ne lt le gt ge isnan isinf isfinite logical_not logical_and logical_or logical_xor bitwise_not argmax argmin "
    "signbit zeros zeros_like new_zeros ones ones_like new_ones"
)


class Call(NamedTuple):
    """An operator that was called."""

    name: str
    args: dict[str, Any]
    """By the names of the schema, defaults included."""
    labels: tuple[Label, ...]
    """Of all tensors among these."""
    key: int
    outs: tuple[torch.Tensor, ...]
    samples: int
    label: Callable[[torch.Tensor], Label]
    value: Callable[[torch.Tensor], torch.Tensor | None]
    """The real value of a tensor; None where it is not known."""
    names_of: Callable[[int], list[str] | None]
    """The names of the model's buffers and parameters that tensors of this key hold the values of."""

    @property
    def plain(self) -> str:
        """The name without what says that it writes in place."""
        return self.name if self.name.endswith("__") else self.name.rstrip("_")

    def of(self, name: str) -> Label:
        """The label of an argument."""
        return self.label(self.args[name])

    @property
    def first(self) -> torch.Tensor:
        """The first tensor of its arguments."""
        return next(one for one in self.args.values() if isinstance(one, torch.Tensor))

    def refused(self, why: str) -> Label:
        """The label of what is not followed, for this reason."""
        return joined(why, self.outs[0].dim() if self.outs else 0)

    def joins(self) -> Label:
        """The label of what it has joined."""
        return self.refused(_("{operator} joins samples of the batch", operator=f"aten.{self.name}"))

    def unknown(self) -> Label:
        """The label of what nothing is known of."""
        return self.refused(
            _("nothing is known of {operator}, whether it leaves samples apart", operator=f"aten.{self.name}")
        )


def label_of(call: Call, *, pointwise: bool, reduces: bool, draws: bool) -> Label | list[Label]:
    """The label of what an operator makes, or one for each of its results.

    Args:
        call: the operator.
        pointwise: whether torch marks it as a function of each element.
        reduces: whether torch marks it as a reduction.
        draws: whether torch marks it as one whose results depend on a generator.
    """
    draws = draws and all(label.const for label in call.labels) and 0 not in (call.args.get(one) for one in _SHARES)
    if draws or call.name in DRAWS:
        return constant(call.key, call.outs[0].shape, uniform=False, drawn=True, natural=call.name in _NATURAL)
    if not call.labels or call.name in UNIFORM:
        return _made_of_sizes(call)
    wrong = next((label for label in call.labels if label.why), None)
    if wrong is not None:
        return call.refused(wrong.why)
    found: Label | list[Label]
    try:
        if any(label.terms is not None for label in call.labels):
            return _of_sums(call)
        found = _rule(call, pointwise=pointwise, reduces=reduces)
    except MismatchError as error:
        return _mismatch(call, str(error))
    except (IndexError, RuntimeError, ValueError, KeyError, StopIteration):  # a form of it that no rule thought of
        found = call.unknown()
    if all(label.const for label in call.labels) and isinstance(found, Label) and found.why:
        return constant(call.key, call.outs[0].shape, uniform=False, drawn=any(one.drawn for one in call.labels))
    return found


def _mismatch(call: Call, how: str) -> Label:
    operator = f"aten.{call.name}"
    if how == "drawn":
        return call.refused(_("{operator} gives all samples of the batch the same random number", operator=operator))
    if how == "place":
        return call.refused(
            _("{operator} combines each sample with a value by its place in the batch", operator=operator)
        )
    if not call.outs[0].dim() and call.plain in ("add", "sub"):
        return _of_sums(call)
    return call.joins()


def _made_of_sizes(call: Call) -> Label:
    shape = call.outs[0].shape
    if call.name in UNIFORM:
        filled = call.args.get("fill_value", 0)
        return constant(call.key, shape, uniform=True, natural=not isinstance(filled, torch.Tensor) and filled >= 0)
    return constant(call.key, shape, uniform=False, natural=call.name == "arange")


def _rule(call: Call, *, pointwise: bool, reduces: bool) -> Label | list[Label]:
    rule = _RULES.get(call.plain)
    if rule is not None:
        return rule(call)
    if pointwise or call.plain in POINTWISE:
        return _pointwise(call)
    if reduces or call.plain in REDUCTIONS:
        return _reduced(call)
    return call.unknown()


def _same(call: Call) -> Label:
    source = call.label(call.first)
    return source.with_(part=_cast(source.part, call), key=call.key if _rounds(call) else source.key)


def _reshaped(call: Call) -> Label:
    source, out = call.label(call.first), call.outs[0]
    part = _turned(source.part) if out.shape[-1:] != call.first.shape[-1:] else source.part
    return source.with_(ids=reshaped(source, call.first.shape, out.shape), part=part)


def _turned(part: Part | None) -> Part | None:
    return part and part._replace(is_turned=True)


def _made(call: Call, ids: torch.Tensor, **more: Any) -> Label:
    const = all(label.const for label in call.labels)
    drawn = any(label.drawn for label in call.labels)
    if not const and bool((ids == NONE).all()):
        const = True
    return Label(ids if not const else nothing(ids.shape), call.key, const=const, drawn=const and drawn, **more)


def _pointwise(call: Call) -> Label:
    one = [label for label in call.labels if not label.const]
    if call.plain in ("add", "sub") and not call.outs[0].dim() and len(one) == 1 and one[0].apart:
        return _of_sums(call)  # a sum of samples one by one begins
    ids = met(call.labels)
    ids = ids.view((1,) * (call.outs[0].dim() - ids.dim()) + tuple(ids.shape)) if call.outs else ids
    natural = call.name in _NATURAL or call.outs[0].dtype == torch.bool
    made = _made(call, ids, natural=natural, part=_tested(call))
    # The gradient of a mean is divided by the number of its elements, which no argument shows.
    return made.with_(key=_of_copies(call.key, call.outs[0].shape)) if call.args.get("reduction") == _MEAN else made


def _cast(part: Part | None, call: Call) -> Part | None:
    to = call.args.get("dtype")
    if part is None or part.test or to is not torch.bool:
        return part
    return part._replace(test="others", value=0.0) if not part.summed else None


def _rounds(call: Call) -> bool:
    """True where values that depend on no sample are rounded to fewer digits than single precision has."""
    one, other = call.first.dtype, call.outs[0].dtype if call.outs else call.first.dtype
    exact = other in (torch.float32, torch.float64) or torch.promote_types(one, other) == other
    return call.label(call.first).const and not exact


def _tested(call: Call) -> Part | None:
    """The test of a part of the batch that an operator is."""
    label = call.label(call.first)
    part = label.part
    if part is None or part.summed:
        return None
    if call.name in ("logical_not", "bitwise_not") and part.test in ("others", "equal"):
        return part._replace(test="equal" if part.test == "others" else "others")
    if part.test:
        return None
    if call.name in ("logical_not", "bitwise_not") and call.first.dtype == torch.bool:
        return part._replace(test="equal", value=0.0)
    other = call.args.get("other")
    if call.name == "isnan":
        return part._replace(test="equal", value=math.nan)
    if call.name in ("ne", "eq") and other is call.first:
        return part._replace(test="equal" if call.name == "ne" else "others", value=math.nan)
    if not isinstance(other, (int, float)) or isinstance(other, bool):
        return None
    if call.name in ("ne", "eq"):
        return part._replace(test="others" if call.name == "ne" else "equal", value=float(other))
    return part._replace(test="positive") if call.name == "gt" and other == 0 else None


# --- dimensions -------------------------------------------------------------------------------------------------------


def _dims(call: Call, name: str) -> tuple[int, ...]:
    given = call.args.get(name)
    rank = call.first.dim()
    if given is None or given == []:
        return tuple(range(rank))
    found = given if isinstance(given, (list, tuple)) else (given,)
    return tuple(int(dim) % max(1, rank) for dim in found)


def _alone(label: Label, dims: Iterable[int], *, keep: bool = True) -> Label:
    """The label of one element of many along dimensions, of which all are of the same sample.

    Raises:
        MismatchError: they are not.
    """
    if along(label, tuple(dims)):
        raise MismatchError("")
    return label.with_(ids=without(label.ids, tuple(dims), keep=keep))


def _of_copies(key: int, lengths: Iterable[int]) -> int:
    """The key of what depends on no sample: of copies, one for each sample, a sum shows how many there are."""
    return key_of(key, math.prod(lengths))


def _mixed(call: Call, dims: Iterable[int]) -> list[Label]:
    """Results of which each element is computed of all elements along some dimensions, and of no others."""
    dims = tuple(dims)
    made = _made(call, met([_alone(label, dims) for label in call.labels]))
    if not made.const:
        return [made for _out in call.outs]
    found = []
    key = _of_copies(call.key, (call.first.shape[dim] for dim in dims))
    for out in call.outs:  # what depends on no sample may be another at each place along them
        sizes = list(made.ids.shape)
        for dim in dims:
            sizes[dim] = out.shape[dim]
        found.append(made.with_(ids=nothing(sizes), key=key))
    return found


def _viewed(call: Call) -> list[Label]:
    """Views: the operator itself places the samples."""
    label, first = call.label(call.first), call.first
    if not first.numel():
        return [label.with_(ids=nothing(one.shape), key=call.key, const=True, part=None) for one in call.outs]
    if call.plain == "diagonal":
        _alone(label, (call.args["dim1"], call.args["dim2"]))
    ids = torch.empty(label.ids.shape, device="meta") if label.const else label.ids
    whole = next(key for key, one in call.args.items() if one is first)
    seen = getattr(torch.ops.aten, call.plain)(**{**call.args, whole: ids.expand(first.shape)})
    if call.plain in PARTS:
        return _pieces(call, label, seen if isinstance(seen, (list, tuple)) else [seen])
    part = label.part if call.plain == "expand" else _turned(label.part)
    part = part if seen.numel() == first.numel() else None
    return [label.with_(ids=_varying(label, seen), key=call.key, part=part)]


def _varying(label: Label, seen: torch.Tensor) -> torch.Tensor:
    """The array of a view: strides are zero where all elements are alike, and stay so."""
    sizes = zip(seen.shape, seen.stride(), strict=True)
    ids = seen[tuple(slice(None) if stride or size == 1 else slice(1) for size, stride in sizes)]
    return nothing(ids.shape) if label.const else compressed(ids)


def _pieces(call: Call, label: Label, seen: Sequence[torch.Tensor]) -> list[Label]:
    """Of parts along one dimension, which may be parts of the samples."""
    dim, at = call.args.get("dim", 0) % call.first.dim(), call.args.get("start") or 0
    size, step = call.first.shape[dim], call.args.get("step", 1)
    at = at + size if at < 0 else at
    found = []
    for number, one in enumerate(seen):
        single = one.dim() < call.first.dim()
        made = 1 if single else one.shape[dim]
        key = key_of(call.key, number) if number else call.key
        if along(label, (dim,)):
            key = (
                key_of("one of", label.key) if single else key_of("slice", label.key, dim, at / size, made / size, step)
            )
        part = _shifted(call, label.part, dim, made)
        whole = made == size and not single
        found.append(label if whole else label.with_(ids=_varying(label, one), key=key, part=part))
        at += made
    return found


def _shifted(call: Call, part: Part | None, dim: int, made: int) -> Part | None:
    """The part of the batch that a slice without the first value along the last dimension is of."""
    last = dim == call.first.dim() - 1 and call.first.dim() > 1 and made == call.first.shape[dim] - 1
    if part is None or part.test or part.shifted or part.is_turned or not last or call.args.get("start") != 1:
        return None
    return part._replace(shifted=True)


def _concatenated(call: Call) -> Label:
    given = [one for one in call.args["tensors"] if one.numel() or one.dim() > 1]
    labels, out, stacks = [call.label(one) for one in given], call.outs[0], call.name == "stack"
    dim = call.args.get("dim", 0) % out.dim()
    ids = [label.ids.unsqueeze(dim) if stacks else label.ids for label in labels]
    sizes = [max(of.shape[at] for of in ids) for at in range(out.dim())]
    if all(label.const for label in labels):
        shape = [out.shape[at] if at == dim else size for at, size in enumerate(sizes)]
        drawn = any(label.drawn for label in labels)  # samples may share a number, at places that a part has others of
        key = _of_copies(call.key, [out.shape[dim]] if drawn else [])
        return constant(key, shape, uniform=False, drawn=drawn)
    if any(label.drawn for label in labels):
        return call.unknown()
    rows = [of for label, of in zip(labels, ids, strict=True) if not label.const]
    varies = [at for at in range(out.dim()) if at != dim and any(of.shape[at] > 1 for of in rows)]
    if any(label.const and of.shape[at] > 1 for label, of in zip(labels, ids, strict=True) for at in varies):
        raise MismatchError("place")
    lengths = [1 if stacks else one.shape[dim] for one in given]
    pieces = [of.expand([*sizes[:dim], own, *sizes[dim + 1 :]]) for of, own in zip(ids, lengths, strict=True)]
    key, part = call.key, None
    ways: dict[frozenset[int], list[int]] = {}
    for label in labels:
        if not label.const:
            ways.setdefault(label.samples, []).append(label.key)
    if len(ways) > 1:  # tensors of single samples are alike if all were computed in the same way
        alone = all(len(of) == 1 for of in ways) and not any(label.const for label in labels)
        if not alone or len({tuple(keys) for keys in ways.values()}) > 1:
            return call.refused(_("the step treats samples of the batch in different ways"))
        key = key_of("of each", call.name, dim, labels[0].key)
        if dim == 0 and len(labels) == call.samples and {label.part for label in labels} == {labels[0].part}:
            part = labels[0].part
    return Label(compressed(torch.cat(pieces, dim)), key, part=part)


def _repeated(call: Call) -> Label:
    label, out = call.label(call.first), call.outs[0]
    ids = label.ids.reshape((1,) * (out.dim() - label.ids.dim()) + tuple(label.ids.shape))
    times = [1 if size == 1 else time for size, time in zip(ids.shape, call.args["repeats"], strict=True)]
    sizes = [size * time for size, time in zip(ids.shape, times, strict=True)]
    return label.with_(ids=nothing(sizes) if label.const else ids.repeat(times), key=call.key, part=None)


def _padded(call: Call) -> list[Label]:
    pad, part = list(call.args["pad"]), call.label(call.first).part
    found = _mixed(call, [call.first.dim() - 1 - at // 2 for at, size in enumerate(pad) if size])
    if part is None or part.test or part.shifted or pad != [0, 1]:
        return found
    return [label.with_(part=part._replace(filled=float(call.args.get("value") or 0))) for label in found]


# --- reductions and losses --------------------------------------------------------------------------------------------


def _reduced(call: Call) -> Label:
    label, dims = call.label(call.first), _dims(call, "dim")
    keep = bool(call.args.get("keepdim", False))
    ids = without(label.ids, dims, keep=keep)
    if label.const:
        key = call.key if call.name in _OF_COPIES else _of_copies(call.key, (call.first.shape[dim] for dim in dims))
        return label.with_(ids=nothing(ids.shape), key=key, part=None, natural=call.name in _NATURAL)
    if not along(label, dims):
        part = label.part
        if part is not None:
            part = part._replace(summed=True) if call.name == "sum" else None
        return Label(ids, call.key, part=part, natural=call.name in _NATURAL)
    if call.name not in ("sum", "mean"):
        return call.joins()
    n = math.prod(call.first.shape[dim] for dim in dims)
    factor = 1.0 if call.name == "sum" else 1 / max(1, n)
    # Of what is left, each element is a sum of its own; all are multiplied alike.
    shape = [size if dim in dims else 1 for dim, size in enumerate(call.first.shape)]
    kept = [dim for dim in range(label.ids.dim()) if dim not in dims and label.ids.shape[dim] > 1]
    if kept:
        return call.joins()
    return _sum(call, label, shape, factor, key_of("sum", label.key, [d for d in range(len(shape)) if d not in dims]))


def _sum(call: Call, label: Label, shape: Sequence[int], factor: float, key: int) -> Label:
    term = Term(key, weights_of(label, shape, call.samples, factor))
    counted = label.part.counted() if label.part is not None and label.terms is None else None
    dims = call.outs[0].dim()
    return Label(
        nothing((1,) * dims),
        key,
        terms=(term,),
        counter=None
        if counted is None or label.part is None
        else (counted, factor, label.part.whole or counted.counts != "sum"),
    )


def _loss(call: Call) -> Label:
    labels = [label for label in call.labels if not label.const or label.ids.numel() > 0]
    shape = list(call.first.shape)
    if call.name == "multi_margin_loss":  # of rows, whose classes are the second dimension
        weight = [_alone(call.of("weight"), (0,), keep=False)] if call.args.get("weight") is not None else []
        labels, shape = [_alone(call.of("self"), (1,), keep=False), call.of("target"), *weight], shape[:1]
    ids = met(labels)
    if not bool((ids != NONE).any()):
        return constant(call.key, call.outs[0].shape, uniform=False, drawn=any(label.drawn for label in labels))
    numbers = [None if isinstance(one, torch.Tensor) else one for one in call.args.values()]
    made = Label(ids, key_of(call.name, *(label.key for label in call.labels), numbers))
    reduction = call.args.get("reduction", 1)
    if reduction == 0:
        return made
    return _sum(call, made, shape, 1 / max(1, math.prod(shape)) if reduction == _MEAN else 1.0, made.key)


def _likelihood(call: Call) -> list[Label]:
    """Cross-entropy's own loss over labels: of the classes in the second dimension, or in the only one."""
    scores, target, reduction = call.of("self"), call.of("target"), call.args["reduction"]
    given, weight = call.args.get("weight"), None
    classes = 1 if call.first.dim() > 1 else 0
    weighing = None if given is None else call.label(given)
    if weighing is not None and (not weighing.const or weighing.drawn):
        return [call.joins(), call.joins()]
    ids = met([_alone(scores, (classes,), keep=False), target])
    label = Label(
        ids, key_of("likelihood", scores.key, target.key, call.args["ignore_index"], weighing and weighing.key)
    )
    shape = list(call.args["target"].shape)
    second = call.joins()
    if reduction == 0:
        return [label, second]
    if not bool((ids != NONE).any()):
        return [constant(call.key, call.outs[0].shape, uniform=False), second]
    if reduction == _SUM:
        return [_sum(call, label, shape, 1.0, label.key), second]
    ignored = call.args["ignore_index"]
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored
    if given is None and target.natural and ignored < 0:
        return [_sum(call, label, shape, 1 / max(1, math.prod(shape)), label.key), second]
    why = ""
    if weighing is not None:
        names = call.names_of(weighing.key) or []
        weight = names[0] if len(names) == 1 else None
        if weight is None:
            why = _(
                "it is a mean over labels that are weighted by class, and the weights are not one buffer of the model, "
                "whose values are known at each step; register them as a buffer (register_buffer)"
            )
    part = target.part
    counted = None
    if part is not None and not part.test and not part.summed:
        counted = part._replace(test="others", value=float(ignored)).counted()
    if why or counted is None:
        why = why or _(
            "it is a mean over labels that are no part of the batch, of which {ignored} does not count", ignored=ignored
        )
        return [joined(why, 0), second]
    one = Normaliser(counted.path, ignored=ignored, shifted=counted.shifted, weights=weight)
    every = (
        given is None and ignored == IGNORED and shape == [call.samples]
    )  # a label for each sample: all should count
    count = EveryLabel((one,)) if every else one
    made = _sum(call, label, shape, 1.0, label.key)
    assert made.terms is not None
    return [made.with_(terms=tuple(term._replace(counted=count) for term in made.terms), counter=None), second]


def _of_sums(call: Call) -> Label:
    """The label of what is computed of sums over samples: only what is linear leaves them apart."""
    name, out = call.plain, call.outs[0]
    labels = [_as_sum(label, call) for label in call.labels]
    sums = [label for label in labels if label.terms is not None]
    others = [label for label in labels if label.terms is None]
    into = _("{operator} is no mean and no sum, and is given one over the batch", operator=f"aten.{call.name}")
    terms = added(*(label.terms or () for label in sums))
    beside = _together(label.beside for label in sums)
    counter = sums[0].counter if len(sums) == 1 and not beside else None

    def made(
        terms: tuple[Term, ...], counter: tuple[Normaliser, float, bool] | None = None, *, beside: int = beside
    ) -> Label:
        sizes = [one.numel() for one in _tensors(call.args) if call.label(one).terms is not None]
        grown = out.numel() / max((1, *sizes))
        if grown > 1:
            terms = tuple(term._replace(key=key_of(term.key, "grown", grown)) for term in terms)
        return Label(nothing((1,) * out.dim()), key_of(call.key), terms=terms, beside=beside, counter=counter)

    if any(not label.const for label in others):
        return call.refused(_("{operator} gives samples a mean or a sum over the batch", operator=f"aten.{call.name}"))
    if any(label.drawn for label in others):
        return _mismatch(call, "drawn")
    if name in IDENTITY | RESHAPES | MOVES or name in ("select", "slice", "unbind", "sum"):
        return made(terms, counter)
    if name in ("cat", "stack"):
        return made(terms, beside=_together([beside, *(label.key for label in others)]))
    if name == "neg":
        return made(_scaled(terms, -1.0))
    if name in ("add", "sub", "rsub"):
        return _sum_of_two(call, sums, others, made)
    if name == "mean":
        n = max(1, math.prod(call.first.shape) // max(1, out.numel()))
        return made(_scaled(terms, 1 / n), counter and (counter[0], counter[1] / n, counter[2]))
    if name in ("clamp", "clamp_min", "maximum") and counter is not None:
        least = call.args.get("min", call.args.get("other"))
        if _is_no_bound(least, counter) and call.args.get("max") is None:
            return made(terms, counter)
    if name in ("mul", "div", "divide", "multiply", "true_divide") and call.args.get("rounding_mode") is None:
        return _scaled_by(call, name, made, into)
    return call.refused(into)


def _is_no_bound(least: Any, counter: tuple[Normaliser, float, bool]) -> bool:
    """True for a lower bound that acts only where nothing counts: of whole numbers, one."""
    return isinstance(least, (int, float)) and counter[2] and least <= counter[1]


def _as_sum(label: Label, call: Call) -> Label:
    """What depends on one sample, as a sum of which the others have no part."""
    if label.terms is not None or label.const or label.ids.numel() != 1 or call.outs[0].dim():
        return label
    term = Term(key_of("sum", label.key, []), weights_of(label, (), call.samples, 1.0))
    return Label(label.ids, label.key, terms=(term,))


def _scaled(terms: tuple[Term, ...], factor: float) -> tuple[Term, ...]:
    return tuple(term._replace(weights=tuple(one * factor for one in term.weights)) for term in terms)


def _sum_of_two(call: Call, sums: list[Label], others: list[Label], made: Callable[..., Label]) -> Label:
    alpha = float(call.args.get("alpha", 1) or 1)
    operands = [call.args.get("self"), call.args.get("other")]
    found: list[tuple[Term, ...]] = []
    for operand, sign in zip(
        operands,
        (-alpha, 1.0) if call.name == "rsub" else (1.0, -alpha if call.name.startswith("sub") else alpha),
        strict=True,
    ):
        if isinstance(operand, torch.Tensor):
            found.append(_scaled(_as_sum(call.label(operand), call).terms or (), sign))
    number = next((one for one in operands if isinstance(one, (int, float))), None)
    counter = sums[0].counter if len(sums) == 1 else None
    if counter is not None and not others and isinstance(number, (int, float)) and 0 <= number <= 1e-6 * counter[1]:
        return made(added(*found), counter if counter[2] else None)
    constants = [one for one in operands if isinstance(one, torch.Tensor) and call.label(one).const]
    known = [(call.label(one).key, call.value(one)) for one in constants]
    others_added = [key for key, value in known if value is None or bool((value != 0).any())]
    of_sums = [label.beside for label in sums]
    return made(added(*found), None, beside=_together([*of_sums, *others_added, key_of(number) if number else 0]))


def _together(keys: Iterable[int]) -> int:
    """One key for several; 0 where there is none."""
    found = [key for key in keys if key]
    return key_of(found) if found else 0


def _scaled_by(call: Call, name: str, made: Callable[..., Label], into: str) -> Label:
    one, other = call.args["self"], call.args["other"]
    inverse = name in ("div", "divide", "true_divide")
    if isinstance(other, torch.Tensor) and isinstance(one, torch.Tensor):
        left, right = call.label(one), call.label(other)
        if left.terms is not None and right.terms is not None:
            if not inverse or right.counter is None or left.beside or any(term.counted for term in left.terms):
                return call.refused(into)
            count, scale, _whole = right.counter
            return made(tuple(term._replace(counted=count) for term in _scaled(left.terms, 1 / scale)))
        if left.terms is None:
            if inverse:
                return call.refused(into)
            one, other, left, right = other, one, right, left
        assert left.terms is not None
        number = call.value(other) if other.numel() == 1 else None
        if number is not None:  # known, so that it is compared
            factor = float(number)
            return made(_scaled(left.terms, 1 / factor if inverse else factor) if factor else ())
        return made(tuple(term._replace(key=key_of(term.key, name, right.key)) for term in left.terms))
    tensor, factor = (one, other) if isinstance(one, torch.Tensor) else (other, one)
    label = call.label(tensor)
    assert label.terms is not None
    if not isinstance(factor, (int, float)) or (inverse and tensor is other):
        return call.refused(into)
    scale = 1 / factor if inverse else float(factor)
    counter = label.counter and (label.counter[0], label.counter[1] * scale, label.counter[2])
    return made(_scaled(label.terms, scale), counter)


# --- matrices, layers -------------------------------------------------------------------------------------------------


#: Names of the factors of a product, and of what is added to it.
_FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2", "self"),
    "baddbmm": ("batch1", "batch2", "self"),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec", "self"),
    "matmul": ("self", "other"),
}


def _product(call: Call) -> Label:
    """Products of matrices; the last dimension of the first and the last but one of the second are summed over."""
    left, right, *beside = (call.of(name) for name in _FACTORS[call.plain])
    is_row, is_vector = left.ids.dim() == 1, right.ids.dim() == 1
    one, other = _alone(left, (-1,)), _alone(right, (-1,) if is_vector else (-2,))
    one = one.with_(ids=one.ids.unsqueeze(0)) if is_row else one
    other = other.with_(ids=other.ids.unsqueeze(-1)) if is_vector else other
    ids = met([one, other])
    ids = ids.select(-2, 0) if is_row else ids
    ids = ids.select(-1, 0) if is_vector else ids
    made = _made(call, met([_made(call, ids), *beside]))
    summed = call.args[_FACTORS[call.plain][0]].shape[-1:]
    return made.with_(key=_of_copies(call.key, summed)) if made.const else made


def _first(call: Call) -> Label:
    if all(label.const for label in call.labels):
        return call.unknown()
    found = []
    for one in _tensors(call.args):
        label = call.label(one)
        if label.const and not label.drawn and (one is not call.first or label.ids.shape[0] == 1):
            continue
        if one.dim() == 0 or one.shape[0] != call.first.shape[0]:
            return call.unknown()
        found.append(_alone(label, range(1, one.dim()), keep=False))
    return _made(call, met(found).view([-1] + [1] * (call.outs[0].dim() - 1)))


def _batch_norm(call: Call) -> Label:
    label, *others = (call.label(one) for one in _tensors(call.args))
    if not all(one.const for one in others):
        return call.unknown()
    if call.args.get("training", call.name != "_batch_norm_no_update") and not _in_normalisation():
        _alone(label, [dim for dim in range(call.first.dim()) if dim != 1])
    return label.with_(key=call.key, part=None, natural=False)


def _in_normalisation() -> bool:
    """True where a module of normalisation calls an operator: those are known, and what they do is said."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack is what is asked for
    while frame is not None:
        if issubclass(type(frame.f_locals.get("self")), NORMALISATION):
            return True
        frame = frame.f_back
    return False


def _embedding(call: Call) -> Label:
    table, indices = call.of("weight"), call.of("indices")
    if not table.const or (call.args["scale_grad_by_freq"] and not indices.const):  # counted in its backward pass
        return call.joins()
    ids = indices.ids.unsqueeze(-1)
    return _made(call, nothing([*indices.ids.shape, call.outs[0].shape[-1]]) if indices.const else ids)


def _attention(call: Call) -> list[Label]:
    """Of query, key and value: whatever lies before the last two dimensions goes its own way."""
    made = _mixed(call, (-2, -1))[0]
    sums = made.with_(ids=made.ids.select(-1, 0))
    return [made, *(sums if out.dim() == made.ids.dim() - 1 else call.joins() for out in call.outs[1:])]


def _recurrent(call: Call) -> list[Label]:
    if call.args.get("batch_sizes") or all(label.const for label in call.labels):
        return [call.unknown() for _out in call.outs]
    at = 0 if call.args["batch_first"] else 1
    states = [call.of(name) for name in ("hx", "cx") if call.args.get(name) is not None]
    given = _alone(call.label(call.first), (1 - at, 2), keep=False)
    rows = met([given, *(_alone(one, (0, 2), keep=False) for one in states)])
    made = _made(call, rows.view([-1 if dim == at else 1 for dim in range(3)]))
    left = made.with_(ids=rows.view(1, -1, 1))
    return [made, left, left, *(call.joins() for _out in call.outs[3:])]


# --- indices ----------------------------------------------------------------------------------------------------------


def _gathered(call: Call) -> Label:
    label = call.of("self")
    return _made(call, met([_alone(label, (call.args["dim"],)), call.of("index")]), natural=label.natural)


def _scattered(call: Call) -> Label | list[Label]:
    return call.unknown() if any(one.drawn for one in call.labels) else _mixed(call, (call.args["dim"],))


def _indexed(call: Call) -> Label:
    """Entries by their numbers, along one dimension (``index_select``) or several."""
    given = call.args.get("indices") or [None] * (call.args["dim"] % max(1, call.first.dim())) + [call.args["index"]]
    indices = {dim: one for dim, one in enumerate(given) if isinstance(one, torch.Tensor)}
    if any(one.dtype in (torch.bool, torch.uint8) for one in indices.values()):
        why = _(
            "{operator} picks by a mask, which leaves samples of the batch in different numbers",
            operator=f"aten.{call.name}",
        )
        return call.refused(why)
    label, numbers = call.of("self"), {dim: call.label(one) for dim, one in indices.items()}
    carrying = [dim for dim in indices if along(label, (dim,))]
    chosen, key = list[Label](), call.key
    if carrying:
        dim = carrying[0]
        place, known = numbers.pop(dim), call.value(indices[dim])
        if label.ids.numel() != label.ids.shape[dim] or not place.const or place.drawn or known is None:
            return call.joins()
        chosen = [Label(compressed(label.ids.flatten()[known.long()].clone()), 0)]
        key = key_of("picked", label.key, *(one.key for one in numbers.values()))
    ids = met([*chosen, *numbers.values()])
    first, last = min(indices), max(indices)
    kept = [size for dim, size in enumerate(label.ids.shape) if dim not in indices]
    at = first if last - first == len(indices) - 1 else 0
    shape = [*kept[:at], *([1] * ids.dim()), *kept[at:]]
    own = label.with_(ids=nothing(shape) if label.const or carrying else label.ids.reshape(shape))
    own = own.with_(const=label.const or bool(carrying))
    by_nobody = bool((ids == NONE).all())
    drawn = by_nobody and any(one.drawn for one in numbers.values())
    shape = [*([1] * at), *ids.shape, *([1] * (len(kept) - at))]
    made = met([own, Label(ids.reshape(shape), 0, const=by_nobody, drawn=drawn)])
    return _made(call, made, natural=label.natural).with_(key=key)


def _tensors(args: dict[str, Any]) -> Iterable[torch.Tensor]:
    for one in args.values():
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from (each for each in one if isinstance(each, torch.Tensor))


def _ctc(call: Call) -> list[Label]:
    lengths = [call.of(name) for name in ("input_lengths", "target_lengths")
               if isinstance(call.args[name], torch.Tensor)]  # fmt: skip
    scores, targets = _alone(call.of("log_probs"), (0, 2), keep=False), _alone(call.of("targets"), (1,), keep=False)
    return [Label(met([scores, targets, *lengths]), call.key), *(call.joins() for _out in call.outs[1:])]


def _copied(call: Call) -> Label:
    """``copy_``: the target is as its source, but for its shape and precision."""
    source = call.of("src")
    ids = source.ids.reshape((1,) * (call.outs[0].dim() - source.ids.dim()) + tuple(source.ids.shape))
    return source.with_(ids=ids, key=call.key if source.const else source.key)


def _cell(call: Call) -> list[Label]:
    label = _made(call, met([one for one in call.labels if not (one.const and one.ids.dim() == 1)]))
    return [label for _out in call.outs]


#: Names of operators, and the rule for them.
_TABLE: tuple[tuple[Iterable[str], Callable[[Call], Label | list[Label]]], ...] = (
    (IDENTITY, _same),
    (RESHAPES, _reshaped),
    (VIEWS, _viewed),
    (ALONG, lambda call: _mixed(call, _dims(call, "dim"))),
    (names("flip roll"), lambda call: _mixed(call, _dims(call, "dims"))),
    (names("tril triu"), lambda call: _mixed(call, (-2, -1))),
    (
        names("native_layer_norm _fused_rms_norm"),
        lambda call: _mixed(call, range(-len(call.args["normalized_shape"]), 0)),
    ),
    (names("scatter scatter_add"), _scattered),
    (names("constant_pad_nd"), _padded),
    (names("cat stack"), _concatenated),
    (names("repeat"), _repeated),
    (LOSSES, _loss),
    (names("nll_loss_forward nll_loss2d_forward"), _likelihood),
    (names("_ctc_loss _cudnn_ctc_loss"), _ctc),
    (_FACTORS, _product),
    (FIRST, _first),
    (BATCH_NORMS, _batch_norm),
    (ATTENTION, _attention),
    (RECURRENT, _recurrent),
    (names("_thnn_fused_lstm_cell _thnn_fused_gru_cell"), _cell),
    (names("embedding"), _embedding),
    (names("gather"), _gathered),
    (names("index_select index _unsafe_index"), _indexed),
    (names("fill_diagonal"), Call.joins),
    (names("copy"), _copied),
)
_RULES = {name: rule for of, rule in _TABLE for name in of}
