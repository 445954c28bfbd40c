"""Requests to the process of a dry run and its answers: both travel as JSON files (:mod:`vram_guard.codec`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from vram_guard.budget import Budget
from vram_guard.releases.installed import Releases
from vram_guard_accelerate._settings import LaunchSettings
from vram_guard_accelerate.launch_plan import LaunchPlan
from vram_guard_accelerate.planning.relaunch import Relaunch
from vram_guard_accelerate.script_files import FileState

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
    relaunch: Relaunch | None = None
    """The changes with which this is launched; None: as it was typed."""

    def relaunched(self, relaunch: Relaunch) -> DryRunRequest:
        """The same for a relaunch of the launch as it was typed."""
        return replace(
            self,
            command=(*self.command, *relaunch.arguments),
            environment={**self.environment, **relaunch.environment},
            relaunch=relaunch,
        )


@dataclass(frozen=True)
class DryRunAnswer:
    """The result of a dry run."""

    plan: Mapping[str, Any]
    """As :mod:`vram_guard.report.as_json` has it."""
    text: str
    """The same for people."""
    launch_plan: LaunchPlan
    notes: tuple[str, ...]
    files: Mapping[str, FileState]
    """The files that it was made from."""
    fits: bool
    changed: bool
    only_told: str
    """The reason why the launch is not changed as the plan says; "" where it is."""
    seconds: Mapping[str, float]
    """Of the script until its first batch, and of the planning."""
    host_memory: Mapping[str, int]
    """Bytes that the script's process had taken until then, and that it or a copy took at the most."""
    releases: Releases
    """Those that the script ran with."""
    relaunch: Relaunch | None = None
    """In another precision, which may be better; None: there is none."""
    own_options: tuple[str, ...] = ()
    """Words for the script's command line that make its batches smaller: nobody has tried them."""
    brief: str = ""
    """The text in about a dozen lines."""
    page: str = ""
    """All of it, as a page."""

    @property
    def slowdown(self) -> float:
        """Step time under the plan over the step time as written."""
        return float(self.plan["slowdown"] or 1.0)
