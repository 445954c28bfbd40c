"""Temporaries of single CUDA kernels, besides their results: sorts, embeddings, softmax, matrix products.

Every handler of an operator, here and in this folder's other modules, gets ``(recorder, func, args, kwargs)`` and
returns the operator's results; new storages among them are recorded by the caller. Temporaries are recorded in the
handler, after the results, as the CUDA kernels allocate them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from vram_guard.scratch import EMBEDDING_SORT_ABOVE, EmbeddingGradient, RadixSort, Rule
from vram_guard.simulate.device.capability import Capability, Since
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators.meta_results import result_of
from vram_guard.torch_release import torch_release

#: ``CUDABlas.cpp`` / ``CublasHandlePool.cpp``, ``getChosenWorkspaceSize``: ``:4096:2:16:8`` KiB before Hopper,
#: 32 MiB from compute capability 9.0 on. Taken from the caching allocator once per handle and stream.
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) * 1024
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20
_HOPPER = Since((9, 0))

#: ``CublasHandlePool.cpp``, ``getCUDABlasLtWorkspace``: in these releases cublasLt keeps a workspace of its own for
#: each handle and stream. Before them every call took one and gave it back (``CUDABlas.cpp``); later it is cuBLAS's.
CUBLASLT_WORKSPACE = 2**20
_OWN_WORKSPACE = (2, 9), (2, 11)

#: ``Sort.h``, ``should_use_small_sort``: up to this many elements a row is sorted in place.
SMALL_SORT = 4096


class Matmuls:
    """cuBLAS takes a workspace at its first call in each thread, the forward's and autograd's, on each stream.

    After the result: it is asked for when the product is launched (Blas.cpp; CUDABlas.cpp, ``getCUDABlasLtWorkspace``).
    cublasLt, which adds a bias to a product, has cuBLAS's handle, and in some releases a workspace of its own.
    """

    OPERATORS: ClassVar[frozenset[str]] = frozenset(
        {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot"}
    )

    def __init__(self, recorder: Recorder, capability: Capability) -> None:
        self._recorder = recorder
        self._capability = capability
        self._threads: set[tuple[bool, int]] = set()
        self._with_own: set[tuple[bool, int]] = set()

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the workspaces that this thread has not yet on this stream."""
        thread = self._recorder.in_backward, self._recorder.streams.current
        if thread not in self._threads:
            self._threads.add(thread)
            size = CUBLAS_WORKSPACE_HOPPER if self._capability.says(_HOPPER) else CUBLAS_WORKSPACE
            self._recorder.permanent(size, str(func), "workspace")
        first, last = _OWN_WORKSPACE
        if thread not in self._with_own and first <= torch_release() <= last and _by_cublas_lt(func, args, kwargs):
            self._with_own.add(thread)
            self._recorder.permanent(CUBLASLT_WORKSPACE, str(func), "workspace")


def _by_cublas_lt(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Blas.cpp, ``isInputCompliesAddmmCudaLt``: a bias of one dimension, and no factor of one row or column."""
    if func._schema.name != "aten::addmm" or kwargs.get("beta", 1) != 1:
        return False
    bias, left, right = args[:3]
    if bias.dim() != 1 or not bias.is_contiguous() or bias.shape[0] != right.shape[1]:
        return False
    return left.is_floating_point() and all(size > 1 for size in (*left.shape, *right.shape))


#: Operators whose kernels first copy operands that are not contiguous -> the positions of these operands.
CONTIGUOUS: dict[str, tuple[int, ...]] = {
    # SoftMax.cu, ``host_softmax`` and ``host_softmax_backward``.
    **dict.fromkeys(("aten::_softmax", "aten::_log_softmax"), (0,)),
    "aten::_log_softmax_backward_data": (0, 1),
    # NLLLoss2d.cu, ``nll_loss2d_forward_out_cuda_template``: scores and labels; Loss.cu: the same, for rows.
    **dict.fromkeys(("aten::nll_loss_forward", "aten::nll_loss2d_forward"), (0, 1)),
    # UpSampleBilinear2d.cu, ``upsample_bilinear2d_backward_out_cuda_template``; Im2Col.cu, Col2Im.cu.
    **dict.fromkeys(("aten::upsample_bilinear2d_backward", "aten::im2col", "aten::col2im"), (0,)),
    # Pooling, padding and upsampling: the gradient that arrives. Measured for one that a sum had expanded.
    **dict.fromkeys(
        (
            *("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward"),
            *("aten::avg_pool2d_backward", "aten::_adaptive_avg_pool2d_backward"),
            *("aten::adaptive_max_pool2d_backward", "aten::reflection_pad2d_backward"),
            *("aten::upsample_nearest2d_backward", "aten::_upsample_nearest_exact2d_backward"),
            *("aten::upsample_bicubic2d_backward", "aten::_upsample_bilinear2d_aa_backward"),
        ),
        (0,),
    ),
}


def contiguous_first(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results; for the call copies of operands that are not contiguous."""
    name = func._schema.name
    out = result_of(func, args, kwargs)
    for result in out if isinstance(out, (tuple, list)) else (out,):
        recorder.track(result, str(func))
    copied = [args[at] for at in CONTIGUOUS[name] if is_symbolic(args[at]) and not _laid_out(args[at])]
    recorder.release([recorder.hold(tensor.numel() * tensor.element_size(), str(func)) for tensor in copied])
    return out


def _laid_out(tensor: torch.Tensor) -> bool:
    """True if one of torch's memory formats describes it: kernels for images read both."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    other = formats.get(tensor.dim())
    return tensor.is_contiguous() or (other is not None and tensor.is_contiguous(memory_format=other))


def softmax_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """The gradient, and for the time of the call ``grad * output`` (SoftMax.cu, ``softmax_backward_cuda_out``)."""
    grad, output, _dim, input_dtype = args
    made = torch.empty_like(grad, dtype=input_dtype)
    recorder.track(made, str(func))
    recorder.temporary(output.numel() * max(grad.element_size(), output.element_size()), str(func))
    return made


def sort(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values and int64 indices; rows of up to 4,096 are sorted in place, longer ones by CUB.

    Sort.h, ``should_use_small_sort``; Sort.cu, ``segmented_sort_pairs``: initial indices in int64, and CUB's alternate
    buffers for keys and values (its documentation: "O(N+P)" temporary storage for sorting between plain pointers).
    """
    made = result_of(func, args, kwargs)
    tensor = args[0]
    name = str(func)
    for result in made:
        recorder.track(result, name)
    dim = next((value for value in (*args[1:], *kwargs.values()) if type(value) is int), -1)
    if tensor.dim() and tensor.shape[dim] > SMALL_SORT:
        count = tensor.numel()
        recorder.together([count * 8, count * (8 + tensor.element_size())], name)
    return made


def scatter(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In a backward formula the scatter goes into its own fresh zeros, in place.

    ``value_selecting_reduction_backward``, ``gather_backward`` and ``index_select_backward_symint``
    (FunctionsManual.cpp) write in place, except under a dispatch mode, where torch takes every tensor for a subclass
    and makes a second one instead; undone here.
    """
    if in_backward_formula(recorder):
        return args[0]
    return result_of(func, args, kwargs)


def embedding_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dense gradient; above 3,072 indices they are sorted, and the rows of each are summed in pieces.

    Embedding.cu, ``embedding_dense_backward_cuda``; EmbeddingBackwardKernel.cu, ``embedding_backward_cuda_kernel``.
    """
    grad, indices, rows = args[:3]
    stride = grad.shape[-1]
    out = torch.empty((rows, stride), dtype=grad.dtype, device="meta")
    name = str(func)
    copies = [
        recorder.hold(tensor.numel() * tensor.element_size(), name)
        for tensor in (indices, grad)
        if not tensor.is_contiguous()
    ]
    held = _sorted_rows(recorder, name, indices, out, EMBEDDING_SORT_ABOVE)
    recorder.release([*copies, *held])
    return out


def embedding_bag_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of a bag of embeddings; a sparse one is made of other operators, which follow."""
    grad, indices, _offsets, _bags, _sizes, _maxima, rows, by_frequency, mode, sparse = args[:10]
    if sparse or not indices.numel():
        return result_of(func, args, kwargs)
    return _bag_gradient(recorder, str(func), grad, indices, rows, mode, by_frequency=by_frequency)


def embedding_bag_dense_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dense gradient of a bag of embeddings, which is all that torch before 2.6 shows of it."""
    grad, indices, _bags, _sizes, _maxima, rows, by_frequency, mode = args[:8]
    if not indices.numel():
        return result_of(func, args, kwargs)
    return _bag_gradient(recorder, str(func), grad, indices, rows, mode, by_frequency=by_frequency)


def _bag_gradient(
    recorder: Recorder,
    name: str,
    grad: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    mode: int,
    *,
    by_frequency: bool,
) -> torch.Tensor:
    """The dense gradient; sums and means sort any number of indices and sum their rows as an embedding's does.

    EmbeddingBag.cu, ``embedding_bag_backward_cuda_sum_avg``; ``embedding_bag_backward_cuda_max`` only adds. The storage
    of the scans for ``scale_grad_by_freq`` is not counted.
    """
    out = torch.empty((rows, grad.shape[-1]), dtype=grad.dtype, device="meta")
    held = [] if grad.is_contiguous() else [recorder.hold(grad.numel() * grad.element_size(), name)]
    if mode == _MAXIMA:
        recorder.track(out, name)
    else:
        held += _sorted_rows(recorder, name, indices, out, 0, counted=by_frequency, bags=True)
    recorder.release(held)
    return out


#: EmbeddingBag.h, ``EmbeddingBagMode::MAX``.
_MAXIMA = 2


def _sorted_rows(
    recorder: Recorder,
    name: str,
    indices: torch.Tensor,
    out: torch.Tensor,
    above: int,
    *,
    counted: bool = False,
    bags: bool = False,
) -> list[int | None]:
    """Sorted indices, their order, and sums of pieces; ``out`` comes in between. What is held for the call."""
    count, width = indices.numel(), indices.element_size()
    rows, stride = out.shape

    def hold(rule: Rule, *numbers: int) -> int | None:
        return recorder.hold((rule, numbers or (count,)), name)

    number = EmbeddingGradient("indices", rows, width, above)
    held = [hold(number), hold(number)]
    # Their range, and CUB's storage; all bits are sorted.
    recorder.release([hold(number), hold(RadixSort(width, whole=True, above=above), count, 0)])
    if counted:
        held.append(hold(number))
    recorder.track(out, name)
    summed = 8 if out.dtype == torch.float64 else 4
    in_place = torch_release() >= (2, 11) and not bags and not torch.are_deterministic_algorithms_enabled()
    parts: list[tuple[Literal["indices", "segments", "pieces", "sums", "places", "table"], int]] = [
        ("indices", width),
        ("segments", width),
        ("segments", width),
        ("pieces", width),
    ]
    if in_place:
        parts.append(("places", width))
        parts += [("table", summed * stride)] if out.element_size() < summed else []
    parts.append(("sums", summed * stride))
    for position, (part, size) in enumerate(parts):
        held.append(hold(EmbeddingGradient(part, rows, size, above, stride if in_place else 0)))
        if position == 0:  # the keys that ``unique_by_key`` (cub.cuh) finds, which are not asked for
            recorder.release([hold(number)])
    return held


def embedding(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rows; indices that are not contiguous are copied first (Embedding.cpp, ``indices.reshape(-1)``)."""
    indices = args[1]
    name = str(func)
    copied = indices.dim() > 1 and is_symbolic(indices) and not _flat(indices)
    held = [recorder.hold(indices.numel() * indices.element_size(), name)] if copied else []
    out = result_of(func, args, kwargs)
    recorder.track(out, name)
    recorder.release(held)
    return out


def _flat(tensor: torch.Tensor) -> bool:
    """True if ``reshape(-1)`` is a view."""
    return all(
        size == 1 or inner == 1 or stride == after * inner
        for size, stride, inner, after in zip(
            tensor.shape[:-1], tensor.stride()[:-1], tensor.shape[1:], tensor.stride()[1:], strict=True
        )
    )


def dropout(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mask, and then the result (Dropout.cu, ``dropout_cuda``)."""
    out, mask = result_of(func, args, kwargs)
    recorder.track(mask, str(func))
    return out, mask


#: Running sums and products.
RUNNING = frozenset({"aten::cumsum", "aten::cumprod"})


def running(recorder: Recorder, func: Any, operand: torch.Tensor, out: torch.Tensor) -> None:
    """For the call the operand in the result's dtype (ReduceOps.cpp, ``impl_func_cum_ops``)."""
    if operand.dtype != out.dtype:
        recorder.temporary(out.numel() * out.element_size(), str(func))


def nothing_new(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Fused optimizers and the gradient scaler's kernels write in place and allocate nothing."""
    return None


def update_scale(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``_amp_update_scale_`` returns the scale it was given."""
    return args[0]


def logsumexp(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result; for the call the maxima and ``(input - maxima).exp()`` in full (``ReduceOps.cpp``)."""
    out = result_of(func, args, kwargs)
    name = str(func)
    recorder.track(out, name)
    size = args[0].element_size() if args[0].is_floating_point() else 4
    recorder.together([out.numel() * size, args[0].numel() * size], name)
    return out


def roll(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result; rolled along several dimensions, one after the other, those before the last live for the call.

    TensorTransformations.cu, ``roll_cuda``, and TensorTransformations.h, ``roll_common``; what is not contiguous is
    copied for the first.
    """
    source, shifts = args[:2]
    name = str(func)
    size = source.numel() * source.element_size()
    out = torch.empty(source.shape, dtype=source.dtype, device="meta")
    copied = [recorder.hold(size, name)] if not source.is_contiguous() else []
    held = []
    for _shift in shifts[1:]:
        held.append(recorder.hold(size, name))
        recorder.release(copied)
        copied = []
    recorder.track(out, name)
    recorder.release([*held, *copied])
    return out


def log_sigmoid(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """The result alone: the buffer is the CPU's (ActivationLogSigmoidKernel.cu, ``log_sigmoid_forward_cuda``)."""
    return torch.empty_like(args[0], device="meta"), torch.empty(0, dtype=args[0].dtype, device="meta")


#: What :func:`in_place_of_formula` is asked for.
ARITHMETIC = frozenset({"aten::sub", "aten::mul", "aten::div"})


def in_place_of_formula(recorder: Recorder, args: tuple[Any, ...]) -> bool:
    """True where a backward formula writes the result into its first operand, a temporary of its own.

    ``binary_cross_entropy_with_logits_backward`` (FunctionsManual.cpp) does, except under a dispatch mode, as in
    :func:`scatter`; the weight of positive labels, which it multiplies first, is kept.
    """
    if not in_backward_formula(recorder):
        return False
    node: Any = torch._C._current_autograd_node()
    if node.name() != "BinaryCrossEntropyWithLogitsBackward0":
        return False
    kept, first, second = node._saved_pos_weight, args[0], args[1]
    if isinstance(second, torch.Tensor) and first.shape != torch.broadcast_shapes(first.shape, second.shape):
        return False
    return kept is None or first.untyped_storage()._cdata != kept.untyped_storage()._cdata


def in_backward_formula(recorder: Recorder) -> bool:
    """True if a C++ backward formula is running (not a user's, not a recomputation)."""
    if not recorder.in_backward or torch.is_grad_enabled():
        return False
    node: Any = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)
