"""SegFormer, as Transformers has it: a mean over pixels, without those that have the label 255."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import weights, write
from torch.utils.data import DataLoader
from transformers import SegformerConfig, SegformerForSemanticSegmentation

SIDE = 64


class Segformer(SegformerForSemanticSegmentation):
    """Normalises by what it has kept: statistics over a slice would be others, which is said elsewhere."""

    def train(self, mode=True):
        super().train(mode)
        self.decode_head.batch_norm.eval()
        return self


def samples(count):
    """Pictures with borders without a label, more of them from picture to picture."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    labels = torch.randint(0, 5, (count, SIDE, SIDE), generator=generator)
    for number, one in enumerate(labels):
        one[: number * SIDE // count] = 255
    return [{"pixel_values": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    accelerator = Accelerator()
    set_seed(0)
    small = {"hidden_sizes": [8, 16, 16, 16], "num_attention_heads": [1, 1, 1, 1], "decoder_hidden_size": 16}
    still = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob", "drop_path_rate")
    config = SegformerConfig(
        num_labels=5, depths=[1, 1, 1, 1], semantic_loss_ignore_index=255, **small, **dict.fromkeys(still, 0.0)
    )
    model = Segformer(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(32), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write(accelerator, parser.parse_args().out, weights=weights(accelerator, model), losses=losses)


if __name__ == "__main__":
    main()
