"""DINOv2's ViT-g/14 as timm has it (``vit_giant_patch14_dinov2``), on images of 224 x 224.

Oquab et al. 2023, table 17: 40 layers of width 1536 with 24 heads and SwiGLU networks; scaled residuals, a class token,
learned positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE, PATCH, WIDTH, LAYERS, HEADS, INNER = 224, 14, 1536, 40, 24, 4096


class Layer(nn.Module):
    """Attention and a gated network, each scaled and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.scale_1, self.scale_2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0))
        x = x + self.out(mixed.transpose(1, 2).flatten(-2)) * self.scale_1
        gate, value = self.up(self.norm_2(x)).chunk(2, dim=-1)
        made: Tensor = x + self.down(functional.silu(gate) * value) * self.scale_2
        return made


class GiantViT(nn.Module):
    """Images to logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(images.shape[0], -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits
