"""The networks of the benchmarks: random weights, a batch of any size and a loss for each. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks.harness.networks import batches, convolutional, diffusion_transformer, language
from benchmarks.harness.networks.batches import Batch, class_loss, next_token_loss, own_loss, squared_loss


class Network(NamedTuple):
    """One network as the cases of the GPU's suite use it."""

    build: Callable[[bool], nn.Module]
    """The model; with True, one that checkpoints its blocks' activations."""
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Tensor]


_IMAGES = batches.classified(3, 224, 224, classes=1000)
_WORDS = batches.language(128, 10_000)

NETWORKS: dict[str, Network] = {
    "resnet50": Network(lambda _: convolutional.resnet50(), _IMAGES, class_loss),
    "small_cnn": Network(convolutional.small_cnn, batches.classified(3, 96, 96, classes=100), class_loss),
    "unet": Network(convolutional.UNet, batches.regression(3, 128, 128), squared_loss),
    "fno": Network(convolutional.fno, batches.regression(3, 128, 128), squared_loss),
    "video": Network(lambda _: convolutional.VideoNet(), batches.classified(3, 8, 64, 64, classes=50), class_loss),
    "lstm": Network(lambda _: language.RecurrentLM(nn.LSTM), _WORDS, next_token_loss),
    "gru": Network(lambda _: language.RecurrentLM(nn.GRU), _WORDS, next_token_loss),
    "gpt2": Network(language.gpt2, batches.language(512, 50_257), own_loss),
    "bert": Network(language.bert, batches.masked_language(256, 30_522, padded=56), own_loss),
    "llama": Network(language.llama_small, batches.language(512, 32_000), own_loss),
    "vit": Network(language.vit, batches.vit_images, own_loss),
    "twins": Network(diffusion_transformer.Twins, diffusion_transformer.twin_batch, diffusion_transformer.twin_loss),
}
