"""Activation checkpointing: the same training in less memory, and nothing of it left behind."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch
from architectures import BY_NAME, adamw
from test_simulate_law import Mixer, real_allocations
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vram_guard.errors import InvalidInputError
from vram_guard.simulate import trace
from vram_guard.simulate.tracing.run import run_step
from vram_guard.step import TrainingStep
from vram_guard.techniques import Recipe, find_blocks, install
from vram_guard.techniques.kept import kept_as

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")  # torch 2.4's own checkpoint

AMPERE = (8, 0)


# --- the same training ----------------------------------------------------------------------------------------------


def checkpoint_modules(model: nn.Module, names, keeps=()):
    return install(model, Recipe(checkpoint=tuple(names), checkpoint_keeps=tuple(keeps)))


def trained(model: nn.Module, batch, loss, names=(), steps: int = 3) -> dict[str, torch.Tensor]:
    """Everything that training leaves: weights, buffers, the last gradients, the state of the generator."""
    torch.manual_seed(1)
    undo = checkpoint_modules(model, names)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    undo()
    left = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    left |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**left, "generator": torch.get_rng_state()}


def assert_same_training(make, batch, loss, names, tolerance: float = 0.0) -> None:
    results = []
    for chosen in ((), names):
        torch.manual_seed(0)
        results.append(trained(make(), batch, loss, chosen))
    plain, checkpointed = results
    assert plain.keys() == checkpointed.keys()
    for name, tensor in plain.items():
        assert torch.allclose(tensor, checkpointed[name], rtol=0, atol=tolerance), name


class Counting(nn.Module):
    """Counts how often its forward runs: in a list, for a number would be put back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, []

    @property
    def runs(self) -> int:
        return len(self.calls)

    def forward(self, *args, **kwargs):
        self.calls.append(1)
        return self.inner(*args, **kwargs)


def total(model, batch):
    return model(batch).square().mean()


def stack(make, count: int = 3):
    return lambda: nn.Sequential(*[Counting(make()) for _ in range(count)])


@pytest.mark.parametrize(
    ("name", "blocks"), [("decoder", None), ("convnet", None), ("unet", ("down1", "down2")), ("lstm", ("rnn",))]
)
def test_architectures_train_as_if_nothing_had_happened(name: str, blocks: tuple[str, ...] | None) -> None:
    architecture = BY_NAME[name]
    if blocks is None:
        blocks = tuple(block.name for block in find_blocks(architecture.model()))
    assert blocks
    assert_same_training(architecture.model, architecture.batch(4), architecture.loss, blocks)


class Attended(nn.Module):
    """Takes what transformer layers take: keywords, flags, None, tuples; gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask=None, *, scale, rotary, use=True, nothing=None):
        assert nothing is None
        x = self.a(x) * scale * rotary[0]
        return (self.b(x.tanh() + rotary[1]) if use else x) if mask is None else x * mask, None, "kept"


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attended() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        rotary = (x.detach().cos(), self.scale.sin())
        for layer in self.layers:
            x, nothing, word = layer(x, scale=self.scale, rotary=rotary, nothing=None)
            assert nothing is None
            assert word == "kept"
        return x


def test_keywords_tuples_flags_and_none_go_through() -> None:
    assert_same_training(Layered, torch.randn(4, 8), total, ("layers.0", "layers.1", "layers.2"))


@pytest.mark.parametrize("use_cache", [None, False])
def test_a_transformer_of_hugging_face_with_its_cache(use_cache: bool | None) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
        )

    def loss(model, ids):
        return model(input_ids=ids, labels=ids, use_cache=use_cache).loss

    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    blocks = tuple(block.name for block in find_blocks(make()))
    assert blocks == ("transformer.h.0", "transformer.h.1", "transformer.h.2")
    # What a cache returns is laid out otherwise, which changes the order of sums in the CPU's attention.
    tolerance = 0.0 if use_cache is False else 1e-6
    assert_same_training(make, ids, loss, blocks, tolerance)
    assert_same_training(make, ids, loss, blocks[1:2], tolerance)


# --- only where it helps --------------------------------------------------------------------------------------------


def test_the_forward_runs_twice_only_in_training_with_gradients() -> None:
    model, batch = stack(lambda: nn.Linear(8, 8))(), torch.randn(4, 8)
    undo = checkpoint_modules(model, ["0"])
    total(model, batch).backward()
    assert [layer.runs for layer in model] == [2, 1, 1]
    with torch.no_grad():
        model(batch)
    assert [layer.runs for layer in model] == [3, 2, 2]
    model.eval()
    total(model, batch).backward()
    assert [layer.runs for layer in model] == [4, 3, 3]
    undo()
    model.train()
    total(model, batch).backward()
    assert [layer.runs for layer in model] == [5, 4, 4]


# --- what the model is to everybody else ----------------------------------------------------------------------------


def test_the_model_is_as_before_to_everybody_else_and_afterwards_exactly() -> None:
    model = stack(lambda: nn.Linear(8, 8))()
    model[1].forward = model[1].forward  # somebody's own, on the instance
    before = [dict(vars(module)) for module in model.modules()]
    names, state = list(model.state_dict()), copy.deepcopy(model.state_dict())
    signature = inspect.signature(model[0].forward)
    undo = checkpoint_modules(model, ["0", "1"])
    assert list(model.state_dict()) == names
    assert type(model[0]) is Counting
    assert inspect.signature(model[0].forward) == signature
    model.load_state_dict(state)
    undo()
    after = [dict(vars(module)) for module in model.modules()]
    assert all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(before, after, strict=True))


def test_a_copy_checkpoints_by_itself_and_a_pickle_opens_anywhere() -> None:
    torch.manual_seed(0)
    model, batch = stack(lambda: nn.Linear(8, 8))(), torch.randn(4, 8)
    checkpoint_modules(model, ["0", "1"])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].inner.weight.zero_()
    total(copied, batch).backward()
    assert [layer.runs for layer in copied] == [2, 2, 1]
    assert [layer.runs for layer in model] == [0, 0, 0]
    assert copied[0].forward.module is copied[0]

    data = pickle.dumps(model)
    assert b"vram_guard" not in data
    loaded = pickle.loads(data)
    total(loaded, batch).backward()
    assert [layer.runs for layer in loaded] == [1, 1, 1]
    assert torch.equal(loaded(batch), model(batch))
    again = io.BytesIO()
    torch.save(copy.deepcopy(loaded), again)
    again.seek(0)
    assert torch.equal(torch.load(again, weights_only=False)(batch), model(batch))


# --- the trace ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.h, self.out = nn.ModuleList(Block(64) for _ in range(count)), nn.Linear(64, 1)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.out(x)


def stack_step(**settings) -> TrainingStep:
    return TrainingStep(Stack, lambda b: torch.randn(b, 128, 64), total, adamw, **settings)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"h.{index}" for index in range(count))


#: Bytes for each token that a block keeps besides its input: the normalised input, the hidden layer before and after
#: GELU, two statistics, and the mask of the dropout.
KEPT = 4 * (64 + 2 * 4 * 64 + 2) + 64

#: Bytes of the values that the second forward is compared with: 256 of each of these tensors, and of the block's input.
COMPARED = 6 * 256 * 4 + 512


def test_every_checkpointed_block_but_the_last_saves_exactly_what_it_kept() -> None:
    batch = 64
    traced = [trace(stack_step(recipe=Recipe(checkpoint=names(k)))) for k in range(7)]
    # Without the buffers that a sum takes for its call: which one meets the peak differs.
    tensors = [replace(each, blocks=tuple(block._replace(scratch=None) for block in each.blocks)) for each in traced]
    peaks = [each.at(batch).peak_allocated for each in tensors]
    assert [peaks[k] - peaks[k + 1] for k in range(5)] == [batch * 128 * KEPT - COMPARED] * 5
    # The last block is computed again while everything else is already small: it saves nothing at the peak, where the
    # values of its seven tensors are compared.
    assert -4 * 7 * 256 * 4 <= peaks[-2] - peaks[-1] <= 512


@pytest.mark.parametrize("keeps", [(), ("addmm",)])
def test_the_trace_of_checkpointed_blocks_allocates_what_a_real_step_allocates(keeps: tuple[str, ...]) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(*[Mixer() for _ in range(4)], nn.Linear(64, 1))
        checkpoint_modules(made, ("0", "1", "3"), keeps)
        return made

    def batch(b: int) -> torch.Tensor:
        return torch.randn(b, 16, 64)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)

    step = TrainingStep(model, batch, total, sgd)
    timeline = run_step(step, 16, AMPERE)
    start = next(p.start for p in timeline.phases if p.step == 2 and p.name == "forward")
    sizes = [0 if block.category == "workspace" else block.bytes_at(16) for block in timeline.blocks]
    events = [sizes[e] if e >= 0 else -sizes[~e] for e in timeline.events[start:]]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the CPU's layer norm takes a temporary for each thread
    try:
        real = real_allocations(step, 16)
    finally:
        torch.set_num_threads(threads)
    generator = torch.get_rng_state().nbytes  # kept for the second forward, in host memory
    assert [size for size in events if abs(size) >= 1024] == [size for size in real if abs(size) != generator]


# --- chosen operators are kept --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A block with attention, which may drop out, and other dropout behind it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(64, 192), nn.Linear(64, 64, bias=False), dropout

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout).transpose(1, 2).flatten(2)
        return x + F.dropout(self.out(made), 0.2)


KEPT_OPERATORS = ("addmm", "attention", "bmm", "mm")


class Ran(TorchDispatchMode):
    """Counts the operators that may be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counted[kept_as(str(func))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dropout", "keeps", "autocast"), [(0.0, ("attention",), True), (0.1, KEPT_OPERATORS, False)])
def test_a_training_that_keeps_results_is_the_one_as_written(
    dropout: float, keeps: tuple[str, ...], autocast: bool
) -> None:
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(batch).float().square().mean()

    results = []
    for chosen in ((), keeps):
        torch.manual_seed(0)
        model = nn.Sequential(*[Attention(dropout) for _ in range(3)])
        undo = checkpoint_modules(model, ("0", "1", "2"), chosen) if chosen else lambda: None
        results.append(trained(model, torch.randn(2, 16, 64), loss))
        undo()
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


@pytest.mark.torch_since(2, 6)
def test_what_is_kept_does_not_run_again_unless_it_is_random() -> None:
    def ran(dropout: float, keeps: tuple[str, ...]) -> Counter[str]:
        model = nn.Sequential(Attention(dropout), Attention(dropout))
        checkpoint_modules(model, ("0", "1"), keeps)
        made = model(torch.randn(2, 16, 64, requires_grad=True)).sum()
        with Ran() as again:
            made.backward()
        return again.counted

    whole, kept = ran(0.0, ()), ran(0.0, ("addmm", "attention"))
    assert (whole["addmm"], kept["addmm"]) == (2, 0)
    assert (whole["attention"], kept["attention"]) == (2, 0)
    assert sum(whole.values()) > sum(kept.values()) > 0
    assert is_random(0.1)
    assert not is_random(0.0)
    again = run_step(attention_step(0.1, KEPT_OPERATORS), 4, AMPERE).work
    assert {kept_as(item.operator) for item in again if item.recomputed} == {"", "attention"}


def attention_step(dropout: float, keeps: tuple[str, ...]) -> TrainingStep:
    recipe = Recipe(checkpoint=("0", "1"), checkpoint_keeps=keeps)
    model = nn.Sequential(Attention(dropout), Attention(dropout), nn.Linear(64, 1))
    return TrainingStep(model, lambda b: torch.randn(b, 16, 64), total, adamw, recipe=recipe)


def is_random(dropout: float) -> bool:
    """Whether the trace says that attention takes random numbers."""
    work = run_step(attention_step(dropout, ()), 4, AMPERE).work
    return any(item.random for item in work if kept_as(item.operator) == "attention")


@pytest.mark.torch_since(2, 6)
def test_what_is_kept_lies_between_as_written_and_all_computed_again() -> None:
    written, *kept, whole = (
        trace(stack_step(recipe=recipe)).at(64).peak_allocated
        for recipe in (
            Recipe(),
            Recipe(checkpoint=names(6), checkpoint_keeps=("addmm",)),
            Recipe(checkpoint=names(6)),
        )
    )
    assert whole < kept[0] < written
    # The hidden layer and the result of each of the six blocks; the last block's are there at the peak anyhow.
    assert kept[0] - whole == 64 * 128 * 4 * 64 * (5 * 5)


def test_operators_that_cannot_be_kept_are_refused() -> None:
    assert Recipe(checkpoint_keeps=("mm",)) == Recipe()
    with pytest.raises(InvalidInputError, match="checkpoint_keeps"):
        Recipe(checkpoint=("h.0",), checkpoint_keeps=("addm",))


def test_an_argument_that_is_changed_in_place_is_noticed_not_used() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attended() for _ in range(2))

        def forward(self, x):
            scale = torch.ones(8)
            out = self.layers[0](x, scale=scale, rotary=(x, x))[0]
            scale += 1
            return out

    model = Careless()
    checkpoint_modules(model, ["layers.0"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total(model, torch.randn(4, 8)).backward()


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_more_checkpointed_blocks_never_take_more_and_keep_the_law(precision: str) -> None:
    before = None
    for count in (0, 2, 5):
        timeline = trace(stack_step(precision=precision, recipe=Recipe(checkpoint=names(count))))
        assert timeline.retrace is None
        assert timeline.tier == "symbolic"
        peak = timeline.at(64).peak_allocated
        assert before is None or peak < before
        before = peak
