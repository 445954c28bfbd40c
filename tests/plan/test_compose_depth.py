"""Timelines of deep models from those of shallow ones, held against direct traces; and plans that rest on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from each import each

torch = pytest.importorskip("torch")

from parallel_cases import Net, Transformer, loss, step  # noqa: E402
from torch import nn  # noqa: E402

from vram_guard import Parallel, Plan, Timeline, TrainingStep, plan  # noqa: E402
from vram_guard.compose import CannotComposeError, DepthLaw  # noqa: E402
from vram_guard.plan import PlanOptions, _depth  # noqa: E402
from vram_guard.simulate.tracing import run  # noqa: E402
from vram_guard.techniques.equal_blocks import equal_blocks, with_depth  # noqa: E402
from vram_guard.techniques.recipe import Recipe  # noqa: E402

DEPTH = 12
SPLIT = {"accumulate": 2, "whole_batch": True}
HALVED = {"param_dtype": "bf16", "reduce_dtype": "fp32"}

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "one GPU": ({}, ""),
    "fsdp2, uneven": ({"parallel": Parallel(7, kind="fsdp2")}, ""),
    "fsdp2, mixed, split": ({"parallel": Parallel(8, kind="fsdp2", **HALVED), "precision": "bf16-mixed", **SPLIT}, ""),
    "fsdp2, checkpointed": ({"parallel": Parallel(8, kind="fsdp2")}, "checkpoint"),
    "fsdp2, offloaded": ({"parallel": Parallel(8, kind="fsdp2")}, "offload_activations"),
    "fsdp2 in host memory": ({"parallel": Parallel(8, kind="fsdp2", offload=True)}, ""),
    "tensor, checkpointed": ({"parallel": Parallel(8, kind="fsdp2", tensor=2)}, "checkpoint"),
}


def traced(model: nn.Module, depth: int, settings: dict[str, Any], treated: str = "") -> Timeline:
    blocks = equal_blocks(model)
    assert blocks is not None
    recipe = Recipe(**{treated: sorted(blocks.within(depth))}) if treated else Recipe()
    with with_depth(model, blocks, depth):
        return run.run_step(step(model=model, recipe=recipe, **settings), 2, (9, 0), marked=True)


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize(("settings", "treated"), CASES.values(), ids=CASES)
def test_five_and_six_blocks_say_what_more_do_event_by_event(settings: dict[str, Any], treated: str) -> None:
    divided = getattr(settings.get("parallel"), "tensor", 1) > 1
    depth = 8 if divided else DEPTH
    model = Transformer(layers=depth) if divided else Net(blocks=depth)
    low, high, deep = (traced(model, blocks, settings, treated) for blocks in (5, 6, depth))
    law = DepthLaw(low, high, 5, ["layers" if divided else "blocks"])
    said = law.at(depth)
    assert said.events == deep.events
    assert said.blocks == deep.blocks
    assert said.phases == deep.phases
    assert said.collectives == deep.collectives
    assert said.host_events == deep.host_events
    assert said.marks == deep.marks
    assert law.holds(deep, depth)
    assert not law.holds(high, depth)


@pytest.mark.torch_since(2, 6)
def test_states_dealt_out_tensor_by_tensor_follow_no_law() -> None:
    """ZeRO-1 gives each parameter to the rank that holds least: no round is like the one before."""
    model, settings = Net(blocks=DEPTH), {"parallel": Parallel(4, kind="zero1")}
    with pytest.raises(CannotComposeError):
        DepthLaw(traced(model, 5, settings), traced(model, 6, settings), 5, ["blocks"])


class Pair(nn.Module):
    """A frozen model, one block of another kind, and a model of the same depth that learns to differ."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.original = Net(blocks=depth).requires_grad_(False)
        self.between = nn.ModuleList(Net(blocks=1).requires_grad_(False) for _ in range(3))
        self.student = Net(blocks=depth)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            known = self.original(words)
            for net in self.between:
                known = known + net(words)
        return self.student(words) - known


# --- equal blocks -------------------------------------------------------------------------------------------------


def numbered(model: nn.Module) -> nn.Module:
    for number, block in enumerate(model.blocks):
        block.number, block.scale = number, 0.1 / (number + 1)
    return model


def one_wider(model: nn.Module) -> nn.Module:
    model.blocks[2].up, model.blocks[2].down = nn.Linear(40, 90), nn.Linear(90, 40)
    return model


def one_frozen(model: nn.Module) -> nn.Module:
    model.blocks[2].requires_grad_(False)
    return model


def one_twice(model: nn.Module) -> nn.Module:
    model.blocks[2] = model.blocks[1]
    return model


def one_outside(model: nn.Module) -> nn.Module:
    model.first = model.blocks[0]
    return model


def one_tied(model: nn.Module) -> nn.Module:
    model.bias = model.blocks[1].down.bias
    return model


def one_dropping(model: nn.Module) -> nn.Module:
    for number, block in enumerate(model.blocks):
        block.every = 0 if number % 2 else 8
    return model


def test_blocks_that_differ_in_their_number_are_equal() -> None:
    model = numbered(Net(blocks=4))
    blocks = equal_blocks(model)
    assert blocks is not None
    assert blocks == (("blocks",), 4)
    assert blocks.names == {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}
    whole = list(model.state_dict())
    with with_depth(model, blocks, 2):
        assert len(model.blocks) == 2
    assert list(model.state_dict()) == whole


def test_the_blocks_of_every_stack_come_back_after_an_error() -> None:
    model = Pair(4)
    blocks = equal_blocks(model)
    assert blocks is not None
    whole = list(model.state_dict())
    with contextlib.suppress(ZeroDivisionError), with_depth(model, blocks, 2):
        assert (len(model.original.blocks), len(model.student.blocks)) == (2, 2)
        raise ZeroDivisionError
    assert list(model.state_dict()) == whole


@each("change", [one_wider, one_frozen, one_twice, one_outside, one_tied, one_dropping])
def test_blocks_that_differ_or_are_shared_are_not(change: Callable[[nn.Module], nn.Module]) -> None:
    assert equal_blocks(change(Net(blocks=4))) is None


# --- plans --------------------------------------------------------------------------------------------------------


class Late(nn.Module):
    """Keeps more from its tenth block on, which no trace with eight shows."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.net = Net(blocks=DEPTH, width=64)
        self.since = since

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.net.embedding(words)
        for number, block in enumerate(self.net.blocks):
            x = block(x)
            if number >= self.since:
                x = torch.sigmoid(torch.exp(x)) * torch.tanh(x)
        return self.net.head(x)


def late(since: int) -> TrainingStep:
    return TrainingStep(
        Late(since),
        lambda size: torch.zeros(size, 8192, dtype=torch.long),
        loss,
        torch.optim.AdamW,
    )


def test_blocks_that_checkpoint_themselves_are_equal_too() -> None:
    model = Net(blocks=4)
    model.blocks.gradient_checkpointing = True
    blocks = equal_blocks(model)
    assert blocks is not None
    assert blocks.stacks == ("blocks",)


def planned(since: int) -> Plan:
    asked = late(since)
    options = PlanOptions(link="nvlink4", layouts=["fsdp2"])
    # Twelve blocks fit as they are where none keeps more, which is what five, six and eight say.
    budget = "140MiB" if since == DEPTH else "165MiB"
    return plan(asked, 1, budget, margin=0.0, gpus=8, allow=["checkpoint"], options=options)


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize("since", [DEPTH, 9], ids=["the law holds", "the law breaks unseen"])
def test_a_plan_by_the_law_is_the_plan_without_it(since: int, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = planned(since)
    depths: list[int] = []
    followed = run.run_step

    def counted(asked: TrainingStep, *args: Any, **kwargs: Any) -> Timeline:
        depths.append(len(asked.model.net.blocks))
        return followed(asked, *args, **kwargs)

    monkeypatch.setattr(_depth, "LEAST_BLOCKS", DEPTH)
    monkeypatch.setattr(_depth, "LEAST_DEPTH", DEPTH)
    monkeypatch.setattr(run, "run_step", counted)
    made = planned(since)

    assert 5 in depths
    assert made.fits
    assert made.recipe.checkpoint
    assert (made.recipe, made.splits, made.peak) == (direct.recipe, direct.splits, direct.peak)
    assert made.spread is not None
    assert direct.spread is not None
    assert made.spread.layout == direct.spread.layout
    assert made.spread.seconds == pytest.approx(direct.spread.seconds)
    assert made.timeline is not None
    assert made.timeline.work  # of a trace with all blocks: nothing composed has any
    if since == DEPTH:
        assert depths.count(DEPTH) == 1  # what is taken; the nearest miss is made of the same, which the trace confirms
