"""The video transformer and the text encoder that a local folder in diffusers' layout describes.

The folder needs the two ``config.json`` files. Weights are read where the folder has them (safetensors only); otherwise
they are random, and the caller is told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PARTS = ("transformer", "text_encoder")


class Folder:
    """A folder with ``transformer`` and ``text_encoder``.

    Raises:
        FileNotFoundError: a part is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        missing = [part for part in PARTS if not (self.path / part / "config.json").is_file()]
        if missing:
            raise FileNotFoundError(f"{self.path} has no {' and no '.join(f'{part}/config.json' for part in missing)}")
        self.transformer_config = self._config("transformer")
        self.text_config = self._config("text_encoder")

    def _config(self, part: str) -> dict[str, Any]:
        text = (self.path / part / "config.json").read_text(encoding="utf-8")
        config: dict[str, Any] = json.loads(text)
        return config

    def has_weights(self, part: str) -> bool:
        """True where the part comes with weights."""
        return any((self.path / part).glob("*.safetensors"))

    def transformer(self, dtype: torch.dtype) -> nn.Module:
        """The video transformer; its weights in ``dtype``."""
        from diffusers import CogVideoXTransformer3DModel

        if self.has_weights("transformer"):
            loaded: nn.Module = CogVideoXTransformer3DModel.from_pretrained(
                self.path / "transformer", torch_dtype=dtype
            )
            return loaded
        built: nn.Module = CogVideoXTransformer3DModel.from_config(self.transformer_config)
        return _in_dtype(built, dtype)

    def text_encoder(self, dtype: torch.dtype) -> nn.Module:
        """The text encoder, frozen; its weights in ``dtype``."""
        from transformers import T5Config, T5EncoderModel

        if self.has_weights("text_encoder"):
            loaded: nn.Module = T5EncoderModel.from_pretrained(self.path / "text_encoder", torch_dtype=dtype)
            return loaded.requires_grad_(False).eval()
        built: nn.Module = T5EncoderModel(T5Config(**self.text_config))
        return _in_dtype(built, dtype).requires_grad_(False).eval()

    @property
    def channels(self) -> int:
        """Channels of a latent."""
        return int(self.transformer_config["in_channels"])

    @property
    def tokens(self) -> int:
        """Tokens of a prompt."""
        return int(self.transformer_config["max_text_seq_length"])

    def rotary(self, frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding of latents: (positions, width of a head) each, float32."""
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        patch = int(self.transformer_config["patch_size"])
        rows, columns = height // patch, width // patch
        cos, sin = get_3d_rotary_pos_embed(
            embed_dim=int(self.transformer_config["attention_head_dim"]),
            crops_coords=((0, 0), (rows, columns)),
            grid_size=(rows, columns),
            temporal_size=frames,
        )
        return cos, sin


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters and buffers in ``dtype``, without the warning that diffusers has for ``model.to(dtype)``."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model
