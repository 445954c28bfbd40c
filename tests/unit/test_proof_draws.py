"""Random draws and normalisation in a step that runs once whole and once in micro-batches."""

from __future__ import annotations

import copy
import pickle
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import batch_norm as imported_batch_norm
from torch.utils.checkpoint import checkpoint

from vram_guard.proof.draws import RowDraws
from vram_guard.proof.fixed_statistics import FixedStatistics
from vram_guard.state.random_generators import RandomState

SAMPLES, LENGTH, WIDTH = 4, 6, 8


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class Noisy(nn.Module):
    """A linear layer on either side of something random, twice: one draw alone goes on from one part to the next."""

    def __init__(self, between):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, 1)
        self.between = between

    def forward(self, x):
        return self.after(self.between(self.between(self.before(x))))


class Recurrent(nn.Module):
    """Two layers with dropout, time first; ``LENGTH`` steps."""

    def __init__(self, cell=nn.LSTM):
        super().__init__()
        self.cell = cell(WIDTH, WIDTH, 2, dropout=0.5)

    def forward(self, x):
        return self.cell(x.transpose(0, 1))[0].transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x):
        return self.layer(x) if self.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)


def diffusion(x):
    """Noise of a strength that is drawn for each sample."""
    t = torch.randint(0, 1000, (len(x),))
    alpha = torch.cos(t / 1000).view(-1, 1, 1)
    return alpha * x + (1 - alpha**2).sqrt() * torch.randn_like(x)


def drop_path(x):
    """Of each channel, so that two draws of a sample hardly ever give the same product."""
    keep = x.new_empty(len(x), 1, WIDTH).bernoulli_(0.5)
    return x * (0.5 + keep)


def layer_drop(x):
    """A choice for the whole batch, from Python's and NumPy's generators."""
    if random.random() < 0.5:
        x = x * 2
    return x * np.random.rand() + random.random()


def tokens(x):
    flat = x.flatten(0, 1)
    return (flat + torch.randn(len(flat), WIDTH)).view_as(x)


def sampled_from_batch(x):
    """Distributions whose parameters are the sample's own, and take a varying count of numbers."""
    rate = 1 + torch.sigmoid(x)
    gamma = torch.distributions.Gamma(rate, 1.0).rsample()
    normal = torch.normal(x.detach(), rate.detach())
    counts = torch.poisson(rate.detach())
    mask = torch.bernoulli(torch.sigmoid(x.detach()))
    ids = torch.multinomial(torch.softmax(x.detach()[:, 0], 1), 2)
    return x * gamma + (normal * counts * mask * ids.sum(1).view(-1, 1, 1)).tanh()


def masked_in_place(x):
    mask = torch.empty_like(x).bernoulli_(torch.sigmoid(x.detach()))
    return x * mask * torch.empty(len(x), LENGTH, 1).uniform_(0.5, 2)


def mixed_by_one(x):
    """One draw for all samples, as long as a micro-batch."""
    strength = torch.distributions.Beta(0.5, 0.5).sample()
    return x * strength + torch.rand(2).sum()


def reseeded(x):
    torch.manual_seed(7)
    return F.dropout(F.dropout(x, 0.5), 0.2)


RANDOM = {
    "nn.Dropout": lambda: nn.Dropout(0.5),
    "F.dropout": lambda: lambda x: F.dropout(x, 0.5),
    "dropout of channels": lambda: lambda x: F.dropout1d(x, 0.5),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "native dropout": lambda: lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rrelu": lambda: nn.RReLU(),
    "attention": lambda: Attention(batch_first=True),
    "attention, time first": lambda: Attention(batch_first=False),
    "scaled dot product": lambda: lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "recurrent, time first": Recurrent,
    "diffusion": lambda: diffusion,
    "gumbel": lambda: lambda x: F.gumbel_softmax(x),
    "stochastic depth of samples": lambda: drop_path,
    "stochastic depth of layers": lambda: layer_drop,
    "tokens": lambda: tokens,
    "parameters of each sample": lambda: sampled_from_batch,
    "probabilities in place": lambda: masked_in_place,
    "one draw for all": lambda: mixed_by_one,
    "seeded inside": lambda: reseeded,
}


def gradients(model, x, sizes, draws=None, wrap=None):
    """Gradients of a mean over samples, summed over micro-batches of these sizes."""
    model = copy.deepcopy(model)
    start = 0
    for size in sizes:
        if draws is not None:
            draws.begin(start, size)
        out = wrap(model, x[start : start + size]) if wrap else model(x[start : start + size])
        (out.square().mean() * size / len(x)).backward()
        start += size
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def reentrant(model, x):
    return checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)


def not_reentrant(model, x):
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("wrap", [None, reentrant, not_reentrant], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("between", RANDOM)
def test_micro_batches_draw_what_the_batch_draws(between, wrap):
    model = Noisy(RANDOM[between]())
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    # Checkpointing puts NumPy's and Python's generators not back: another function, in training too.
    numpy_again = wrap is not None and between == "stochastic depth of layers"
    with RowDraws(SAMPLES) as draws:
        whole = gradients(model, x, [SAMPLES], draws)
        for sizes in ([2, 2], [1, 3], [1, 1, 1, 1]):
            parts = gradients(model, x, sizes, draws, wrap)
            same = torch.allclose(whole, parts, rtol=1e-4, atol=1e-6)
            assert same is not numpy_again, sizes
    # Without the mode the same step differs: the test above could fail.
    state = RandomState()
    whole = gradients(model, x, [SAMPLES])
    state.restore()
    assert not torch.allclose(whole, gradients(model, x, [2, 2]), rtol=1e-3)


def test_it_goes_on_in_another_process():
    """The layout of the whole batch's draws travels; without it, time first is read as samples first."""
    model = Noisy(Attention(batch_first=False)).double()
    x = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.double)
    state = RandomState()
    with RowDraws(SAMPLES) as draws:
        whole = gradients(model, x, [SAMPLES], draws)
    layout = pickle.loads(pickle.dumps(draws.layout))
    found = []
    for known in (layout, None):
        state.restore()
        with RowDraws(SAMPLES, layout=known) as other:
            found.append(torch.allclose(whole, gradients(model, x, [2, 2], other)))
    assert found == [True, False]


@given(
    samples=st.integers(1, 6),
    size=st.integers(1, 6),
    times=st.integers(1, 3),
    width=st.integers(0, 3),
    seed=st.integers(),
)
@settings(max_examples=40)
def test_a_part_is_a_part_of_the_whole(samples, size, times, width, seed):
    """Also where nobody saw the whole batch, where the rows come first."""
    size = min(size, samples)
    start = seed % (samples - size + 1)

    def draw(count):
        rows = count * times
        mean = torch.zeros(rows, width)
        return torch.rand(rows, width), torch.randn_like(mean), torch.normal(mean, 1.0), torch.poisson(mean + 3)

    for stacked in (False, True):
        with RowDraws(samples, stacked=stacked) as draws:
            draws.layout.clear()
            draws.begin(start, size)
            part = draw(size)
            draws.begin(0, samples)
            whole = draw(samples)
        for one, other in zip(part, whole, strict=True):
            if stacked:
                rows = other.view(times, samples, width)[:, start : start + size].reshape(size * times, width)
            else:
                rows = other[start * times : (start + size) * times]
            assert torch.equal(one, rows)


def test_rows_of_views_that_were_stacked():
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    model = Noisy(lambda h: sum(F.dropout(torch.cat([h, 2 * h])).chunk(2)))
    for stacked in (True, False):
        with RowDraws(SAMPLES, stacked=stacked) as draws:
            whole = gradients(model, x, [SAMPLES], draws)
            assert torch.allclose(whole, gradients(model, x, [2, 2], draws), rtol=1e-4, atol=1e-6) is stacked


def test_own_generators():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()

    def noise(x):
        return x + torch.randn(x.shape, generator=generator)

    model, x = Noisy(noise), torch.randn(SAMPLES, LENGTH, WIDTH)
    with RowDraws(SAMPLES) as draws:
        whole = gradients(model, x, [SAMPLES], draws)
        assert torch.allclose(whole, gradients(model, x, [2, 2], draws), rtol=1e-4, atol=1e-6)
        # Checkpointing does not put this generator back, so the block is another one when it runs again.
        assert not torch.allclose(whole, gradients(model, x, [4], draws, not_reentrant), rtol=1e-3)
    assert torch.equal(generator.get_state(), before)


def test_draws_of_a_pass_differ_from_each_other():
    with RowDraws(2) as draws:
        draws.begin(0, 2)
        drawn = [torch.rand(2, 3) for _ in range(5)] + [torch.rand(2, 3, generator=torch.Generator())]
        rows = torch.cat(drawn)
    assert len({tuple(row.tolist()) for row in rows}) == 12


def test_numbers_are_those_of_the_distribution():
    """Rows are independent, and of a mean and spread as asked for."""
    with RowDraws(50) as draws:
        draws.begin(10, 20)
        plain = torch.randn(20, 1000)
        by_sample = torch.normal(torch.zeros(20, 1000), torch.ones(20, 1000))
    for drawn in (plain, by_sample):
        assert drawn.mean().abs() < 0.03
        assert (drawn.std() - 1).abs() < 0.03
        assert (torch.corrcoef(drawn) - torch.eye(20)).abs().max() < 0.2


def test_a_block_runs_again_after_the_next_pass_began():
    model, x = Noisy(nn.Dropout(0.5)), torch.randn(SAMPLES, LENGTH, WIDTH)
    with RowDraws(SAMPLES) as draws:
        whole = gradients(model, x, [SAMPLES], draws)
        outs = []
        for start in (0, 2):
            draws.begin(start, 2)
            outs.append(not_reentrant(model, x[start : start + 2]).square().mean() / 2)
        for out in outs:  # in the order of the forwards, and so the first one after the second began
            out.backward()
    parts = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-6)


def test_the_generators_go_on_as_before():
    expected = RandomState()
    numbers = torch.rand(3), random.random(), np.random.rand()
    expected.restore()
    with RowDraws(SAMPLES) as draws:
        draws.begin(2, 2)
        torch.rand(2), random.random(), np.random.rand(), torch.poisson(torch.ones(2))
    assert torch.equal(torch.rand(3), numbers[0])
    assert (random.random(), np.random.rand()) == numbers[1:]


def test_strides_types_and_identity_are_those_of_the_operator():
    image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with RowDraws(4) as draws:
        draws.begin(2, 2)
        assert torch.randn_like(image).stride() == image.stride()
        assert torch.rand(2, 3, dtype=torch.bfloat16).dtype == torch.bfloat16
        held = torch.zeros(3, 2).t()
        assert held.uniform_() is held
        assert held.count_nonzero() == 6
        out = torch.zeros(2, 3)
        assert torch.bernoulli(torch.ones(2, 3), out=out) is out
        assert torch.equal(out, torch.ones(2, 3))
        assert torch.rand(2, 3, out=out) is out
        x = torch.full((2, 3), -1.0)
        assert F.rrelu(x, training=True, inplace=True) is x
        assert ((x < -0.1) & (x > -0.4)).all()
        assert torch.randperm(5).sort().values.tolist() == [0, 1, 2, 3, 4]
        assert torch.randint(2, 4, ()).item() in (2, 3)


# --- batch normalisation ------------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return self.function(x.transpose(1, 2), self.weight).transpose(1, 2)


class Normalised(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


NORMS = {
    "BatchNorm1d": lambda: Normalised(nn.BatchNorm1d(WIDTH)),
    "momentum=None": lambda: Normalised(nn.BatchNorm1d(WIDTH, momentum=None)),
    "no running statistics": lambda: Normalised(nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    "no weights": lambda: Normalised(nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)),
    "SyncBatchNorm": lambda: Normalised(nn.SyncBatchNorm(WIDTH)),
    "F.batch_norm": lambda: Functional(lambda x, w: F.batch_norm(x, None, None, w, training=True)),
    "imported": lambda: Functional(lambda x, w: imported_batch_norm(x, None, None, w, training=True)),
    "torch.batch_norm": lambda: Functional(
        lambda x, w: torch.batch_norm(x, w, None, None, None, True, 0.1, 1e-5, False)
    ),
}


@pytest.mark.parametrize("wrap", [None, reentrant, not_reentrant], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("norm", NORMS)
def test_normalisation_does_not_see_the_batch(norm, wrap):
    model = Noisy(NORMS[norm]())
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2)
    before = copy.deepcopy(dict(model.named_buffers()))
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    same = []
    for context in (FixedStatistics(model), nullcontext()):
        with context:
            whole = gradients(model, x, [SAMPLES])
            parts = gradients(model, x, [1, 3], wrap=wrap)
            model(x)
            same.append(torch.allclose(whole, parts, rtol=1e-4, atol=1e-6))
        if len(same) == 1:
            assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert same == [True, False]


def test_statistics_are_the_running_ones():
    norm = nn.BatchNorm1d(2)
    norm.running_mean.copy_(torch.tensor([1.0, -1.0]))
    norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    x = torch.randn(5, 2)
    with FixedStatistics(norm):
        assert norm.training
        fixed = norm(x)
        assert norm(x[:1]).shape == (1, 2)  # one value a channel has no variance, and needs none
    assert torch.allclose(fixed, norm.eval()(x))
    assert torch.batch_norm is not None
    assert norm.num_batches_tracked == 0
    with pytest.raises(ValueError, match="more than 1 value"):
        norm.train()(x[:1])


def test_synchronised_normalisation_asks_no_other_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        norm, x = nn.SyncBatchNorm(2), torch.randn(3, 2)
        with FixedStatistics(norm):
            assert torch.allclose(norm(x), x, atol=1e-4)
        assert "forward" in vars(nn.SyncBatchNorm)
        assert nn.SyncBatchNorm.forward is not nn.BatchNorm1d.forward
        with pytest.raises(ValueError, match="expected input tensor to be on"):
            norm(x)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.GroupNorm(2, LENGTH), nn.InstanceNorm1d(LENGTH)])
def test_normalisation_of_single_samples_is_left_alone(norm):
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    with FixedStatistics(norm):
        inside = norm(x)
    assert torch.equal(inside, norm(x))
