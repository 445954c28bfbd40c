"""Training steps as people really write them: each with a defined answer."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pickle
from collections import UserDict
from typing import Any

import pytest
import torch
from architectures import Decoder, adamw
from each import each
from torch import nn
from torch.autograd import grad as grad_imported_by_name
from torch.cuda import nvtx
from torch.cuda.nvtx import range_pop, range_push
from torch.nn import functional as F

from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.plan import plan
from vram_guard.simulate import estimate, trace
from vram_guard.simulate.compiled import EAGER
from vram_guard.simulate.tracing.run import run_step
from vram_guard.step import TrainingStep
from vram_guard.techniques import Recipe


def vectors(b: int) -> torch.Tensor:
    return torch.randn(b, 16)


def step_of(model, loss=lambda m, b: m(b).sum(), batch=vectors, **settings) -> TrainingStep:
    settings.setdefault("optimizer", adamw)
    return TrainingStep(model, batch, loss, **settings)


def category(timeline, name: str) -> int:
    return sum(block.bytes_at(2) for block in timeline.blocks if block.category == name)


def linear() -> nn.Module:
    return nn.Linear(16, 16)


def test_tied_weights_are_counted_once() -> None:
    tied = estimate(TrainingStep(Decoder, lambda b: torch.zeros(b, 24, dtype=torch.long), _next, adamw), 2)
    unique = sum(p.numel() for p in Decoder().parameters())
    assert tied.breakdown["parameters"] >= unique * 4
    assert tied.breakdown["parameters"] - unique * 4 < 512 * 40  # only the allocator's rounding


def _next(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    def half_frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        model[0].requires_grad_(False)
        return model

    timeline = trace(step_of(half_frozen))
    assert category(timeline, "parameters") == 2 * 1024
    assert category(timeline, "gradients") == 2 * 1024  # one weight, in each of two steps
    assert category(timeline, "optimizer_states") == 2 * 1024


def test_questions_about_the_loss_get_an_answer_that_keeps_the_loop_going(capsys) -> None:
    def loss(model, batch):
        value = model(batch).pow(2).mean()
        print(f"loss {value.item():.4f} {value:.3f} {value}")
        if torch.isnan(value) or not torch.isfinite(value) or math.isnan(float(value.detach())) or value.isinf().any():
            raise RuntimeError("diverged")
        assert value.tolist() == 1.0
        assert value.detach().cpu().numpy().shape == ()
        return value

    timeline = trace(step_of(linear, loss))
    assert timeline.tier == "symbolic"
    assert "loss 1.0000 1.000" in capsys.readouterr().out


BY_A_COMPUTED_VALUE = {
    "if tensor": lambda value: value if value > 0.5 else value * 2,
    "if item": lambda value: value if value.item() > 0.5 else value * 2,
    "if what is calculated from it": lambda value: value if 2 * value.detach().item() - 1 > 0.5 else value * 2,
    "truth of a number": lambda value: value if value.item() else value * 2,
    "truth of a bool": lambda value: value if (value > 0.5).item() else value * 2,
    "count": lambda value: value if (value > 0).sum().item() == 3 else value * 2,
}


@each("way", BY_A_COMPUTED_VALUE)
def test_a_way_that_a_computed_value_decides_is_followed_and_said(way: str) -> None:
    timeline = trace(step_of(linear, lambda model, batch: BY_A_COMPUTED_VALUE[way](model(batch).pow(2).mean())))
    assert timeline.tier == "partly symbolic"
    (note,) = [note for note in timeline.notes if "branches on a computed value" in note.message]
    assert "test_hard_cases.py" in note.source


def test_numbers_that_are_only_logged_decide_nothing() -> None:
    seen = {"best": 0.0}

    def loss(model, batch):
        value = model(batch).pow(2).mean()
        number = value.item()
        seen.update(best=max(seen["best"], number), text=f"{number:.3f}", total=seen.get("total", 0.0) + number)
        seen.update(json=json.dumps(number), copy=pickle.loads(pickle.dumps(number)), tensor=torch.tensor(number))
        assert not math.isnan(number)
        if number != number or number == float("inf"):  # noqa: PLR0124 - how some scripts ask for NaN
            raise RuntimeError("diverged")
        return value

    timeline = trace(step_of(linear, loss))
    assert timeline.tier == "symbolic"
    assert not timeline.notes
    assert (seen["json"], seen["text"], type(seen["copy"])) == ("1.0", "1.000", float)


def test_values_that_the_batch_decides_are_the_batchs_own() -> None:
    def masked(b: int):
        return {"x": torch.randn(b, 16), "mask": torch.tensor([True, False] * 8).expand(b, 16).clone()}

    seen = []

    def loss(model, batch):
        seen.append((batch["mask"].all().item(), int(batch["mask"].sum()), bool((batch["mask"][0] == 1).any())))
        return (model(batch["x"]) * batch["mask"]).sum()

    trace(step_of(linear, loss, masked))
    assert seen[0] == (False, 2 * 8, True)


def test_a_size_that_depends_on_the_batch_is_counted_as_in_the_batch_and_said() -> None:
    def labelled(b: int):
        return torch.randn(b, 16), torch.tensor([1] * 4 + [0] * 12, dtype=torch.bool).expand(b, 16)

    def loss(model, batch):
        x, mask = batch
        return model(x)[mask].sum()

    timeline = trace(step_of(linear, loss, labelled))
    assert timeline.tier == "partly symbolic"
    assert any(
        "depends on the values in the batch" in n.message and "test_hard_cases.py" in n.source for n in timeline.notes
    )
    exact = timeline.exact(10)
    assert [b for b in exact.blocks if "aten.index" in b.operator and b.size.base == 10 * 4 * 4]


def test_a_size_that_depends_on_weights_is_counted_at_its_bound_and_said() -> None:
    def loss(model, batch):
        out = model(batch)
        return out[out > 0].sum()

    timeline = trace(step_of(linear, loss))
    assert timeline.tier == "partly symbolic"
    note = next(n for n in timeline.notes if "upper bound" in n.message)
    assert note.source.startswith("unit/test_hard_cases.py:")
    assert [b for b in timeline.blocks if b.bytes_at(5) == 5 * 16 * 4 and "index" in b.operator]


def test_an_operator_without_symbolic_kernel_is_tried_on_zeros_and_said() -> None:
    library = torch.library.Library("vram_guard_test", "FRAGMENT")
    library.define("double_rows(Tensor x) -> Tensor")
    library.impl("double_rows", lambda x: torch.cat([x, x]), "CPU")
    try:

        def loss(model, batch):
            with torch.no_grad():
                extra = torch.ops.vram_guard_test.double_rows(batch)
            return model(batch).sum() + extra.sum()

        timeline = trace(step_of(linear, loss))
        assert timeline.tier == "partly symbolic"
        assert any("double_rows" in n.operator and "test_hard_cases.py" in n.source for n in timeline.notes)
        assert [b for b in timeline.blocks if "double_rows" in b.operator and b.bytes_at(5) == 2 * 5 * 16 * 4]
    finally:
        library._destroy()


def test_an_operator_that_cannot_be_tried_gives_a_lower_bound_that_never_fits() -> None:
    library = torch.library.Library("vram_guard_test2", "FRAGMENT")
    library.define("only_on_gpu(Tensor x) -> Tensor")
    library.impl("only_on_gpu", lambda x: x, "CUDA")
    try:

        def loss(model, batch):
            return model(torch.ops.vram_guard_test2.only_on_gpu(batch)).sum()

        timeline = trace(step_of(linear, loss))
    finally:
        library._destroy()
    assert timeline.tier == "formula"
    assert any("only_on_gpu" in note.message and "register_fake" in note.message for note in timeline.notes)
    assert timeline.max_batch_size("80GiB") == 0
    weights = (16 * 16 + 16) * 4
    assert category(timeline, "optimizer_states") == 2 * weights
    assert category(timeline, "gradients") == weights


def test_the_users_exception_comes_with_the_users_traceback() -> None:
    def loss(model, batch):
        return model(batch.view(3, 5, 7)).sum()

    with pytest.raises(RuntimeError, match="invalid for input of size") as caught:
        trace(step_of(linear, loss))
    assert any(entry.path.name == "test_hard_cases.py" and entry.name == "loss" for entry in caught.traceback)


def test_lazy_modules_are_refused_with_advice() -> None:
    with pytest.raises(UnsupportedStepError):
        trace(step_of(nn.LazyLinear(4)))


def test_sharded_models_are_refused_with_advice(tmp_path) -> None:
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        cpu, whole = torch.device("cpu"), ShardingStrategy.NO_SHARD
        wrapped = FullyShardedDataParallel(linear(), sharding_strategy=whole, device_id=cpu)
        with pytest.raises(UnsupportedStepError, match="FullyShardedDataParallel"):
            trace(step_of(wrapped))
        fully_shard = getattr(torch.distributed.fsdp, "fully_shard", None)
        if fully_shard is not None:
            mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
            with pytest.raises(UnsupportedStepError):
                trace(step_of(fully_shard(linear(), mesh=mesh)))
    finally:
        distributed.destroy_process_group()


def test_an_empty_model_and_scalar_parameters_are_valid() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return x * self.scale + self.nothing.sum()

    found = estimate(step_of(Scale), 4)
    assert found.breakdown["parameters"] == 512  # four bytes in the smallest block; nothing for the empty one


def test_inference_needs_no_optimizer_and_keeps_no_activations() -> None:
    deep = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    batch = lambda b: torch.randn(b, 256)  # noqa: E731
    inference = estimate(step_of(deep, lambda m, b: m(b), batch, optimizer=None), 4096)
    training = estimate(step_of(deep, batch=batch), 4096)
    assert inference.breakdown["gradients"] == inference.breakdown["optimizer_states"] == 0
    assert inference.peak_allocated < training.peak_allocated / 2


def deep_network() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)])


def trains_by_itself(losses=lambda model, batch: [model(batch).square().mean()]):
    """A step whose loss callable runs backward and optimizer steps itself, as Lightning's manual optimization does."""
    made: list[Any] = []

    def prepare(model: nn.Module) -> None:
        made[:] = [torch.optim.AdamW(model.parameters())]

    def train(model: nn.Module, batch: torch.Tensor) -> None:
        with torch.enable_grad():
            for loss in losses(model, batch):
                made[0].zero_grad()
                loss.backward()
                made[0].step()

    return TrainingStep(deep_network, lambda size: torch.zeros(size, 64), train, None, keeps="nothing", prepare=prepare)


def test_a_loss_that_trains_by_itself_takes_what_its_training_takes() -> None:
    usual = TrainingStep(
        deep_network,
        lambda size: torch.zeros(size, 64),
        lambda model, batch: model(batch).square().mean(),
        torch.optim.AdamW,
        keeps="nothing",
        zero_grad="before_backward",
    )
    for size in (64, 4096):
        own, expected = estimate(trains_by_itself(), size), estimate(usual, size)
        assert own.peak_reserved == expected.peak_reserved
        assert own.peak_phase == expected.peak_phase
        assert own.breakdown == expected.breakdown
        assert own.breakdown["optimizer_states"] > 0


def test_the_phases_of_a_loss_that_trains_by_itself_are_those_that_it_runs() -> None:
    def two(model, batch):
        yield model(batch).square().mean()
        yield model(batch).abs().mean()

    hooks = importlib.import_module("torch.optim.optimizer")
    before = [dict(hooks._global_optimizer_pre_hooks), dict(hooks._global_optimizer_post_hooks)]
    phases = [(phase.name, phase.step) for phase in trace(trains_by_itself(two)).phases]
    one = ["forward", "backward", "optimizer"]
    assert phases == [("setup", 0), *((name, step) for step in (1, 2) for name in ("batch", *one, *one))]
    assert [hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks] == before
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_a_loss_that_trains_by_itself_has_its_blocks_checkpointed() -> None:
    step = trains_by_itself()
    peak = estimate(step, 4096).peak_reserved
    made = plan(step, 4096, Budget.resolve(budget=peak - 1, margin=0.0), allow=("checkpoint",))
    assert made.fits
    assert made.recipe.checkpoint
    assert made.estimate.peak_reserved == estimate(step.with_(recipe=made.recipe), 4096).peak_reserved


def test_one_example_batch_is_resized() -> None:
    example = {"x": torch.randn(4, 16), "y": torch.ones(4), "names": ["a", "b"], "weight": torch.ones(16)}
    step = step_of(linear, lambda m, b: (m(b["x"]) * b["weight"]).sum(), example)
    from_callable = step_of(
        linear,
        lambda m, b: (m(b["x"]) * b["weight"]).sum(),
        lambda b: {"x": torch.randn(b, 16), "y": torch.ones(b), "names": ["a", "b"], "weight": torch.ones(16)},
    )
    assert estimate(step, 64).peak_reserved == estimate(from_callable, 64).peak_reserved


@each(
    ("field", "value"),
    [("precision", "fp16"), ("zero_grad", "never"), ("accumulate", 0), ("accumulate", True), ("loss", 3), ("model", 3)],
)
def test_nonsense_in_a_training_step_is_refused_at_once(field: str, value) -> None:
    settings = {"model": linear, "batch": vectors, "loss": lambda m, b: m(b).sum(), "optimizer": adamw, field: value}
    with pytest.raises(InvalidInputError, match=field):
        TrainingStep(**settings)


def test_where_a_block_comes_from_is_written_down() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
            self.head = nn.Linear(32, 4)

        def forward(self, x):
            hidden = self.encoder(x)
            return self.head(hidden)

    timeline = trace(step_of(Named))
    forward = [b for b in timeline.blocks if "addmm" in b.operator]
    assert {b.module for b in forward} == {"encoder.0", "head"}
    assert {b.source.split(":")[0] for b in forward} == {"unit/test_hard_cases.py"}
    backward = [b for b in timeline.blocks if b.category == "gradients" and b.bytes_at(2) == 16 * 32 * 4]
    assert {b.module for b in backward} == {"encoder.0"}  # the backward knows whose it is


def test_no_line_of_this_package_is_named_as_a_source() -> None:
    """Offloading saves tensors in hooks of this package, below the user's line."""
    offloaded = step_of(lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU())).with_(
        recipe=Recipe(offload_activations=("",))
    )
    sources = {block.source.rpartition(":")[0] for block in trace(offloaded).blocks}
    assert sources == {"", "unit/test_hard_cases.py"}


def test_a_model_that_asks_its_tensors_where_they_are_is_answered_cuda() -> None:
    answers = []

    def loss(model, batch):
        answers.append((batch.device.type, batch.is_cuda, batch.is_meta, torch.cuda.is_available()))
        made = torch.arange(16, device=batch.device) + torch.tensor([1.0], device="cuda") + torch.ones(16).to(batch)
        moved = torch.ones(16).cuda() + torch.zeros(16, device="cuda:0") + batch.new_zeros(16)
        host = batch.detach().to("cpu")
        answers.append((host.device.type, host.is_cuda))
        return (model(batch) * made * moved).sum()

    timeline = trace(step_of(linear, loss))
    assert answers[0] == ("cuda", True, False, True)
    assert answers[1] == ("cpu", False)
    assert timeline.tier == "symbolic"
    assert not torch.ones(1).is_cuda


def test_traces_cannot_be_nested() -> None:
    def loss(model, batch):
        trace(step_of(linear))
        return model(batch).sum()

    with pytest.raises(UnsupportedStepError):
        trace(step_of(linear, loss))


def test_nested_tensors_are_refused_before_they_reach_torch():
    def batch(size):
        return torch.nested.nested_tensor([torch.zeros(length + 1, 4) for length in range(size)], layout=torch.jagged)

    step = TrainingStep(
        model=lambda: nn.Linear(4, 4), batch=batch, loss=lambda model, x: model(x).values().sum(), optimizer=adamw
    )
    with pytest.raises(UnsupportedStepError):
        trace(step)


@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor


class Mover:
    """As torch_geometric's batches: no container, and it moves itself."""

    def __init__(self) -> None:
        self.x, self.y = torch.zeros(4, 16), torch.zeros(4, 16)

    def keys(self) -> list[str]:
        return ["x", "y"]

    def __getitem__(self, name: str) -> torch.Tensor:
        return getattr(self, name)

    def __iter__(self) -> Any:
        yield from ((name, self[name]) for name in self.keys())

    def to(self, device: Any) -> Mover:
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


def _pops(model, batch):
    target = batch.pop("y")
    return (model(batch.pop("x")) - target).square().mean()


def _pops_last(model, batch):
    target = batch.pop()
    return (model(batch.pop()) - target).square().mean()


def _sets(model, batch):
    batch.x = model(batch.x)
    batch.y = batch.y * 2
    return (batch.x - batch.y).square().mean()


def _mapping() -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(4, 16), "y": torch.zeros(4, 16)}


WRITTEN = {
    "dict": (_mapping, _pops),
    "mapping": (lambda: UserDict(_mapping()), _pops),
    "list": (lambda: list(_mapping().values()), _pops_last),
    "data class": (lambda: Fields(**_mapping()), _sets),
    "object that moves itself": (Mover, _sets),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_step_may_write_into_its_batch(kind: str) -> None:
    made, loss = WRITTEN[kind]
    batch = made()
    before = [*vars(batch).values()] if hasattr(batch, "__dict__") else list(batch)
    assert trace(step_of(linear, loss, lambda _size: batch)).blocks
    after = [*vars(batch).values()] if hasattr(batch, "__dict__") else list(batch)
    assert all(one is other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("gpu", ["T4", "Tesla V100 PCIe 16GB", "GTX 1080 Ti"])
def test_bfloat16_is_predicted_where_it_is_emulated_and_not_proposed(gpu: str) -> None:
    def encoder() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))

    def step(precision: str) -> TrainingStep:
        return step_of(encoder, batch=lambda size: torch.zeros(size, 512), precision=precision)

    assert plan(step("bf16-mixed"), 512, gpu=gpu).fits
    assert not plan(step("32-true"), 4096, gpu=gpu, budget="96MiB").precision.startswith("bf16")


class TwoEvaluations(torch.optim.Optimizer):
    """As SAM is written: gradients are there, and the closure evaluates the loss at other weights."""

    def __init__(self, params: Any, base: Any = torch.optim.AdamW) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM requires closure"
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        kept = [p.data.clone() for p in own]
        for p in own:
            p.add_(p.grad / norm)
            p.grad = None
        with torch.enable_grad():
            loss = closure()
        for p, before in zip(own, kept, strict=True):
            p.data = before
        self.base.step()
        return loss


class EvaluatesFirst(torch.optim.AdamW):
    """Needs its closure, although it has a default."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize("kind", [TwoEvaluations, EvaluatesFirst])
def test_optimizers_that_call_a_closure_are_followed(kind: Any) -> None:
    forwards: list[int] = []

    def loss(model, batch):
        forwards.append(len(batch))
        return model(batch).square().mean()

    plain = estimate(step_of(linear), 4).peak_allocated
    assert estimate(step_of(linear, loss, optimizer=kind), 4).peak_allocated >= plain
    each = 2 if kind is TwoEvaluations else 1
    assert len(forwards) % (2 * each) == 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_gradients_are_followed_by_the_optimizers_that_take_them(kind: Any) -> None:
    step = step_of(
        lambda: nn.Embedding(100, 16, sparse=True),
        lambda model, ids: model(ids).square().mean(),
        lambda size: torch.zeros(size, 8, dtype=torch.long),
        optimizer=kind,
    )
    timeline = trace(step)
    assert timeline.tier == "partly symbolic"
    assert category(timeline, "optimizer_states") >= 100 * 16 * 4


AMPERE = (8, 0)


def test_a_second_frozen_model_under_no_grad_keeps_no_activations() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(16, 16), nn.Sequential(*[nn.Linear(16, 16) for _ in range(9)])
            self.teacher.requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return F.mse_loss(self.student(x), target)

    timeline = run_step(step_of(Distilled), 100, AMPERE)
    teacher = [
        b
        for b in timeline.blocks
        if b.module.startswith("teacher") and "addmm" in b.operator and b.size.base == 100 * 16 * 4
    ]
    kept = [b for b in teacher if b.category == "activations"]
    assert len(teacher) == 18
    assert len(kept) == 2  # its result, in each of two steps


def test_buffers_that_are_replaced_in_forward_are_followed_and_restored() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x):
            out = self.linear(x)
            self.mean = self.mean * 0.9 + out.detach().mean(0) * 0.1
            return out - self.mean

    model = Average()
    buffer = model.mean
    trace(step_of(model))
    assert model.mean is buffer
    assert torch.equal(buffer, torch.zeros(16))


def test_several_losses_and_dictionaries_are_taken() -> None:
    for result in (
        lambda out: {"loss": out.sum(), "logits": out},
        lambda out: (out.sum(), out.mean()),
        lambda out: type("Output", (), {"loss": out.sum()})(),
    ):
        assert trace(step_of(linear, lambda m, b, r=result: r(m(b)))).tier == "symbolic"
    with pytest.raises(UnsupportedStepError):
        trace(step_of(linear, lambda m, b: "nothing"))


def test_custom_autograd_functions_are_run() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    timeline = trace(step_of(linear, lambda m, b: Cube.apply(m(b)).sum()))
    assert timeline.tier == "symbolic"


def test_a_backward_pass_is_seen_however_its_function_was_imported() -> None:
    def training(grad: Any) -> TrainingStep:
        def train(model: nn.Module, batch: torch.Tensor) -> None:
            with torch.enable_grad():
                parameters = list(model.parameters())
                for parameter, slope in zip(parameters, grad(model(batch).square().mean(), parameters), strict=True):
                    parameter.grad = slope
            made[-1].step()

        made: list[torch.optim.Optimizer] = []
        prepare = lambda model: made.append(torch.optim.SGD(model.parameters(), lr=0.1))  # noqa: E731
        batch = lambda size: torch.zeros(size, 64)  # noqa: E731
        return TrainingStep(deep_network, batch, train, None, keeps="nothing", prepare=prepare)

    by_module = training(lambda *args: torch.autograd.grad(*args))
    by_name = training(grad_imported_by_name)
    assert phases_of(by_name) == phases_of(by_module) == ["batch", "forward", "backward", "optimizer"]
    assert estimate(by_name, 4096).breakdown == estimate(by_module, 4096).breakdown


def phases_of(step: TrainingStep) -> list[str]:
    """The phases of the second step."""
    return [phase.name for phase in trace(step).phases if phase.step == 2]


def test_a_step_in_the_backward_pass_is_a_part_of_it() -> None:
    made: dict[Any, torch.optim.Optimizer] = {}

    def prepare(model: nn.Module) -> None:
        def update(parameter: torch.Tensor) -> None:
            made[parameter].step()
            made[parameter].zero_grad()

        for parameter in model.parameters():
            made[parameter] = torch.optim.AdamW([parameter])
            parameter.register_post_accumulate_grad_hook(update)

    def train(model: nn.Module, batch: torch.Tensor) -> None:
        with torch.enable_grad():
            model(batch).square().mean().backward()

    step = TrainingStep(deep_network, lambda size: torch.zeros(size, 64), train, None, keeps="nothing", prepare=prepare)
    assert phases_of(step) == ["batch", "forward", "backward"]
    assert estimate(step, 64).breakdown["optimizer_states"] > 0


def test_what_an_optimizer_does_behind_its_closure_is_its_own() -> None:
    def train(model: nn.Module, batch: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            made[-1].zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        with torch.enable_grad():
            made[-1].step(closure)

    made: list[Any] = []
    prepare = lambda model: made.append(torch.optim.AdamW(model.parameters()))  # noqa: E731
    step = TrainingStep(deep_network, lambda size: torch.zeros(size, 64), train, None, keeps="nothing", prepare=prepare)
    assert phases_of(step) == ["batch", "forward", "optimizer", "forward", "backward", "optimizer"]
    updates = [work for work in trace(step).work if work.phase == "optimizer"]
    assert any("addcdiv" in work.operator for work in updates)


def test_an_example_batch_whose_size_cannot_be_told_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        trace(step_of(linear, batch=(torch.randn(4, 16), torch.randn(5, 16))))
    with pytest.raises(InvalidInputError):
        trace(step_of(linear, batch={"path": "x"}))


def test_compiled_functions_inside_a_step_run_eagerly() -> None:
    compiled = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")
    traced, written = (
        trace(step_of(linear, loss)) for loss in (lambda m, b: compiled(m(b)), lambda m, b: m(b).sin().sum())
    )
    assert traced.events == written.events
    assert traced.at(8).peak_reserved == written.at(8).peak_reserved
    assert (traced.tier, written.tier) == ("partly symbolic", "symbolic")
    assert EAGER in [note.said for note in traced.notes]


def test_a_loss_of_none_is_said() -> None:
    with pytest.raises(UnsupportedStepError, match="returned None"):
        trace(step_of(linear, lambda m, b: m(b) and None if False else [m(b), None][1]))


@nvtx.range("a decorated forward")
def _decorated(model, batch):
    return model(batch).sum()


def _in_ranges(model, batch):
    range_push("forward")
    with torch.cuda.nvtx.range("layer {}", 1):
        hidden = model(batch)
    range_pop()
    nvtx.mark("loss")
    handle = nvtx.range_start("sum")
    value = hidden.sum()
    nvtx.range_end(handle)
    return value


def _profiled(model, batch):
    torch.cuda.cudart().cudaProfilerStart()
    with torch.cuda.profiler.profile():
        value = model(batch).sum()
    torch.cuda.cudart().cudaProfilerStop()
    return value


@pytest.mark.parametrize("loss", [_decorated, _in_ranges, _profiled])
def test_ranges_for_a_profiler_stop_no_trace(loss) -> None:
    plain = trace(step_of(linear))
    timeline = trace(step_of(linear, loss))
    assert (timeline.tier, timeline.notes) == ("symbolic", ())
    assert [(block.size, block.category) for block in timeline.blocks] == [
        (block.size, block.category) for block in plain.blocks
    ]
