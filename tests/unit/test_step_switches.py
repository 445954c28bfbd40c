"""What hooks may switch of a model, and which objects are hooks that do."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vram_guard.guard.step_switches import ModelAttributes, numbers_of, overriding  # noqa: E402


class Base:
    def before(self) -> None: ...

    def after(self) -> None: ...


class Switching(Base):
    def after(self) -> None:
        raise NotImplementedError


def test_objects_without_a_hook_do_nothing_in_it() -> None:
    """A framework may keep others in their places, such as silent views of them."""
    switching = Switching()
    assert overriding([Base(), switching, object()], ("before", "after"), Base) == [switching]
    assert overriding([switching], ("before",), Base) == []


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList([torch.nn.Dropout(0.5)])
        self.wide, self.start_epoch, self.size = False, 7, 64
        self.latest: Any = None
        self.losses: dict[str, list[Any]] = {"train": []}
        self.factors = [0.0, 1.0]


def test_attributes_are_those_that_no_step_keeps() -> None:
    model = Model()
    attributes = ModelAttributes(model, ["size"])
    before = attributes.now()
    assert (before["wide"], before["inner.0.p"], before["latest"]) == (False, False, None)
    assert "size" not in before
    assert attributes.places(("epoch",)) == {7}
    model.inner[0].p = 0.0
    assert attributes.now() == {**before, "inner.0.p": True}  # zero
    with attributes.in_step():
        model.latest = torch.zeros(3)
        model.wide = True  # an epoch's hook may switch it back
    assert attributes.now().keys() == before.keys() - {"latest"}


def test_numbers_that_hooks_collect_switch_nothing() -> None:
    model = Model()
    attributes = ModelAttributes(model)
    empty = attributes.now()
    model.losses["train"] += [0.5, (3, "of the first epoch", torch.zeros(()))]
    full = attributes.now()
    assert full == empty
    model.losses["train"].clear()
    assert attributes.now() == full
    model.losses["train"].append("another loss")
    assert attributes.now() != empty
    model.losses["train"].clear()
    model.factors[0] = 0.1
    assert attributes.now() != empty


def test_numbers_are_found_in_containers() -> None:
    hook = Switching()
    vars(hook).update(at=3, more={"late": [5, 8], 9: None}, none=0, share=0.5)
    assert sorted(numbers_of(hook)) == [3, 5, 8, 9]
