"""A forward that stands in the place of another, and recipes that several processes can or cannot run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vram_guard.techniques.patched_forward import PatchedForward


class Doubled(PatchedForward):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.as_written(*args, **kwargs)


def test_a_forward_of_the_instances_own_is_kept_and_comes_back() -> None:
    module, x = nn.Identity(), torch.ones(2)
    plus_three = module.__dict__["forward"] = lambda x: x + 3
    patched = Doubled(module)
    patched.install()
    assert module(x).tolist() == [8, 8]
    module.__dict__["forward"] = lambda x: patched(x) + 100  # somebody else wraps it
    patched.remove()
    assert module(x).tolist() == [104, 104]
    module.__dict__["forward"] = patched
    patched.remove()
    assert module.__dict__["forward"] is plus_three


def test_a_forward_of_the_class_is_uncovered_again() -> None:
    module, x = nn.Identity(), torch.ones(2)
    patched = Doubled(module)
    patched.install()
    assert module(x).tolist() == [2, 2]
    patched.remove()
    assert module(x).tolist() == [1, 1]
    assert "forward" not in module.__dict__
