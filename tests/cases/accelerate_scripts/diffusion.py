"""A small latent diffusion model trained as diffusers' examples do it: after each epoch its pipeline makes pictures."""

import argparse

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--pictures", type=int, default=4)
options = parser.parse_args()

PIXELS, WORDS, WIDTH = 128, 8, 32
accelerator = Accelerator()
blocks = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
vae = AutoencoderKL(
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, **blocks
)
unet = UNet2DConditionModel(
    sample_size=PIXELS // 2,
    in_channels=4,
    out_channels=4,
    cross_attention_dim=WIDTH,
    attention_head_dim=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    **blocks,
)
noise = DDPMScheduler(num_train_timesteps=100)
vae.requires_grad_(False)
optimizer = torch.optim.AdamW(unet.parameters())
pictures = [{"pixels": torch.randn(3, PIXELS, PIXELS), "text": torch.randn(WORDS, WIDTH)} for _ in range(16)]
unet, optimizer, loader = accelerator.prepare(unet, optimizer, DataLoader(pictures, batch_size=1))
vae.to(accelerator.device)


def validate():
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        unet=accelerator.unwrap_model(unet),
        scheduler=noise,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).to(accelerator.device)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator(device=accelerator.device).manual_seed(0)
    text = torch.zeros(options.pictures, WORDS, WIDTH, device=accelerator.device)
    with torch.autocast(accelerator.device.type, enabled=False):
        made = pipeline(
            prompt_embeds=text, negative_prompt_embeds=text, num_inference_steps=8, generator=generator
        ).images
    del pipeline
    return made


for _epoch in range(3):
    unet.train()
    for batch in loader:
        latents = vae.encode(batch["pixels"]).latent_dist.sample() * vae.config.scaling_factor
        added = torch.randn_like(latents)
        steps = torch.randint(0, 100, (len(latents),), device=latents.device).long()
        predicted = unet(noise.add_noise(latents, added, steps), steps, batch["text"]).sample
        accelerator.backward(nn.functional.mse_loss(predicted.float(), added.float()))
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        assert len(validate()) == options.pictures
