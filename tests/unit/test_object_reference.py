"""Training steps by name, as the command line and configs give them: real files, really imported."""

from __future__ import annotations

import sys

import pytest
from each import each

from vram_guard import TrainingStep
from vram_guard.capture.object_reference import load_object, load_step, load_steps
from vram_guard.errors import InvalidInputError

SOURCE = """
import torch
from vram_guard import TrainingStep


def build(width=8, depth: int = 1):
    layers = [torch.nn.Linear(width, width) for _ in range(depth)]
    return TrainingStep(
        model=lambda: torch.nn.Sequential(*layers),
        batch=lambda size: torch.zeros(size, width),
        loss=lambda model, x: model(x).sum(),
        optimizer=torch.optim.SGD,
    )


def needs(width):
    return build(width)


def everything(**config):
    build.seen = config
    return build()


def breaks():
    raise RuntimeError("no weights here")


class Net(torch.nn.Module):
    pass


class Holder:
    step = build()


ready = build(4)
both = {"small": build(4), "large": build(16)}
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module's name, importable from the current folder only."""
    name = f"named_steps_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield name
    sys.modules.pop(name, None)


def width_of(step):
    return step.batch(1).shape[1]


def test_a_step_a_function_and_a_dotted_attribute(module):
    assert width_of(load_step(f"{module}:ready")) == 4
    assert width_of(load_step(f"{module}:build")) == 8
    assert isinstance(load_step(f"{module}:Holder.step"), TrainingStep)


def test_a_file_with_its_neighbours(module, tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "sizes.py").write_text("WIDTH = 24\n")
    (folder / "net.py").write_text(f"from sizes import WIDTH\nfrom {module} import needs\nstep = needs(WIDTH)\n")
    assert width_of(load_step(f"{folder / 'net.py'}:step")) == 24
    assert load_object(f"{folder / 'net.py'}:step") is load_object(f"{folder / 'net.py'}:step")


def test_a_config_gives_what_the_function_has_parameters_for(module):
    assert width_of(load_step(f"{module}:build", {"width": 12, "batch_size": 4, 3: "odd"})) == 12
    load_step(f"{module}:everything", {"width": 12, 3: "odd"})
    assert load_object(f"{module}:build").seen == {"width": 12}


def test_several_steps_under_one_name(module):
    assert [width_of(step) for step in load_steps(f"{module}:both").values()] == [4, 16]
    assert list(load_steps(f"{module}:ready")) == ["ready"]


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("needs", "needs width"),
        ("breaks", "RuntimeError: no weights here"),
        ("number", "gives a value of type int, not a TrainingStep"),
        ("Net", "is a model, not a step"),
        ("biuld", "did you mean build"),
        ("both", "gives a value of type dict"),
    ],
)
def test_what_is_no_step_is_named(module, attribute, said):
    with pytest.raises(InvalidInputError, match=said):
        load_step(f"{module}:{attribute}")


@each("name", ["", "torch", ":build", "a b:build", "mod:", "mod:1x", "../x:build", "x" * 2000 + ":y", 3, None])
def test_malformed_names_are_refused_before_anything_is_imported(name):
    with pytest.raises(InvalidInputError):
        load_object(name)


def test_modules_that_cannot_be_imported(module, tmp_path):
    with pytest.raises(InvalidInputError, match="'no_such_package_here'"):
        load_object("no_such_package_here.inner:build")
    with pytest.raises(InvalidInputError):
        load_object("missing.py:build")
    (tmp_path / "broken.py").write_text("import no_such_library_here\n")
    with pytest.raises(InvalidInputError, match="'no_such_library_here'"):
        load_object("broken.py:build")
    (tmp_path / "wrong.py").write_text("def build(:\n")
    with pytest.raises(InvalidInputError, match="SyntaxError"):
        load_object("wrong.py:build")
