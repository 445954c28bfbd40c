"""Training steps of Llama models, spread over GPUs as torchtitan spreads them.

The facts were read in torchtitan's ``parallelisms/parallelize_llama.py``, ``train.py`` and ``optimizer.py`` (9dec370,
5940dde, e23bb70, 02923f0): order of what is applied, dtypes, what is resharded, what selective checkpointing keeps.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.sharded.llama import SIZES, Llama, Norm
from vram_guard import Parallel, TrainingStep

Checkpointing = Literal["none", "op", "full"]

#: Chunks of the chunked loss (e23bb70).
CHUNKS = 8


@dataclass(frozen=True)
class Recipe:
    """A training of torchtitan, as far as memory depends on it."""

    model: str
    gpus: int
    batch: int
    length: int = 8192
    checkpointing: Checkpointing = "op"
    tensor: int = 1
    reshard: Literal["default", "always", "never"] = "default"
    """"default": all blocks but the last."""
    norm: Norm = "composed"
    optimizer: Literal["foreach", "fused"] = "foreach"
    loss: Literal["plain", "chunked", "kept"] = "plain"
    """"plain": logits die before the backward; "chunked": one part after the other; "kept": the loop's name for the
    logits lives on into the next step (until June 2024)."""
    positions: int | None = None
    """For which the rotation is tabled; None: the sequence's."""
    wide: bool = False
    """The model itself returns float32 (until October 2024)."""
    older: bool = False
    """Reduce-scatters as FSDP2 made them until June 2024 (:func:`reduce_as_before`)."""
    groups: bool = False
    """As in 2025 (b00e484): the embedding is a group of its own, norm and output another one, which stays whole."""

    def step(self) -> TrainingStep:
        """The step of one rank."""
        sizes = SIZES[self.model]
        fused = self.optimizer == "fused"
        return TrainingStep(
            model=lambda: Llama(sizes, self.positions or self.length, self.norm, wide=self.wide),
            batch=lambda samples: tuple(torch.zeros(samples, self.length, dtype=torch.long) for _ in range(2)),
            loss=self.loss_of,
            optimizer=lambda weights: torch.optim.AdamW(
                list(weights), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused, foreach=not fused
            ),
            zero_grad="before_forward",
            clip_grad_norm=1.0,
            keeps="outputs" if self.loss == "kept" else "loss",
            parallel=Parallel(gpus=self.gpus, tensor=self.tensor, apply=self.apply),
        )

    def apply(self, model: nn.Module, mesh: Any) -> nn.Module:
        """Tensor parallelism, checkpointing, FSDP2, in this order."""
        assert isinstance(model, Llama)
        if self.tensor > 1:
            divide_layers(model, mesh["tensor"])
        checkpoint_blocks(model, self.checkpointing)
        sharded = shard_in_groups if self.groups else shard
        sharded(model, mesh["shard"] if self.tensor > 1 else mesh, self.reshard)
        if self.older:
            reduce_as_before(model)
        return model

    def loss_of(self, model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        """The loss; with tensor parallelism, of logits that are divided over the vocabulary."""
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel() if self.tensor > 1 else contextlib.nullcontext():
            return LOSSES[self.loss](model, batch)


def _plain(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, labels = batch
    logits = model(tokens)
    loss = _cross_entropy(logits, labels)
    del logits
    return loss


def _chunked(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
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


def _kept(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens, labels = batch
    logits = model(tokens)
    return _cross_entropy(logits, labels), logits


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


LOSSES: dict[str, Callable[..., Any]] = {"plain": _plain, "chunked": _chunked, "kept": _kept}


def divide_layers(model: Llama, mesh: Any) -> None:
    """Tensor parallelism with sequence parallelism, and logits that stay divided over the vocabulary."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole, parts = Replicate(), Shard(1)
    outer = {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=parts),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=parts, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outer)
    for block in model.layers.values():
        inner = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(parts, None), desired_input_layouts=(whole, None)),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=parts),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(whole,)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=parts),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, inner)


def checkpoint_blocks(model: Llama, mode: Checkpointing) -> None:
    """Recompute blocks: "full": all of each; "op": all but attention and every other matrix product."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if mode == "none":
        return
    settings: dict[str, Any] = {"preserve_rng_state": False}
    if mode == "op":
        settings["context_fn"] = _selective
    for name, block in list(model.layers.named_children()):
        model.layers.register_module(name, checkpoint_wrapper(block, **settings))


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


def shard(model: Llama, mesh: Any, reshard: str) -> None:
    """FSDP2 block by block, in bfloat16, gradients reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last = len(model.layers) - 1
    for number, block in enumerate(model.layers.values()):
        free = number < last if reshard == "default" else reshard == "always"
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def reduce_as_before(model: Llama) -> None:
    """Inputs of reduce-scatters lie in the pool of the stream that reduces.

    FSDP2 allocated them there until 27 June 2024; pytorch pull request 129721 moved them to the default stream.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class Before(DefaultReduceScatter):
        def __init__(self, state: Any) -> None:
            super().__init__()
            self.state = state

        def allocate(self, *size: Any, **settings: Any) -> Tensor:
            with torch.cuda.stream(self.state._comm_ctx.reduce_scatter_stream):  # noqa: SLF001 - has no other name
                return super().allocate(*size, **settings)

    for module in (*model.layers.values(), model):
        sharded: Any = module
        sharded.set_custom_reduce_scatter(Before(sharded._get_fsdp_state()))  # noqa: SLF001 - its streams


def shard_in_groups(model: Llama, mesh: Any, reshard: str) -> None:
    """The same with the embedding apart, and with norm and output together."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.tok_embeddings, *model.layers.values()):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard != "never")
    last = [model.norm, model.output]
    fully_shard(last, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard == "always")  # type: ignore[type-var]
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
