"""Steps under torch.compile: Inductor's own code runs in the trace, without a GPU, Triton or a C++ compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from compiled_cases import MISSING, WIDTH, Block
from torch import nn

from vram_guard import TrainingStep
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.plan import plan
from vram_guard.report import text
from vram_guard.report.as_json import as_dict
from vram_guard.simulate.compiled import EAGER, Compiler, NotCompiledError, allowed_seconds
from vram_guard.simulate.tracing.run import run_step
from vram_guard.techniques import Recipe
from vram_guard.timeline import CompiledCode, Timeline, merge_affine

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"this torch's compiler is not followed: {MISSING}"),
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES = 4096
#: Bytes of one activation.
ONE = 4 * WIDTH * SAMPLES
CAPABILITY = (8, 0)


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def step_of(model: nn.Module, loss: Callable[..., Any] = mean_square) -> TrainingStep:
    return TrainingStep(
        model=model,
        batch=lambda count: torch.ones(count, WIDTH, requires_grad=True),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count)))


def compiled_blocks(**options: Any) -> nn.Sequential:
    made = blocks()
    for block in made:
        block.compile(**options)
    return made


def bytes_of(timeline: Timeline, category: str) -> int:
    sizes = timeline.sizes(SAMPLES)
    return sum(size for block, size in zip(timeline.blocks, sizes, strict=True) if block.category == category)


def followed(step: TrainingStep, size: int = SAMPLES) -> Timeline:
    return Compiler(lambda size: run_step(step, size, CAPABILITY, compiled=True), 300)(size)


def eager(step: TrainingStep) -> Timeline:
    return run_step(step, SAMPLES, CAPABILITY)


def test_compiled_blocks_take_what_inductors_code_allocates() -> None:
    step = step_of(compiled_blocks())
    made, as_written = followed(step), eager(step)
    assert made.compiled == CompiledCode(graphs=2)  # forward and backward: the three blocks are one graph
    # Uncompiled, a block keeps the results of sin, tanh and exp and their input; compiled, the latter alone.
    assert bytes_of(as_written, "activations") - bytes_of(made, "activations") >= 2 * 3 * 2 * ONE
    assert bytes_of(made, "gradients") == bytes_of(as_written, "gradients") > 0
    assert {block.module for block in made.blocks if block.category == "activations"} >= {"0", "1", "2"}


def test_two_compiled_sizes_predict_a_third_where_the_code_is_the_same() -> None:
    step = step_of(compiled_blocks())
    small, large, direct = (followed(step, size) for size in (2048, 3072, SAMPLES))
    merged = merge_affine(small, large)
    assert merged is not None
    assert merged.events == direct.events
    assert merged.sizes(SAMPLES) == direct.sizes(SAMPLES)
    assert merged.at(SAMPLES).peak_reserved == direct.at(SAMPLES).peak_reserved
    assert merged.compiled == direct.compiled == CompiledCode(graphs=2)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_whole_model_is_compiled(dynamic: bool | None) -> None:
    model: Any = torch.compile(blocks(), dynamic=dynamic)
    made = followed(step_of(model))
    assert made.compiled == CompiledCode(graphs=2)
    assert made.at(SAMPLES).peak_allocated < eager(step_of(blocks())).at(SAMPLES).peak_allocated


def test_a_compiled_loss_keeps_its_gradient() -> None:
    compiled = torch.compile(lambda scores, labels: F.cross_entropy(scores * 2, labels))
    step = step_of(blocks(1), lambda model, batch: compiled(model(batch), batch[:, 0].long()))
    made = followed(step)
    assert bytes_of(made, "gradients") == bytes_of(eager(step_of(blocks(1))), "gradients") > 0
    assert made.compiled == CompiledCode(graphs=2)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x) * torch.tensor([2.0], device=x.device)


def test_a_graph_break_is_said_and_modules_behind_it_are_compiled() -> None:
    made = followed(step_of(torch.compile(Breaking())))
    assert made.compiled is not None
    assert made.compiled.graphs == 4
    assert len(made.compiled.breaks) == 1
    assert "graph_break" in made.compiled.breaks[0]


def test_batch_normalisation_convolutions_dropout_and_autocast_are_followed() -> None:
    model: Any = torch.compile(
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Flatten(), nn.Linear(512, 10)),
        )
    )
    step = TrainingStep(
        model=model,
        batch=lambda count: (torch.ones(count, 3, 8, 8), torch.zeros(count, dtype=torch.long)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        precision="bf16-mixed",
    )
    made = followed(step, 8)
    assert made.compiled == CompiledCode(graphs=2)
    assert sum(size for block, size in zip(made.blocks, made.sizes(8), strict=True) if block.category == "gradients")


class Flex(nn.Module):
    """Attention whose kernel is made of one of Inductor's templates."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        heads = x.view(1, 4, -1, WIDTH)
        return flex_attention(heads, heads, heads).reshape(x.shape)  # type: ignore[union-attr]


def test_flex_attention_is_followed_where_it_is_compiled() -> None:
    made = followed(step_of(nn.Sequential(Block(), torch.compile(Flex()))), 1024)  # type: ignore[arg-type]
    assert made.compiled is not None
    assert made.compiled.graphs
    assert not made.compiled.breaks


class Grouped(nn.Module):
    """Attention of four heads over one group, as users write it in models that are not compiled otherwise."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.parts, self.attention = nn.Linear(WIDTH, 6 * WIDTH), attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts(x).view(x.shape[0], -1, 6, WIDTH).transpose(1, 2)
        query, key, value = parts.split([4, 1, 1], dim=1)
        return self.attention(query, key, value, enable_gqa=True)  # type: ignore[no-any-return]


def attending(attention: Callable[..., Any]) -> TrainingStep:
    step = step_of(Grouped(attention))
    return step.with_(batch=lambda count: torch.ones(count, 256, WIDTH))


def test_flex_attention_outside_the_compiler_is_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    with pytest.raises(UnsupportedStepError, match=r"torch\.compile\(flex_attention\)"):
        run_step(attending(flex_attention), 4, CAPABILITY)


# --- plans and reports ----------------------------------------------------------------------------------------------


def test_a_plan_shows_the_compiled_step_beside_the_eager_one() -> None:
    made = plan(step_of(compiled_blocks()), SAMPLES, "1GiB")
    assert made.compiled is not None
    assert made.fits
    assert not made.changed
    assert (made.compiled.graphs, made.compiled.breaks, made.compiled.why) == (2, (), "")
    assert made.estimate.peak_allocated < made.compiled.eager.peak_allocated
    assert made.estimate == made.before
    shown = text.render(made)
    assert "torch.compile" in shown
    assert "uncompiled" in shown
    described = as_dict(made)["compiled"]
    assert described["followed"] is True
    assert described["eager"]["peak_allocated"] == made.compiled.eager.peak_allocated


def test_checkpointed_blocks_are_compiled_too() -> None:
    made = plan(step_of(compiled_blocks()), SAMPLES, "1GiB", pin={"checkpoint": "all"})
    assert made.checkpointed_modules
    assert made.compiled is not None
    assert made.compiled.graphs
    assert not made.compiled.breaks


class Random(Block):
    """A block that draws: what a checkpoint computes again has to draw the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


def as_a_whole(*parts: nn.Module) -> nn.Sequential:
    made = nn.Sequential(*parts)
    made.compile()
    return made


class Changing(Block):
    """A block that reads a buffer, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(torch.sin(x + self.offset))
        self.offset.mul_(0.9)
        return x


class Normalised(Block):
    """A block that changes buffers, and does not read them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize(
    ("kind", "share", "says"),
    [
        (Random, 0.1, "issues/190758"),
        (Random, 1.0, ""),
        (Changing, 0.1, "pull/197039"),
        (Normalised, 1.0, ""),
    ],
)
def test_wrong_gradients_of_the_code_as_it_is_compiled_are_said(kind: type[Block], share: float, says: str) -> None:
    with torch._functorch.config.patch(activation_memory_budget=share):
        notes = [str(note) for note in followed(step_of(as_a_whole(kind(), kind()))).notes]
    said = [note for note in notes if "pytorch/pytorch" in note]
    assert [says in note for note in said] == [True] * bool(says)


def compiled_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    squares: torch.Tensor = torch.compile(lambda values: values.sin().tanh().exp().square().mean())(model(batch))
    return squares


def test_a_compiled_loss_is_followed_though_the_model_is_not_compiled() -> None:
    made = plan(step_of(blocks(1), compiled_loss), SAMPLES, "1GiB")
    assert made.compiled is not None
    assert made.compiled.graphs == 2
    assert made.compiled.eager.peak_allocated - made.estimate.peak_allocated >= ONE
    assert made.estimate.tier == "symbolic"
    plain = plan(step_of(blocks(1)), SAMPLES, "1GiB")
    assert plain.compiled is None
    assert plain.estimate.tier == "symbolic"


@pytest.mark.parametrize(
    ("options", "why"),
    [({"mode": "reduce-overhead"}, "CUDA graphs"), ({"fullgraph": True}, "graph_break"), ({"backend": "none"}, "none")],
)
def test_what_cannot_be_compiled_is_counted_as_eager_and_said(options: dict[str, Any], why: str) -> None:
    model = torch.compile(Breaking(), **options) if "backend" not in options else compiled_by_nothing()
    made = plan(step_of(model), SAMPLES, "1GiB")
    assert made.compiled is not None
    assert why in made.compiled.why
    assert made.estimate.peak_reserved == made.compiled.eager.peak_reserved
    assert made.estimate.tier == "partly symbolic"
    assert any(made.compiled.why in note.message for note in made.estimate.notes)
    assert "not followed" in text.render(made)


def compiled_by_nothing() -> nn.Module:
    def none(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("none is no compiler")

    made: nn.Module = torch.compile(Breaking(), backend=none)  # type: ignore[assignment]
    return made


def test_the_compiler_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def works(_asked: Any) -> NoReturn:
        while True:
            pass

    with pytest.raises(NotCompiledError, match=r"longer than 0\.01 s"):
        Compiler(works, 0.01)(1)
    # One that waits for its processor takes no time of it.
    waits: Any = Compiler(lambda _asked: threading.Event().wait(1.5), 1.0)  # type: ignore[arg-type,return-value]
    assert waits(1) is False
    monkeypatch.setenv("VRAM_GUARD_COMPILE_SECONDS", "0")
    made = plan(step_of(compiled_blocks()), SAMPLES, "1GiB")
    assert made.compiled is not None
    monkeypatch.setenv("VRAM_GUARD_COMPILE_SECONDS", "-1")
    with pytest.raises(InvalidInputError, match="compile_seconds"):
        allowed_seconds()


def test_torch_is_as_before_and_compiles_for_real_afterwards() -> None:
    import torch._dynamo.convert_frame
    import torch._inductor.compile_fx
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    places = (torch, torch.cuda, torch.Tensor, FakeTensor, FakeTensorMode, torch._inductor.compile_fx, nn.Module)
    run_step(step_of(compiled_blocks()), 4, CAPABILITY)
    before = [dict(vars(place)) for place in places]
    kernels = dict(torch.ops.aten.nll_loss.default.py_kernels)
    model = compiled_blocks(backend="aot_eager")
    run_step(step_of(model), 4, CAPABILITY, compiled=True)
    for place, known in zip(places, before, strict=True):
        assert {n for n, value in known.items() if callable(value) and vars(place).get(n) is not value} == set()
    assert torch.ops.aten.nll_loss.default.py_kernels == kernels
    x = torch.ones(2, WIDTH)
    assert torch.allclose(model(x), nn.Sequential(*(block for block in model))(x))


class Positions(nn.Module):
    """A break in a function that has made a tensor: Dynamo's guards there hold what the factory looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x + torch.arange(WIDTH, device=x.device))
        torch._dynamo.graph_break()
        return x * torch.arange(WIDTH, device=x.device)


def test_what_a_trace_does_around_factories_compiles_nothing_anew() -> None:
    made = followed(step_of(torch.compile(Positions())))
    assert made.compiled is not None
    assert made.compiled.graphs == 4  # two steps, but each graph and its backward once


def test_compiled_flex_attention_takes_the_same_blocks_where_a_trace_runs_uncompiled() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    step = attending(torch.compile(flex_attention))
    uncompiled, compiled = run_step(step, 4, CAPABILITY), followed(step, 4)
    assert compiled.compiled == CompiledCode(graphs=2)

    def blocks(timeline: Timeline) -> list[tuple[str, int]]:
        sizes = timeline.sizes(4)
        found = zip(timeline.blocks, sizes, strict=True)
        return sorted((block.category, size) for block, size in found if size > 4096)  # scalars lie below

    assert blocks(uncompiled) == blocks(compiled)


def test_a_compiled_loss_that_is_not_followed_is_said() -> None:
    made = run_step(step_of(blocks(1), compiled_loss), 4, CAPABILITY)
    assert made.tier == "partly symbolic"
    assert [note.said for note in made.notes] == [EAGER]


def test_checkpointed_blocks_that_draw_are_compiled_too() -> None:
    model = nn.Sequential(*(Random() for _ in range(3)))
    for block in model:
        block.compile()
    step = step_of(model)
    made = followed(step.with_(recipe=Recipe(checkpoint=("0", "1", "2"))))
    assert made.compiled == CompiledCode(graphs=2)
    assert bytes_of(made, "activations") < bytes_of(followed(step), "activations")
