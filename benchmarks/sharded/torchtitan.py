"""Training steps of Llama models, spread over GPUs as torchtitan spreads them.

The facts were read in torchtitan's ``parallelisms/parallelize_llama.py``, ``train.py`` and ``optimizer.py`` (9dec370,
5940dde, e23bb70): order of what is applied, dtypes, what is resharded, what selective checkpointing keeps.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.sharded.llama import LLAMA_8B, Llama, Norm, Sizes
from vram_guard import Parallel, TrainingStep

#: Chunks of the chunked loss (e23bb70).
CHUNKS = 8


@dataclass(frozen=True)
class Recipe:
    """A training of Llama 3 8B by torchtitan, as far as memory depends on it."""

    gpus: int = 8
    batch: int = 1
    length: int = 8192
    reshard: Literal["default", "always", "never"] = "default"
    """"default": all blocks but the last."""
    norm: Norm = "composed"
    optimizer: Literal["foreach", "fused"] = "foreach"
    chunked: bool = False
    """The loss of one part of the logits after the other."""
    groups: bool = False
    """As in 2025 (b00e484): the embedding is a group of its own, norm and output another one, which stays whole."""
    sizes: Sizes = LLAMA_8B

    def step(self) -> TrainingStep:
        """The step of one rank."""
        fused = self.optimizer == "fused"
        return TrainingStep(
            model=lambda: Llama(self.sizes, self.length, self.norm),
            batch=lambda samples: tuple(torch.zeros(samples, self.length, dtype=torch.long) for _ in range(2)),
            loss=chunked_loss if self.chunked else plain_loss,
            optimizer=lambda weights: torch.optim.AdamW(
                list(weights), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused, foreach=not fused
            ),
            zero_grad="before_forward",
            clip_grad_norm=1.0,
            parallel=Parallel(gpus=self.gpus, apply=self.apply),
        )

    def apply(self, model: nn.Module, mesh: Any) -> nn.Module:
        """Checkpointing, then FSDP2."""
        assert isinstance(model, Llama)
        checkpoint_blocks(model)
        shard(model, mesh, self.reshard, groups=self.groups)
        return model


def plain_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Logits die before the backward pass."""
    tokens, labels = batch
    logits = model(tokens)
    loss = _cross_entropy(logits, labels)
    del logits
    return loss


def chunked_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One part after the other."""
    tokens, labels = batch
    logits = model(tokens)
    parts = zip(logits.chunk(CHUNKS, dim=1), labels.chunk(CHUNKS, dim=1), strict=True)
    loss = _summed(parts) / CHUNKS
    del logits
    return loss


def _summed(parts: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    total: Any = 0.0
    for logits, labels in parts:
        total += _cross_entropy(logits, labels)
    assert isinstance(total, Tensor)
    return total


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def checkpoint_blocks(model: Llama) -> None:
    """Recompute all of each block but attention and every other matrix product."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, block in list(model.layers.named_children()):
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False, context_fn=_selective)
        model.layers.register_module(name, wrapped)


def _selective() -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    product = aten.mm.default
    kept = {
        product,
        aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001 - an operator's name
        aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 - an operator's name
        torch.ops._c10d_functional.reduce_scatter_tensor.default,  # noqa: SLF001 - an operator's name
        aten.abs.default,
        aten.max.default,
    }
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator == product:
            products[context.is_recompute] += 1
        second = operator == product and products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if operator in kept and not second else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def shard(model: Llama, mesh: Any, reshard: str, *, groups: bool) -> None:
    """FSDP2 block by block, in bfloat16, gradients reduced in float32.

    With ``groups``, the embedding is sharded apart, and norm and output together.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts: list[Any] = [*([model.tok_embeddings] if groups else []), *model.layers.values()]
    for part in parts:
        free = groups or part is not parts[-1] if reshard == "default" else reshard == "always"
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    if groups:
        last: Any = [model.norm, model.output]
        fully_shard(last, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard == "always")
    fully_shard(model, mesh=mesh, mp_policy=policy)


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Attention as torch of 2024 chose it: cuDNN's, which it prefers today on an H100, is not asked.

    It was opt-in from October 2024 (pytorch pull request 138522) until 2.9 (162073), which asks for cuDNN 9.15 besides.
    Selective checkpointing here keeps flash attention's result and not cuDNN's, so the difference is large.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
