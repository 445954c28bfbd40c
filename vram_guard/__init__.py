"""Know how much GPU memory a training step takes before it runs, and make it fit.

Most public names are imported on first use, so that ``import vram_guard`` costs almost nothing and
``vram-guard --help`` never waits for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# Not lazy: importing the package `vram_guard.plan` would bind it here under the name of the function. Done now,
# the function keeps the name in any order of imports. Costs milliseconds, and no torch.
from vram_guard.plan import Plan, plan

if TYPE_CHECKING:
    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import Budget
    from vram_guard.check import assert_fits
    from vram_guard.errors import VramGuardError
    from vram_guard.job import Job
    from vram_guard.parallel.spec import Parallel
    from vram_guard.plan.comparison import variants
    from vram_guard.simulate import estimate, trace
    from vram_guard.step import TrainingStep
    from vram_guard.timeline import Estimate, Timeline

__version__ = "0.1.0"

__all__ = [
    "AllocatorSettings",
    "Budget",
    "Estimate",
    "Job",
    "Parallel",
    "Plan",
    "Timeline",
    "TrainingStep",
    "VramGuardError",
    "__version__",
    "assert_fits",
    "estimate",
    "plan",
    "trace",
    "variants",
]

_HOME = {
    "AllocatorSettings": "vram_guard.allocator",
    "Budget": "vram_guard.budget",
    "Estimate": "vram_guard.timeline",
    "Job": "vram_guard.job",
    "Parallel": "vram_guard.parallel.spec",
    "Timeline": "vram_guard.timeline",
    "TrainingStep": "vram_guard.step",
    "VramGuardError": "vram_guard.errors",
    "assert_fits": "vram_guard.check",
    "estimate": "vram_guard.simulate",
    "trace": "vram_guard.simulate",
    "variants": "vram_guard.plan.comparison",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
