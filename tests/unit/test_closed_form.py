"""What the closed forms read of a model's sizes in its config, and of the types of its weights."""

from __future__ import annotations

import pytest
from each import each

from vram_guard.closed_form.inputs import USUAL_LENGTH, InputSizes, latent_patch, prompt_tokens, sample_shape
from vram_guard.closed_form.weights import Weights
from vram_guard.errors import InvalidInputError

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


def test_a_video_model_s_sample_is_its_latents() -> None:
    # 49 frames: one latent frame for the first, and one for every four of the other 48.
    assert sample_shape(VIDEO, InputSizes()) == (16, 13, 60, 90)
    assert sample_shape(VIDEO, InputSizes(height=32, width=48, num_frames=2)) == (16, 2, 32, 48)
    assert prompt_tokens(VIDEO) == 226


def test_a_diffusion_model_of_images_is_given_one_frame() -> None:
    assert sample_shape({"_class_name": "UNet2DModel", "sample_size": 32}, InputSizes()) == (4, 32, 32)


def test_frames_are_patched_too() -> None:
    assert latent_patch(VIDEO) == (1, 2, 2)
    assert latent_patch({**VIDEO, "patch_size_t": 2}) == (2, 2, 2)
    assert latent_patch({"patch_size": [1, 2, 2]}) == (1, 2, 2)


def test_a_vision_model_is_given_pictures() -> None:
    assert sample_shape({"image_size": 224, "patch_size": 16}, InputSizes()) == (3, 224, 224)
    assert sample_shape({"image_size": [64, 96], "num_channels": 1}, InputSizes()) == (1, 64, 96)


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
    assert sample_shape(config, InputSizes(seq_length=given)) == (tokens,)


@each(
    "entry",
    [
        {"sample_size": "big"},
        {"sample_size": [1, 2, 3, 4]},
        {"in_channels": -5},
        {"in_channels": 2**63},
        {"patch_size": [2, 0]},
        {"sample_frames": 1.5},
        {"max_text_seq_length": True},
    ],
)
def test_nonsense_numbers_are_refused_by_their_names(entry: dict[str, object]) -> None:
    config = {"_class_name": "X", "text_embed_dim": 8, **entry}
    with pytest.raises(InvalidInputError, match=next(iter(entry))):
        print(sample_shape(config, InputSizes()), latent_patch(config), prompt_tokens(config))


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
