"""Which modules of a model are its blocks."""

from __future__ import annotations

import warnings

import pytest
from architectures import BY_NAME
from torch import nn

from vram_guard.errors import InvalidInputError
from vram_guard.techniques import ModelBlock, find_blocks, named_blocks


def found(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


def layers(count: int) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), count, enable_nested_tensor=False)


class Feed(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.bn1(self.conv1(x))


def test_layers_of_transformers() -> None:
    model = nn.Module()
    model.encoder = layers(2)
    model.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 3)
    assert found(model) == [
        *("encoder.layers.0", "encoder.layers.1"),
        *("decoder.layers.0", "decoder.layers.1", "decoder.layers.2"),
    ]
    block = find_blocks(layers(2))[1]
    one = sum(p.numel() for p in nn.TransformerEncoderLayer(8, 2, 16).parameters())
    assert block == ModelBlock("layers.1", "TransformerEncoderLayer", "layers", one)


def test_blocks_inside_blocks_belong_to_them() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.experts = nn.MultiheadAttention(8, 2), nn.ModuleList(Feed() for _ in range(4))

        def forward(self, x):
            return sum(expert(x) for expert in self.experts)

    model = nn.Module()
    model.layers = nn.ModuleList(Experts() for _ in range(3))
    assert found(model) == ["layers.0", "layers.1", "layers.2"]
    model.layers[0].experts = nn.ModuleList(Feed(16) for _ in range(2))  # one layer of another size, as DeepSeek's
    assert found(model) == ["layers.0", "layers.1", "layers.2"]


def test_stages_are_looked_into() -> None:
    class Stage(nn.Module):
        def __init__(self, channels: int, depth: int) -> None:
            super().__init__()
            self.blocks, self.reduce = (
                nn.ModuleList(Residual(channels) for _ in range(depth)),
                nn.Conv2d(channels, 8, 1),
            )

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.reduce(x)

    model = nn.Sequential(Stage(8, 2), Stage(16, 3), Stage(32, 1))
    # The last stage repeats nothing: it is a block as a whole.
    assert found(model) == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1", "1.blocks.2", "2"]


def test_residual_networks_and_their_kin() -> None:
    resnet = nn.Module()
    for stage in range(1, 5):
        setattr(resnet, f"layer{stage}", nn.Sequential(*[Residual(8 * stage) for _ in range(2)]))
    assert found(resnet) == [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]
    assert found(BY_NAME["convnet"].model())
    assert found(BY_NAME["decoder"].model())


def test_levels_of_a_unet_written_as_sequentials() -> None:
    def level(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels), nn.ReLU())

    model = nn.Module()
    model.down1, model.down2, model.bottom = level(4), level(8), level(16)
    model.head = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    assert found(model) == ["down1", "down2", "bottom"]


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "grad_checkpointing"])
def test_blocks_that_the_user_checkpoints_are_left_out(flag: str) -> None:
    model = nn.Module()
    model.encoder, model.decoder = layers(2), layers(2)
    setattr(model.decoder, flag, True)
    assert found(model) == ["encoder.layers.0", "encoder.layers.1"]
    setattr(model.decoder.layers[1], flag, False)
    assert found(model) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.1"]


def test_hugging_faces_own_checkpointing_is_seen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    assert found(model) == ["transformer.h.0", "transformer.h.1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers 5 has another name for it, 4 has not
        model.gradient_checkpointing_enable()
    assert found(model) == []


def test_named_blocks_are_checked() -> None:
    model = layers(2)
    (block,) = named_blocks(model, ["layers.1.self_attn"])
    assert (block.kind, block.stack) == ("MultiheadAttention", "layers.1")
    for names, message in (
        (["layer.1"], "no module named 'layer.1'; did you mean 'layers.1'"),
        (["layers"], "'layers' is a ModuleList without a forward"),
        (["layers.0", "layers.0"], "'layers.0' is named twice"),
        ([""], "the whole model is not a block"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            named_blocks(model, names)
