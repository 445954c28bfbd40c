"""Sizes of one sample as a model receives it, read from its config.json without building the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.step import checked_count

#: Tokens of a prompt where the config does not say: CLIP's context (Radford et al. 2021, section 2.4).
PROMPT_TOKENS: Final = 77
#: Tokens of a text where the number is not given: longer contexts are possible, and rarely trained with.
USUAL_LENGTH: Final = 512
#: Sizes where none are given: ImageNet's images; Stable Diffusion's latents of a 256 x 256 image.
USUAL_IMAGE: Final = 224
USUAL_LATENT: Final = 32
LATENT_CHANNELS: Final = 4
#: Under which names configs say how wide the text's encoding is.
TEXT_WIDTHS: Final = ("text_embed_dim", "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim")


@dataclass(frozen=True)
class InputSizes:
    """Of one sample as the model is given it (latents for latent diffusion); None: what the config says."""

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    seq_length: int | None = None


def whole(config: Mapping[str, Any], name: str, default: int = 1) -> int:
    """A number of a config; the default where it is missing or null.

    Raises:
        InvalidInputError: it is something else than a whole number of at least 1.
    """
    value = config.get(name)
    return default if value is None else checked_count(name, value)


def whole_sides(config: Mapping[str, Any], name: str, default: int = 1) -> tuple[int, int]:
    """(height, width) of an entry that is one number, or a list that ends with both (as patches of videos do).

    Raises:
        InvalidInputError: it is something else.
    """
    value = config.get(name)
    if not isinstance(value, (list, tuple)):
        side = whole(config, name, default)
        return side, side
    if len(value) not in (2, 3):
        raise InvalidInputError(_("{name} must be one number or [height, width], not {value}", name=name, value=value))
    return checked_count(name, value[-2]), checked_count(name, value[-1])


def text_width(config: Mapping[str, Any]) -> int | None:
    """Width of the encoded prompt that a diffusion model takes; None where it takes none."""
    found = (name for name in TEXT_WIDTHS if isinstance(config.get(name), int))
    return next((whole(config, name) for name in found), None)


def prompt_tokens(config: Mapping[str, Any]) -> int:
    """Tokens of a prompt, as a diffusion model takes it."""
    return whole(config, "max_text_seq_length", PROMPT_TOKENS)


def sequence_length(config: Mapping[str, Any], sizes: InputSizes) -> int:
    """Tokens of one text."""
    own = whole(config, "max_position_embeddings", whole(config, "n_positions", USUAL_LENGTH))
    return sizes.seq_length or min(own, USUAL_LENGTH)


def image_size(config: Mapping[str, Any], sizes: InputSizes) -> tuple[int, int, int]:
    """(channels, height, width) of what a vision model is given."""
    height, width = whole_sides(config, "image_size", USUAL_IMAGE)
    return whole(config, "num_channels", 3), sizes.height or height, sizes.width or width


#: Latents with longer sides than this many times those of the config are taken for pixels: positional embeddings end
#: there, and one latent stands for 8 pixels or more.
MOST_LATENTS: Final = 2


def is_video(config: Mapping[str, Any]) -> bool:
    """True for a diffusion model whose input has frames."""
    name = str(config.get("_class_name"))
    return "sample_frames" in config or any(word in name for word in ("CogVideoX", "3D", "Video", "Wan"))


def sees_pictures(config: Mapping[str, Any]) -> bool:
    """True for a model of transformers that is given pictures."""
    return not {"image_size", "num_channels"}.isdisjoint(config)


def sizes_read(config: Mapping[str, Any]) -> frozenset[str]:
    """The names of :class:`InputSizes` that the model of a config.json has."""
    if isinstance(config.get("_class_name"), str):
        return frozenset({"height", "width", *(("num_frames",) if is_video(config) else ())})
    return frozenset({"height", "width"} if sees_pictures(config) else {"seq_length"})


def latent_size(config: Mapping[str, Any], sizes: InputSizes) -> tuple[int, int, int]:
    """(frames, height, width) of what a diffusion model is given.

    Raises:
        InvalidInputError: a side is that of a picture in pixels, see :data:`MOST_LATENTS`.
    """
    height, width = whole_sides(config, "sample_size", USUAL_LATENT)
    height, width = whole(config, "sample_height", height), whole(config, "sample_width", width)
    # Three channels are pixels, and more are latents.
    if not {"sample_size", "sample_height"}.isdisjoint(config) and whole(config, "in_channels", LATENT_CHANNELS) > 3:
        for name, given, own in (("height", sizes.height, height), ("width", sizes.width, width)):
            if given is not None and given > MOST_LATENTS * own:
                raise InvalidInputError(
                    _(
                        "--{name} {given} is in latents, and the model's own {name} is {own}: give the sizes of the "
                        "latents, not of the picture or video",
                        name=name,
                        given=given,
                        own=own,
                    )
                )
    # Configs count frames of the video; its latents have one for the first and one for every four more.
    every = whole(config, "temporal_compression_ratio")
    frames = sizes.num_frames or (whole(config, "sample_frames") - 1) // every + 1
    return frames, sizes.height or height, sizes.width or width


def latent_patch(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(frames, height, width) of one patch, which a diffusion transformer makes a token of."""
    height, width = whole_sides(config, "patch_size")
    listed = config.get("patch_size")
    across = listed[0] if isinstance(listed, (list, tuple)) and len(listed) == 3 else config.get("patch_size_t")
    return checked_count("patch_size", 1 if across is None else across), height, width


def sample_shape(config: Mapping[str, Any], sizes: InputSizes) -> tuple[int, ...]:
    """Shape of one sample: (tokens,), (channels, height, width), or of a video (channels, frames, height, width).

    Raises:
        InvalidInputError: a number of the config is none.
    """
    if isinstance(config.get("_class_name"), str):
        frames, height, width = latent_size(config, sizes)
        channels = whole(config, "in_channels", LATENT_CHANNELS)
        return (channels, *((frames,) if is_video(config) else ()), height, width)
    return image_size(config, sizes) if sees_pictures(config) else (sequence_length(config, sizes),)
