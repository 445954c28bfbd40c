"""The operators whose allocations on CUDA are not just their results on the meta device, and what handles each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators import attention, convolutions, data_dependent_shapes, kernels, norms, recurrent

Handler = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[str, Handler] = {
    "aten::logsumexp": kernels.logsumexp,
    "aten::convolution": convolutions.convolution,
    "aten::convolution_backward": convolutions.convolution_backward,
    "aten::embedding_dense_backward": kernels.embedding_backward,
    "aten::_softmax_backward_data": kernels.softmax_backward,
    "aten::native_group_norm_backward": norms.group_norm_backward,
    "aten::native_layer_norm": norms.layer_norm,
    "aten::native_layer_norm_backward": norms.layer_norm_backward,
    "aten::sort": kernels.sort,
    "aten::scatter": kernels.scatter,
    "aten::scatter_add": kernels.scatter,
    "aten::native_batch_norm": norms.batch_norm_forward,
    "aten::native_batch_norm_backward": norms.norm_backward,
    "aten::cudnn_batch_norm": norms.cudnn_norm_forward,
    "aten::cudnn_batch_norm_backward": norms.cudnn_norm_backward,
    "aten::_cudnn_rnn": recurrent.rnn_forward,
    "aten::_cudnn_rnn_backward": recurrent.rnn_backward,
    "aten::_scaled_dot_product_flash_attention": attention.flash_forward,
    "aten::_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "aten::_scaled_dot_product_efficient_attention": attention.efficient_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": attention.cudnn_forward,
    "aten::_scaled_dot_product_cudnn_attention_backward": attention.cudnn_backward,
    "aten::_local_scalar_dense": data_dependent_shapes.local_scalar,
    "aten::equal": data_dependent_shapes.equal,
    "aten::nonzero": data_dependent_shapes.nonzero,
    "aten::masked_select": data_dependent_shapes.masked_select,
    "aten::index": data_dependent_shapes.index,
    "aten::index_put_": data_dependent_shapes.index_put,
    "aten::_index_put_impl_": data_dependent_shapes.index_put,
    "aten::index_put": data_dependent_shapes.index_put,
    "aten::_unique2": data_dependent_shapes.unique,
    "aten::unique_consecutive": data_dependent_shapes.unique,
    **dict.fromkeys(
        (
            *("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"),
            "aten::_amp_foreach_non_finite_check_and_unscale_",
            # bitsandbytes/backends/cuda/ops.py: the kernels write in place.
            *("bitsandbytes::optimizer_update_8bit_blockwise", "bitsandbytes::optimizer_update_32bit"),
        ),
        kernels.nothing_new,
    ),
    "aten::_amp_update_scale_": kernels.update_scale,
}
