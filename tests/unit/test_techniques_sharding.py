"""Parameters on the host: a real FSDP2 run in one gloo process equals the plain one; the trace's device memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vram_guard import TrainingStep
from vram_guard.errors import InvalidInputError, UnsupportedTechniqueError
from vram_guard.simulate.tracing.run import run_step
from vram_guard.techniques import Recipe
from vram_guard.techniques.sharding import offload_parameters

pytestmark = pytest.mark.torch_since(2, 6)

WIDTH, BLOCKS = 64, 3
NAMES = tuple(f"blocks.{i}" for i in range(BLOCKS))
#: A block's weight and bias, in bytes as the allocator grants them (multiples of 512).
WEIGHT, BIAS = WIDTH * WIDTH * 4, 512


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return (self.head(x) * self.scale).square().mean()


@pytest.fixture
def gloo() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(model: nn.Module, steps: int = 4, optimizer: torch.optim.Optimizer | None = None):
    """Two micro-batches a step, clipping, a scheduler: what must go on working."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(1)
    rates = []
    for _ in range(steps):
        for _ in range(2):
            (model(torch.randn(5, WIDTH, generator=generator)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return optimizer, rates


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name in mine:
        torch.testing.assert_close(whole(mine[name]), whole(theirs[name]), rtol=0, atol=1e-7)


@pytest.mark.usefixtures("gloo")
def test_training_equals_the_plain_run_with_accumulation_clipping_and_a_scheduler():
    model, written = Net(), Net()
    offload_parameters(model, NAMES, "cpu")
    _, rates = train(model)
    _, rates_written = train(written)
    assert rates == rates_written
    same(model, written)
    start = Net().state_dict()["head.weight"]
    assert not torch.allclose(whole(model.state_dict()["head.weight"]), start, atol=1e-3), "nothing was trained"


def test_mixed_precision_carries_bfloat16_and_keeps_float32():
    assert not dist.is_initialized()
    try:
        model = Net()
        offload_parameters(model, NAMES, "cpu", "bf16-mixed")
        seen = []
        model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, WIDTH))
        loss.backward()
        assert seen == [torch.bfloat16]
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
def test_what_cannot_be_carried_is_refused_before_anything_is_changed():
    model = Net()
    before = dict(model.named_parameters())
    with pytest.raises(InvalidInputError, match=r"blocks\.7"):
        offload_parameters(model, ("blocks.0", "blocks.7"), "cpu")
    with pytest.raises(InvalidInputError):
        offload_parameters(model, ("blocks",), "cpu")
    with pytest.raises(UnsupportedTechniqueError, match="16-mixed"):
        offload_parameters(model, NAMES, "cpu", "16-mixed")
    model.head.weight = model.blocks[0].weight
    with pytest.raises(UnsupportedTechniqueError, match="shares"):
        offload_parameters(model, NAMES, "cpu")
    model.head.weight = before["head.weight"]
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert not dist.is_initialized()


def step(**settings: object) -> TrainingStep:
    return TrainingStep(
        model=settings.pop("model", None) or Net(),
        batch=lambda size: torch.zeros(size, WIDTH),
        loss=lambda model, batch: model(batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        **{"recipe": Recipe(parameters_on_host=NAMES), **settings},
    )


def device_bytes(timeline, category: str) -> int:
    """The most bytes of one category that are alive at any time."""
    live = most = 0
    for event in timeline.events:
        block = timeline.blocks[event if event >= 0 else ~event]
        if block.category == category:
            size = -(-block.size.base // 512) * 512
            live += size if event >= 0 else -size
            most = max(most, live)
    return most


def test_the_trace_carries_one_block_at_a_time_and_the_root_with_it():
    timeline = run_step(step(), 4, (8, 0))
    # The head (root) from its forward to its backward, and the block that runs.
    assert device_bytes(timeline, "parameters") == 2 * (WEIGHT + BIAS)
    assert device_bytes(timeline, "optimizer_states") == 0
    # While they are divided: one that goes to the host, and its pinned copy. Nothing holds those before it.
    assert device_bytes(timeline, "temporaries") < 3 * (WEIGHT + BIAS)
    # Gradients of the block that ends and of the root, which is reduced last.
    assert device_bytes(timeline, "gradients") == 2 * (WEIGHT + BIAS)
    plain = run_step(step(recipe=Recipe()), 4, (8, 0))
    assert device_bytes(plain, "parameters") == (BLOCKS + 1) * (WEIGHT + BIAS)
    assert device_bytes(plain, "optimizer_states") == 2 * (BLOCKS + 1) * (WEIGHT + BIAS)


def test_the_trace_finds_parameter_gradient_and_two_states_on_the_host():
    each = WIDTH * WIDTH * 4 + WIDTH * 4
    timeline = run_step(step(), 4, (8, 0))
    peak = timeline.at(4).host_peak
    # Adam's loop on the CPU (torch/optim/adam.py, _single_tensor_adam): the square root and its quotient of a weight,
    # while `denom` still holds that of the bias before.
    assert peak == 4 * (BLOCKS + 1) * each + 2 * WIDTH * WIDTH * 4 + WIDTH * 4
    # Pinned are the parameters, once (FSDPParam._init_sharded_param), and the gradients of each of the two steps, which
    # are copied without waiting (foreach_reduce).
    pinned = [block.size.base for block in timeline.host_blocks if block.pinned]
    assert sorted(pinned) == sorted(3 * (BLOCKS + 1) * [WIDTH * WIDTH * 4, WIDTH * 4])


def test_what_the_trace_allocates_is_the_sequence_of_a_real_run(monkeypatch):
    """Unsharded parameters: the real FSDP2 on a real process, its storages followed while it runs on the CPU."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    sizes: list[int] = []

    def noted(original):
        def run(tensor: torch.Tensor) -> None:
            before = tensor.untyped_storage().size()
            original(tensor)
            after = tensor.untyped_storage().size()
            if after != before:
                sizes.append(after - before)

        return run

    for name in ("alloc_storage", "free_storage"):
        monkeypatch.setattr(_fsdp_param, name, noted(getattr(_fsdp_param, name)))
    # Where it is imported by name.
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    if hasattr(_fsdp_param_group, "alloc_storage"):
        monkeypatch.setattr(_fsdp_param_group, "alloc_storage", _fsdp_param.alloc_storage)
    try:
        model = Net()
        offload_parameters(model, NAMES, "cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            sizes.clear()  # the first step makes the storages, the second only fills them
            model(torch.zeros(4, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    real = list(sizes)

    timeline = run_step(step(), 4, (8, 0))
    start = next(phase.start for phase in timeline.phases if phase.step == 2)
    traced = []
    filled = set()
    for event in timeline.events[start:]:
        block = timeline.blocks[event if event >= 0 else ~event]
        if event >= 0 and block.operator == "resize_":
            filled.add(event)
            traced.append(block.size.base)
        elif event < 0 and ~event in filled:
            traced.append(-block.size.base)
    assert len(real) == 2 * 2 * (2 * BLOCKS + 1)  # weight and bias, in and out, each block twice and the root once
    assert traced == real


def test_a_trace_leaves_the_model_and_torch_as_they_were():
    model = Net()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    run_step(step(model=model), 2, (8, 0))
    assert not dist.is_initialized()
    assert [type(module) for module in model.modules()] == kinds
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    first = run_step(step(model=model), 2, (8, 0))
    assert first.events == run_step(step(model=model), 2, (8, 0)).events, "torch's caches changed the second trace"
    try:
        offload_parameters(model, NAMES, "cpu")  # torch has forgotten the traced one
        model(torch.ones(2, WIDTH)).backward()
    finally:
        dist.destroy_process_group()


def test_a_trace_within_a_process_group_leaves_the_group_alone(gloo):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    here = run_step(step(), 4, (8, 0))
    assert dist.is_initialized()
    assert dist.get_backend() == "gloo"
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    assert here.events == run_step(step(), 4, (8, 0)).events
