"""Kernels of other libraries: eager Triton launches, and operators for CUDA whose kernels are Python."""

import importlib
import sys

import pytest
import torch
import torch._dynamo  # looks for Triton on import
from torch import nn

from vram_guard import TrainingStep, trace

WIDTH = 1024

TRITON = {
    "__init__": "from triton.runtime import driver\n",
    "runtime/__init__": "from triton.runtime.driver import driver\n",
    "runtime/driver": "class Config:\n    _active = None\n    active = property(lambda self: self._active)\n"
    "driver = Config()\n",
    "runtime/jit": "class JITFunction:\n    def __getitem__(self, grid):\n        return self.run\n"
    "    def run(self, *args, **kwargs):\n        raise AssertionError('libcuda.so cannot found!')\n",
    "runtime/autotuner": "from triton.runtime.jit import JITFunction\n"
    "class Autotuner(JITFunction):\n    configs = (1, 2)\n    def run(self, *args, **kwargs):\n        raise OSError\n"
    "class Heuristics(Autotuner):\n    pass\n",
}


@pytest.fixture
def triton(tmp_path, monkeypatch):
    """A Triton as a machine without a GPU has it: launches fail. It is imported by the model's constructor."""
    for name, text in TRITON.items():
        path = tmp_path / "triton" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]


def step(model, rows=8):
    return TrainingStep(
        model=model,
        batch=lambda size: torch.zeros(size * rows, WIDTH),
        loss=lambda net, x: net(x).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters),
    )


def sizes(timeline):
    """At two samples."""
    return [size for size, block in zip(timeline.sizes(2), timeline.blocks, strict=True) if block.operator]


class Launching(nn.Module):
    """A linear layer whose result goes through a Triton kernel into a buffer of its own."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        module = importlib.import_module("triton.runtime.autotuner")
        self.kernel = getattr(module, kind)()

    def forward(self, x):
        x = self.linear(x)
        out = torch.empty(x.shape[0], 3, device=x.device)
        self.kernel[(x.shape[0],)](x, out)
        assert sys.modules["triton"].driver.active.get_current_target().arch == 80
        return x.sum() + out.sum()


@pytest.mark.usefixtures("triton")
def test_launches_do_nothing_and_what_python_makes_around_them_is_counted():
    timeline = trace(step(lambda: Launching("JITFunction")))
    assert 8 * 2 * 3 * 4 in sizes(timeline)
    assert timeline.tier == "symbolic"
    assert 256 * 2**20 not in sizes(timeline)
    with pytest.raises(AssertionError, match="libcuda"):  # Triton is as before
        sys.modules["triton.runtime.autotuner"].JITFunction()[(1,)](torch.zeros(1))


@pytest.mark.usefixtures("triton")
def test_the_first_launch_of_an_autotuned_kernel_measures_with_a_buffer():
    assert sizes(trace(step(lambda: Launching("Autotuner")))).count(256 * 2**20) == 1


def test_kernels_of_liger_are_followed():
    pytest.importorskip("triton")
    liger = pytest.importorskip("liger_kernel.transformers")

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = liger.LigerRMSNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 32 * WIDTH, bias=False)
            self.loss = liger.LigerFusedLinearCrossEntropyLoss()

        def forward(self, x):
            labels = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
            return self.loss(self.head.weight, self.norm(x), labels)

    timeline = trace(step(Head, rows=256))
    # Never all scores at once: chunks of them (fused_linear_cross_entropy.py), here of a 32nd of the rows.
    assert timeline.tier == "symbolic"
    assert 2 * 256 * 32 * WIDTH * 4 not in sizes(timeline)


def test_a_custom_operator_for_cuda_without_a_fake_kernel_runs_its_python():
    @torch.library.custom_op("vram_guard_tests::gated", mutates_args=(), device_types="cuda")
    def gated(x: torch.Tensor) -> torch.Tensor:
        in_double = torch.empty(x.shape, dtype=torch.float64, device=x.device)
        assert x.is_cuda
        return torch.nn.functional.silu(x) + in_double.sum().to(x.dtype)

    gated.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=_keep)

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return gated(self.linear(x))

    timeline = trace(step(Gated))
    assert sizes(timeline).count(8 * 2 * WIDTH * 8) == 2  # once a step


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def test_a_compiled_operator_without_a_fake_kernel_is_named_and_the_answer_is_a_lower_bound():
    @torch.library.custom_op("vram_guard_tests::compiled", mutates_args=(), device_types="cuda")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        raise TypeError("fwd(): incompatible function arguments")  # pybind's words for a symbolic tensor

    timeline = trace(step(lambda: _Calls(compiled)))
    assert timeline.tier == "formula"
    assert any("vram_guard_tests.compiled" in str(note) and "register_fake" in str(note) for note in timeline.notes)


class _Calls(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.operator = operator

    def forward(self, x):
        return self.operator(self.linear(x))
