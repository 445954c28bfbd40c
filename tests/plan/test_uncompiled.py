"""A trace imports torch's compiler where the step uses it, and not otherwise."""

import json
import subprocess
import sys
from typing import Any

import pytest

#: What a trace of a small step holds at most, by its loss; the compiler's modules that are there.
_STEP = """
import inspect, json, os, sys
import torch
from torch import nn
import vram_guard

os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))

def peak(loss, model=net):
    batch = (torch.zeros(4, 64), torch.zeros(4, 8))
    step = vram_guard.TrainingStep(model, batch, loss, torch.optim.AdamW)
    return vram_guard.trace(step).replay(8).peak_allocated

def compiler():
    return sorted(name for name in sys.modules if name.startswith("torch._dynamo"))

def error(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()
"""


def in_a_process(code: str) -> Any:
    run = subprocess.run([sys.executable, "-c", _STEP + code], check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_trace_imports_no_compiler() -> None:
    """What comes of it is what came of it with one, and the compiler that is imported afterwards is whole."""
    found = in_a_process("""
def listing(model, batch):
    inspect.getmodule(net)  # goes through all modules
    return error(model, batch)

first = peak(listing)
without, unset = compiler(), "TORCHINDUCTOR_CACHE_DIR" not in os.environ
import torch._dynamo
weight = nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.5)
(weight * 3).sum().backward()
optimizer.step()
optimizer.zero_grad()
bare = torch.optim.Optimizer.zero_grad.__wrapped__
print(json.dumps({
    "without": without, "unset": unset, "peaks": [first, peak(error)], "weight": weight.tolist(),
    "left_alone": getattr(bare, "__dynamo_disable") is not bare,
    "compiled": torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item(),
}))
""")
    assert found["without"] == []
    assert found["unset"]
    assert found["peaks"][0] == found["peaks"][1] > 0
    assert found["weight"] == [-0.5, -0.5]
    assert found["left_alone"], "the compiler was told nothing of the optimizer's functions"
    assert found["compiled"] == 2.0


@pytest.mark.parametrize(
    "imported",
    [
        "torch.compile(error, backend=refused)",
        "__import__('torch._dynamo.config', fromlist=['x']) and torch.compile(error, backend=refused)",
        "getattr(__import__('torch._dynamo', fromlist=['x']), 'optimize')(refused)(error)",
    ],
)
def test_what_a_step_compiles_by_itself_runs_uncompiled(imported: str) -> None:
    """Also where it is the step that imports the compiler, in any of the ways to do so."""
    found = in_a_process(f"""
def refused(*_graph):
    raise AssertionError("the compiler ran")

def compiling(model, batch):
    return ({imported})(model, batch)

compiled = peak(compiling)
print(json.dumps([compiled, peak(error), len(compiler()) > 10]))
""")
    assert found[0] == found[1]
    assert found[2]


def test_a_model_that_is_compiled_as_it_is_built_is_traced_uncompiled() -> None:
    found = in_a_process("""
compiled = peak(error, lambda: torch.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))))
print(json.dumps([compiled, peak(error)]))
""")
    assert found[0] == found[1]
