"""Attributes that are replaced for a while: on classes, instances and modules, put back exactly as they were."""

from __future__ import annotations

import types

import pytest

from vram_guard.patching import replace_attributes, replaced


class Base:
    def inherited(self) -> str:
        return "base"


class Child(Base):
    own = 1

    @property
    def fixed(self) -> int:
        return 1


def test_inside_the_block_the_attributes_are_the_new_ones_and_afterwards_the_old_ones() -> None:
    module = types.ModuleType("made_up")
    module.present = 1
    with replaced(module, {"present": 2, "absent": 3}):
        assert (module.present, module.absent) == (2, 3)
    assert module.present == 1
    assert not hasattr(module, "absent")


def test_what_was_inherited_is_inherited_again() -> None:
    child = Child()
    undo_class = replace_attributes(Child, {"inherited": lambda self: "child", "own": 2})
    undo_instance = replace_attributes(child, {"inherited": lambda: "instance"})
    assert child.inherited() == "instance"
    undo_instance()
    assert child.inherited() == "child"
    undo_class()
    assert (child.inherited(), Child.own) == ("base", 1)
    assert "inherited" not in vars(child) | vars(Child)


def test_an_error_in_the_block_or_while_replacing_puts_everything_back() -> None:
    with pytest.raises(KeyError), replaced(Child, {"own": 2}):
        raise KeyError
    assert Child.own == 1
    child = Child()
    with pytest.raises(AttributeError):
        replace_attributes(child, {"own": 3, "fixed": 4})
    assert vars(child) == {}
