"""State that ``training_step`` advances itself, and randomness of its own."""

from __future__ import annotations

import collections
import itertools
import os
import random
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .harness import FIT, MICRO, REPORT, TIGHT
from .lightning import FOLDER, Base, Net, Pairs, Training, case, drawn, loader

DRAWS = r"random|draw|dropout|generator"


def state(name: str, *names: str, **about: Any) -> Any:
    """A case whose words have to name one of ``names``: what is advanced once for every micro-batch."""
    return case(f"state {name}", REPORT, FIT, MICRO, **{"says": "|".join(rf"\b{one}\b" for one in names), **about})


# --- state ----------------------------------------------------------------------------------------------------


@state("counter", "calls")
class Counter(Base):
    calls = 0

    def loss(self, batch):
        self.calls += 1
        self.effects.append(self.calls)
        return super().loss(batch) * min(1.0, self.calls / 3)


@state("counter in a buffer", "calls")
class CounterBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def loss(self, batch):
        self.calls += 1
        return super().loss(batch)


@case("state queue of keys", REPORT, FIT, MICRO, TIGHT, says=r"\bqueue\b|\bpointer\b")
class Queue(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", F.normalize(drawn(11, 32, 4), dim=-1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def loss(self, batch):
        x, y = batch
        query, key = F.normalize(self.net(x), dim=-1), F.normalize(y, dim=-1)
        scores = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone().T], -1) / 0.5
        place = (int(self.pointer) + torch.arange(len(key))) % len(self.queue)
        self.queue[place] = key
        self.pointer.add_(len(key)).remainder_(len(self.queue))
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


@state("rate of the optimizer", "lr", "param_groups")
class OwnRate(Base):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().param_groups[0]["lr"] *= 0.9
        return loss


@case("state variable of the environment", says=r"environ")
def in_environment():
    class InEnvironment(Base):
        def loss(self, batch):
            calls = int(os.environ.get("FIDELITY_CALLS", "0")) + 1
            os.environ["FIDELITY_CALLS"] = str(calls)
            return super().loss(batch) * min(1.0, calls / 3)

    os.environ.pop("FIDELITY_CALLS", None)
    return Training(InEnvironment(), effects=lambda: os.environ.get("FIDELITY_CALLS"))


class Taught(Base):
    def __init__(self):
        super().__init__()
        self.teacher = Net().requires_grad_(requires_grad=False)
        self.teacher.load_state_dict(self.net.state_dict())

    @torch.no_grad()
    def follow(self):
        for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs + 0.01, alpha=0.1)

    def loss(self, batch):
        x, y = batch
        out = self.net(x)
        return F.mse_loss(out, y) + F.mse_loss(out, self.teacher(x + 0.1))


@state("teacher averaged in the step", "teacher")
class Teacher(Taught):
    def loss(self, batch):
        self.follow()
        return super().loss(batch)


@state("teacher made in the first step", "teacher", "old")
class TeacherMadeLate(Base):
    old = None

    def loss(self, batch):
        x, y = batch
        if self.old is None:
            self.old = [part.detach().clone() for part in self.net.parameters()]
        with torch.no_grad():
            for mine, theirs in zip(self.old, self.net.parameters(), strict=True):
                mine.mul_(0.5).add_(theirs, alpha=0.5)
        first, bias, last, more = self.old
        taught = F.linear(torch.tanh(F.linear(x, first, bias)), last, more)
        return F.mse_loss(self.net(x), y) + F.mse_loss(self.net(x), taught + 0.1)


@state("cache by the length of the batch", "cache")
class Cached(Base):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def loss(self, batch):
        x, y = batch
        noise = self.cache.setdefault(len(x), torch.full((1, 6), 0.01 * len(x)))
        return F.mse_loss(self.net(x + noise), y)


@case("state teacher averaged after the batch", REPORT, FIT, MICRO, TIGHT, exact=True)
class TeacherAfter(Taught):
    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()


@state("recurrent state carried on", "hidden")
class Carried(Base):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 6)
        self.hidden = torch.zeros(1, 6)

    def loss(self, batch):
        x, y = batch
        new = self.cell(x, self.hidden.expand(len(x), -1))
        self.hidden = new.detach().mean(0, keepdim=True)
        return F.mse_loss(self.net(new), y)


@state("spectral norm", "_u", "_v", "last", "spectral", r"parametrizations\S*")
class Spectral(Base):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.net.last)


@state("spectral norm of old", "weight_u", "weight_v", "first", "spectral")
class SpectralOld(Base):
    def __init__(self):
        super().__init__()
        nn.utils.spectral_norm(self.net.first)


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", drawn(12, 8, 6))

    def forward(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        for code in nearest.unique().tolist():
            self.codes.data[code] = self.codes.data[code] * 0.8 + 0.2 * x.detach()[nearest == code].mean(0)
        return x + (self.codes[nearest] - x).detach()


@state("codebook through data", "codes", "codebook")
class Quantised(Base):
    def __init__(self):
        super().__init__()
        self.inner, self.codebook = nn.Linear(6, 6), Codebook()

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(self.codebook(self.inner(x))), y)


@state("counter of the class", "made", "ClassCounter")
def class_counter():
    class ClassCounter(Base):
        made: ClassVar[int] = 0

        def loss(self, batch):
            type(self).made += 1
            return super().loss(batch) * (1 + type(self).made / 10)

    return Training(ClassCounter(), effects=lambda: ClassCounter.made)


class Meter:
    def __init__(self):
        self.values, self.total = [], 0

    def add(self, value):
        self.values.append(value)
        self.total += 1


@state("helper object", "meter")
def helper():
    class Helped(Base):
        def __init__(self):
            super().__init__()
            self.meter = Meter()

        def loss(self, batch):
            self.meter.add(len(batch[0]))
            return super().loss(batch) / (1 + 0.1 * self.meter.total)

    module = Helped()
    return Training(module, effects=lambda: vars(module.meter))


@state("helper object that is nobody's attribute", "meter", "Meter", "closure", "training_step")
def foreign_helper():
    meter = Meter()

    class Helped(Base):
        def loss(self, batch):
            meter.add(len(batch[0]))
            return super().loss(batch) / (1 + 0.1 * meter.total)

    return Training(Helped(), effects=lambda: vars(meter))


SEEN: list[int] = []


@state("list of the script", "SEEN", "global", "training_step")
def global_list():
    SEEN.clear()

    class Appending(Base):
        def loss(self, batch):
            SEEN.append(len(batch[0]))
            return super().loss(batch)

    return Training(Appending(), effects=lambda: list(SEEN))


@state("file that is appended to", r"file\S*", "writ\\w*", r"lines\S*", "training_step")
def file():
    path = Path(tempfile.mkdtemp(dir=FOLDER.name)) / "lines.txt"
    path.touch()

    class Writing(Base):
        def loss(self, batch):
            with path.open("a") as lines:
                lines.write(f"{len(batch[0])}\n")
            return super().loss(batch)

    return Training(Writing(), effects=path.read_text)


@state("centre of the outputs", "centre")
class Centred(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def loss(self, batch):
        x, y = batch
        out = self.net(x)
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return F.mse_loss(out - self.centre, y)


@case("state batch normalisation", REPORT, FIT, MICRO, TIGHT, says=r"normali[sz]ation|running|batchnorm|statistic")
class Normalised(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(self.norm(x)), y)


@case("state frozen batch normalisation", exact=True)
class FrozenNorm(Normalised):
    def loss(self, batch):
        self.norm.eval()
        return super().loss(batch)


@case("state instance and group normalisation", exact=True)
class GroupNormalised(Base):
    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.GroupNorm(2, 6), nn.LayerNorm(6)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(self.norm(x) + self.other(x)), y)


@state("weight steered by the loss", "beta")
class Steered(Base):
    beta = 1.0

    def loss(self, batch):
        loss = super().loss(batch)
        value = loss * self.beta
        self.beta = self.beta * 0.9 + 0.1 * float(loss.detach())
        return value


@state("memory of samples", "memory")
class Memory(Base):
    def __init__(self):
        super().__init__()
        self.memory: list[torch.Tensor] = []

    def loss(self, batch):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        if self.memory:
            loss = loss + self.net(self.memory[-1]).square().mean()
        self.memory.append(x.detach().clone())
        return loss


@state("nested statistics", "stats")
def nested():
    class Nested(Base):
        def __init__(self):
            super().__init__()
            self.stats = {"steps": {"n": 0, "sizes": []}, "last": torch.zeros(4)}

        def loss(self, batch):
            self.stats["steps"]["n"] += 1
            self.stats["steps"]["sizes"].append(len(batch[0]))
            self.stats["last"] += self.net(batch[0]).detach().sum(0)
            return super().loss(batch)

    module = Nested()
    return Training(module, effects=lambda: module.stats)


@state("tensor attribute of a part", "scale", "scaling")
class TensorAttribute(Base):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(6)

        def forward(self, x):
            self.scale = 0.9 * self.scale + 0.1 * x.abs().mean(0)
            return x / self.scale

    def __init__(self):
        super().__init__()
        self.scaling = self.Scaling()

    def loss(self, batch):
        return super().loss((self.scaling(batch[0]), batch[1]))


@state("initialised by the first batch", "ready", "shift", "scale")
class DataDependent(Base):
    def __init__(self):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.ready = False

    def loss(self, batch):
        x, y = batch
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / x.std(0))
            self.ready = True
        return F.mse_loss(self.net((x + self.shift) * self.scale), y)


@state("last losses", "recent")
def recent():
    class Recent(Base):
        def __init__(self):
            super().__init__()
            self.recent = collections.deque(maxlen=3)

        def loss(self, batch):
            loss = super().loss(batch)
            self.recent.append(loss.item())
            return loss * len(self.recent)

    module = Recent()
    return Training(module, effects=lambda: list(module.recent))


@state("array of counts", "counts")
def array():
    class Counting(Base):
        def __init__(self):
            super().__init__()
            self.counts = np.zeros(3)

        def loss(self, batch):
            self.counts += 1
            return super().loss(batch)

    module = Counting()
    return Training(module, effects=lambda: module.counts)


@state("iterator", "numbers")
class Iterating(Base):
    def __init__(self):
        super().__init__()
        self.numbers = itertools.count(1)

    def loss(self, batch):
        number = next(self.numbers)
        self.effects.append(number)
        return super().loss(batch) / number


@state("generator function", "numbers")
class Yielding(Base):
    def __init__(self):
        super().__init__()
        self.numbers = (n for n in range(1, 99))

    def loss(self, batch):
        return super().loss(batch) / next(self.numbers)


@state("second loader in the step", "targets", r"other\S*")
class SecondLoader(Base):
    def __init__(self):
        super().__init__()
        self.targets = iter(loader(Pairs(800), shuffle=True))

    def loss(self, batch):
        other, _ = next(self.targets)
        return super().loss(batch) + 0.1 * self.net(other).square().mean()


@state("weights normalised in the step", "weight")
class NormalisedWeights(Base):
    def loss(self, batch):
        with torch.no_grad():
            self.net.last.weight.copy_(F.normalize(self.net.last.weight, dim=-1))
        return super().loss(batch)


@case("state set of what was seen")
def seen():
    class Seeing(Base):
        def __init__(self):
            super().__init__()
            self.seen: set[float] = set()

        def loss(self, batch):
            self.seen |= {round(float(value), 3) for value in batch[0][:, 0]}
            return super().loss(batch)

    module = Seeing()
    return Training(module, effects=lambda: sorted(module.seen))


@state("counter in a setting of the trainer", "callback_metrics", "calls", "trainer", "training_step")
def counter_elsewhere():
    tally = {"calls": 0}

    class Elsewhere(Base):
        def loss(self, batch):
            tally["calls"] += 1
            return super().loss(batch) * (1 + tally["calls"] / 10)

    return Training(Elsewhere(), effects=lambda: dict(tally))


# --- randomness -----------------------------------------------------------------------------------------------


def draws(name: str, *modes: str, **about: Any) -> Any:
    return case(f"draws {name}", *(modes or (REPORT, FIT, MICRO)), **{"says": DRAWS, **about})


@draws("dropout", REPORT, FIT, MICRO, TIGHT)
class Dropped(Base):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def loss(self, batch):
        return super().loss((self.drop(batch[0]), batch[1]))


@draws("functional dropout")
class FunctionalDropout(Base):
    def loss(self, batch):
        return super().loss((F.dropout(batch[0], 0.3), batch[1]))


@draws("noise")
class Noisy(Base):
    def loss(self, batch):
        return super().loss((batch[0] + 0.3 * torch.randn_like(batch[0]), batch[1]))


@draws("noise of a module's generator")
def own_generator():
    class OwnNoise(Base):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def loss(self, batch):
            x, y = batch
            return super().loss((x + 0.3 * torch.randn(x.shape, generator=self.generator), y))

    module = OwnNoise()
    return Training(module, effects=lambda: module.generator.get_state())


@draws("a module's numpy generator")
def own_numpy():
    class OwnNumpy(Base):
        def __init__(self):
            super().__init__()
            self.rng = np.random.default_rng(5)

        def loss(self, batch):
            return super().loss(batch) * float(self.rng.uniform(0.5, 1.5))

    module = OwnNumpy()
    return Training(module, effects=lambda: repr(module.rng.bit_generator.state))


@draws("a module's Python generator")
def own_python():
    class OwnPython(Base):
        def __init__(self):
            super().__init__()
            self.rng = random.Random(5)

        def loss(self, batch):
            return super().loss(batch) * self.rng.uniform(0.5, 1.5)

    module = OwnPython()
    return Training(module, effects=lambda: module.rng.getstate())


@draws("mixup", REPORT, FIT, MICRO, TIGHT)
class Mixup(Base):
    def loss(self, batch):
        x, y = batch
        part, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
        return super().loss((part * x + (1 - part) * x[order], part * y + (1 - part) * y[order]))


@draws("a random scale from Python")
class RandomScale(Base):
    def loss(self, batch):
        return super().loss((batch[0] * random.choice([0.5, 1.0, 2.0]), batch[1]))


@draws("flips with Python's generator")
class Flips(Base):
    def loss(self, batch):
        x, y = batch
        return super().loss((x.flip(-1) if random.random() < 0.5 else x, y))


@draws("diffusion")
class Diffusion(Base):
    def loss(self, batch):
        x, _ = batch
        time, noise = torch.randint(0, 10, (len(x), 1)) / 10, torch.randn_like(x)
        return F.mse_loss(self.net((1 - time).sqrt() * x + time.sqrt() * noise), noise[:, :4])


@draws("a variational encoder")
class Variational(Base):
    def loss(self, batch):
        mean, spread = self.net(batch[0]).chunk(2, -1)
        made = mean + spread.exp() * torch.randn_like(mean)
        return F.mse_loss(made, batch[1][:, :2]) + 0.01 * (mean.square() + spread.exp() - spread).mean()


@draws("a masked autoencoder")
class Masked(Base):
    def loss(self, batch):
        x, y = batch
        return super().loss((x * (torch.rand(x.shape).argsort(-1) < 3), y))


@draws("gumbel softmax")
class Gumbel(Base):
    def loss(self, batch):
        return F.mse_loss(F.gumbel_softmax(self.net(batch[0])), batch[1])


@draws("stochastic depth")
class StochasticDepth(Base):
    def loss(self, batch):
        x, y = batch
        kept = torch.empty(len(x), 1).bernoulli_(0.7) / 0.7
        return F.mse_loss(kept * self.net(x), y)


@draws("negatives from the generator")
class Negatives(Base):
    def loss(self, batch):
        x, y = batch
        other = torch.randint(len(x), (len(x),))
        out = self.net(x)
        return F.softplus((out * y[other]).sum(-1) - (out * y).sum(-1)).mean()


class Jitter(nn.Module):
    def forward(self, weight):
        return weight + 0.1 * torch.randn_like(weight)


@draws("a weight with noise")
class Jittered(Base):
    def __init__(self):
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.net.last, "weight", Jitter())


@draws("a seed for every batch")
class Seeded(Base):
    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)
        loss = self.loss((batch[0] + 0.3 * torch.randn_like(batch[0]), batch[1]))
        self.log("loss", loss)
        return loss


@draws("a leaky unit of random slope")
class RandomSlope(Base):
    def __init__(self):
        super().__init__()
        self.unit = nn.RReLU()

    def loss(self, batch):
        return F.mse_loss(self.unit(self.net(batch[0])), batch[1])
