"""Forms of an optimizer: the same results, the same groups, and what each takes from the GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from each import each
from torch import nn

from vram_guard import TrainingStep
from vram_guard.errors import InvalidInputError, MissingLibraryError, UnsupportedTechniqueError
from vram_guard.simulate.tracing.run import run_step
from vram_guard.techniques import Recipe, optimizers
from vram_guard.techniques.compatibility import incompatible
from vram_guard.techniques.optimizers import eight_bit_classes, repoint, with_form

WIDTH = 64  # a weight of 4,096 elements, the fewest that torchao moves
MAKERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", MAKERS)
def test_for_loop_and_fused_train_as_the_written_one(name):
    model, other, third = net(), net(), net()
    written = train(model, MAKERS[name](model.parameters()))
    looped = train(other, with_form(MAKERS[name](other.parameters()), "for-loop"))
    fused_optimizer = with_form(MAKERS[name](third.parameters()), "fused")
    assert fused_optimizer.param_groups[0]["fused"] is True
    fused = train(third, fused_optimizer)
    for a, b, c in zip(written, looped, fused, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["for-loop", "fused"])
def test_a_form_stays_when_a_state_is_loaded(form):
    """A checkpoint of the training as written brings the flags that it was saved with."""
    model, other = net(), net()
    written = MAKERS["AdamW"](model.parameters())
    train(model, written)
    resumed = with_form(MAKERS["AdamW"](other.parameters()), form)
    resumed.load_state_dict(written.state_dict())
    assert {bool(group["fused"]) for group in resumed.param_groups} == {form == "fused"}
    assert {group["foreach"] for group in resumed.param_groups} == {False}
    for loaded, saved in zip(resumed.state.values(), written.state.values(), strict=True):
        assert torch.equal(loaded["exp_avg"], saved["exp_avg"])
        assert float(loaded["step"]) == float(saved["step"])


def test_what_has_no_such_form_is_refused_and_left_alone():
    class Mine(torch.optim.AdamW):
        pass

    parameters = list(net().parameters())
    for optimizer, form, words in (
        (torch.optim.RMSprop(parameters), "fused", "no fused form"),
        (Mine(parameters), "fused", "Mine has no fused form"),
        (torch.optim.AdamW(parameters, differentiable=True), "fused", "differentiable"),
        (torch.optim.LBFGS(parameters), "for-loop", "no foreach"),
        (torch.optim.SGD(parameters), "8bit", "no 8-bit form"),
        (torch.optim.AdamW(parameters, amsgrad=True), "8bit", "amsgrad"),
    ):
        before = dict(optimizer.param_groups[0])
        with pytest.raises(UnsupportedTechniqueError, match=words):
            with_form(optimizer, form)
        assert optimizer.param_groups[0] == before
    with pytest.raises(InvalidInputError, match="smaller"):
        with_form(torch.optim.AdamW(parameters), "smaller")
    with pytest.raises(InvalidInputError, match="apex"):
        with_form(torch.optim.AdamW(parameters), "8bit", library="apex")


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingLibraryError, match="pip install bitsandbytes"):
        with_form(torch.optim.AdamW(net().parameters()), "8bit")
    with pytest.raises(MissingLibraryError, match="pip install torchao"):
        with_form(torch.optim.AdamW(net().parameters()), "8bit", library="torchao")


def test_a_library_that_cannot_be_imported_is_named_with_the_reason(tmp_path, monkeypatch):
    """As torchao's newest release under torch 2.4."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise AttributeError('torch has no attribute int1')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingLibraryError, match=r"torchao .*\(AttributeError: .* int1\)"):
        eight_bit_classes("torchao")


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.filterwarnings("ignore")
def test_8_bit_keeps_groups_and_hyperparameters(library, kind):
    pytest.importorskip(library)
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters(), "weight_decay": 0.5}]
    written = kind(groups, lr=1e-3, betas=(0.8, 0.95), eps=1e-6)
    scheduler = torch.optim.lr_scheduler.StepLR(written, 1, gamma=0.5)
    small = with_form(written, "8bit", library=library)
    assert type(small).__name__ == kind.__name__ + "8bit"
    assert [float(group["lr"]) for group in small.param_groups] == pytest.approx([1e-2, 1e-3])
    for mine, theirs in zip(small.param_groups, written.param_groups, strict=True):
        assert [id(p) for p in mine["params"]] == [id(p) for p in theirs["params"]]
        assert (tuple(mine["betas"]), mine["eps"], mine["weight_decay"]) == ((0.8, 0.95), 1e-6, theirs["weight_decay"])
    repoint(scheduler, small)
    assert scheduler.optimizer is small
    scheduler.step()
    assert [float(group["lr"]) for group in small.param_groups] == pytest.approx([5e-3, 5e-4])
    assert [group["lr"] for group in written.param_groups] == [1e-2, 1e-3], "the old one is no longer driven"


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.4's SequentialLR warns of itself
def test_a_repointed_scheduler_goes_on_as_the_old_one_would():
    def make():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        parts = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ]
        return model, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    model, optimizer, scheduler = make()
    _, replaced, moved = make()
    expected, got = [], []
    for at in range(5):
        if at == 1:
            fresh = torch.optim.AdamW(list(replaced.param_groups[0]["params"]), lr=7.0)
            repoint(moved, fresh)
            replaced = fresh
        for one, two, rates in ((optimizer, scheduler, expected), (replaced, moved, got)):
            one.step()
            two.step()
            rates.append(one.param_groups[0]["lr"])
    assert got == expected
    with pytest.raises(UnsupportedTechniqueError, match="groups"):
        repoint(moved, torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}]))


# --- in the trace ----------------------------------------------------------------------------------------------------

BIG = 128


def optimizer_phase(recipe: Recipe):
    """(bytes of states, most bytes of temporaries in the second optimizer step) of two square layers without bias."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(BIG, BIG, bias=False), nn.Linear(BIG, BIG, bias=False))

    timeline = run_step(
        TrainingStep(
            model=model,
            batch=lambda size: torch.zeros(size, BIG),
            loss=lambda model, batch: model(batch).mean(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            recipe=recipe,
        ),
        2,
        (8, 0),
    )
    states = sum(block.size.base for block in timeline.blocks if block.category == "optimizer_states")
    start = next(phase.start for phase in timeline.phases if phase.name == "optimizer" and phase.step == 2)
    live = most = 0
    made = set()
    for event in timeline.events[start:]:
        if event >= 0:
            made.add(event)
            live += timeline.blocks[event].size.base
        elif ~event in made:
            live -= timeline.blocks[~event].size.base
        most = max(most, live)
    return states, most


WEIGHT = BIG * BIG * 4


def test_each_form_takes_what_its_source_says():
    # torch/optim/adam.py: _multi_tensor_adamw keeps the denominators of all parameters, _single_tensor_adamw two
    # temporaries of one parameter and the denominator of the one before, the fused kernel none.
    assert optimizer_phase(Recipe()) == (4 * WEIGHT, 2 * WEIGHT)
    assert optimizer_phase(Recipe(optimizer="for-loop")) == (4 * WEIGHT, 3 * WEIGHT)
    states, most = optimizer_phase(Recipe(optimizer="fused"))
    assert states == 4 * WEIGHT + 2 * 4  # and a step count on the device for each parameter
    assert most == 0


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
@pytest.mark.filterwarnings("ignore")
def test_8_bit_states_are_traced_as_the_library_allocates_them(library, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.setattr(optimizers, "LIBRARIES", (library,))
    states, most = optimizer_phase(Recipe(optimizer="8bit"))
    # One byte an element, one float32 for each 256 elements, twice for each of two parameters; the maps of 256 float32
    # belong to each state with torchao (subclass_8bit.py), and to the optimizer with bitsandbytes (name2qmap).
    each = BIG * BIG + BIG * BIG // 256 * 4
    assert states == 4 * each + (4 if library == "torchao" else 2) * 1024
    if library == "bitsandbytes":
        assert most == 0  # one kernel in place
    else:
        assert most > 2 * WEIGHT  # traced as it is written: an upper bound of what the compiled step takes


# --- what goes together ----------------------------------------------------------------------------------------------


@each(
    ("recipe", "settings", "together"),
    [
        (Recipe(optimizer="fused"), {"clip": True, "precision": "16-mixed"}, False),
        (Recipe(optimizer="fused"), {"optimizer_name": "RMSprop"}, False),
        (Recipe(optimizer="8bit"), {"optimizer_name": "SGD"}, False),
        (Recipe(optimizer_on_host=True), {"clip": True}, False),
        (Recipe(optimizer_on_host=True), {"precision": "16-mixed"}, False),
        (Recipe(optimizer_on_host=True), {"ranks": 2}, False),
        (Recipe(optimizer_on_host=True), {"optimizer_name": "LBFGS"}, False),
        (Recipe(optimizer_on_host=True, optimizer="8bit"), {}, False),
        (Recipe(parameters_on_host=("a",), optimizer_on_host=True), {}, False),
        (Recipe(parameters_on_host=("a",), frozen_on_host=("b",)), {}, False),
        (Recipe(parameters_on_host=("a",), optimizer="8bit"), {}, False),
        (Recipe(parameters_on_host=("a",)), {"precision": "16-mixed"}, False),
        (Recipe(parameters_on_host=("a",)), {"ranks": 2}, False),
        (Recipe(parameters_on_host=("a",)), {"torch_version": (2, 4)}, False),
        (Recipe(), {"clip": True, "precision": "16-mixed", "ranks": 8}, True),
        (Recipe(optimizer="fused"), {"clip": True, "precision": "bf16-mixed", "optimizer_name": "AdamW"}, True),
        (Recipe(optimizer="for-loop", frozen_on_host=("t",)), {"precision": "16-mixed"}, True),
        (Recipe(optimizer_on_host=True, frozen_on_host=("t",)), {"optimizer_name": "AdamW"}, True),
        (Recipe(parameters_on_host=("a",), checkpoint=("a",)), {"clip": True, "torch_version": (2, 13)}, True),
    ],
)
def test_what_goes_together(recipe, settings, together):
    assert (incompatible(recipe, **settings) == "") is together


def test_a_form_can_change_in_the_middle_of_a_training():
    model, other = net(), net()
    written = MAKERS["AdamW"](model.parameters())
    changed = MAKERS["AdamW"](other.parameters())
    train(model, written)
    train(other, changed)
    assert with_form(changed, "fused") is changed
    for a, b in zip(train(model, written), train(other, changed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    with_form(changed, "for-loop")
    assert not changed.__dict__.get("_step_supports_amp_scaling")
    for a, b in zip(train(model, written), train(other, changed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore")
def test_real_8_bit_states_have_the_bytes_that_the_trace_counts():
    torchao = pytest.importorskip("torchao.optim")
    state = torchao.AdamW8bit([nn.Parameter(torch.zeros(BIG, BIG))])._new_buffer(torch.zeros(BIG, BIG), True)
    parts = [getattr(state, name) for name in state.__tensor_flatten__()[0]]
    assert sum(part.numel() * part.element_size() for part in parts) == BIG * BIG + BIG * BIG // 256 * 4 + 1024
