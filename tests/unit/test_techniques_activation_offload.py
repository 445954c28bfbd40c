"""Activation offload: what is saved waits on the host, weights stay, and the trace counts both sides."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from architectures import BY_NAME, adamw
from test_techniques_checkpointing import Stack, names, stack_step, total
from torch import nn

from vram_guard.errors import InvalidInputError
from vram_guard.simulate import trace
from vram_guard.simulate.tracing.run import run_step
from vram_guard.step import TrainingStep
from vram_guard.techniques import Recipe, install
from vram_guard.techniques.cpu_as_gpu import cpu_as_gpu
from vram_guard.timeline import Timeline

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")  # torch 2.4's own checkpoint

TOKENS = 64 * 128
FLOATS = 4 * TOKENS
#: What a block of ``Stack`` saves at batch size 64, in bytes: its input, that normalised, the hidden layer before and
#: after GELU, two statistics of the norm, and the mask of the dropout.
SAVED = (64 * FLOATS, 64 * FLOATS, 256 * FLOATS, 256 * FLOATS, FLOATS, FLOATS, 64 * TOKENS)


def power_of_two(size: int) -> int:
    power = 1
    while power < size:
        power *= 2
    return power


def live_at_end_of_forward(timeline: Timeline) -> int:
    """Requested bytes on the GPU when the forward pass of the second step ends, for a batch of 64."""
    end = next(p.start for p in timeline.phases if p.name == "backward" and p.step == 2)
    sizes, live = timeline.sizes(64), 0
    for event in timeline.events[:end]:
        live += sizes[event] if event >= 0 else -sizes[~event]
    return live


# --- the trace ------------------------------------------------------------------------------------------------------


def test_what_leaves_the_gpu_is_what_the_host_takes() -> None:
    plain = trace(stack_step())
    for count in (1, 3, 6):
        moved = trace(stack_step(recipe=Recipe(offload_activations=names(count))))
        assert moved.retrace is None
        assert moved.tier == "symbolic"
        left = live_at_end_of_forward(plain) - live_at_end_of_forward(moved)
        # The first block's input is the batch, which the loop holds: copied, but not gone.
        assert left == count * sum(SAVED) - 64 * FLOATS
        assert sorted(b.size.at(64) for b in moved.host_blocks) == sorted(SAVED * count * 2)
        assert all(block.pinned for block in moved.host_blocks)
        assert moved.at(64).host_peak == count * sum(map(power_of_two, SAVED))


def test_weights_buffers_and_their_views_stay() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)
            self.register_buffer("scale", torch.ones(512, 512))

        def forward(self, x):
            return (self.linear(x) @ self.scale.t()) @ self.linear.weight

    step = TrainingStep(Model, lambda b: torch.randn(b, 512), total, adamw)
    timeline = trace(step.with_(recipe=Recipe(offload_activations=("",))))
    assert max(block.size.at(4) for block in timeline.host_blocks) == 4 * 512 * 4


def test_a_tensor_that_many_save_is_copied_once() -> None:
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            return self.q(x).exp() * self.k(x).sin() + self.v(x)

    step = TrainingStep(Fan, lambda b: torch.randn(b, 16, 64), lambda m, b: m(b).sum(), adamw)
    timeline = trace(step.with_(recipe=Recipe(offload_activations=("",))))
    one = 4 * 16 * 64 * 4
    # x once; exp's result, twice saved; sin's argument; sin's result. Two steps.
    assert [block.size.at(4) for block in timeline.host_blocks] == [one] * 4 * 2


def test_torchs_own_save_on_cpu_is_followed_too() -> None:
    class Own(Stack):
        def __init__(self, pin: bool | None) -> None:
            super().__init__()
            self.pin = pin

        def forward(self, x):
            saved = contextlib.nullcontext() if self.pin is None else torch.autograd.graph.save_on_cpu(self.pin)
            with saved:
                return super().forward(x)

    plain, pageable, pinned = (trace(stack_step().with_(model=lambda p=p: Own(p))) for p in (None, False, True))
    assert plain.at(64).host_peak == 0
    assert live_at_end_of_forward(pageable) == live_at_end_of_forward(pinned)
    assert pageable.at(64).peak_allocated < plain.at(64).peak_allocated
    # All that the blocks save and the input of the last layer; weights too, which torch moves and we do not.
    activations = 6 * sum(SAVED) + 64 * FLOATS
    assert activations < pageable.at(64).host_peak < activations + 2 * 4 * 6 * 2 * 64 * 256
    assert pageable.at(65).host_peak < pinned.at(65).host_peak < 2 * pageable.at(65).host_peak
    ours = trace(stack_step().with_(recipe=Recipe(offload_activations=("",))))
    assert ours.at(64).peak_allocated <= pageable.at(64).peak_allocated


def test_a_checkpointed_block_in_an_offloaded_model_has_its_input_moved_and_nothing_else() -> None:
    recipe = Recipe(checkpoint=names(6), offload_activations=("",))
    both = trace(stack_step(recipe=recipe))
    inside = trace(stack_step(recipe=recipe.with_(offload_activations=())))
    assert both.retrace is None
    # The inputs of the six blocks and of the last layer; the batch is one of them.
    assert [b.size.at(64) for b in both.host_blocks if b.size.per_sample > 512] == [64 * FLOATS] * 7 * 2
    assert both.at(64).peak_allocated < inside.at(64).peak_allocated


# --- the same training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["convnet", "decoder", "lstm", "unet"])
def test_the_copies_give_the_same_training(name: str) -> None:
    architecture = BY_NAME[name]
    torch.manual_seed(0)
    model, batch = architecture.model(), architecture.batch(4)
    other, recipe = copy.deepcopy(model), Recipe(offload_activations=("",))
    with cpu_as_gpu(recipe):
        undo = install(other, recipe)
        for one in (model, other):
            torch.manual_seed(1)
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
            for _ in range(3):
                optimizer.zero_grad()
                architecture.loss(one, batch).backward()
                optimizer.step()
        undo()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert all("forward" not in vars(module) for module in other.modules())


def test_a_saved_tensor_that_is_changed_in_place_is_noticed() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.linear(x).exp()
            hidden += 1
            return hidden

    model = Careless()
    install(model, Recipe(offload_activations=("",)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total(model, torch.randn(4, 8)).backward()


def test_unknown_names_change_nothing() -> None:
    model = Stack(2)
    with pytest.raises(InvalidInputError, match=r"'h\.2'"):
        install(model, Recipe(offload_activations=("h.0", "h.2")))
    assert "forward" not in vars(model.h[0])


AMPERE = (8, 0)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_more_offloaded_blocks_never_take_more_and_keep_the_law(precision: str) -> None:
    before, on_host = None, -1
    for count in (0, 2, 6):
        timeline = trace(stack_step(precision=precision, recipe=Recipe(offload_activations=names(count))))
        assert timeline.retrace is None
        estimate = timeline.at(64)
        assert before is None or estimate.peak_allocated <= before
        assert estimate.host_peak > on_host
        before, on_host = estimate.peak_allocated, estimate.host_peak


def test_accumulation_splits_and_the_law_with_host_memory() -> None:
    step = stack_step(accumulate=4, whole_batch=True, recipe=Recipe(offload_activations=names(6)))
    timeline = trace(step)
    direct = run_step(step, 16, AMPERE)
    assert timeline.host_events == direct.host_events
    assert timeline.host_sizes(16) == direct.host_sizes(16)
    assert timeline.at(16).host_peak == direct.at(16).host_peak
    assert pickle.loads(pickle.dumps(timeline)) == timeline


def test_nothing_outlives_the_backward_pass() -> None:
    model = Stack(2)
    install(model, Recipe(offload_activations=("h.0", "h.1")))
    seen = []
    model.h[0].norm.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    gc.disable()
    try:
        total(model, torch.randn(4, 16, 64)).backward()
        assert seen[0]() is None
    finally:
        gc.enable()
