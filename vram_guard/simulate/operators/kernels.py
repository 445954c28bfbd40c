"""What single operators allocate on CUDA beyond, or other than, their results on the meta device.

A handler gets ``(recorder, func, args, kwargs)`` and returns the operator's results; new storages among them are
recorded by the caller. Temporaries are recorded here, after the results, as the CUDA kernels allocate them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from vram_guard.errors import UnsupportedOperatorError
from vram_guard.language import Message
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.fake_cuda import is_symbolic
from vram_guard.simulate.operators import attention, composite_ops, convolutions, norms
from vram_guard.simulate.tracing.recorder import Recorder

Handler = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]

#: ``CUDABlas.cpp`` / ``CublasHandlePool.cpp``, ``getChosenWorkspaceSize``: ``:4096:2:16:8`` KiB before Hopper,
#: 32 MiB from compute capability 9.0 on. Taken from the caching allocator once per handle and stream.
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) * 1024
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20

#: ``Embedding.cu``, ``embedding_dense_backward_cuda``: up to this many indices no sort is needed.
EMBEDDING_SORT_ABOVE = 3072

#: ``Sort.h``, ``should_use_small_sort``: up to this many elements a row is sorted in place.
SMALL_SORT = 4096

#: Larger stand-ins are not computed for real: it would cost host memory and time.
LARGEST_STAND_IN = 64 * 2**20


class Matmuls:
    """cuBLAS takes a workspace at its first call in each thread: the forward thread and autograd's own."""

    OPERATORS: ClassVar[frozenset[str]] = frozenset(
        {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot"}
    )

    def __init__(self, recorder: Recorder, capability: tuple[int, int]) -> None:
        self._recorder = recorder
        self._size = CUBLAS_WORKSPACE if capability < (9, 0) else CUBLAS_WORKSPACE_HOPPER
        self._threads: set[bool] = set()

    def before(self, func: Any) -> None:
        """Note the workspace if this thread has none yet."""
        thread = self._recorder.in_backward
        if thread not in self._threads:
            self._threads.add(thread)
            self._recorder.permanent(self._size, str(func), "workspace")


# --- temporaries inside single kernels ------------------------------------------------------------------------------


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
    made = func(*args, **kwargs)
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

    ``value_selecting_reduction_backward`` and ``gather_backward`` (FunctionsManual.cpp) write in place, except under a
    dispatch mode, where torch takes every tensor for a subclass and makes a second one instead; undone here.
    """
    if in_backward_formula(recorder):
        return args[0]
    return func(*args, **kwargs)


def in_backward_formula(recorder: Recorder) -> bool:
    """Whether a C++ backward formula is running (not a user's, not a recomputation)."""
    if not recorder.in_backward or torch.is_grad_enabled():
        return False
    node: Any = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


# --- embedding, optimizer, scaler ----------------------------------------------------------------------------------


def embedding_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dense gradient; above 3,072 indices their sorted copy and their order, int64 each."""
    grad, indices, rows = args[:3]
    out = torch.empty((rows, grad.shape[-1]), dtype=grad.dtype, device="meta")
    name = str(func)
    recorder.track(out, name)
    if not grad.is_contiguous():  # Embedding.cu begins with grad.contiguous()
        recorder.temporary(grad.numel() * grad.element_size(), name)
    count = indices.numel()
    recorder.gated_temporary(2 * count * 8, count, EMBEDDING_SORT_ABOVE, name)
    return out


def nothing_new(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Fused optimizers and the gradient scaler's kernels write in place and allocate nothing."""
    return None


def update_scale(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``_amp_update_scale_`` returns the scale it was given."""
    return args[0]


def unscale_copy(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The functional forms return new tensors like their first argument."""
    return [torch.empty_like(tensor) for tensor in args[0]]


# --- questions about data ------------------------------------------------------------------------------------------


def local_scalar(recorder: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``.item()``: the real value where it is known, else a placeholder."""
    return constants.scalar(args[0])


def equal(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """``torch.equal``: known values are compared, unknown ones taken for different."""
    one, other = (constants.compute(tensor) for tensor in args[:2])
    return one is not None and other is not None and torch.equal(one, other)


def _data_dependent(recorder: Recorder, func: Any, bound: int, args: tuple[Any, ...]) -> None:
    name = str(func)
    recorder.note(
        Message(
            "the size of {operator}'s result depends on data that is not known before training; counted at its upper "
            "bound of {bound} elements",
            operator=name,
            bound=bound,
        ),
        operator=name,
        tier="partly symbolic",
    )


def _note_from_batch(recorder: Recorder, func: Any) -> None:
    name = str(func)
    recorder.note(
        Message(
            "the size of {operator}'s result depends on the values in the batch; counted as in the batch that was "
            "given",
            operator=name,
        ),
        operator=name,
        tier="partly symbolic",
        from_values=True,
    )


def nonzero(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Indices (count, dimensions) in int64: counted from known values, else every element."""
    tensor = args[0]
    real = constants.compute(tensor)
    if real is None:
        count = tensor.numel()
        _data_dependent(recorder, func, count, args)
    else:
        count = int(real.count_nonzero())
        _note_from_batch(recorder, func)
    out = torch.empty((count, tensor.dim()), dtype=torch.int64, device="meta")
    if real is not None:
        constants.known(out, real.nonzero())
    return out


def masked_select(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """The selected elements in one dimension: counted from a known mask, else all."""
    tensor, mask = args[:2]
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    real = constants.compute(mask)
    if real is None:
        count = shape.numel()
        _data_dependent(recorder, func, count, args)
    else:
        count = int(real.expand(shape).count_nonzero())
        _note_from_batch(recorder, func)
    return torch.empty(count, dtype=tensor.dtype, device="meta")


def index(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask]``: a boolean mask selects as many rows as it has true entries; indices are as everywhere."""
    tensor, indices = args[:2]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        out = func(*args, **kwargs)
        constants.derive(func, args, kwargs, out)
        return out
    replaced: list[Any] = []
    for position in indices:
        if position is None or position.dtype not in (torch.bool, torch.uint8):
            replaced.append(position)
            continue
        rows = nonzero(recorder, func, (position,), {})
        recorder.track(rows, str(func))
        replaced.extend(rows[:, dim] for dim in range(position.dim()))
    return func(tensor, replaced)


def index_put(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """In place: returns its target; the functional form returns a copy of it."""
    if func._schema.name.endswith("_"):
        constants.forget(args[0])
        return args[0]
    if in_backward_formula(recorder):  # ``index_backward`` writes into its own zeros, as in ``scatter``
        return args[0]
    return torch.empty_like(args[0])


def unique(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``unique`` and its kin: computed for real where the values are known, else as many as there are."""
    tensor = args[0]
    real = constants.compute(tensor)
    if real is not None:
        _note_from_batch(recorder, func)
        results = func(real, *args[1:], **kwargs)
    else:
        _data_dependent(recorder, func, tensor.numel(), args)
        results = func(torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape), *args[1:], **kwargs)
    made = tuple(torch.empty_like(result, device="meta") for result in results)
    if real is not None:
        for out, result in zip(made, results, strict=True):
            constants.known(out, result)
    return made


# --- operators without a symbolic kernel -----------------------------------------------------------------------------


def stand_in_result(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Any:
    """Run an operator that has no kernel for symbolic tensors on real zeros, to learn its results' shapes.

    Raises:
        UnsupportedOperatorError: the stand-ins would be too large, or the CPU cannot run the operator either; the
            message names the operator and the line.
    """
    name = str(func)
    size = 0

    def real(value: Any) -> Any:
        nonlocal size
        if isinstance(value, torch.Tensor) and is_symbolic(value):
            known = constants.compute(value)
            if known is not None:
                return known
            size += value.numel() * value.element_size()
            if size > LARGEST_STAND_IN:
                raise UnsupportedOperatorError(_no_kernel(recorder, name, "and its inputs are too large to try"))
            return torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, (list, tuple)):
            return type(value)(real(item) for item in value)
        return value

    try:
        results = func(*real(args), **{key: real(value) for key, value in kwargs.items()})
    except (NotImplementedError, RuntimeError) as second:
        raise UnsupportedOperatorError(_no_kernel(recorder, name, f"and fails on the CPU: {second}")) from error
    recorder.note(
        Message(
            "{operator} has no symbolic kernel; the shapes of its results come from a run on zeros, what it takes in "
            "between is not known",
            operator=name,
        ),
        operator=name,
        tier="partly symbolic",
    )

    def symbolic(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_like(value, device="meta")
        if isinstance(value, (list, tuple)):
            return type(value)(symbolic(item) for item in value)
        return value

    if func._schema.is_mutable:
        return args[0]
    return_value = symbolic(results)
    for tensor in return_value if isinstance(return_value, (list, tuple)) else [return_value]:
        if isinstance(tensor, torch.Tensor):
            recorder.track(tensor, name)
    return return_value


def _no_kernel(recorder: Recorder, name: str, why: str) -> str:
    return (
        f"the operator {name} (at {recorder.source() or 'an unknown line'}) cannot be run symbolically {why}; "
        "register a fake kernel for it with torch.library.register_fake"
    )


def logsumexp(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result; for the call the maxima and ``(input - maxima).exp()`` in full (``ReduceOps.cpp``)."""
    out = func(*args, **kwargs)
    name = str(func)
    recorder.track(out, name)
    size = args[0].element_size() if args[0].is_floating_point() else 4
    recorder.together([out.numel() * size, args[0].numel() * size], name)
    return out


HANDLERS: dict[str, Handler] = {
    "aten::logsumexp": logsumexp,
    "aten::convolution": convolutions.convolution,
    "aten::convolution_backward": convolutions.convolution_backward,
    "aten::embedding_dense_backward": embedding_backward,
    "aten::_softmax_backward_data": softmax_backward,
    "aten::native_group_norm_backward": norms.group_norm_backward,
    "aten::native_layer_norm": norms.layer_norm,
    "aten::native_layer_norm_backward": norms.layer_norm_backward,
    "aten::sort": sort,
    "aten::scatter": scatter,
    "aten::scatter_add": scatter,
    "aten::native_batch_norm": composite_ops.batch_norm_forward,
    "aten::native_batch_norm_backward": composite_ops.norm_backward,
    "aten::cudnn_batch_norm": composite_ops.cudnn_norm_forward,
    "aten::cudnn_batch_norm_backward": composite_ops.cudnn_norm_backward,
    "aten::_cudnn_rnn": composite_ops.rnn_forward,
    "aten::_cudnn_rnn_backward": composite_ops.rnn_backward,
    "aten::_scaled_dot_product_flash_attention": attention.flash_forward,
    "aten::_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "aten::_scaled_dot_product_efficient_attention": attention.efficient_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": attention.cudnn_forward,
    "aten::_scaled_dot_product_cudnn_attention_backward": attention.cudnn_backward,
    "aten::_local_scalar_dense": local_scalar,
    "aten::equal": equal,
    "aten::nonzero": nonzero,
    "aten::masked_select": masked_select,
    "aten::index": index,
    "aten::index_put_": index_put,
    "aten::_index_put_impl_": index_put,
    "aten::index_put": index_put,
    "aten::_unique2": unique,
    "aten::unique_consecutive": unique,
    "aten::_amp_foreach_non_finite_check_and_unscale_": nothing_new,
    "aten::_amp_update_scale_": update_scale,
    "aten::_fused_adam_": nothing_new,
    "aten::_fused_adamw_": nothing_new,
    "aten::_fused_sgd_": nothing_new,
    "aten::_fused_adagrad_": nothing_new,
    # bitsandbytes/backends/cuda/ops.py: the kernels write in place.
    "bitsandbytes::optimizer_update_8bit_blockwise": nothing_new,
    "bitsandbytes::optimizer_update_32bit": nothing_new,
}
