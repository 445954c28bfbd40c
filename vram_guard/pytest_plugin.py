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

#: Annotations travel with the reports of tests, from other processes too.
_PROPERTY = "vram_guard_annotation"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; settings in ``[tool.vram_guard]`` and the environment come before them."""
    group = parser.getgroup("vram-guard", _("memory of training steps"))
    group.addoption("--vram-guard-gpu", metavar="NAME", help=_('GPU that steps must fit ("RTX 4090")'))
    group.addoption("--vram-guard-budget", metavar="AMOUNT", help=_('memory that PyTorch may reserve, such as "24GiB"'))
    report = _("write an HTML report of every check into this folder")
    group.addoption("--vram-guard-report", metavar="DIR", help=report)
    annotations = _('annotations of checks that fail: "github"')
    group.addoption("--vram-guard-annotations", metavar="WHERE", help=annotations)


def pytest_configure(config: pytest.Config) -> None:
    """An unknown form of annotations is an error before any test."""
    if where := config.getoption("--vram-guard-annotations"):
        from vram_guard.errors import InvalidInputError
        from vram_guard.report.annotations import check_annotations

        try:
            check_annotations(where)
        except InvalidInputError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Annotations come at the end, of all processes that ran tests."""
    if config.getoption("--vram-guard-annotations"):
        reports = [one for ended in terminalreporter.stats.values() for one in ended if hasattr(one, "user_properties")]
        told = [value for one in reports for name, value in one.user_properties if name == _PROPERTY]
        for line in dict.fromkeys(told):
            terminalreporter.write_line("")
            terminalreporter.write_line(line)


@pytest.fixture
def assert_fits(request: pytest.FixtureRequest) -> Callable[..., Estimate]:
    """:func:`vram_guard.assert_fits`, with the GPU or budget of the command line, else of the settings.

    A test may give its own: ``assert_fits(step, 32, gpu="RTX 4090")``.
    """
    counted = 0

    def check(step: Any, batch_size: int, budget: Any = None, **more: Any) -> Estimate:
        from vram_guard.check import checked, raise_unless_it_fits
        from vram_guard.errors import DoesNotFitError

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
        try:
            raise_unless_it_fits(estimate, timeline, held_against, more.get("settings"))
        except DoesNotFitError as error:
            if request.config.getoption("--vram-guard-annotations"):
                from vram_guard.report.annotations import annotation

                file, line, _name = request.node.location
                found = annotation(str(error), estimate.peak_source, file, (line or 0) + 1)
                request.node.user_properties.append((_PROPERTY, found))
            raise
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
