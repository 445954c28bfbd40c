"""Matrix products that compiled code pads: what Inductor would measure on a GPU follows from a rule."""

from __future__ import annotations

from collections.abc import Sequence
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


def is_padded(left: Sequence[int], right: Sequence[int], dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    from vram_guard.simulate.compiler.padding import is_padded as asked

    return asked(
        torch.empty(left, dtype=dtype, device="meta"), torch.empty(right, dtype=dtype, device="meta"), capability
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [((TOKENS, WIDTH), (WIDTH, WORDS)), ((TOKENS, WORDS), (WORDS, WIDTH)), ((WORDS, TOKENS), (TOKENS, WIDTH))],
)
def test_products_over_odd_vocabularies_are_padded_in_half_precision_alone(left, right):
    """As on an H200, torch 2.11: benchmarks/gpu/results, compiled "gpt2" and "bert"."""
    assert is_padded(left, right, torch.bfloat16, (9, 0)) is (left[0] != WORDS)
    assert not is_padded(left, right, torch.float32, (9, 0))
    even, odd = 30_522, WORDS
    left, right = ([even if size == odd else size for size in shape] for shape in (left, right))
    assert not is_padded(left, right, torch.bfloat16, (9, 0))


def test_what_counts_are_rows_as_they_lie():
    from vram_guard.simulate.compiler.padding import is_padded as asked

    gradient = torch.empty(TOKENS, WORDS, dtype=torch.bfloat16, device="meta").t()  # of the weight's gradient
    assert asked(gradient, torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta"), (9, 0))
    assert not is_padded((8191, WIDTH), (WIDTH, 1024), torch.bfloat16, (9, 0))
    assert not is_padded((TOKENS, 1), (1, 1024), torch.float16, (9, 0))


def test_small_and_batched_products_and_those_without_tensor_cores():
    assert not is_padded((16, 64), (64, 1001), torch.float16, (9, 0))  # bound by memory
    assert is_padded((8, 1024, 1001), (8, 1001, 1024), torch.float16, (9, 0))
    assert not is_padded((TOKENS, WIDTH), (WIDTH, WORDS), torch.bfloat16, (7, 0))


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
