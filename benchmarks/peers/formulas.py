"""Published formulas, written anew from their descriptions; each says where it is described. All sizes in bytes."""

from __future__ import annotations

from typing import NamedTuple

#: ``torch.finfo(torch.float32).bits // 8``; every workload here is trained in float32.
FLOAT = 4


class Model(NamedTuple):
    """The sizes of a model that the formulas take."""

    parameters: int
    """Shared ones counted once."""
    largest_layer: int
    """Most parameters that one module holds by itself."""


def deepspeed_zero2(model: Model, gpus: int = 1) -> int:
    """DeepSpeed's estimate for ZeRO-2 without offload: ``4 P + 16 P / gpus`` per GPU.

    Source: "Memory Requirements", deepspeed.readthedocs.io/en/latest/memory.html, and
    ``estimate_zero2_model_states_mem_needs`` of deepspeed.runtime.zero.stage_1_and_2. Parameters and gradients in half
    precision, a float32 copy of both, and Adam's two moments.
    """
    return 4 * model.parameters + 16 * model.parameters // gpus


def deepspeed_zero3(model: Model, gpus: int = 1) -> int:
    """DeepSpeed's estimate for ZeRO-3 without offload: ``4 L + 18 P / gpus``, L: largest layer. Source as above."""
    return 4 * model.largest_layer + 18 * model.parameters // gpus


def grid_guide_activations(batch_size: int, sequence: int, height: int, width: int, hidden: int, layers: int) -> int:
    """Activations by the guide of a super-resolution project: ``batch x sequence x H x W x hidden x 4 x layers``.

    Source: its "GPU memory calculator" guide. Weights, gradients and optimizer state are not counted one by one:
    they are expected to stay within the 30% of the GPU that the guide keeps for them (:func:`grid_guide`).
    """
    return batch_size * sequence * height * width * hidden * FLOAT * layers


def grid_guide(activations: int) -> int:
    """The smallest GPU that the guide calls safe: activations may take 70% of it."""
    return activations * 10 // 7


def twin_guide(parameters: int, models: int, batch_bytes: int) -> int:
    """The guide of a video-diffusion project: model states, a batch, and activations of 3 to 5 times the batch.

    Source: its memory estimation guide. One model: ``parameters x (1 + 1 + 2)``; with a frozen original beside the
    trained one: ``parameters x (1 + 1 + 1 + 2)``, times the bytes of an element. Of "3 to 5" the middle is taken here.

    Args:
        parameters: of one of the models.
        models: 1, or 2 with a frozen twin.
        batch_bytes: of the inputs.
    """
    return parameters * (3 + models) * FLOAT + batch_bytes + 4 * batch_bytes
