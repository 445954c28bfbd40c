"""What scripts do beside a plain loop, one function each; run with the names of some.

The structures are those of the examples that Accelerate, Transformers and Diffusers publish; the code is ours.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    find_executable_batch_size,
    set_seed,
)
from common import Network, WithLoss, dataset, end_process_groups_at_exit, weights, write
from safetensors.torch import save_file, save_model
from torch import nn
from torch.utils.data import DataLoader, Subset


class ByHand(torch.optim.Optimizer):
    """An optimizer with a mode, as schedule-free ones have: it trains on other weights than it evaluates with."""

    def __init__(self, parameters, lr=0.1, warmup=4):
        super().__init__(parameters, {"lr": lr, "warmup": warmup, "k": 0, "training": False})

    def _exchange(self, training):
        for group in self.param_groups:
            if group["training"] == training:
                continue
            group["training"] = training
            for parameter in group["params"]:
                if "average" in self.state[parameter]:
                    average = self.state[parameter]["average"]
                    kept = parameter.detach().clone()
                    parameter.data.copy_(average)
                    average.copy_(kept)

    def train(self):
        self._exchange(training=True)

    def eval(self):
        self._exchange(training=False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            rate = group["lr"] * min(1.0, group["k"] / group["warmup"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "average" not in state:
                    state["average"] = parameter.detach().clone()
                parameter.sub_(parameter.grad, alpha=rate)
                state["average"].lerp_(parameter, 1 / (group["k"] + 1))


def parts(options, *, model=WithLoss, optimizer=None, samples=None):
    """A model, its optimizer, a loader for training and one for evaluation, not prepared."""
    set_seed(0)
    model = model()
    optimizer = (optimizer or (lambda own: torch.optim.SGD(own, lr=0.1)))(model.parameters())
    data = dataset(samples or options.samples)
    return (
        model,
        optimizer,
        DataLoader(data, batch_size=options.batch_size, shuffle=True, drop_last=True),
        DataLoader(dataset(24), batch_size=8),
    )


def train(accelerator, model, optimizer, loader, *, each=lambda number, loss: False):
    """One epoch; ``each`` is called after every batch, and may end it."""
    for number, (x, y) in enumerate(loader):
        loss = model(x, labels=y)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if each(number, loss):
            break


def evaluate(accelerator, model, loader):
    """The share of right answers, without the samples that fill the last batch of several processes up."""
    model.eval()
    right, seen = 0, 0
    for number, (x, y) in enumerate(loader):
        with torch.no_grad():
            found = model(x, labels=y)["logits"].argmax(-1)
        found, known = accelerator.gather((found, y))
        if accelerator.use_distributed and number == len(loader) - 1:
            found, known = found[: len(loader.dataset) - seen], known[: len(loader.dataset) - seen]
        right, seen = right + (found == known).sum().item(), seen + len(found)
    return right / seen


# --- loops ----------------------------------------------------------------------------------------------------


def early_stopping(options):
    accelerator = Accelerator()
    model, optimizer, loader, evaluation = accelerator.prepare(*parts(options))
    losses, shares = [], []

    def each(number, loss):
        losses.append(loss.item())
        if min(losses[-2:]) > losses[0] + 10 or number == 3:
            accelerator.set_trigger()
        return accelerator.check_trigger()

    for _ in range(2):
        model.train()
        train(accelerator, model, optimizer, loader, each=each)
        shares.append(evaluate(accelerator, model, evaluation))
    return accelerator, {"weights": weights(accelerator, model), "losses": losses, "rates": shares}


def retried(options):
    """Everything is made inside a function that is called again with half the batch where memory is short."""
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=2 * options.batch_size)
    def training(batch_size):
        nonlocal accelerator
        tried.append(batch_size)
        accelerator.gradient_accumulation_steps = 2 * options.batch_size // batch_size
        accelerator.free_memory()
        if batch_size > options.batch_size:
            raise RuntimeError("CUDA out of memory.")
        options.batch_size = batch_size
        model, optimizer, loader, _ = accelerator.prepare(*parts(options))
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x, labels=y)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        return model

    model = training()
    return accelerator, {"weights": weights(accelerator, model), "steps": tried}


def folds(options):
    """A new model, optimizer and loader for every part of the data, in one process."""
    accelerator = Accelerator()
    everything, kept, batches = dataset(options.samples), [], []
    for fold in range(2):
        set_seed(fold)
        chosen = [number for number in range(options.samples) if number % 2 == fold]
        model = WithLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Subset(everything, chosen), batch_size=options.batch_size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model.train()
        sizes = []
        train(accelerator, model, optimizer, loader, each=lambda _, loss, sizes=sizes: sizes.append(loss))
        kept += weights(accelerator, model)
        batches.append(len(sizes))
        accelerator.free_memory()
    return accelerator, {"weights": kept, "steps": batches, "losses": [optimizer.param_groups[0]["lr"]]}


def shuffled_by_hand(options):
    """A loader with a batch sampler of the script's own."""
    accelerator = Accelerator()
    model, optimizer, loader, _ = parts(options)
    sampler = torch.utils.data.BatchSampler(range(options.samples), options.batch_size, drop_last=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(loader.dataset, batch_sampler=sampler))
    train(accelerator, model, optimizer, loader)
    return accelerator, {"weights": weights(accelerator, model)}


def profiled(options):
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], record_shapes=True)])
    model, optimizer, loader, _ = accelerator.prepare(*parts(options))
    model.train()
    with accelerator.profile() as profile:
        train(accelerator, model, optimizer, loader)
    accelerator.print(profile.key_averages().table(sort_by="cpu_time_total", row_limit=3))
    return accelerator, {"weights": weights(accelerator, model)}


def hooked(options):
    """Gradients travel between processes in float16."""
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(kwargs_handlers=[handler])
    model, optimizer, loader, _ = accelerator.prepare(*parts(options))
    model.train()
    train(accelerator, model, optimizer, loader)
    return accelerator, {"weights": weights(accelerator, model)}


def with_modes(options):
    accelerator = Accelerator()
    model, optimizer, loader, evaluation = accelerator.prepare(*parts(options, optimizer=ByHand))
    shares = []
    for _ in range(2):
        model.train()
        optimizer.train()
        train(accelerator, model, optimizer, loader)
        optimizer.eval()
        shares.append(evaluate(accelerator, model, evaluation))
    return accelerator, {"weights": weights(accelerator, model), "rates": shares}


def tracked(options):
    """A tracker of its own, the loss summed on the device, numbers logged once an epoch."""
    from accelerate.tracking import GeneralTracker, on_main_process

    logged = []

    class Own(GeneralTracker):
        name, requires_logging_directory = "own", False

        @on_main_process
        def __init__(self):
            super().__init__()

        @property
        def tracker(self):
            return logged

        @on_main_process
        def store_init_configuration(self, values):
            logged.append(values)

        @on_main_process
        def log(self, values, step=None, **kwargs):
            logged.append(values)

    accelerator = Accelerator(log_with=Own())
    model, optimizer, loader, _ = accelerator.prepare(*parts(options))
    accelerator.init_trackers("own", {"batch_size": options.batch_size})
    model.train()
    total = 0

    def each(_number, loss):
        nonlocal total
        total += loss.detach().float()

    train(accelerator, model, optimizer, loader, each=each)
    accelerator.log({"loss": total.item() / len(loader)})
    accelerator.end_training()
    return accelerator, {"weights": weights(accelerator, model), "losses": [one["loss"] for one in logged[1:]]}


def counted(options):
    """The batches of a step are loaded ahead, and their losses divided by the items of all of them."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    made = parts(options, model=lambda: Counting(classes=10), samples=56)  # the last step has one batch
    model, optimizer, loader, _ = accelerator.prepare(*made)
    norms, steps = [], math.ceil(len(loader) / 2)
    model.train()
    batches = iter(loader)
    for step in range(steps):
        ahead = [next(batches) for _ in range(2 if step < steps - 1 or len(loader) % 2 == 0 else 1)]
        items = accelerator.gather(sum((y % 3 > 0).sum() for _, y in ahead)).sum().item()
        for number, (x, y) in enumerate(ahead):
            last = number == len(ahead) - 1
            with contextlib.nullcontext() if last or accelerator.num_processes == 1 else model.no_sync():
                loss = model(x, labels=torch.where(y % 3 > 0, y, -100), num_items_in_batch=items)["loss"]
                accelerator.backward(loss * 2 * accelerator.num_processes)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, {"weights": weights(accelerator, model), "norms": norms}


class Counting(Network):
    """Divides its loss by a number that it is given, as the models of Transformers do."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = super().forward(x)
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / (num_items_in_batch or (labels != -100).sum()), "logits": logits}


def one_by_one(options):
    """Loader first, models after it, each thing prepared by itself; the next batch is asked for by hand."""
    accelerator = Accelerator()
    set_seed(0)
    loader = accelerator.prepare(DataLoader(dataset(options.samples), batch_size=options.batch_size))
    generator = accelerator.prepare(Network(classes=4))
    one = accelerator.prepare(torch.optim.SGD(generator.parameters(), lr=0.1))
    critic = accelerator.prepare_model(Network(classes=1))
    nn.init.orthogonal_(accelerator.unwrap_model(critic).last.weight)
    two = accelerator.prepare_optimizer(torch.optim.SGD(critic.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(two.optimizer, lambda step: 1 / (1 + step))
    scheduler = accelerator.prepare_scheduler(scheduler)

    def endless():
        while True:
            yield from loader

    batches, rates = endless(), []
    for _ in range(3):
        x, _ = next(batches)
        made = generator(x)[:, None, :].expand(-1, 8, -1)
        accelerator.backward(critic(made.detach()).mean() - critic(x[:, :8]).mean())
        two.step()
        scheduler.step()
        two.zero_grad()
        accelerator.backward(-critic(made).mean())
        one.step()
        one.zero_grad()
        two.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return accelerator, {"weights": weights(accelerator, generator, critic), "rates": rates}


def ahead(options):
    """Three batches of a step are loaded before the model leaves the evaluation mode in which it came."""
    accelerator = Accelerator()
    model, optimizer, loader, evaluation = accelerator.prepare(*parts(options))
    evaluate_with_gradients(model, evaluation)
    batches = iter(loader)
    for _ in range(2):
        loaded = [next(batches) for _ in range(3)]
        for x, y in loaded:
            model.train()
            accelerator.backward(model(x, labels=y)["loss"] / 3)
        optimizer.step()
        optimizer.zero_grad()


def evaluate_with_gradients(model, loader):
    model.eval()
    for x, y in loader:
        model(x, labels=y)


def evaluated_first(options):
    accelerator = Accelerator()
    model, optimizer, loader, evaluation = accelerator.prepare(*parts(options))
    evaluate_with_gradients(model, evaluation)
    model.train()
    train(accelerator, model, optimizer, loader)


def in_evaluation_mode(options):
    """Trained with dropout and batch statistics off, as adapters over a frozen model are."""
    accelerator = Accelerator()
    model, optimizer, loader, _ = accelerator.prepare(*parts(options))
    model.eval()
    train(accelerator, model, optimizer, loader)
    return accelerator, {"weights": weights(accelerator, model)}


#: The last one ends the process group.
LOOPS = (early_stopping, retried, folds, profiled, hooked, with_modes, counted, one_by_one, tracked)


# --- around the loop ------------------------------------------------------------------------------------------


def system():
    return subprocess.check_output(["uname", "-s"], text=True).strip()


def asks(options):
    """Before and after ``prepare``: where it runs, as trackers like to know."""
    before = system()
    accelerator = Accelerator()
    model, optimizer, loader, _ = accelerator.prepare(*parts(options))
    accelerator.print("runs on", before, system() == before)
    train(accelerator, model, optimizer, loader)
    return accelerator, {"weights": weights(accelerator, model)}


def changes(options, change):
    accelerator = Accelerator()
    model, optimizer, loader, _ = accelerator.prepare(*parts(options))
    change()
    train(accelerator, model, optimizer, loader)
    return accelerator, {"weights": weights(accelerator, model)}


def runs(options):
    return changes(options, lambda: subprocess.run(["touch", f"{options.out}.touched"], check=True))


def runs_in_a_shell(options):
    return changes(options, lambda: os.system(f"echo touched > {options.out}.touched"))


def starts(options):
    touched = Path(f"{options.out}.touched")
    return changes(options, lambda: multiprocessing.get_context("fork").Process(target=touched.touch).start())


def leaves_one_behind(options):
    """A process of its own, which outlives it, and writes down that it runs."""
    runs = Path(f"{options.out}.runs")
    subprocess.Popen(["sh", "-c", 'echo > "$0"; sleep 300; true', str(runs)])
    while not runs.is_file():
        time.sleep(0.05)
    return changes(options, lambda: None)


def caches(options):
    """Writes beside what Hugging Face's libraries keep, as their metrics do, and reads it back."""
    from huggingface_hub.constants import HF_HOME

    accelerator = Accelerator()
    model, optimizer, loader, _ = accelerator.prepare(*parts(options))
    folder = Path(HF_HOME) / "metrics" / "mine"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers").write_text("1 2")
    shutil.move(folder / "numbers", folder / "kept")
    if (folder / "kept").read_text() != "1 2":
        raise RuntimeError("what was written is gone")
    shutil.rmtree(folder)
    shutil.copy(__file__, options.out)
    train(accelerator, model, optimizer, loader)


def loaded_there(options):
    """A model whose weights are loaded onto the GPU at once, which Transformers does in threads."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, loss_type="ForCausalLM")
    GPT2LMHeadModel(config).save_pretrained(f"{options.out}.model")
    model = GPT2LMHeadModel.from_pretrained(f"{options.out}.model", device_map="cuda")
    tokens = torch.randint(0, 16, (options.samples, 8))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=8)
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


def saves(options):
    """After every batch, with the means of several libraries."""
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    accelerator = Accelerator()
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 32, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        whole = accelerator.unwrap_model(model)
        whole.save_pretrained(options.out, state_dict=accelerator.get_state_dict(model))
        whole.config.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
        save_file({"weight": whole.lm_head.weight}, f"{options.out}.safetensors")
        save_model(whole, f"{options.out}.model")
        np.save(f"{options.out}.npy", np.zeros(2))


def resumes(options):
    """From the newest checkpoint, where there is one; rates of three steps; a checkpoint."""
    project = ProjectConfiguration(project_dir=options.out, automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    model, optimizer, loader, _ = parts(options, samples=8 * options.batch_size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if list(Path(options.out).glob("checkpoints/*")):
        accelerator.load_state()
    rates = []

    def each(number, _loss):
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
        return number == 1

    train(accelerator, model, optimizer, loader, each=each)
    project.iteration = len(list(Path(options.out).glob("checkpoints/*")))
    accelerator.save_state()
    Path(options.out, "rates.txt").write_text(" ".join(map(str, rates)))
    return accelerator, {}


def all_loops(options):
    """One loop after the other in one process."""
    folder = Path(options.out)
    for one in LOOPS:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator, found = one(options)
        write(accelerator, folder / f"{one.__name__}.pt", **{"rates": [], **found})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--out", default="never")
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    options.batch_size = 8  # no option of its own: a larger batch has to be made where the loader is
    came = globals()[options.name](options)
    if globals()[options.name] in LOOPS:
        accelerator, found = came
        write(accelerator, options.out, **{"rates": [], **found})


if __name__ == "__main__":
    end_process_groups_at_exit()
    main()
