"""ViT-L/16 in torchvision's form, for runs that had it: torchvision comes with a CUDA build of torch only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, DEPTH, HEADS, HIDDEN, PATCH, SIDE = 1024, 24, 16, 4096, 16, 224


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.0, batch_first=True)
        self.before_forward = nn.LayerNorm(WIDTH, eps=1e-6)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)  # one name after the other, so that no more lives than in torchvision's
        y, _weights = self.attention(y, y, y, need_weights=False)
        y = y + x
        return y + self.feed_forward(self.before_forward(y))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2021, table 1, "ViT-Large", on images of 224 x 224; a class token, learned positions.

    torchvision's ``vit_l_16`` has the same layers, with dropouts of probability 0, which do nothing.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, WIDTH))
        self.layers = nn.Sequential(*(Layer() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        size = images.shape[0]
        x = self.patches(images).reshape(size, WIDTH, -1).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(size, -1, -1), x], dim=1)
        return self.head(self.norm(self.layers(x + self.positions))[:, 0])  # type: ignore[no-any-return]
