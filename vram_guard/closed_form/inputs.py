"""What one sample looks like to a model, from its config.json: known without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Tokens of a prompt where the config does not say: CLIP's context (Radford et al. 2021, section 2.4).
PROMPT_TOKENS: Final = 77
#: Tokens of a text where nobody says how many: longer contexts are possible, and rarely trained with.
USUAL_LENGTH: Final = 512
#: Under which names configs say how wide the text's encoding is.
TEXT_WIDTHS: Final = ("text_embed_dim", "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim")


@dataclass(frozen=True)
class InputSizes:
    """Of one sample as the model is given it (latents for latent diffusion); None: what the config says."""

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    seq_length: int | None = None


def text_width(config: Mapping[str, Any]) -> int | None:
    """How wide the encoding of a prompt is that a diffusion model takes; None where it takes none."""
    return next((config[name] for name in TEXT_WIDTHS if isinstance(config.get(name), int)), None)


def prompt_tokens(config: Mapping[str, Any]) -> int:
    """Tokens of a prompt, as a diffusion model takes it."""
    return int(config.get("max_text_seq_length") or PROMPT_TOKENS)


def sequence_length(config: Mapping[str, Any], sizes: InputSizes) -> int:
    """Tokens of one text."""
    own = int(config.get("max_position_embeddings") or config.get("n_positions") or USUAL_LENGTH)
    return sizes.seq_length or min(own, USUAL_LENGTH)


def latent_size(config: Mapping[str, Any], sizes: InputSizes) -> tuple[int, int, int]:
    """(frames, height, width) of what a diffusion model is given."""
    own: Any = config.get("sample_size")
    high, wide = own if isinstance(own, (list, tuple)) and len(own) == 2 else (own, own)
    height: Any = sizes.height or config.get("sample_height") or high or 32
    width: Any = sizes.width or config.get("sample_width") or wide or 32
    frames = sizes.num_frames
    if frames is None:
        # Configs count frames of the video; its latents have one for the first and one for every four more.
        every = int(config.get("temporal_compression_ratio") or 1)
        frames = (int(config.get("sample_frames") or 1) - 1) // every + 1
    return int(frames), int(height), int(width)


def sample_of(config: Mapping[str, Any], sizes: InputSizes) -> tuple[int, int, int]:
    """Of one sample: (numbers of the model's input, numbers of its encoded prompt, tokens inside the model).

    A diffusion model cuts latents into patches of ``patch_size`` x ``patch_size`` and puts the prompt beside them; a
    language model is given whole numbers, one a token, which hardly count; a vision model cuts images into patches.
    """
    if isinstance(config.get("_class_name"), str):
        frames, height, width = latent_size(config, sizes)
        numbers = frames * height * width * int(config.get("in_channels") or 4)
        patch, across = int(config.get("patch_size") or 1), int(config.get("patch_size_t") or 1)
        text = text_width(config)
        prompt = 0 if text is None else prompt_tokens(config)
        tokens = -(-frames // across) * (height // patch) * (width // patch)
        return numbers, prompt * (text or 0), tokens + prompt
    if "image_size" in config:
        side: Any = config["image_size"]
        own_height, own_width = side if isinstance(side, (list, tuple)) else (side, side)
        height, width = sizes.height or int(own_height), sizes.width or int(own_width)
        patch = int(config.get("patch_size") or 1)
        return height * width * int(config.get("num_channels") or 3), 0, (height // patch) * (width // patch) + 1
    return 0, 0, sequence_length(config, sizes)
