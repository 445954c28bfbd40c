"""After a trace, a failed trace or Ctrl-C: every object of the user's and of the process is as it was."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME, adamw
from torch import nn
from torch.nn import functional as F

from vram_guard.errors import UnsupportedStepError
from vram_guard.plan import plan
from vram_guard.simulate import estimate, trace
from vram_guard.simulate.device.fake_cuda import TENSOR_ATTRIBUTES
from vram_guard.step import TrainingStep
from vram_guard.techniques import Recipe


class Untidy(nn.Module):
    """Does in forward what modules should not do, and sometimes do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.history: list[torch.Tensor] = []
        self.settings = {"seen": 0}
        self.last: torch.Tensor | None = None
        self.tied = [self.linear.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(x)
        self.settings["seen"] += 1
        self.settings["fresh"] = x
        self.last = self.norm(F.dropout(self.linear(x), 0.5))
        self.extra = self.last
        self.eval().train()
        return self.rnn(self.last[:, None])[0] + self.tied[0].sum() + self.teacher(x.detach())[:, None]


def fingerprint(module: nn.Module):
    """Identity and content of all that a module holds."""
    found = {}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, dict):
                value_copy = {key: id(item) for key, item in value.items()}
            elif isinstance(value, list):
                value_copy = [id(item) for item in value]
            else:
                value_copy = id(value)
            found[path, name] = (id(value), value_copy)
    tensors = {
        name: (id(t), t.data_ptr(), t.clone(), t.requires_grad, t.grad, t._version)
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    }
    return found, tensors


def assert_same(before, after) -> None:
    assert before[0] == after[0]
    for name, (key, pointer, value, requires_grad, grad, version) in before[1].items():
        key2, pointer2, value2, requires_grad2, grad2, version2 = after[1][name]
        assert (key, pointer, requires_grad, version) == (key2, pointer2, requires_grad2, version2), name
        assert torch.equal(value, value2)
        assert grad is grad2


def process_state():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.cuda.is_available(),
        torch.get_default_device(),
        {name: torch.Tensor.__dict__.get(name) for name in TENSOR_ATTRIBUTES},
        nn.Module.__call__,
        torch.tensor,
        torch.clear_autocast_cache,
    )


def untidy_step(model: nn.Module, **settings) -> TrainingStep:
    settings.setdefault("loss", lambda m, b: m(b).sum())
    return TrainingStep(model, lambda b: torch.randn(b, 6), optimizer=adamw, **settings)


@pytest.fixture
def untidy() -> Untidy:
    model = Untidy()
    model(torch.randn(4, 6)).sum().backward()  # gradients of the user's own
    return model


TREATED = Recipe(checkpoint=("linear",), offload_activations=("norm",), frozen_on_host=("teacher",))


@pytest.mark.parametrize(
    "settings", [{"precision": "32-true"}, {"precision": "16-mixed"}, {"precision": "16-true"}, {"recipe": TREATED}]
)
def test_a_trace_leaves_nothing_behind(untidy: Untidy, settings: dict[str, Any]) -> None:
    if "recipe" in settings:
        pytest.importorskip("accelerate")
    before, process = fingerprint(untidy), process_state()
    trace(untidy_step(untidy, **settings))
    assert_same(before, fingerprint(untidy))
    assert process == process_state()


@pytest.mark.parametrize(
    ("error", "place"),
    [(ValueError, "loss"), (KeyboardInterrupt, "optimizer"), (SystemExit, "batch"), (KeyboardInterrupt, "hook")],
)
def test_an_exception_leaves_nothing_behind_and_comes_out_unchanged(untidy: Untidy, error, place: str) -> None:
    thrown = error("mine")

    def fail(*_args, **_kwargs):
        random.random()
        raise thrown

    model, step = untidy, untidy_step(untidy)
    if place == "hook":
        handle = model.norm.register_forward_hook(fail)
    else:
        step = step.with_(**{place: fail})
    before, process = fingerprint(model), process_state()
    with pytest.raises(error) as caught:
        trace(step)
    assert caught.value is thrown
    assert any(frame.name == "fail" for frame in caught.traceback)
    assert_same(before, fingerprint(model))
    assert process == process_state()
    if place == "hook":
        handle.remove()
    trace(untidy_step(untidy))  # and the next trace works


def test_training_after_a_trace_is_bit_identical_to_training_without() -> None:
    def train(with_trace: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = Untidy()
        if with_trace:
            estimate(untidy_step(model, precision="bf16-mixed"), 8)
        optimizer = adamw(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).pow(2).sum().backward()
            optimizer.step()
        return model.state_dict()

    plain, guarded = train(False), train(True)
    assert all(torch.equal(plain[name], guarded[name]) for name in plain)


def test_a_trace_does_no_arithmetic_and_takes_no_memory() -> None:
    """A model of 60 GiB is traced on a machine that could never hold it."""

    def giant() -> nn.Module:
        return nn.Sequential(*[nn.Linear(32768, 32768, bias=False) for _ in range(15)])

    step = TrainingStep(giant, lambda b: torch.zeros(b, 32768), lambda m, b: m(b).sum(), adamw)
    assert estimate(step, 2).breakdown["parameters"] == 15 * 32768**2 * 4


def test_ctrl_c_at_any_moment_leaves_nothing_behind() -> None:
    """A timer presses Ctrl-C at moments spread over a whole trace, the restoring included.

    It runs by this process's own time: other work on the machine shifts no moment.
    """
    import signal
    import time

    model = Untidy()
    step = untidy_step(model)
    trace(step)
    start = time.process_time()
    trace(step)
    whole = time.process_time() - start
    before, process = fingerprint(model), process_state()
    signal.signal(signal.SIGPROF, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    # A shell starts background jobs with SIGINT ignored; then nobody's Ctrl-C arrives, here or in training.
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    # Nor does one that meets a callback of the collector, such as Hypothesis has: Python drops what is raised there.
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    interrupted = 0
    try:
        for moment in range(24):
            try:
                signal.setitimer(signal.ITIMER_PROF, whole * (moment + 0.5) / 20)
                trace(step)
                signal.setitimer(signal.ITIMER_PROF, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert_same(before, fingerprint(model))
            assert process == process_state()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGINT, own)
        gc.callbacks[:] = callbacks
    assert interrupted >= 5


@pytest.mark.torch_since(2, 6)
def test_switches_that_a_step_turns_are_turned_back() -> None:
    def loss(model, batch):
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(True)
        torch.backends.cudnn.benchmark = True
        torch.autograd.set_detect_anomaly(True)
        torch.set_autocast_enabled("cpu", True)
        torch.backends.cuda.enable_flash_sdp(False)
        return model(batch).sum()

    model = nn.Linear(6, 6)
    before = process_state()
    switches = (torch.backends.cudnn.benchmark, torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu"))
    trace(untidy_step(model, loss=loss))
    assert before == process_state()
    assert switches == (torch.backends.cudnn.benchmark, torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu"))
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.ones(2).device.type == "cpu"


def test_real_tensors_that_a_step_writes_to_hold_what_they_held() -> None:
    """An average of the weights kept outside the model, a counter, a second model's gradients."""
    model, average, counter = nn.Linear(6, 6), torch.ones(6), torch.zeros(1)
    model(torch.randn(2, 6)).sum().backward()
    gradient = model.weight.grad

    def loss(module, batch):
        average.mul_(0.5).add_(1)
        torch._foreach_add_([counter], 1)
        model.weight.grad = None
        return module(batch).sum()

    parameter = model.weight

    def spoils(module, batch):
        parameter.grad = None
        return loss(module, batch)

    trace(untidy_step(model, loss=spoils))
    assert torch.equal(average, torch.ones(6))
    assert counter.item() == 0
    assert model.weight.grad is gradient


def state_of_torch() -> dict[str, object]:
    """Modules' own state that outlives a trace: groups, tables, caches, switches, the environment."""
    from torch._dynamo import config, trace_rules
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.tensor import _redistribute

    backends = (torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn)
    plain = (bool, int, float, str, type(None))
    planned = getattr(_redistribute, "_planner_cache", {})
    return {
        "groups": (torch.distributed.is_initialized(), c10d._backend, c10d._default_pg_init_method, id(c10d._world)),
        "tables": [
            [*map(id, getattr(trace_rules, name)())]
            for name in ("get_torch_obj_rule_map", "get_tensor_method", "get_legacy_mod_inlinelist")
        ],
        "planned": len(planned),
        "switches": [[getattr(one, "enabled", None), getattr(one, "allow_tf32", None)] for one in backends],
        "dynamo": {key: value for key, value in config.get_config_copy().items() if isinstance(value, plain)},
        "environment": dict(os.environ),
        "process": (sys.excepthook, torch.get_num_threads(), len(warnings.filters)),
    }


@pytest.mark.torch_since(2, 6)
def test_nothing_of_torch_is_another_after_a_plan_over_several_gpus() -> None:
    import torch.distributed.tensor  # what is imported and filled for good by the first look is no state of a trace

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    step = TrainingStep(model, torch.ones(2, 64), lambda model, batch: model(batch).square().mean(), adamw)
    before, process = state_of_torch(), process_state()
    trace(step)
    assert before == state_of_torch()
    plan(step, 8, "80GiB", gpus=2)
    trace(step.with_(recipe=Recipe(parameters_on_host=("0", "2"))))
    assert before == state_of_torch()
    assert process == process_state()


def test_hooks_of_other_libraries_survive() -> None:
    model = BY_NAME["decoder"].model()
    seen: list[str] = []
    handle = model.norm.register_forward_hook(lambda *_: seen.append("hook"))
    trace(BY_NAME["decoder"].step(model=model))
    assert list(model.norm._forward_hooks) == [handle.id]
    assert len(seen) == 6  # two steps at three sizes: hooks run as in training


def test_hooks_that_write_to_their_module_leave_no_trace(untidy: Untidy) -> None:
    def notes(module: nn.Module, _inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        untidy.history.append(output)
        untidy.settings["hooks"] = untidy.settings.get("hooks", 0) + 1
        untidy.calls.add_(10)
        module.weight_of_last = output.detach()

    untidy.linear.register_forward_hook(notes)
    untidy.linear.weight.register_hook(lambda grad: untidy.history.append(grad))
    untidy.register_forward_pre_hook(lambda module, _inputs: setattr(module, "last", None))
    before = fingerprint(untidy)
    trace(untidy_step(untidy))
    assert_same(before, fingerprint(untidy))
    assert not hasattr(untidy.linear, "weight_of_last")


def test_what_was_taken_from_torch_cuda_during_a_trace_stops_pretending() -> None:
    """As a module does that is imported in the middle of a trace: ``from torch.cuda import ...``."""
    taken = {}

    def loss(model, batch):
        from torch.cuda import Event, is_available

        taken.update(is_available=is_available, Event=Event)
        assert is_available()
        assert Event(enable_timing=True).elapsed_time(None) == 0.0
        return model(batch).sum()

    real_event = torch.cuda.Event
    trace(untidy_step(nn.Linear(6, 6), loss=loss))
    assert taken["is_available"]() == torch.cuda.is_available()
    assert issubclass(taken["Event"], real_event)
    try:
        made = taken["Event"]()
    except RuntimeError:  # what the real class says on a torch without CUDA
        return
    assert type(made) is real_event


def test_an_optimizer_over_real_parameters_is_followed_over_the_models_own_and_trains_none() -> None:
    """LightningCLI makes its optimizer over the model's parameters before the trace begins."""
    model, other = nn.Linear(6, 6), nn.Linear(6, 6)
    model(torch.randn(2, 6)).sum().backward()
    before = [one.detach().clone() for one in (model.weight, other.weight)]

    def step(trained: nn.Module) -> TrainingStep:
        optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
        return TrainingStep(model, lambda b: torch.randn(b, 6), lambda m, b: m(b).sum(), lambda parameters: optimizer)

    assert estimate(step(model), 2).breakdown["optimizer_states"] == 2 * 2 * 512  # two of each, in blocks
    with pytest.raises(UnsupportedStepError):
        trace(step(other))
    assert all(torch.equal(one, now) for one, now in zip((model.weight, other.weight), before, strict=True))
    assert model.weight.grad is not None


LAZY = """
import torch
from lazily_imported_helper import ONES

TABLE = torch.arange(4.0)
ON_GPU = torch.cuda.is_available()
DEVICE = torch.empty(1).device.type
KNOWN = {torch.Tensor.to, torch.Tensor.cuda, torch.zeros}
"""


@pytest.mark.parametrize("where", ["constructor", "forward"])
def test_a_module_that_is_imported_during_a_trace_is_a_real_one(where, tmp_path, monkeypatch):
    (tmp_path / "lazily_imported.py").write_text(LAZY)
    (tmp_path / "lazily_imported_helper.py").write_text("import torch\nONES = torch.ones(2)\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Lazy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            if where == "constructor":
                self.forward(torch.zeros(1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import lazily_imported  # type: ignore[import-not-found]

            assert where == "constructor" or torch.cuda.is_available(), "the step itself believes in a GPU"
            return super().forward(x + lazily_imported.TABLE.to(x.device))

    try:
        estimate(
            TrainingStep(
                model=Lazy, batch=lambda b: torch.zeros(b, 4), loss=lambda model, x: model(x).sum(), optimizer=adamw
            ),
            2,
        )
        import lazily_imported

        assert lazily_imported.TABLE.tolist() == [0, 1, 2, 3]
        assert lazily_imported.ONES.tolist() == [1, 1]
        assert lazily_imported.DEVICE == "cpu"
        assert torch.cuda.is_available() == lazily_imported.ON_GPU
        assert {torch.Tensor.to, torch.Tensor.cuda, torch.zeros} == lazily_imported.KNOWN
    finally:
        for name in ("lazily_imported", "lazily_imported_helper"):
            sys.modules.pop(name, None)


def test_factories_follow_the_default_device_after_a_trace_as_before() -> None:
    """In a process of its own: torch looks its factories up once, when a device is first used as a context."""
    code = (
        "import torch\n"
        "from vram_guard import TrainingStep, trace\n"
        "trace(TrainingStep(lambda: torch.nn.Linear(4, 4), lambda n: torch.zeros(n, 4), lambda m, b: m(b).sum()))\n"
        "with torch.device('meta'):\n"
        "    print(torch.tensor([1.0]).device, torch.as_tensor([1.0]).device, torch.empty(2).device)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["meta", "meta", "meta"]


def test_the_environment_of_later_processes_is_as_before() -> None:
    """In a process of its own: torch sets a variable when its compiler is first imported."""
    code = (
        "import os\n"
        "before = dict(os.environ)\n"
        "import torch\n"
        "from vram_guard import TrainingStep, trace\n"
        "trace(TrainingStep(lambda: torch.nn.Linear(4, 4), lambda n: torch.zeros(n, 4), lambda m, b: m(b).sum()))\n"
        "print(sorted(name for name, value in os.environ.items() if before.get(name) != value))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
