"""Requests to the process of a dry run and its answers: both travel as JSON files (:mod:`vram_guard.codec`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vram_guard.budget import Budget
from vram_guard.report.html import where_to_read_on
from vram_guard_accelerate._settings import LaunchSettings
from vram_guard_accelerate.launch_plan import LaunchPlan

REQUEST: Final = Path("request.json")
ANSWER: Final = Path("answer.json")


@dataclass(frozen=True)
class DryRunRequest:
    """A script, how it is to be launched, and what may be changed."""

    command: tuple[str, ...]
    """The script, or a module's name, and its arguments."""
    module: bool
    settings: LaunchSettings
    budget: Budget
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that accelerate adds to the environment."""
    local_ranks: int = 1
    """Processes that share a machine, and its memory."""


@dataclass(frozen=True)
class DryRunAnswer:
    """The result of a dry run."""

    plan: Mapping[str, Any]
    """As :mod:`vram_guard.report.as_json` has it."""
    text: str
    """The same for people."""
    launch_plan: LaunchPlan
    notes: tuple[str, ...]
    fits: bool
    changed: bool
    only_told: str
    """The reason why the launch is not changed as the plan says; "" where it is."""
    own_options: tuple[str, ...] = ()
    """Words for the script's command line that make its batches smaller: nobody has tried them."""
    brief: str = ""
    """The text in about a dozen lines."""
    page: str = ""
    """All of it, as a page."""

    def words(self, option: str, *, verbose: bool, remarks: Sequence[str] = ()) -> str:
        """The answer for people, with its notes.

        Args:
            option: that shows the whole text, as it is written.
            verbose: whether it is given.
            remarks: beside the answer's own notes.
        """
        told = self.plan["reasons"]
        notes = [f"  - {note}" for note in (*self.notes, *remarks) if note not in told]
        lines = [(self.text if verbose else self.brief).rstrip(), *notes]
        return "\n".join(lines if verbose else [*lines, where_to_read_on(self.page, option)])
