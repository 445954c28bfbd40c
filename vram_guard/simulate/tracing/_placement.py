"""Places of an operator's tensors: on the simulated GPU, in host memory, or on the user's own meta device.

CUDA's operators refuse tensors of the host beside those of the GPU, with few exceptions. They are those that
``torch/_subclasses/fake_tensor.py`` (``_find_common_device``) and ``fake_impls.py`` list, and those whose CUDA code
takes lengths from the host.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from vram_guard.errors import DeviceMismatchError
from vram_guard.language import _
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.recorder import Place, Recorder
from vram_guard.tensors import map_tensors_in, tensors_in

#: Operators that take tensors from both places: copies, indices, lengths of sequences.
_TAKE_BOTH = frozenset(
    "aten::" + name
    for name in (
        *("copy", "copy_", "_to_copy", "_copy_from", "_copy_from_and_resize", "_foreach_copy", "_foreach_copy_"),
        *("slice_scatter", "select_scatter", "diagonal_scatter", "set_", "set_data", "resize_", "resize_as_"),
        *("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"),
        *("_pack_padded_sequence", "_pack_padded_sequence_backward", "_cudnn_rnn", "_cudnn_rnn_backward"),
        *("_ctc_loss", "_ctc_loss_backward", "_cudnn_ctc_loss", "_use_cudnn_ctc_loss", "segment_reduce"),
        "_efficient_attention_backward",  # what its forward has drawn lies on the host, or is empty (xformers)
        *("bernoulli", "bernoulli_"),  # DistributionTemplates.h moves the probabilities
        *("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"),  # "lr" may be a tensor of the host
    )
)


class Placement:
    """Says where an operator runs, and refuses what CUDA refuses.

    Args:
        recorder: knows where each symbolic tensor lies.
        mixed: tensors of the host may meet those of the GPU, and then lie there too: the step really runs on the CPU,
            or a model is being built.
    """

    def __init__(self, recorder: Recorder, *, mixed: bool) -> None:
        self._recorder = recorder
        self._mixed = mixed
        self._adopted: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.Tensor]] = {}

    def of(self, func: Any, args: tuple[Any, ...]) -> tuple[Place, tuple[Any, ...]]:
        """The place of an operator's results, and its arguments as it will get them.

        Raises:
            DeviceMismatchError: a tensor of the host meets one of the GPU.
        """
        tensors = tensors_in(args)
        if self._recorder.all_on_gpu(tensors):
            return "cuda", args
        on_gpu = on_host = elsewhere = False
        for tensor in tensors:
            if not is_symbolic(tensor):
                on_host = on_host or (tensor.dim() > 0 and tensor.device.type == "cpu")
                continue
            place = self._recorder.place_of(tensor)
            if place == "cuda":
                on_gpu = True
            elif place == "cpu":
                on_host, elsewhere = on_host or tensor.dim() > 0, True
            else:
                elsewhere = True
        if on_gpu and on_host and func.namespace == "aten" and func._schema.name not in _TAKE_BOTH:
            if not self._mixed:
                raise DeviceMismatchError(self._message(func, args))
            written = func._schema.is_mutable and isinstance(args[0], torch.Tensor) and not is_symbolic(args[0])
            if not written:
                args = tuple(map_tensors_in(self._arrived, value) for value in args)
        if on_gpu or not elsewhere:
            return "cuda", args
        symbolic = [tensor for tensor in tensors_in(args) if is_symbolic(tensor)]
        places = {self._recorder.place_of(tensor) for tensor in symbolic}
        return ("cpu" if "cpu" in places else "meta"), args

    def _message(self, func: Any, args: tuple[Any, ...]) -> str:
        stranger = next(
            tensor
            for tensor in tensors_in(args)
            if tensor.dim() and (self._recorder.place_of(tensor) == "cpu" if is_symbolic(tensor) else True)
        )
        return _(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! At {line} "
            "{operator} is given a tensor of shape {shape} that lies in host memory: make it on the device, move it "
            "there (tensor.to(device)), or register it as a buffer of the model",
            line=self._recorder.source() or _("an unknown line"),
            operator=func,
            shape=tuple(stranger.shape),
        )

    def _arrived(self, tensor: torch.Tensor) -> torch.Tensor:
        """The symbolic twin of a real tensor, whose memory counts for as long as the real one's lives."""
        if is_symbolic(tensor) or tensor.dim() == 0 or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key not in self._adopted:
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            self._adopted[key] = weakref.ref(storage, lambda _gone: self._adopted.pop(key, None)), memory
            self._recorder.track(memory, "")
        memory = self._adopted[key][1].view(tensor.dtype)
        twin = memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        constants.known(twin, tensor)
        return twin
