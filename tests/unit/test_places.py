"""Places of tensors in a trace: on the simulated GPU, in host memory, or on the user's own meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import adamw
from each import each
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vram_guard import Timeline, TrainingStep, trace
from vram_guard.errors import DeviceMismatchError
from vram_guard.simulate.tracing.run import run_step

AMPERE = (8, 0)
WIDTH = 64
TABLE = 4 * WIDTH * WIDTH

Code = Callable[["Net", torch.Tensor], Any]


class Net(nn.Module):
    """A layer, and tensors that are neither parameters nor buffers."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table = torch.ones(WIDTH, WIDTH)
        self.tables = {"own": [torch.ones(WIDTH, WIDTH)]}
        self.scale = torch.tensor(2.0)
        self.order = torch.arange(WIDTH)
        self.code = code

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.code(self, self.layer(inputs))


def built(code: Code) -> Callable[[], nn.Module]:
    return lambda: Net(code)


def made(code: Code) -> nn.Module:
    return Net(code)


def on_meta(code: Code) -> nn.Module:
    with torch.device("meta"):
        return Net(code)


FORMS = [built, made, on_meta]
CLOSURE = torch.ones(WIDTH, WIDTH)


def traced(model: Any, **settings: Any) -> Timeline:
    step = TrainingStep(model, lambda size: torch.zeros(size, WIDTH), lambda m, b: m(b).sum(), adamw, **settings)
    return run_step(step, 4, AMPERE)


MIXED: dict[str, Code] = {
    "attribute": lambda net, x: x @ net.table,
    "a view of it": lambda net, x: x + net.table[0],
    "in a container": lambda net, x: x @ net.tables["own"][0],
    "closure": lambda net, x: x @ CLOSURE,
    "made without a device": lambda net, x: x + torch.zeros(WIDTH),
    "concatenated": lambda net, x: torch.cat([x, net.table]),
    "mask": lambda net, x: x.masked_fill(torch.ones(WIDTH, dtype=torch.bool), 0),
    "weights of a loss": lambda net, x: F.cross_entropy(
        x, torch.zeros(len(x), dtype=torch.long, device=x.device), CLOSURE[0]
    ),
    "indices of an embedding": lambda net, x: F.embedding(net.order, x),
    "moved to the host": lambda net, x: x * x.detach().cpu(),
    "in place": lambda net, x: x + net.table.add_(x.detach()[:1]).sum().item(),
}


@pytest.mark.parametrize("form", FORMS)
@each("way", MIXED)
def test_a_tensor_of_the_host_beside_one_of_the_gpu_is_refused_as_cuda_refuses_it(way: str, form: Any) -> None:
    with pytest.raises(
        DeviceMismatchError, match=r"at least two devices, cuda:0 and cpu! At .*test_places\.py:\d+ aten"
    ):
        traced(form(MIXED[way]))


ALLOWED: dict[str, Code] = {
    "scalar tensor": lambda net, x: x * net.scale,
    "indices": lambda net, x: x[:, net.order],
    "assigned by indices": lambda net, x: x.clone().index_put_((net.order[:2],), x[0]),
    "moved": lambda net, x: x @ net.table.to(x.device),
    "moved by another tensor": lambda net, x: x @ net.table.to(x),
    "type_as": lambda net, x: x @ net.table.type_as(x),
    "type": lambda net, x: x @ net.table.type("torch.cuda.FloatTensor"),
    "cuda()": lambda net, x: x @ net.tables["own"][0].cuda(),
    "copied into": lambda net, x: x @ torch.empty_like(x[0]).expand(WIDTH, WIDTH).clone().copy_(net.table),
    "probabilities": lambda net, x: x * torch.empty_like(x).bernoulli_((net.table / 2)[: len(x)]),
    "host alone": lambda net, x: x * (net.table @ net.table).softmax(-1).mean(),
}


@pytest.mark.parametrize("form", FORMS)
@each("way", ALLOWED)
def test_what_cuda_allows_is_followed(way: str, form: Any) -> None:
    timeline = traced(form(ALLOWED[way]))
    assert (timeline.tier, timeline.notes) == ("symbolic", ())


@pytest.mark.parametrize("form", FORMS)
def test_what_stays_on_the_host_takes_nothing_of_the_gpu(form: Any) -> None:
    def code(net: Net, x: torch.Tensor) -> Any:
        assert {net.table.device.type, net.tables["own"][0].device.type, net.order.device.type} == {"cpu"}
        assert not net.table.is_cuda
        assert not (net.table @ net.table).softmax(-1).is_cuda
        assert net.layer.weight.is_cuda
        return x

    def moving(net: Net, x: torch.Tensor) -> Any:
        return x + 0 * net.table.to(x.device).sum()

    plain, moved = traced(form(code)), traced(form(moving))
    assert sum(block.size.base == TABLE for block in moved.blocks) > sum(
        block.size.base == TABLE for block in plain.blocks
    )
    assert [block.size for block in plain.blocks] == [block.size for block in traced(form(lambda _net, x: x)).blocks]


def test_the_users_own_meta_tensors_take_nothing_and_are_on_the_meta_device() -> None:
    with torch.device("meta"):
        teacher = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Softmax(-1), nn.LayerNorm(8 * WIDTH))

    def code(net: Net, x: torch.Tensor) -> Any:
        with torch.device("meta"):
            inner = nn.Sequential(nn.Linear(8 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, device="cpu"))
        inner[1] = nn.Linear(WIDTH, WIDTH, device="meta")
        seen = inner(teacher(x.detach().to("meta")))
        assert (seen.device.type, seen.is_meta, seen.is_cuda, x.is_meta) == ("meta", True, False, False)
        assert teacher[0].weight.device.type == "meta"
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            seen.to("cuda")
        seen.mean().add_(1)
        return x * seen.shape[-1]

    plain = traced(made(lambda _net, x: x * WIDTH))
    timeline = traced(made(code))
    assert [(block.size, block.operator) for block in timeline.blocks] == [
        (block.size, block.operator) for block in plain.blocks
    ]


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize("form", FORMS)
def test_the_default_device_is_the_one_that_could_have_been_named(form: Any) -> None:
    """``torch.set_default_device`` is a function mode that stays on: in the backward, in the optimizer, ever after."""

    def making(net: Net, x: torch.Tensor, **where: Any) -> torch.Tensor:
        made = torch.tensor([2.0], **where), torch.as_tensor(net.table, **where), torch.zeros(WIDTH, **where)
        assert [one.device.type for one in made] == ["cuda"] * 3
        assert torch.as_tensor(x, **where) is x
        return x * made[0] @ made[1].sin() + made[2]

    def by_default(net: Net, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_device("cuda")
        return making(net, x)

    def blocks(code: Code) -> list[Any]:
        def batch(size: int) -> torch.Tensor:
            return torch.zeros(size, WIDTH, device="cpu")

        step = TrainingStep(form(code), batch, lambda m, b: m(b).sum(), adamw)
        return [(block.size, block.operator) for block in run_step(step, 4, AMPERE).blocks]

    assert blocks(by_default) == blocks(lambda net, x: making(net, x, device="cuda"))


def test_what_torch_itself_makes_like_a_tensor_of_the_gpu_is_on_the_gpu() -> None:
    """A gradient that is an expanded tensor is copied by autograd, with the device of the meta tensor behind it."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            total = (inputs[:1] + self.weight).sum()
            total.register_hook(lambda grad: grad)
            return total

    def loss(model: Any, batch: Any) -> Any:
        return model(batch)

    timeline = run_step(TrainingStep(Sum, lambda size: torch.zeros(size, WIDTH), loss, adamw), 4, AMPERE)
    gradients = [block for block in timeline.blocks if block.category == "gradients"]
    assert [block.size.base for block in gradients] == [TABLE, TABLE]


def test_a_tensor_on_the_cpu_that_trains_counts_once_for_as_long_as_it_lives() -> None:
    def code(net: Net, x: torch.Tensor) -> Any:
        return x @ net.table + x @ net.table.t()

    timeline = traced(made(code), device="cpu")
    plain = traced(made(lambda net, x: x @ net.layer.weight + x @ net.layer.weight.t()), device="cpu")
    tables = [index for index, block in enumerate(timeline.blocks) if block.size.base == TABLE and not block.operator]
    assert len(tables) == 2  # the weight and the table, each once in two steps
    assert sum(block.size.base == TABLE and not block.operator for block in plain.blocks) == 1
    assert not any(~index in timeline.events for index in tables)


class SizedByNumbers(nn.Module):
    """Layers sized by what the constructor computes on the host (RegNet), and a weight that is replaced (adapters)."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        rows, columns = torch.meshgrid(torch.arange(entries), torch.arange(entries), indexing="ij")
        pairs = torch.stack([rows.flatten(), columns.flatten()], dim=1)
        self.apart = pairs[pairs[:, 0] != pairs[:, 1]]
        sizes = torch.diff(torch.tensor([0, 1, 3, 8])).tolist()
        self.layer = nn.Linear(4, sum(sizes))
        self.layer.weight.data = torch.zeros(sum(sizes), 4, device=self.layer.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)
        return made


@pytest.mark.parametrize("entries", [4, 2000])  # known values, and more than are computed
def test_a_constructor_computes_on_the_host(entries: int) -> None:
    seen: list[int] = []

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        seen.append(out.shape[1])
        total: torch.Tensor = out.sum()
        return total

    timeline = trace(
        TrainingStep(lambda: SizedByNumbers(entries), lambda size: torch.zeros(size, 4), loss, torch.optim.SGD)
    )
    assert set(seen) == {8}
    assert timeline.tier == "symbolic"


class Forwarding(TorchFunctionMode):
    """A function mode that changes nothing, as profilers and loggers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMS)
def test_a_function_mode_that_is_on_changes_no_place(form: Any) -> None:
    """torch hands each function to the modes once."""

    def moving(net: Net, x: torch.Tensor) -> torch.Tensor:
        table = net.table.to("cuda")
        kept = x.detach().cpu()
        assert (x.to("cuda").device.type, table.is_cuda, kept.is_cpu, kept.to(x).is_cuda) == ("cuda", True, True, True)
        assert x.new_zeros(3).is_cuda
        assert (table.is_meta, table.get_device()) == (False, 0)
        assert torch.as_tensor(table, device="cuda").is_cuda
        return x.double().to("cuda", torch.float32) @ table.type_as(x)

    def by_way_of_a_mode(net: Net, x: torch.Tensor) -> torch.Tensor:
        with Forwarding() as mode:
            moved = moving(net, x)
        assert mode.called.count("to") == 4
        return moved

    plain = [(block.size, block.operator) for block in traced(form(moving)).blocks]
    assert plain == [(block.size, block.operator) for block in traced(form(by_way_of_a_mode)).blocks]
