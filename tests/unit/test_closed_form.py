"""What the closed forms read from a config, and their rule for activations, number by number."""

from __future__ import annotations

from each import each

from vram_guard.closed_form.folder import Component
from vram_guard.closed_form.inputs import USUAL_LENGTH, InputSizes, sample_of
from vram_guard.closed_form.tuning import TransformerShape, Tuning
from vram_guard.closed_form.weights import Weights

VIDEO = {
    "_class_name": "CogVideoXTransformer3DModel",
    "in_channels": 16,
    "sample_height": 60,
    "sample_width": 90,
    "sample_frames": 49,
    "temporal_compression_ratio": 4,
    "patch_size": 2,
    "text_embed_dim": 4096,
    "max_text_seq_length": 226,
}


def test_a_video_model_s_sample_is_counted_as_its_latents() -> None:
    # 49 frames: one latent frame for the first, and one for every four of the other 48.
    assert sample_of(VIDEO, InputSizes()) == (13 * 60 * 90 * 16, 226 * 4096, 13 * 30 * 45 + 226)
    assert sample_of(VIDEO, InputSizes(height=32, width=48, num_frames=2)) == (
        2 * 32 * 48 * 16,
        226 * 4096,
        2 * 16 * 24 + 226,
    )


def test_a_diffusion_model_of_images_is_given_one_frame() -> None:
    assert sample_of({"_class_name": "UNet2DModel", "sample_size": 32}, InputSizes()) == (4 * 32 * 32, 0, 32 * 32)


def test_what_is_smaller_than_a_patch_is_one_token() -> None:
    config = {"_class_name": "DiTTransformer2DModel", "sample_size": 8, "patch_size": 2}
    assert sample_of(config, InputSizes(height=1))[2] == 4
    assert sample_of(config, InputSizes(width=1))[2] == 4


def test_frames_are_patched_too_and_the_last_patch_may_be_partial() -> None:
    patched = {**VIDEO, "patch_size_t": 2}
    assert sample_of(patched, InputSizes())[2] == 7 * 30 * 45 + 226


def test_a_vision_model_puts_one_token_beside_its_patches() -> None:
    assert sample_of({"image_size": 224, "patch_size": 16}, InputSizes()) == (3 * 224 * 224, 0, 14 * 14 + 1)
    assert sample_of({"image_size": [64, 96], "num_channels": 1, "patch_size": [8, 16]}, InputSizes()) == (
        64 * 96,
        0,
        8 * 6 + 1,
    )


@each(
    ("config", "given", "tokens"),
    [
        ({"max_position_embeddings": 128}, None, 128),
        ({"max_position_embeddings": 131_072}, None, USUAL_LENGTH),
        ({"n_positions": 77}, None, 77),
        ({}, None, USUAL_LENGTH),
        ({"max_position_embeddings": 128}, 4096, 4096),
    ],
)
def test_a_language_model_is_trained_with_its_context_up_to_a_usual_length(
    config: dict[str, int], given: int | None, tokens: int
) -> None:
    assert sample_of(config, InputSizes(seq_length=given)) == (0, 0, tokens)


@each(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_activations_are_those_of_the_cited_equation(dtype: str, size: int) -> None:
    trained = (Component("x", {}, Weights({"F32": 10})),)
    tuning = Tuning(trained, (), 3, dtype, shape=TransformerShape(layers=5, hidden=64, tokens=7))
    numbers = 3 * 7 * 64
    one_layer = 34 * numbers * size // 2  # Korthikanti et al. 2022: 34 bytes in 16 bit
    assert tuning.activations() == 5 * one_layer
    assert Tuning((), trained, 3, dtype, shape=tuning.shape).activations() == 0


@each(
    ("stored", "size"),
    [
        ({"F64": 3}, 24),
        ({"F32": 3}, 12),
        ({"F16": 1, "BF16": 1}, 4),
        ({"F8_E4M3": 3, "F8_E5M2FNUZ": 1, "F8_E8M0": 1}, 5),
        ({"F6_E2M3": 4}, 3),
        ({"F4": 4}, 2),
        ({"C64": 1, "I64": 1, "U64": 1}, 24),
        ({"I8": 1, "U8": 1, "BOOL": 1}, 3),
    ],
)
def test_numbers_have_the_sizes_that_their_names_say(stored: dict[str, int], size: int) -> None:
    assert Weights(stored).stored_bytes == size
