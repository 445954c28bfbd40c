"""Let a video transformer unlearn a concept, from prompts alone: an ordinary script for Accelerate.

    accelerate launch train_unlearning.py --model_path tiny --target_concept "a red car" --batch_size 4
    vram-guard launch --budget 200MiB train_unlearning.py --model_path tiny --target_concept "a red car" --batch_size 4

Nothing in it knows of vram_guard.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from models import Folder
from torch.utils.data import DataLoader, Dataset
from transformers import ByT5Tokenizer
from unlearning import Unlearning, kept_share

SETTINGS = (
    "at night",
    "in the rain",
    "in a garden",
    "from above",
    "in slow motion",
    "at the sea",
    "on a stage",
    "far away",
)


class Prompts(Dataset[dict[str, torch.Tensor]]):
    """The concept in several settings, each with the empty prompt and a latent of noise."""

    def __init__(self, concept: str, count: int, tokens: int, latent: tuple[int, ...], dtype: torch.dtype) -> None:
        # Bytes as tokens: a tokenizer that needs no vocabulary file.
        prompts = [f"{concept} {SETTINGS[index % len(SETTINGS)]}" for index in range(count)]
        options = {"padding": "max_length", "truncation": True, "max_length": tokens, "return_tensors": "pt"}
        tokenizer = ByT5Tokenizer()
        self.concept = tokenizer(prompts, **options).input_ids
        self.nothing = tokenizer([""] * count, **options).input_ids
        noise = torch.Generator().manual_seed(0)
        self.latents = torch.randn(count, *latent, generator=noise).to(dtype)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"latents": self.latents[index], "concept": self.concept[index], "nothing": self.nothing[index]}


def main() -> None:
    """Train and save."""
    options = _options()
    accelerator = Accelerator(gradient_accumulation_steps=options.gradient_accumulation_steps)
    set_seed(options.seed)
    folder = Folder(options.model_path)
    dtype = getattr(torch, options.dtype)
    accelerator.print(
        *(
            f"{part}: {'weights' if folder.has_weights(part) else 'random weights'}"
            for part in ("transformer", "text_encoder")
        ),
        sep=", ",
    )

    unlearned = folder.transformer(dtype)
    original = folder.transformer(dtype).requires_grad_(False).eval()
    original.load_state_dict(unlearned.state_dict())
    text_encoder = folder.text_encoder(dtype)
    optimizer = torch.optim.AdamW(unlearned.parameters(), lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, options.warmup_steps))
    )

    size = (options.num_frames, folder.channels, options.height, options.width)
    data = Prompts(options.target_concept, options.prompts, folder.tokens, size, dtype)
    loader = DataLoader(data, batch_size=options.batch_size, shuffle=True, drop_last=True)
    unlearned, optimizer, loader, schedule = accelerator.prepare(unlearned, optimizer, loader, schedule)
    original.to(accelerator.device)
    text_encoder.to(accelerator.device)
    rotary = tuple(
        table.to(accelerator.device) for table in folder.rotary(options.num_frames, options.height, options.width)
    )
    training = Unlearning(unlearned, original, text_encoder, rotary, kept_share().to(accelerator.device))

    step = 0
    while step < options.max_train_steps:
        for batch in loader:
            with accelerator.accumulate(unlearned):
                loss = training.loss(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unlearned.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                accelerator.print(f"step {step}: loss {loss.item():.5f}, learning rate {schedule.get_last_lr()[0]:.2e}")
            if step == options.max_train_steps:
                break
    if options.output_dir:
        accelerator.unwrap_model(unlearned).save_pretrained(
            options.output_dir, is_main_process=accelerator.is_main_process
        )
    accelerator.end_training()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model_path", type=Path, required=True, help="a folder in diffusers' layout")
    parser.add_argument("--target_concept", required=True)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_frames", type=int, default=17, help="frames of a latent")
    parser.add_argument("--height", type=int, default=32, help="rows of a latent")
    parser.add_argument("--width", type=int, default=32, help="columns of a latent")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="of all weights")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_train_steps", type=int, default=8)
    parser.add_argument("--warmup_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, help="where the unlearned transformer is saved")
    return parser.parse_args()


if __name__ == "__main__":
    main()
