"""What docs/lab/guides.md says is wrong in the five guides: every number of it, worked out again."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from folders import text_encoder_tensors, transformer_tensors

from vram_guard.closed_form.calculator import Calculation, Network

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "guides.md"
GB, MB = 1e9, 1e6
SMALL, LARGE = Network(8, 128, 128, 256, 10), Network(16, 256, 256, 512, 10)

#: What guide 000 prints in its tables: side, hidden, batch, GB.
TABLES = [
    (64, 256, 16, 5.4),
    (128, 256, 8, 10.7),
    (256, 256, 2, 10.7),
    (128, 512, 8, 21.5),
    (256, 512, 4, 21.5),
    (512, 256, 2, 21.5),
    (64, 256, 8, 2.7),
    (128, 256, 4, 5.4),
    (256, 256, 1, 5.4),
]
#: What guide 001 prints in its summary, in GB.
SUMMARY = {
    "model_parameters": 10.44,
    "gradients": 10.44,
    "optimizer_states": 20.88,
    "batch_latents": 0.14,
    "text_encoder_outputs": 0.0,
    "activations": 1.5,
    "original_model": 10.44,
    "unlearned_model": 10.44,
}
#: What guide 004 adds up for batch 8 with FP16, in GB.
BATCH_8 = {"parameters": 0.05, "activations": 12, "optimizer states": 0.1, "other": 2}


def assert_said(*parts):
    """The page says all of this."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for part in parts:
        assert part in text, part


def parameters(tensors):
    return sum(prod(shape) for _dtype, shape in tensors.values())


def test_the_calculators_examples():
    answer = Calculation(LARGE, 24 * 10**9)
    assert_said(
        f"{SMALL.layer_bytes / GB:.3f} GB",
        f"{SMALL.total_bytes / GB:.2f} GB",
        f"{LARGE.layer_bytes / GB:.2f}",
        f"{LARGE.total_bytes / GB:.2f} GB",
        f"{-answer.remaining / GB:.2f}",
        f"{answer.largest_batch} ",
        "{} x {}".format(*answer.largest_resolution),
        f"{int(256 * (16.8 / 85.90) ** 0.5)}",
    )
    assert (round(10.74 * GB / SMALL.total_bytes, 2), round(85.90 * GB / LARGE.total_bytes, 2)) == (8, 4)


def test_the_tables_of_recommended_batches():
    factors = [printed * GB / Network(n, side, side, hidden, 10).total_bytes for side, hidden, n, printed in TABLES]
    assert [round(factor) for factor in factors] == [8, 8, 8, 8, 4, 4, 8, 8, 8]
    assert factors == pytest.approx([round(factor) for factor in factors], rel=0.02)


def test_the_estimators_summary():
    once = [SUMMARY[name] for name in ("original_model", "unlearned_model", "gradients", "optimizer_states")]
    latents, text = 4 * 16 * 32 * 32 * 17 * 2, 4 * 226 * 4096 * 2
    assert_said(
        f"{sum(SUMMARY.values()):.2f} GB", f"{sum(once):.1f} GB", f"{latents / MB:.1f} MB", f"{text / MB:.1f} MB"
    )


def test_the_models_of_the_estimator():
    assert_said(f"{2 * parameters(text_encoder_tensors()) / GB:.1f} GB", f"{parameters(transformer_tensors()):,}")
    for tensors in (transformer_tensors(), text_encoder_tensors()):
        assert_said(f"{parameters(tensors) / 1e9:.2f} billion")


def test_percentages_of_parameters():
    full, lite, micro, conv_lstm = 114833, 8777, 2617, 11601
    assert_said(f"{100 * (1 - lite / full):.1f}%", f"{100 * (1 - micro / full):.1f}%")
    assert micro < conv_lstm / 4


def test_the_sum_for_batch_8_with_half_precision():
    assert_said(f"{sum(BATCH_8.values()) + 1e-9:.1f} GB")
