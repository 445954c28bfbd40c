"""Optimizers whose states lie elsewhere than torch's, that step elsewhere, or that work now and then."""

import pytest
import torch
from torch import nn

from vram_guard import TrainingStep, trace

WIDTH, LAYERS = 1024, 4
WEIGHT = WIDTH * WIDTH * 4


def net():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def traced(optimizer, model=net):
    return trace(
        TrainingStep(
            model=model,
            batch=lambda size: torch.zeros(size, WIDTH),
            loss=lambda model, x: model(x).sum(),
            optimizer=optimizer,
        )
    )


def states(timeline):
    pairs = zip(timeline.sizes(2), timeline.blocks, strict=True)
    return sum(size for size, block in pairs if block.category == "optimizer_states")


class Preconditioner:
    def __init__(self, parameter):
        self.factors = [torch.zeros_like(parameter), {"inverse": torch.zeros_like(parameter)}]


class EverySoOften(torch.optim.SGD):
    """Keeps a state in an object, and says that it renews it every 200 steps."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["precondition_frequency"] = 200

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("kept", Preconditioner(parameter))
        return super().step(closure)


def test_states_in_lists_and_objects_are_states_and_work_now_and_then_is_said():
    timeline = traced(EverySoOften)
    assert states(timeline) == 2 * LAYERS * WEIGHT
    assert any("every 200 steps (precondition_frequency)" in str(note) for note in timeline.notes)
    assert timeline.tier == "partly symbolic"
    assert not traced(torch.optim.AdamW).notes


def test_paged_states_are_managed_memory_outside_of_the_allocator():
    bnb = pytest.importorskip("bitsandbytes.optim")
    paged, plain = traced(bnb.PagedAdamW), traced(bnb.AdamW)
    assert plain.at(2).peak_allocated - paged.at(2).peak_allocated == 2 * LAYERS * WEIGHT
    assert sum(block.size.base for block in paged.host_blocks) == 2 * LAYERS * WEIGHT
    assert any("managed memory" in str(note) for note in paged.notes)
    with pytest.raises(RuntimeError, match="get_managed_ptr"):  # as before: no driver here
        bnb.adamw.PagedAdamW.get_state_buffer.__globals__["F"].get_paged(WIDTH, WIDTH)


def test_states_that_torchao_keeps_on_the_host_take_nothing_on_the_gpu():
    torchao = pytest.importorskip("torchao.optim")
    timeline = traced(lambda parameters: torchao.CPUOffloadOptimizer(parameters, torch.optim.AdamW))
    assert states(timeline) == 0
    # The parameters' and the gradients' copies, and two states (torchao/optim/cpu_offload.py).
    assert sum(block.size.base for block in timeline.host_blocks) == 4 * LAYERS * WEIGHT


def test_plain_replacements_of_fast_kernels_are_said():
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50)
    timeline = trace(
        TrainingStep(
            model=lambda: transformers.MambaForCausalLM(config),
            batch=lambda size: torch.zeros(size, 8, dtype=torch.long),
            loss=lambda model, ids: model(input_ids=ids, labels=ids).loss,
            optimizer=torch.optim.SGD,
        )
    )
    said = [str(note) for note in timeline.notes]
    assert any("modeling_mamba runs in plain PyTorch here" in note and "mamba_ssm" in note for note in said)
    assert timeline.tier == "partly symbolic"


def stepping_in_backward(model):
    """As PyTorch's tutorial has it: an optimizer for each parameter, stepped from a hook that frees the gradient."""
    optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return optimizers


def nothing_left(parameters):
    return torch.optim.SGD(parameters)


def test_an_optimizer_in_the_backward_pass_is_followed_where_its_hooks_were_there_before():
    model = net()
    optimizers = stepping_in_backward(model)
    model(torch.ones(1, WIDTH)).sum().backward()  # has states already
    kept = {parameter: dict(one.state[parameter]) for parameter, one in optimizers.items()}
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    hooks = [dict(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()]

    followed = traced(nothing_left, model)
    assert followed.tier == "symbolic"
    assert not followed.notes
    assert states(followed) == 2 * LAYERS * WEIGHT
    prepared = trace(
        TrainingStep(
            model=net,
            batch=lambda size: torch.zeros(size, WIDTH),
            loss=lambda model, x: model(x).sum(),
            optimizer=nothing_left,
            prepare=stepping_in_backward,
        )
    )
    assert followed.at(2).peak_allocated == prepared.at(2).peak_allocated
    usual = traced(torch.optim.Adam)
    assert usual.at(2).peak_allocated - followed.at(2).peak_allocated >= (LAYERS - 2) * WEIGHT

    for (parameter, value), own in zip(before, hooks, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None
        assert dict(parameter._post_accumulate_grad_hooks) == own
        assert optimizers[parameter].state[parameter].keys() == kept[parameter].keys()
        assert all(optimizers[parameter].state[parameter][name] is one for name, one in kept[parameter].items())
    model(torch.ones(1, WIDTH)).sum().backward()  # it trains on
    assert not any(torch.equal(parameter, value) for parameter, value in before)
