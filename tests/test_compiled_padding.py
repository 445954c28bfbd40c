"""Matrix products that compiled code pads: what Inductor would measure on a GPU follows from a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_cases import MISSING
from torch import nn

from vram_guard import TrainingStep
from vram_guard.simulate.compiled import Compiler
from vram_guard.simulate.tracing.run import run_step

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"this torch's compiler is not followed: {MISSING}"),
    pytest.mark.filterwarnings("ignore"),
]

TOKENS, WIDTH, WORDS = 8192, 768, 50_257


def is_padded(left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    from vram_guard.simulate.compiler.padding import is_padded as asked

    return asked(
        torch.empty(left, dtype=dtype, device="meta"), torch.empty(right, dtype=dtype, device="meta"), capability
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [((TOKENS, WIDTH), (WIDTH, WORDS)), ((TOKENS, WORDS), (WORDS, WIDTH)), ((WORDS, TOKENS), (TOKENS, WIDTH))],
)
def test_products_over_a_vocabulary_are_padded_in_half_precision_alone(left, right):
    """As on an H200, torch 2.11: benchmarks/gpu/results, "gpt2 b16 bf16-mixed ... compiled" and "gpt2 b8 32-true"."""
    assert is_padded(left, right, torch.bfloat16, (9, 0))
    assert not is_padded(left, right, torch.float32, (9, 0))


def test_aligned_small_and_batched_products():
    assert not is_padded((TOKENS, WIDTH), (WIDTH, 50_264), torch.bfloat16, (9, 0))
    assert not is_padded((16, 64), (64, 1001), torch.float16, (9, 0))  # bound by memory
    assert is_padded((8, 1024, 1001), (8, 1001, 1024), torch.float16, (9, 0))
    assert not is_padded((TOKENS, 1), (1, 1024), torch.float16, (9, 0))  # a dimension of 1 is never padded
    assert not is_padded((TOKENS, WIDTH), (WIDTH, WORDS), torch.bfloat16, (7, 0))  # no tensor cores for it


def test_tf32_is_computed_on_tensor_cores():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert is_padded((TOKENS, WIDTH), (WIDTH, WORDS), torch.float32, (9, 0))
        assert not is_padded((TOKENS, WIDTH), (WIDTH, 50_260), torch.float32, (9, 0))  # four of 4 bytes
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Head(nn.Module):
    """Dynamo leaves torch's own modules alone where nothing is around them."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float()


def test_a_compiled_head_allocates_the_padded_product():
    words, padded = 3001, 3008

    def model() -> nn.Module:
        made = Head(words)
        made.compile()
        return made

    step = TrainingStep(
        model=model,
        batch=lambda size: torch.ones(size, WIDTH),
        loss=lambda net, batch: F.cross_entropy(net(batch), torch.zeros_like(batch[:, 0], dtype=torch.long)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        precision="bf16-mixed",
    )

    def sizes(**change: Any) -> list[int]:
        follow = Compiler(lambda size: run_step(step.with_(**change), size, (9, 0), compiled=True), 300.0)
        return follow(TOKENS).sizes(TOKENS)

    assert 2 * TOKENS * padded in sizes()
    assert 2 * WIDTH * padded in sizes()
    assert 4 * TOKENS * padded not in sizes(precision="32-true")
