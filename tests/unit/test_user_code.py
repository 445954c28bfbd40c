"""What is the user's own code is told by where it lies, the same for all that ask."""

from __future__ import annotations

import json
import os
import sysconfig
import warnings
from pathlib import Path

import pytest
import torch
from each import each

import vram_guard
from vram_guard.language import speaking
from vram_guard.user_code import (
    is_users_file,
    leads_to_stand_ins,
    level_of_user,
    line_of_error,
    said_of_failure,
)


@each(
    "name", ["/home/me/train.py", "train.py", "/usr/src/app/train.py", "/usr/local/train.py", "/tmp/site-packages.py"]
)
def test_files_of_the_user(name):
    assert is_users_file(name)


@each(
    "name",
    [
        torch.__file__,
        json.__file__,
        vram_guard.__file__,
        "/usr/lib/python3/dist-packages/torch/nn/modules/module.py".replace("/", os.sep),
        str(Path(sysconfig.get_path("scripts")) / "vram-guard"),
        "<string>",
        "<frozen importlib._bootstrap>",
    ],
)
def test_files_of_others(name):
    assert not is_users_file(name)


def test_the_innermost_line_of_the_user_is_named():
    def fails():
        torch.ones(2).view(3)

    try:
        fails()
    except RuntimeError as error:
        found, outside = line_of_error(error), line_of_error(error, script="elsewhere.py")
    number = fails.__code__.co_firstlineno + 1
    assert found == outside == f"test_user_code.py, line {number}"


def test_a_warning_stands_at_the_line_of_the_user() -> None:
    def library(call):  # code of a library calls ours, which warns
        exec(compile("call()", torch.__file__, "exec"), {"call": call})

    def ours():
        exec(compile("warn(found())", vram_guard.__file__, "exec"), {"warn": warned, "found": level_of_user})

    def warned(level):
        levels.append(level)

    levels: list[int] = []
    ours()
    assert levels == [2]  # from the frame that stands in for ours, to this file
    with pytest.warns(UserWarning, match="here") as told:
        library(lambda: warnings.warn("here", stacklevel=level_of_user()))
    assert told[0].filename == __file__


@each(
    ("kind", "message", "ours", "not_ours"),
    [
        ("NotImplementedError", "Cannot copy out of meta tensor; no data!", False, True),
        ("ValueError", "found invalid values: tensor(..., device='cuda:0', size=(2,), dtype=torch.int64)", False, True),
        ("AttributeError", "'Linear' object has no attribute 'out_features'", True, True),
        ("AttributeError", "'Net' object has no attribute 'head'", False, False),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", True, False),
        ("ValueError", "odd", False, False),
    ],
)
def test_a_failure_of_tensors_without_values_is_not_laid_on_the_users_code(
    kind: str, message: str, ours: bool, not_ours: bool
) -> None:
    with speaking("en"):
        stand_ins = leads_to_stand_ins(kind, message, ours=ours)
        assert stand_ins is not_ours
        said = said_of_failure("train.py, line 12", f"{kind}: {message}", "--verbose", stand_ins=stand_ins)
    assert ("train.py, line 12 fails" in said) is not not_ours
    assert message.rstrip(".") in said
