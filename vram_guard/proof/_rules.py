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
    "native_dropout native_dropout_backward _fused_dropout fill fill_ zero_ bernoulli bernoulli_ "
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
#: The same elements in other places along dimensions that move as a whole.
MOVES = names("permute transpose transpose_ t t_ movedim swapaxes swapdims adjoint mT numpy_T")
#: Operators along dimensions, which give every element a value of its whole line: argument that holds them.
ALONG = {
    **dict.fromkeys(
        names(
            "_softmax _log_softmax softmax log_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort topk "
            "kthvalue glu _softmax_backward_data _log_softmax_backward_data glu_backward _safe_softmax"
        ),
        "dim",
    ),
    **dict.fromkeys(names("flip roll _fft_r2c _fft_c2r _fft_c2c fft_rfft fft_irfft"), "dims"),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), "dim"),
    "renorm": "dim",
}
#: Reductions that torch marks as such, and others; their argument "dim", all dimensions without it.
REDUCTIONS = names(
    "sum mean nansum nanmean amax amin max min prod any all var std var_mean std_mean logsumexp norm "
    "linalg_vector_norm argmax "
    "argmin median nanmedian mode count_nonzero aminmax"
)
#: Losses with a reduction of their own, over what is computed of each element.
LOSSES = names(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "soft_margin_loss kl_div"
)
#: Losses with a reduction of their own over rows, whose classes are the second dimension.
ROW_LOSSES = names("multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward")
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
_SIZES = RESHAPES | UNIFORM | DRAWS | names("expand expand_copy repeat")
#: Functions of which the results are not below zero.
_NATURAL = names(
    "eq ne lt le gt ge isnan isinf isfinite logical_not logical_and logical_or logical_xor bitwise_not argmax argmin "
    "argsort signbit zeros zeros_like new_zeros ones ones_like new_ones"
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

    def of(self, name: str) -> Label:
        """The label of an argument."""
        return self.label(self.args[name])

    @property
    def first(self) -> torch.Tensor:
        """The first tensor of its arguments."""
        return next(one for one in self.args.values() if isinstance(one, torch.Tensor))

    def joins(self) -> Label:
        """The label of what it has joined."""
        dims = self.outs[0].dim() if self.outs else 0
        return joined(_("{operator} joins samples of the batch", operator=f"aten.{self.name}"), dims)

    def unknown(self) -> Label:
        """The label of what nothing is known of."""
        dims = self.outs[0].dim() if self.outs else 0
        why = _("nothing is known of {operator}, whether it leaves samples apart", operator=f"aten.{self.name}")
        return joined(why, dims)


def label_of(call: Call, *, pointwise: bool, reduces: bool) -> Label | list[Label]:
    """The label of what an operator makes, or one for each of its results.

    Args:
        call: the operator.
        pointwise: whether torch marks it as a function of each element.
        reduces: whether torch marks it as a reduction.
    """
    if not call.labels or call.name in UNIFORM or call.name in DRAWS:
        return _made_of_sizes(call)
    wrong = next((label for label in call.labels if label.why), None)
    if wrong is not None:
        return joined(wrong.why, call.outs[0].dim() if call.outs else 0)
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
    dims = call.outs[0].dim() if call.outs else 0
    if how == "drawn":
        return joined(_("{operator} gives all samples of the batch the same random number", operator=operator), dims)
    if how == "place":
        return joined(
            _("{operator} combines each sample with a value by its place in the batch", operator=operator), dims
        )
    if not dims and {label.key for label in call.labels} and call.name in ("add", "sub", "add_", "sub_"):
        return _of_sums(call)
    return call.joins()


def _made_of_sizes(call: Call) -> Label:
    shape = call.outs[0].shape
    if call.name in DRAWS:
        return constant(call.key, shape, uniform=False, drawn=True, natural=call.name in ("rand", "randint"))
    if call.name in UNIFORM:
        filled = call.args.get("fill_value", 0)
        return constant(call.key, shape, uniform=True, natural=not isinstance(filled, torch.Tensor) and filled >= 0)
    return constant(call.key, shape, uniform=False, natural=call.name in ("arange", "randperm"))


def _rule(call: Call, *, pointwise: bool, reduces: bool) -> Label | list[Label]:
    name = call.name.rstrip("_") if not call.name.endswith("__") else call.name
    if name in IDENTITY:
        source = call.label(call.first)
        return source.with_(part=_cast(source.part, call), key=call.key if _rounds(call) else source.key)
    if name in RESHAPES:
        source = call.label(call.first)
        return source.with_(ids=reshaped(source, call.first.shape, call.outs[0].shape), key=source.key)
    if name in _OTHERS:
        return _OTHERS[name](call)
    if name in MOVES:
        return _moved(call)
    if name in ALONG:
        return _along(call, _dims(call, ALONG[name]))
    if name in LOSSES or name in ROW_LOSSES:
        return _loss(call, rows=name in ROW_LOSSES)
    if name in FIRST:
        return _first(call)
    if name in BATCH_NORMS:
        return _batch_norm(call)
    if name in ATTENTION:
        return _attention(call)
    if pointwise or name in POINTWISE:
        return _pointwise(call)
    if reduces or name in REDUCTIONS:
        return _reduced(call)
    return call.unknown()


def _made(call: Call, ids: torch.Tensor, **more: Any) -> Label:
    const = all(label.const for label in call.labels)
    drawn = any(label.drawn for label in call.labels)
    if not const and bool((ids == NONE).all()):
        const = True
    return Label(ids if not const else nothing(ids.shape), call.key, const=const, drawn=const and drawn, **more)


def _pointwise(call: Call) -> Label:
    one = [label for label in call.labels if not label.const]
    if call.name in ("add", "add_", "sub", "sub_") and not call.outs[0].dim() and len(one) == 1 and one[0].apart:
        return _of_sums(call)  # a sum of samples one by one begins
    ids = met(call.labels)
    ids = ids.view((1,) * (call.outs[0].dim() - ids.dim()) + tuple(ids.shape)) if call.outs else ids
    natural = call.name in _NATURAL or call.outs[0].dtype == torch.bool
    return _made(call, ids, natural=natural, part=_tested(call))


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


def _moved(call: Call) -> Label:
    label, first = call.label(call.first), call.first
    ids, name = label.ids, call.name.rstrip("_")
    if name == "permute":
        ids = ids.permute(call.args["dims"])
    elif name == "t":
        ids = ids.t()
    elif name in ("transpose", "swapaxes", "swapdims"):
        ids = ids.transpose(call.args["dim0"], call.args["dim1"])
    elif first.dim() == 2:
        ids = ids.t()
    else:
        return call.unknown()
    return label.with_(ids=ids, key=call.key)


def _along(call: Call, dims: tuple[int, ...]) -> Label:
    ids = met(call.labels)
    label = _made(call, ids)
    if along(label, dims):
        return call.joins()
    if label.const and not label.drawn:
        return label.with_(natural=call.name == "argsort")
    if label.drawn and any(ids.shape[dim] > 1 for dim in dims):
        return call.joins() if len(call.outs[0].shape) else label
    return label


def _expanded(call: Call) -> Label:
    label, out = call.label(call.first), call.outs[0]
    ids = label.ids.reshape((1,) * (out.dim() - label.ids.dim()) + tuple(label.ids.shape))
    same = out.numel() == call.first.numel()
    return label.with_(ids=ids, key=call.key, part=label.part if same else None)


def _selected(call: Call) -> Label:
    label, dim = call.label(call.first), call.args["dim"] % call.first.dim()
    varies = label.ids.shape[dim] > 1
    ids = label.ids.select(dim, call.args["index"] if varies else 0)
    key = key_of("one of", label.key) if varies and not label.const else call.key
    return label.with_(ids=compressed(ids) if not label.const else ids, key=key, part=None)


def _sliced(call: Call) -> Label:
    label, dim = call.label(call.first), call.args["dim"] % call.first.dim()
    size, made = call.first.shape[dim], call.outs[0].shape[dim]
    if size == made:
        return label
    start, end, step = call.args.get("start") or 0, call.args.get("end"), call.args.get("step", 1)
    start = start + size if start < 0 else start
    part = label.part
    if part is not None:
        last = dim == call.first.dim() - 1 and call.first.dim() > 1 and not part.test and not part.shifted
        part = part._replace(shifted=True) if last and start == 1 and made == size - 1 and step == 1 else None
    if label.ids.shape[dim] == 1:
        return label.with_(key=call.key, part=part)
    ids = label.ids.narrow(dim, 0, label.ids.shape[dim])[tuple([slice(None)] * dim + [slice(start, end, step)])]
    if label.const:
        return label.with_(ids=nothing(ids.shape), key=call.key)
    key = key_of("slice", label.key, dim, start / size, made / size, step)
    return label.with_(ids=compressed(ids), key=key, part=None)


def _pieces(call: Call) -> list[Label]:
    """Of split, chunk and unbind."""
    label, dim = call.label(call.first), call.args.get("dim", 0) % call.first.dim()
    found, at, size = [], 0, call.first.shape[dim]
    unbind = call.name == "unbind"
    for number, out in enumerate(call.outs):
        made = 1 if unbind else out.shape[dim]
        varies = label.ids.shape[dim] > 1
        ids = label.ids.narrow(dim, at, made) if varies else label.ids
        ids = ids.select(dim, 0) if unbind else ids
        key = key_of("piece", label.key, dim, number)
        if varies and not label.const:
            key = key_of("one of", label.key) if unbind else key_of("slice", label.key, dim, at / size, made / size, 1)
        found.append(label.with_(ids=ids if label.const else compressed(ids), key=key, part=None))
        at += made
    return found


def _concatenated(call: Call) -> Label:
    given = [one for one in call.args["tensors"] if one.numel() or one.dim() > 1]
    labels, out = [call.label(one) for one in given], call.outs[0]
    stacks = call.name == "stack"
    dim = call.args.get("dim", 0) % out.dim()
    if all(label.const for label in labels):
        shape = [size if at == dim or any(not stacks and label.ids.shape[at] > 1 for label in labels) else 1
                 for at, size in enumerate(out.shape)]  # fmt: skip
        if stacks:
            shape = list(out.shape)
        return constant(call.key, shape, uniform=False, drawn=any(label.drawn for label in labels))
    if any(label.drawn for label in labels):
        return call.unknown()
    ids = [label.ids.unsqueeze(dim) if stacks else label.ids for label in labels]
    shapes = [tuple(one.unsqueeze(dim).shape if stacks else one.shape) for one in given]
    others = [max(of.shape[at] for of in ids) for at in range(out.dim())]
    rows = [of for label, of in zip(labels, ids, strict=True) if not label.const]
    varies = [at for at in range(out.dim()) if at != dim and any(of.shape[at] > 1 for of in rows)]
    if any(label.const and of.shape[at] > 1 for label, of in zip(labels, ids, strict=True) for at in varies):
        raise MismatchError("place")
    full = torch.cat(
        [
            of.expand([shape[at] if at == dim else others[at] for at in range(out.dim())])
            for of, shape in zip(ids, shapes, strict=True)
        ],
        dim,
    )
    single = {sample for label in labels for sample in label.samples}
    key, part = call.key, None
    if all(len(label.samples) == 1 for label in labels) and len(single) == len(labels):
        # One tensor for each sample: they are alike only if all were computed in the same way.
        if len({label.key for label in labels}) > 1:
            return joined(_("the step treats samples of the batch in different ways"), out.dim())
        key = key_of("of each", call.name, dim, labels[0].key)
        if dim == 0 and len(labels) == call.samples and {label.part for label in labels} == {labels[0].part}:
            part = labels[0].part
    return Label(compressed(full), key, part=part)


def _repeated(call: Call) -> Label:
    label, out = call.label(call.first), call.outs[0]
    ids = label.ids.reshape((1,) * (out.dim() - label.ids.dim()) + tuple(label.ids.shape))
    shape = (1,) * (out.dim() - call.first.dim()) + tuple(call.first.shape)
    times = [1 if ids.shape[dim] == 1 else out.shape[dim] // shape[dim] for dim in range(out.dim())]
    sizes = [size * time for size, time in zip(ids.shape, times, strict=True)]
    return label.with_(ids=nothing(sizes) if label.const else ids.repeat(times), key=call.key, part=None)


def _padded(call: Call) -> Label:
    label, pad = call.label(call.first), list(call.args["pad"])
    dims = [call.first.dim() - 1 - at // 2 for at, size in enumerate(pad) if size]
    if along(label, dims):
        return call.joins()
    part = label.part
    value = call.args.get("value") or 0
    kept = part is not None and not part.test and not part.shifted and pad[:2] == [0, 1] and len(pad) == 2
    ids = label.ids
    if label.const:
        ids = nothing(
            [size if label.ids.shape[at] > 1 or at in dims else 1 for at, size in enumerate(call.outs[0].shape)]
        )
    return label.with_(ids=ids, key=call.key, part=part._replace(filled=float(value)) if kept and part else None)


def _diagonal(call: Call) -> Label:
    label = call.label(call.first)
    dims = [call.args[name] % call.first.dim() for name in ("dim1", "dim2")]
    ids = label.ids
    if along(label, dims):
        return call.joins()
    kept = [dim for dim in range(ids.dim()) if dim not in dims]
    varies = any(ids.shape[dim] > 1 for dim in dims)
    new = ids.permute([*kept, *dims]).reshape([ids.shape[dim] for dim in kept] + [-1])[..., :1]
    if label.const:
        new = nothing([*(ids.shape[dim] for dim in kept), call.outs[0].shape[-1] if varies else 1])
    return label.with_(ids=new, key=call.key, part=None)


def _triangle(call: Call) -> Label:
    label = call.label(call.first)
    if along(label, (call.first.dim() - 2, call.first.dim() - 1)):
        return call.joins()
    if label.const:
        return constant(call.key, call.first.shape, uniform=False, drawn=label.drawn)
    return label.with_(key=call.key, part=None)


# --- reductions and losses --------------------------------------------------------------------------------------------


def _reduced(call: Call) -> Label:
    label, dims = call.label(call.first), _dims(call, "dim")
    keep = bool(call.args.get("keepdim", False))
    ids = without(label.ids, dims, keep=keep)
    if label.const:
        return label.with_(ids=nothing(ids.shape), key=call.key, part=None, natural=call.name in _NATURAL)
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


def _loss(call: Call, *, rows: bool) -> Label | list[Label]:
    labels = [label for label in call.labels if not label.const or label.ids.numel() > 0]
    if rows:
        label = call.of("self")
        if along(label, (1,)):
            return call.joins()
        ids = met([label.with_(ids=label.ids.select(1, 0)), _rows(call.of("target"), 1)])
        shape = [call.first.shape[0]]
    else:
        ids, shape = met(labels), list(call.first.shape)
    made = Label(
        ids, key_of(call.name, *(label.key for label in call.labels), call.args.get("beta"), call.args.get("delta"))
    )
    reduction = call.args.get("reduction", 1)
    if not bool((ids != NONE).any()):
        return constant(call.key, call.outs[0].shape, uniform=False, drawn=any(label.drawn for label in labels))
    if reduction == 0:
        return made
    return _sum(call, made, shape, 1 / max(1, math.prod(shape)) if reduction == _MEAN else 1.0, made.key)


def _rows(label: Label, dims: int) -> Label:
    ids = label.ids
    while ids.dim() > dims:
        if ids.shape[-1] > 1 and not label.const:
            raise MismatchError("")
        ids = ids.select(-1, 0)
    return label.with_(ids=ids)


def _likelihood(call: Call) -> list[Label]:
    """Cross-entropy's own loss over labels: of the classes in the second dimension, or in the only one."""
    scores, target, reduction = call.of("self"), call.of("target"), call.args["reduction"]
    given, weight = call.args.get("weight"), None
    classes = 1 if call.first.dim() > 1 else 0
    weighing = None if given is None else call.label(given)
    if along(scores, (classes,)) or (weighing is not None and not weighing.const) or (weighing and weighing.drawn):
        return [call.joins(), call.joins()]
    ids = met([scores.with_(ids=scores.ids.select(classes, 0)), target])
    label = Label(
        ids, key_of("likelihood", scores.key, target.key, call.args["ignore_index"], weighing and weighing.key)
    )
    shape = list(call.args["target"].shape)
    second = joined(_("{operator} joins samples of the batch", operator=f"aten.{call.name}"), call.outs[1].dim())
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
    name, out = call.name.rstrip("_"), call.outs[0]
    labels = [_as_sum(label, call) for label in call.labels]
    sums = [label for label in labels if label.terms is not None]
    others = [label for label in labels if label.terms is None]
    into = _("{operator} is no mean and no sum, and is given one over the batch", operator=f"aten.{call.name}")
    terms = added(*(label.terms or () for label in sums))
    beside = any(label.beside for label in sums)
    counter = sums[0].counter if len(sums) == 1 and not beside else None

    def made(
        terms: tuple[Term, ...], counter: tuple[Normaliser, float, bool] | None = None, *, beside: bool = beside
    ) -> Label:
        sizes = [one.numel() for one in _tensors(call.args) if call.label(one).terms is not None]
        grown = out.numel() / max((1, *sizes))
        if grown > 1:
            terms = tuple(term._replace(key=key_of(term.key, "grown", grown)) for term in terms)
        return Label(nothing((1,) * out.dim()), key_of(call.key), terms=terms, beside=beside, counter=counter)

    if any(not label.const for label in others):
        return joined(
            _("{operator} gives samples a mean or a sum over the batch", operator=f"aten.{call.name}"), out.dim()
        )
    if any(label.drawn for label in others):
        return joined(
            _("{operator} gives all samples of the batch the same random number", operator=f"aten.{call.name}"),
            out.dim(),
        )
    if (
        name in IDENTITY
        or name in RESHAPES
        or name in MOVES
        or name in ("expand", "select", "slice", "unbind", "squeeze")
    ):
        return made(terms, counter)
    if name in ("cat", "stack"):
        return made(terms, beside=beside or bool(others))
    if name == "neg":
        return made(_scaled(terms, -1.0))
    if name in ("add", "sub", "rsub"):
        return _sum_of_two(call, sums, others, made)
    if name == "sum":
        return made(terms, counter)
    if name == "mean":
        n = max(1, math.prod(call.first.shape) // max(1, out.numel()))
        return made(_scaled(terms, 1 / n), counter and (counter[0], counter[1] / n, counter[2]))
    if name in ("clamp", "clamp_min", "maximum") and counter is not None:
        least = call.args.get("min", call.args.get("other"))
        return (
            made(terms, counter)
            if _is_no_bound(least, counter) and call.args.get("max") is None
            else joined(into, out.dim())
        )
    if name in ("mul", "div", "divide", "multiply", "true_divide") and call.args.get("rounding_mode") is None:
        return _scaled_by(call, name, made, into)
    return joined(into, out.dim())


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
    known = [call.value(one) for one in operands if isinstance(one, torch.Tensor) and call.label(one).const]
    constants = any(one is None or bool((one != 0).any()) for one in known)
    beside = any(label.beside for label in sums) or constants or bool(number)
    return made(added(*found), None, beside=beside)


def _scaled_by(call: Call, name: str, made: Callable[..., Label], into: str) -> Label:
    one, other = call.args["self"], call.args["other"]
    inverse = name in ("div", "divide", "true_divide")
    if isinstance(other, torch.Tensor) and isinstance(one, torch.Tensor):
        left, right = call.label(one), call.label(other)
        if left.terms is not None and right.terms is not None:
            if not inverse or right.counter is None or left.beside or any(term.counted for term in left.terms):
                return joined(into, call.outs[0].dim())
            count, scale, _whole = right.counter
            return made(tuple(term._replace(counted=count) for term in _scaled(left.terms, 1 / scale)))
        if left.terms is None:
            if inverse:
                return joined(into, call.outs[0].dim())
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
        return joined(into, call.outs[0].dim())
    scale = 1 / factor if inverse else float(factor)
    counter = label.counter and (label.counter[0], label.counter[1] * scale, label.counter[2])
    return made(_scaled(label.terms, scale), counter)


# --- matrices, layers -------------------------------------------------------------------------------------------------


#: Names of the factors of a product, and of what is added to it.
_FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2", "self"),
    "addmm_": ("mat1", "mat2", "self"),
    "baddbmm": ("batch1", "batch2", "self"),
    "baddbmm_": ("batch1", "batch2", "self"),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec", "self"),
    "addmv_": ("mat", "vec", "self"),
    "matmul": ("self", "other"),
}


def _product(call: Call) -> Label:
    """Products of matrices; the last dimension of the first and the last but one of the second are summed over."""
    given = call.args
    names_of = _FACTORS[call.name]
    two = given[names_of[0]], given[names_of[1]]
    beside = given[names_of[2]] if len(names_of) > 2 else None
    left, right = (call.label(one) for one in two)
    lhs, rhs = left.ids, right.ids
    vector = rhs.dim() == 1
    rhs = rhs.unsqueeze(-1) if vector else rhs
    row = lhs.dim() == 1
    lhs = lhs.unsqueeze(0) if row else lhs
    if (lhs.shape[-1] > 1 and not left.const) or (rhs.shape[-2] > 1 and not right.const):
        return call.joins()
    one = left.with_(ids=lhs.narrow(-1, 0, 1))
    other = right.with_(ids=rhs.narrow(-2, 0, 1))
    labels = [one, other]
    ids = met(labels)
    if row:
        ids = ids.select(-2, 0)
    if vector:
        ids = ids.select(-1, 0)
    if beside is not None:
        ids = met([_made(call, ids), call.label(beside)])
    return _made(call, compressed(ids) if not all(label.const for label in call.labels) else ids)


def _first(call: Call) -> Label:
    labels = [(one, call.label(one)) for one in _tensors(call.args)]
    if all(label.const for _one, label in labels):
        return call.unknown()
    out = call.outs[0]
    found = []
    for one, label in labels:
        if label.const and not label.drawn and (one.dim() == 0 or label.ids.shape[0] == 1 or one is not call.first):
            continue
        if any(size > 1 for size in label.ids.shape[1:]) and not label.const:
            return call.joins()
        if one.dim() == 0 or one.shape[0] != call.first.shape[0]:
            return call.unknown()
        found.append(label.with_(ids=label.ids.flatten(1)[:, 0] if label.ids.dim() > 1 else label.ids))
    ids = met(found)
    return _made(call, ids.view([-1] + [1] * (out.dim() - 1)))


def _batch_norm(call: Call) -> Label:
    label = call.label(call.first)
    if any(not call.label(one).const for one in _tensors(call.args) if one is not call.first):
        return call.unknown()
    trains = call.args.get("training", call.name != "_batch_norm_no_update")
    if trains and along(label, [dim for dim in range(call.first.dim()) if dim != 1]) and not _in_normalisation():
        return call.joins()
    return label.with_(key=call.key, part=None, natural=False)


def _in_normalisation() -> bool:
    """True where a module of normalisation calls an operator: those are known, and what they do is said."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack is what is asked for
    while frame is not None:
        if issubclass(type(frame.f_locals.get("self")), NORMALISATION):
            return True
        frame = frame.f_back
    return False


def _layer_norm(call: Call) -> list[Label]:
    label = call.label(call.first)
    dims = range(call.first.dim() - len(call.args["normalized_shape"]), call.first.dim())
    if any(not call.label(one).const for one in _tensors(call.args) if one is not call.first) or along(label, dims):
        return [call.joins() for _out in call.outs]
    made = label.with_(key=call.key, part=None, natural=False)
    return [
        made,
        *(made.with_(ids=without(label.ids, dims, keep=out.dim() == call.first.dim())) for out in call.outs[1:]),
    ]


def _embedding(call: Call) -> Label:
    table, indices = call.of("weight"), call.of("indices")
    if not table.const or (call.args["scale_grad_by_freq"] and not indices.const):  # counted in its backward pass
        return call.joins()
    ids = indices.ids.unsqueeze(-1)
    return _made(call, nothing([*indices.ids.shape, call.outs[0].shape[-1]]) if indices.const else ids)


def _attention(call: Call) -> list[Label]:
    """Of query, key and value: whatever lies before the last two dimensions goes its own way."""
    found = []
    for one in _tensors(call.args):
        label = call.label(one)
        if along(label, (one.dim() - 2, one.dim() - 1)):
            return [call.joins() for _out in call.outs]
        ids = label.ids
        found.append(label.with_(ids=without(ids, (-1, -2), keep=True)))
    ids = met(found)
    made = _made(call, ids)
    return [
        made,
        *(made.with_(ids=ids.select(-1, 0)) if out.dim() == ids.dim() - 1 else call.joins() for out in call.outs[1:]),
    ]


def _recurrent(call: Call) -> list[Label]:
    if call.args.get("batch_sizes"):
        return [call.unknown() for _out in call.outs]
    at = 0 if call.args["batch_first"] else 1
    label = call.label(call.first)
    of_states = [call.label(call.args[name]) for name in ("hx", "cx") if call.args.get(name) is not None]
    if along(label, [dim for dim in range(3) if dim != at]) or any(along(one, (0, 2)) for one in of_states):
        return [call.joins() for _out in call.outs]
    rows = met(
        [
            label.with_(ids=label.ids.select(2, 0).select(1 - at, 0)),
            *(one.with_(ids=one.ids.select(2, 0).select(0, 0)) for one in of_states),
        ]
    )
    made = _made(call, rows.view([-1 if dim == at else 1 for dim in range(3)]))
    states = made.with_(ids=rows.view(1, -1, 1))
    return [made, states, states, *(call.joins() for _out in call.outs[3:])]


# --- indices ----------------------------------------------------------------------------------------------------------


def _gathered(call: Call) -> Label:
    label, index = call.of("self"), call.of("index")
    dim = call.args["dim"] % max(1, call.first.dim())
    if along(label, (dim,)):
        return call.joins()
    inner = label.with_(ids=without(label.ids, (dim,), keep=True) if label.ids.dim() else label.ids)
    ids = met([inner, index])
    return _made(call, ids, natural=label.natural)


def _scattered(call: Call) -> Label:
    dim = call.args["dim"] % max(1, call.first.dim())
    labels = [call.label(one) for one in _tensors(call.args)]
    if any(along(label, (dim,)) for label in labels):
        return call.joins()
    for label in labels:  # by its place along that dimension each is another, whatever is put there
        if label.const and label.drawn:
            return call.unknown()
    flat = [label.with_(ids=without(label.ids, (dim,), keep=True)) for label in labels]
    return _made(call, met(flat))


def _picked(call: Call) -> Label:
    """``index_select``: entries of one dimension."""
    label, index = call.of("self"), call.of("index")
    dim = call.args["dim"] % max(1, call.first.dim())
    return _at_indices(call, label, [None] * dim + [call.args["index"]], [index])


def _indexed(call: Call) -> Label:
    indices = [one if isinstance(one, torch.Tensor) else None for one in call.args["indices"]]
    return _at_indices(call, call.of("self"), indices, [call.label(one) for one in indices if one is not None])


def _at_indices(call: Call, label: Label, indices: Sequence[torch.Tensor | None], labels: Sequence[Label]) -> Label:
    by_mask = any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)
    if by_mask:
        why = _(
            "{operator} picks by a mask, which leaves samples of the batch in different numbers",
            operator=f"aten.{call.name}",
        )
        return joined(why, call.outs[0].dim())
    dims = [dim for dim, one in enumerate(indices) if one is not None]
    carrying = [dim for dim in dims if not label.const and label.ids.shape[dim] > 1]
    chosen: list[Label] = []
    if carrying:
        if len(carrying) > 1 or any(size > 1 for dim, size in enumerate(label.ids.shape) if dim != carrying[0]):
            return call.joins()
        index = indices[carrying[0]]
        assert index is not None
        place, known = call.label(index), call.value(index)
        if not place.const or place.drawn or known is None:
            return call.joins()
        line = label.ids.flatten()
        chosen = [Label(compressed(line[known.long()].clone()), 0)]
        labels = [one for one, dim in zip(labels, dims, strict=True) if dim != carrying[0]]
    ids = met([*chosen, *labels]) if chosen or labels else nothing(())
    rest = [dim for dim in range(label.ids.dim()) if dim not in dims]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    at = len([dim for dim in rest if dim < dims[0]]) if adjacent else 0
    kept = [label.ids.shape[dim] for dim in rest]
    source = (
        label.ids.reshape([*kept[:at], *([1] * ids.dim()), *kept[at:]])
        if not carrying
        else nothing((1,) * (len(kept) + ids.dim()))
    )
    source = nothing([*kept[:at], *([1] * ids.dim()), *kept[at:]]) if label.const else source
    shape = [*([1] * at), *ids.shape, *([1] * (len(kept) - at))]
    nobodys = bool((ids == NONE).all())
    index_label = Label(
        nothing(shape) if nobodys else ids.reshape(shape),
        0,
        const=nobodys,
        drawn=nobodys and any(one.drawn for one in labels),
    )
    own = label.with_(ids=source, const=label.const or bool(carrying), drawn=label.drawn)
    key = call.key
    if carrying:
        numbers = [call.label(one).key for dim, one in enumerate(indices) if one is not None and dim != carrying[0]]
        key = key_of("picked", label.key, *numbers)
    made = met([own, index_label])
    const = bool((made == NONE).all())
    return Label(
        nothing(made.shape) if const else made,
        key,
        const=const,
        drawn=const and (label.drawn or index_label.drawn),
        natural=label.natural,
    )


def _tensors(args: dict[str, Any]) -> Iterable[torch.Tensor]:
    for one in args.values():
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from (each for each in one if isinstance(each, torch.Tensor))


def _ctc(call: Call) -> list[Label]:
    scores, targets = call.of("log_probs"), call.of("targets")
    if along(scores, (0, 2)) or along(targets, (1,)) or scores.ids.dim() != 3 or targets.ids.dim() != 2:
        return [call.joins() for _out in call.outs]
    lengths = [
        call.label(call.args[name])
        for name in ("input_lengths", "target_lengths")
        if isinstance(call.args[name], torch.Tensor)
    ]
    ids = met([scores.with_(ids=scores.ids[0, :, 0]), targets.with_(ids=targets.ids[:, 0]), *lengths])
    return [Label(ids, call.key), *(call.joins() for _out in call.outs[1:])]


def _filled_diagonal(call: Call) -> Label:
    return call.joins() if not call.label(call.first).const else constant(call.key, call.first.shape, uniform=False)


def _copied(call: Call) -> Label:
    """``copy_``: the target is as its source, but for its shape and precision."""
    source = call.of("src")
    ids = source.ids.reshape((1,) * (call.outs[0].dim() - source.ids.dim()) + tuple(source.ids.shape))
    return source.with_(ids=ids, key=call.key if source.const else source.key)


def _cell(call: Call) -> list[Label]:
    label = _made(call, met([one for one in call.labels if not (one.const and one.ids.dim() == 1)]))
    return [label for _out in call.outs]


def _cosine(call: Call) -> Label:
    first = met([call.of("x1"), call.of("x2")])
    dim = call.args["dim"] % first.dim()
    return _made(call, without(first, (dim,))) if first.shape[dim] == 1 else call.joins()


_OTHERS: dict[str, Callable[[Call], Label | list[Label]]] = {
    "expand": _expanded,
    "expand_copy": _expanded,
    "select": _selected,
    "slice": _sliced,
    **dict.fromkeys(
        names("split split_with_sizes chunk unbind unsafe_split unsafe_chunk unsafe_split_with_sizes"), _pieces
    ),
    **dict.fromkeys(names("cat stack"), _concatenated),
    "repeat": _repeated,
    "constant_pad_nd": _padded,
    "diagonal": _diagonal,
    **dict.fromkeys(names("tril triu"), _triangle),
    **dict.fromkeys(names("nll_loss_forward nll_loss2d_forward"), _likelihood),
    **dict.fromkeys(names("mm bmm addmm baddbmm mv addmv matmul"), _product),
    **dict.fromkeys(names("native_layer_norm _fused_rms_norm"), _layer_norm),
    "embedding": _embedding,
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(names("gather"), _gathered),
    **dict.fromkeys(names("scatter scatter_add"), _scattered),
    "index_select": _picked,
    **dict.fromkeys(names("index _unsafe_index"), _indexed),
    **dict.fromkeys(names("_ctc_loss _cudnn_ctc_loss"), _ctc),
    "fill_diagonal": _filled_diagonal,
    "copy": _copied,
    **dict.fromkeys(names("_thnn_fused_lstm_cell _thnn_fused_gru_cell"), _cell),
}
