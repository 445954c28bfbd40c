"""The ``assert_fits`` fixture for pytest: a test that fails when a training step no longer fits its GPU.

Found through the entry point ``pytest11``. It imports nothing heavy at pytest's start: torch comes with the first test
that asks for the fixture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vram_guard.language import _
from vram_guard.timeline import Estimate


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; settings in ``[tool.vram_guard]`` and the environment come before them."""
    group = parser.getgroup("vram-guard", _("memory of training steps"))
    group.addoption("--vram-guard-gpu", metavar="NAME", help=_('GPU that steps must fit ("RTX 4090")'))
    group.addoption("--vram-guard-budget", metavar="AMOUNT", help=_('memory that PyTorch may reserve, such as "24GiB"'))
    report = _("write an HTML report of every check into this folder")
    group.addoption("--vram-guard-report", metavar="DIR", help=report)


@pytest.fixture
def assert_fits(request: pytest.FixtureRequest) -> Callable[..., Estimate]:
    """:func:`vram_guard.assert_fits`, with the GPU or budget of the command line, else of the settings.

    A test may give its own: ``assert_fits(step, 32, gpu="RTX 4090")``.
    """
    counted = 0

    def check(step: Any, batch_size: int, budget: Any = None, **more: Any) -> Estimate:
        from vram_guard.check import checked, raise_unless_it_fits

        nonlocal counted
        counted += 1
        __tracebackhide__ = True
        if budget is None and more.get("gpu") is None:
            budget, more["gpu"] = _configured(request.config)
        estimate, timeline, held_against = checked(step, batch_size, budget, **more)
        folder = request.config.getoption("--vram-guard-report")
        if folder:
            from vram_guard.report import save

            name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.nodeid).strip("-")
            path = Path(folder) / f"{name}{f'-{counted}' if counted > 1 else ''}.html"
            save(estimate, path, timeline=timeline, budget=held_against, title=request.node.nodeid)
        raise_unless_it_fits(estimate, timeline, held_against, more.get("settings"))
        return estimate

    return check


def _configured(config: pytest.Config) -> tuple[Any, Any]:
    """(budget, GPU's name) of the options; with neither, of the settings; this machine's GPU where both are None."""
    budget, gpu = config.getoption("--vram-guard-budget"), config.getoption("--vram-guard-gpu")
    if budget is not None or gpu is not None:
        return budget, gpu
    from vram_guard.settings import settings

    found = settings()
    if "gpu_memory" in found:
        from vram_guard.budget import Budget

        return Budget.resolve(gpu_memory=found["gpu_memory"].value), None
    return tuple(found[name].value if name in found else None for name in ("budget", "gpu"))  # type: ignore[return-value]
