"""A loop that somebody else runs: its tensors become symbolic, and what it allocates is written down."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from vram_guard import TrainingStep, trace
from vram_guard.simulate.tracing.external_loop import ExternalLoopTracer, address_of


def test_tensors_become_symbolic_where_they_are() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    held, buffer = model.weight, torch.arange(6).view(2, 3).t()
    following = ExternalLoopTracer((8, 0), lambda optimizer: None)
    following.adopt([model.weight, model.bias, buffer])
    assert model.weight is held is optimizer.param_groups[0]["params"][0]
    for tensor in (held, buffer):
        assert tensor.is_meta
    assert isinstance(held, nn.Parameter)
    assert held.requires_grad
    assert (held.shape, held.stride(), buffer.stride()) == ((3, 4), (4, 1), (1, 3))
    assert sum(block.size.base for block in following.recorder.blocks()) == 4 * 12 + 4 * 3 + 8 * 6


class TokensFirst(nn.Module):
    """Tensors of its own and of its children, as vision transformers have them; one child stands there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(5))
        self.register_buffer("positions", torch.zeros(7))
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(11)
        self.again = nn.Sequential(self.attention, nn.Linear(13, 3))


def test_a_model_arrives_in_the_order_in_which_torch_moves_it() -> None:
    moved: dict[int, int] = {}

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        moved.setdefault(tensor.data_ptr(), tensor.nbytes)
        return tensor

    TokensFirst()._apply(seen)
    following = ExternalLoopTracer((8, 0), lambda optimizer: None)
    following.adopt_model(TokensFirst())
    assert [block.size.base for block in following.recorder.blocks()] == list(moved.values())
    step = TrainingStep(TokensFirst, lambda size: torch.zeros(size, 13), lambda m, x: m.again[1](x).sum(), None)
    assert [block.size.base for block in trace(step).blocks[: len(moved)]] == list(moved.values())


def test_symbolic_tensors_are_told_apart_by_an_address() -> None:
    """FSDP asks ``data_ptr`` whether two tensors are the same memory; a symbolic one has none of its own."""
    symbolic = torch.empty(4, 3, device="meta")
    row = symbolic[1]
    assert address_of(symbolic) == address_of(symbolic.view(12)) != address_of(torch.empty(4, 3, device="meta"))
    assert address_of(row) == address_of(symbolic) + 3 * 4
    real = torch.empty(4)
    assert address_of(real[1:]) == real.data_ptr() + 4


LOOP = """
import torch
from torch import nn
from vram_guard import TrainingStep
from vram_guard.simulate import estimate
from vram_guard.simulate.tracing.external_loop import ExternalLoopTracer

def model():
    return nn.Sequential(nn.Linear(300, 400), nn.GELU(), nn.Linear(400, 10))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def batch(size):
    return torch.zeros(size, 300), torch.zeros(size, dtype=torch.long)

expected = estimate(TrainingStep(model(), batch, loss, torch.optim.AdamW), 32)
net = model()
optimizer = torch.optim.AdamW(net.parameters())
steps = []
following = ExternalLoopTracer((8, 0), steps.append)
following.begin()
following.adopt_model(net)
following.train(net)
for number in range(2):
    with following.loading():
        data = [part.to("cuda") for part in batch(32)]
    assert net[0].weight.device.type == "cuda"
    value = loss(net, data)
    assert value.item() == 1.0
    value.backward()
    optimizer.step()
    following.steps += 1
    optimizer.zero_grad()
found = following.timeline(32, "32-true").at(32)
assert len(steps) == 2
assert found.peak_allocated == expected.peak_allocated, (found, expected)
assert dict(found.breakdown) == dict(expected.breakdown), (found.breakdown, expected.breakdown)
with following.paused():
    assert not torch.cuda.is_available()
print("followed")
"""


def test_a_loop_that_is_followed_takes_what_the_same_step_takes() -> None:
    """In a process of its own: following is for good."""
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "followed\n"
