"""Expandable segments in a process that runs: torch's allocator takes settings for what it reserves from then on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.allocator import with_expandable_segments
from vram_guard.guard.refusals import before_the_process
from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.guard.applied import Applied

# ruff: noqa: SLF001 - torch has no public way to give its allocator settings


def why_not_expandable(device: torch.device) -> str:
    """The reason why segments stay of a fixed size in this process ("" where they may grow).

    Args:
        device: that trains. CUDA is not begun for the answer.
    """
    if device.type != "cuda":
        return _("this training takes no memory of a GPU")
    if sys.platform == "win32":
        return _("PyTorch has none on Windows")
    if _setter() is None:
        return before_the_process()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved(device):
        name, value = with_expandable_segments()
        return _(
            "the process has reserved memory of the GPU already: start it with {name}={value}", name=name, value=value
        )
    return ""


def expand_segments(applied: Applied) -> None:
    """What is reserved from now on lies in expandable segments; the settings are put back with the rest.

    Example:
        >>> from vram_guard.guard.applied import Applied
        >>> with Applied() as applied:
        ...     expand_segments(applied)
    """
    set_to = _setter()
    if set_to is None:
        return
    name, wanted = with_expandable_segments()
    own = os.environ.get(name, "")
    # torch leaves a setting as it is where it is not named.
    applied.callback(set_to, own if "expandable_segments" in own else with_expandable_segments(grow=False)[1])
    set_to(wanted)


def _setter() -> Callable[[str], Any] | None:
    """What gives the allocator settings; None: this release has neither."""
    found: Callable[[str], Any] | None = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    return found or getattr(torch.cuda.memory, "_set_allocator_settings", None)
