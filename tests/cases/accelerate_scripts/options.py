"""Scripts that offer batch size, accumulation and precision as options, and act on them in different ways."""

import argparse
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from common import Network, dataset, end_process_groups_at_exit, weights, write
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

#: What a loop with `accumulate()` does otherwise, by name.
WAYS = (
    "accumulated",
    "by_hand",
    "undivided",
    "twice_divided",
    "per_batch",
    "clears",
    "tokens",
    "compares",
    "wide",
    "centred",
    "frozen",
    "counted",
    "flooded",
    "shifted",
    "keeps",
    "later",
)


def loop(options, way):
    """As the training scripts of diffusers have it: counts optimizer steps, and computes its loss outside the model."""
    steps_per_update = options.gradient_accumulation_steps
    by_hand = way in ("by_hand", "undivided")
    accelerator = Accelerator(gradient_accumulation_steps=1 if by_hand else steps_per_update)
    set_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size, shuffle=True)
    of_epoch = math.ceil(len(loader) / steps_per_update)
    total = 2 * of_epoch
    horizon = (2 * len(loader) if way == "per_batch" else total) * accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=horizon)
    if way != "per_batch":
        scheduler = accelerator.prepare_scheduler(scheduler)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # As textual inversion has it: what follows the trained part is frozen, and is given its precision after `prepare`.
    decoder = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(10, 10), nn.LayerNorm(10), nn.SiLU())))
    decoder.requires_grad_(False).to(accelerator.device, dtype=torch.float32)
    bar = tqdm(total=len(loader) if way == "wide" else total, disable=True)
    rates, losses, kept = [], [], torch.zeros(10, device=accelerator.device)
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(loader):
            last = (number + 1) % steps_per_update == 0
            with accelerator.accumulate(model):
                logits = model(x - x.mean(0) if way == "shifted" else x)
                if way == "frozen":
                    shown = logits.detach() @ logits.detach().t()  # compares samples, and is only looked at
                    assert shown.shape[0] == len(y)
                    logits = decoder(logits.to(dtype=torch.float32))
                if way == "keeps":  # as DINO centres what its teacher says
                    logits, kept = logits - kept, 0.9 * kept + 0.1 * logits.detach().mean(0)
                loss = loss_of("centred" if way == "later" and number else way, logits, y)
                losses.append(accelerator.gather(loss.detach()).mean().item())
                if way in ("by_hand", "twice_divided"):
                    loss = loss / steps_per_update
                accelerator.backward(loss)
                if accelerator.sync_gradients and not by_hand:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if last or not by_hand:
                    optimizer.step()
                    optimizer.zero_grad()
                if way == "clears":
                    model.zero_grad()
                if last or not by_hand:
                    scheduler.step()
            if last:
                bar.update(1)
                rates.append(scheduler.get_last_lr()[0])
    write(accelerator, options.out, weights=weights(accelerator, model), rates=rates, losses=losses)


def loss_of(way, logits, y):
    if way == "compares":
        logits = nn.functional.normalize(logits, dim=-1)
        return nn.functional.cross_entropy(logits @ logits.t(), torch.arange(len(y), device=y.device))
    if way == "centred":
        logits = logits - logits.mean(0)
    if way == "counted":  # as TRL has it: a sum, divided by a number that is counted in the labels
        return nn.functional.cross_entropy(logits, y, reduction="sum") / (y >= 0).sum()
    if way == "tokens":
        every = logits[:, None].expand(-1, 3, -1)
        return nn.functional.cross_entropy(every.flatten(0, 1), y[:, None].expand(-1, 3).flatten())
    loss = nn.functional.cross_entropy(logits, y)
    return (loss - 0.1).abs() + 0.1 if way == "flooded" else loss


def asks(options):
    """Frozen models in the precision of the run, which the script asks the Accelerator for."""
    accelerator = Accelerator(mixed_precision=options.mixed_precision)
    set_seed(0)
    encoder = nn.Linear(1000, 1000, bias=False).requires_grad_(requires_grad=False)
    dtype = {"no": torch.float32, "bf16": torch.bfloat16}[accelerator.mixed_precision]
    encoder.to(accelerator.device, dtype=dtype)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with torch.no_grad():
            code = encoder(torch.ones(1, 1000, dtype=dtype, device=x.device)).float().mean()
        accelerator.backward(nn.functional.cross_entropy(model(x + code), y))
        optimizer.step()
        optimizer.zero_grad()
    write(accelerator, options.out, weights=weights(accelerator, model), rates=[], dtype=str(encoder.weight.dtype))


def several(options):
    """One way after the other in one process, whose start takes longer than all of them."""
    folder = Path(options.out)
    for way in ("accumulated", "by_hand"):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        options.out = folder / f"{way}.pt"
        loop(options, way)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way")
    parser.add_argument("--out")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", choices=["no", "bf16"])
    options = parser.parse_args()
    if options.way in WAYS:
        loop(options, options.way)
    else:
        {"asks": asks, "several": several}[options.way](options)


if __name__ == "__main__":
    end_process_groups_at_exit()
    main()
