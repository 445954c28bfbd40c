"""The training loops that people write with Accelerate, one function each; run with the name of one."""

import argparse
import copy
import os
from collections import deque
from functools import partial
from pathlib import Path

import torch
import torch._functorch.config
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin, set_seed
from common import Network, WithLoss, dataset, end_process_groups_at_exit, weights, write
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 2


def loop(options, accelerator, *, model=None, loss_of=None, clip=False):
    """A loop without accumulation, as most scripts have it; what it came to."""
    set_seed(0)
    model = (model or Network)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size, shuffle=True)
    total = accelerator.num_processes * EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loss_of = loss_of or (lambda model, x, y: nn.functional.cross_entropy(model(x), y))
    rates, losses, sizes, norms = [], [], [], []
    for _ in range(EPOCHS):
        model.train()
        for step, (x, y) in enumerate(loader):
            loss = loss_of(model, x, y)
            accelerator.backward(loss)
            if clip:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
            losses.append(loss.item())
            sizes.append(len(x))
            if step % 2 == 0:
                accelerator.print("step", step, losses[-1])
        model.eval()
        with torch.no_grad():
            for x, _ in DataLoader(dataset(8), batch_size=4):
                accelerator.gather(torch.as_tensor(len(model(x.to(accelerator.device))), device=accelerator.device))
    return {
        "weights": weights(accelerator, model),
        "rates": rates,
        "losses": losses,
        "sizes": sizes,
        "norms": norms,
        "length": len(loader),
    }


def plain(options):
    accelerator = Accelerator()
    write(accelerator, options.out, **loop(options, accelerator))


def clipping(options):
    """The model returns its loss; gradients are clipped; an evaluation stands before the training."""
    accelerator = Accelerator()
    accelerator.init_trackers("never", config={})

    def loss_of(model, x, y):
        return model(x, labels=y)["loss"]

    write(accelerator, options.out, **loop(options, accelerator, model=WithLoss, loss_of=loss_of, clip=True))


def accumulate(options):
    """``accumulate()``, progress counted in optimizer steps, checkpoints, a limit of steps, resuming."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    evaluate(accelerator, model)
    if options.resume:
        accelerator.load_state(options.resume)
    model.train()
    rates, done, total = [], 0, 0.0
    while done < options.steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, labels=y)["loss"]
                total += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                rates.append(scheduler.get_last_lr()[0])
                if options.checkpoints:
                    accelerator.save_state(f"{options.checkpoints}/step_{done}")
                if done == options.steps:
                    break
    write(accelerator, options.out, weights=weights(accelerator, model), rates=rates, losses=[float(total)])


def evaluate(accelerator, model):
    model.eval()
    seen = 0
    for x, y in accelerator.prepare(DataLoader(dataset(64), batch_size=4)):
        with torch.no_grad():
            logits = model(x, labels=y)["logits"]
        predicted, known = accelerator.gather_for_metrics((logits.argmax(-1), y))
        seen += (predicted == known).sum().item()
    return seen


def fetching(options):
    """The batches of an optimizer step are all loaded before the first is computed, as in Transformers' Trainer."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = iter(loader)
    for _ in range(len(loader) // 2):
        for x, y in [next(batches), next(batches)]:
            accelerator.backward(model(x, labels=y)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    write(accelerator, options.out, weights=weights(accelerator, model), rates=[])


def modulo(options):
    """Accumulation by hand: the loop counts its own batches, and divides by its own number."""
    accelerator = Accelerator()
    set_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for step, (x, y) in enumerate(loader):
        accelerator.backward(nn.functional.cross_entropy(model(x), y) / 2)
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    write(accelerator, options.out, weights=weights(accelerator, model), rates=[], steps=steps)


def adversarial(options):
    """Two models, two optimizers, and the gradient of one model's output through the other."""
    accelerator = Accelerator()
    set_seed(0)
    generator, critic = Network(classes=4), Network(classes=1)
    one = torch.optim.SGD(generator.parameters(), lr=0.1)
    two = torch.optim.SGD(critic.parameters(), lr=0.1)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size, shuffle=True)
    generator, critic, one, two, loader = accelerator.prepare(generator, critic, one, two, loader)
    truth = nn.functional.binary_cross_entropy_with_logits
    for x, _ in loader:
        made = generator(x)[:, None, :].expand(-1, 8, -1)
        real, fake = critic(x[:, :8]), critic(made.detach())
        accelerator.backward(truth(real, torch.ones_like(real)) + truth(fake, torch.zeros_like(fake)))
        two.step()
        two.zero_grad()
        fake = critic(made)
        accelerator.backward(truth(fake, torch.ones_like(fake)))
        one.step()
        one.zero_grad()
        two.zero_grad()
    write(accelerator, options.out, weights=weights(accelerator, generator, critic), rates=[])


def writes(options):
    """Everything that leaves something behind: the dry run must not."""
    folder = Path(options.out)
    accelerator = Accelerator(project_dir=folder)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("tracked", config={})
    for number, (x, y) in enumerate(loader):
        os.makedirs(folder / "checkpoints", exist_ok=True)  # noqa: PTH103 - as scripts do
        accelerator.save_state(folder / "checkpoints" / "first")
        torch.save(model.state_dict(), folder / "model.pt")
        (folder / "notes.txt").write_text("trained")
        (folder / "done").touch()
        with (folder / "log.txt").open("a") as log:
            log.write(f"{number}\n")
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()})
        (folder / "kept.txt").unlink()
    accelerator.save_model(model, folder / "final")
    accelerator.end_training()


def drifting(options):
    accelerator = Accelerator()
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True):
        pass


def frozen(options):
    """A frozen teacher that is moved by hand, and used."""
    accelerator = Accelerator()
    teacher = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    teacher.to(accelerator.device)

    def loss_of(model, x, y):
        with torch.no_grad():
            weight = teacher(torch.ones(1, 1000, device=accelerator.device)).mean()
        return nn.functional.cross_entropy(model(x), y) * weight

    write(accelerator, options.out, **loop(options, accelerator, loss_of=loss_of))


def diffusion(options):
    """A frozen encoder in the precision of the run, an average of weights, noise from a generator on the device."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    encoder = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    model = Network(classes=4)
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    encoder.to(accelerator.device, dtype=dtype)
    average.to(accelerator.device)
    generator = torch.Generator(device=accelerator.device).manual_seed(0)
    losses = []
    for x, _ in loader:
        with accelerator.accumulate(model):
            latent = encoder(x.to(dtype))
            noise = torch.randn(latent.shape, generator=generator, device=latent.device)
            loss = nn.functional.mse_loss(model(latent + noise).float(), noise.mean(1), reduction="mean")
            losses.append(accelerator.gather(loss.repeat(options.batch_size)).mean().item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            with torch.no_grad():
                for kept, new in zip(average.parameters(), accelerator.unwrap_model(model).parameters(), strict=True):
                    kept.lerp_(new, 0.1)
    write(accelerator, options.out, weights=weights(accelerator, model, average), rates=[], losses=losses)


def compiled(options):
    """Compiled by Accelerate."""
    accelerator = Accelerator(dynamo_backend="eager")
    write(accelerator, options.out, **loop(options, accelerator))


def by_inductor(options):
    """Compiled by Accelerate, block by block, for the GPU."""
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    accelerator = Accelerator(dynamo_plugin=plugin)
    write(accelerator, options.out, **loop(options, accelerator))


def reduce_overhead(options):
    """Compiled by the script, to run as CUDA graphs."""
    accelerator = Accelerator()
    made = partial(torch.compile, Network(), mode="reduce-overhead")
    write(accelerator, options.out, **loop(options, accelerator, model=made))


def remembers(options):
    """A block fills a queue of its own each time that it runs."""

    class Remembers(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block, self.means = block, deque(maxlen=8)

        def forward(self, x):
            self.means.append(x.detach().mean())
            return self.block(x - self.means[0])

    def made():
        model = Network()
        model.blocks = nn.ModuleList([*(Remembers(block) for block in model.blocks[:2]), *model.blocks[2:]])
        return model

    accelerator = Accelerator()
    write(accelerator, options.out, **loop(options, accelerator, model=made))


def contrastive(options):
    """Each sample is told apart from all others of its batch, inside the model."""

    class Contrastive(Network):
        def forward(self, x):
            found = nn.functional.normalize(super().forward(x), dim=-1)
            likeness = found @ found.t()
            truth = torch.arange(len(x), device=x.device)
            return {"loss": nn.functional.cross_entropy(likeness, truth), "likeness": likeness}

    accelerator = Accelerator()
    loss_of = lambda model, x, _: model(x)["loss"]  # noqa: E731
    write(accelerator, options.out, **loop(options, accelerator, model=Contrastive, loss_of=loss_of))


def beside(options):
    """The model is given labels and returns its loss; the script computes another one, and trains on that."""

    def loss_of(model, x, y):
        return nn.functional.cross_entropy(model(x, labels=y)["logits"], y, label_smoothing=0.1)

    accelerator = Accelerator()
    write(accelerator, options.out, **loop(options, accelerator, model=WithLoss, loss_of=loss_of))


def summed(options, *, masked=False):
    """A loss that sums over the batch; or a mean over what a mask leaves, which nobody can tell beforehand."""

    class Summed(Network):
        def forward(self, x, labels):
            of_each = nn.functional.cross_entropy(super().forward(x), labels, reduction="none")
            return {"loss": (of_each * (labels < 5)).sum() / (labels < 5).sum() if masked else of_each.sum() / 100}

    accelerator = Accelerator()
    loss_of = lambda model, x, y: model(x, y)["loss"]  # noqa: E731
    write(accelerator, options.out, **loop(options, accelerator, model=Summed, loss_of=loss_of))


def masked(options):
    summed(options, masked=True)


def unprepared(options):
    """Training without ``prepare``: Accelerate never sees it."""
    model = Network()
    for x, y in DataLoader(dataset(8), batch_size=4):
        nn.functional.cross_entropy(model(x), y).backward()


def explicit(options):
    """A precision of its own."""
    accelerator = Accelerator(mixed_precision="no")
    write(accelerator, options.out, **loop(options, accelerator))


def offered(options):
    """A precision that its own command line decides."""
    accelerator = Accelerator(mixed_precision=options.mixed_precision)
    write(accelerator, options.out, **loop(options, accelerator))


def asks(options):
    input("Continue? ")


def never(options):
    accelerator = Accelerator()
    accelerator.prepare(Network(), DataLoader(dataset(8), batch_size=4))


def stepless(options):
    accelerator = Accelerator()
    model, loader = accelerator.prepare(Network(), DataLoader(dataset(8), batch_size=4))
    for number, (x, y) in enumerate(loader):
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        if number == 3:
            return


def fails(options):
    accelerator = Accelerator()
    model, loader = accelerator.prepare(Network(), DataLoader(dataset(8), batch_size=4))
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y[:-1])


def spawns(options):
    torch.multiprocessing.spawn(print, nprocs=2)


def waits(options):
    """For a signal: says that it is there, then trains for a long time."""
    accelerator = Accelerator()
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(options.samples), batch_size=options.batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(100_000):
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            Path(options.out).write_text(str(os.getpid()))


def several(options):
    """One loop after the other in one process, whose start takes longer than all of them."""
    folder = Path(options.out)
    for one in (plain, clipping, accumulate, modulo, adversarial, diffusion):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        options.out = folder / f"{one.__name__}.pt"
        one(options)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("loop")
    parser.add_argument("--out")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--checkpoints")
    parser.add_argument("--resume")
    parser.add_argument("--mixed_precision")
    parser.add_argument("--scale_lr", action="store_true")
    options = parser.parse_args()
    globals()[options.loop](options)


if __name__ == "__main__":
    end_process_groups_at_exit()
    main()
