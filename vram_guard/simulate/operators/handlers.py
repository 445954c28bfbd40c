"""The operators whose allocations on CUDA are not just their results on the meta device, and what handles each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators import (
    _attention,
    _convolutions,
    _data_dependent_shapes,
    _distances,
    _fourier,
    _losses,
    _norms,
    _recurrent,
    kernels,
)

Handler = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[str, Handler] = {
    "aten::logsumexp": kernels.logsumexp,
    "aten::convolution": _convolutions.convolution,
    "aten::convolution_backward": _convolutions.convolution_backward,
    "aten::embedding": kernels.embedding,
    "aten::embedding_dense_backward": kernels.embedding_backward,
    "aten::_embedding_bag_backward": kernels.embedding_bag_backward,
    "aten::_embedding_bag_dense_backward": kernels.embedding_bag_dense_backward,
    **dict.fromkeys(kernels.CONTIGUOUS, kernels.contiguous_first),
    "aten::_softmax_backward_data": kernels.softmax_backward,
    "aten::native_group_norm": _norms.group_norm,
    "aten::native_group_norm_backward": _norms.group_norm_backward,
    "aten::native_layer_norm": _norms.layer_norm,
    "aten::native_layer_norm_backward": _norms.layer_norm_backward,
    "aten::_fused_rms_norm": _norms.rms_norm,
    "aten::_fused_rms_norm_backward": _norms.rms_norm_backward,
    **dict.fromkeys(("aten::mse_loss", "aten::smooth_l1_loss"), _losses.result_first),
    "aten::huber_loss": _losses.elements_first,
    **dict.fromkeys(("aten::binary_cross_entropy", "aten::soft_margin_loss"), _losses.keeps_elements),
    "aten::soft_margin_loss_backward": _losses.soft_margin_backward,
    "aten::_ctc_loss": _losses.ctc,
    "aten::_ctc_loss_backward": _losses.ctc_backward,
    "aten::_cdist_forward": _distances.cdist,
    "aten::_cdist_backward": _distances.cdist_backward,
    "aten::_euclidean_dist": _distances.euclidean,
    **dict.fromkeys(("aten::_fft_r2c", "aten::_fft_c2c", "aten::_fft_c2r"), _fourier.transform),
    "aten::binary_cross_entropy_with_logits": _losses.with_logits,
    "aten::native_dropout": kernels.dropout,
    "aten::log_sigmoid_forward": kernels.log_sigmoid,
    "aten::roll": kernels.roll,
    "aten::sort": kernels.sort,
    "aten::scatter": kernels.scatter,
    **dict.fromkeys(("aten::scatter_add", "aten::index_add"), kernels.scatter),
    "aten::native_batch_norm": _norms.batch_norm_forward,
    "aten::native_batch_norm_backward": _norms.norm_backward,
    "aten::cudnn_batch_norm": _norms.cudnn_norm_forward,
    "aten::cudnn_batch_norm_backward": _norms.cudnn_norm_backward,
    "aten::_cudnn_rnn": _recurrent.rnn_forward,
    "aten::_cudnn_rnn_backward": _recurrent.rnn_backward,
    "aten::_thnn_fused_lstm_cell": _recurrent.lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _recurrent.lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _recurrent.gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _recurrent.gru_cell_backward,
    "aten::_scaled_dot_product_flash_attention": _attention.flash_forward,
    "aten::_scaled_dot_product_flash_attention_backward": _attention.flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _attention.efficient_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": _attention.efficient_backward,
    "aten::_efficient_attention_forward": _attention.direct_efficient_forward,
    "aten::_efficient_attention_backward": _attention.direct_efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": _attention.cudnn_forward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention.cudnn_backward,
    "aten::_local_scalar_dense": _data_dependent_shapes.local_scalar,
    "aten::equal": _data_dependent_shapes.equal,
    "aten::nonzero": _data_dependent_shapes.nonzero,
    "aten::masked_select": _data_dependent_shapes.masked_select,
    **dict.fromkeys(("aten::masked_scatter", "aten::masked_scatter_"), _data_dependent_shapes.masked_scatter),
    "aten::index": _data_dependent_shapes.index,
    "aten::index_put_": _data_dependent_shapes.index_put,
    "aten::_index_put_impl_": _data_dependent_shapes.index_put,
    "aten::index_put": _data_dependent_shapes.index_put,
    "aten::_unique2": _data_dependent_shapes.unique,
    "aten::unique_consecutive": _data_dependent_shapes.unique,
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

#: Operators whose sizes depend on values wherever the tensors lie.
BY_VALUES = frozenset(
    "aten::" + name
    for name in ("_local_scalar_dense", "equal", "nonzero", "masked_select", "index", "_unique2", "unique_consecutive")
)
