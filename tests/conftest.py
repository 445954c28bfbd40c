"""What every test gets: no network, and ``gpu`` tests skipped where there is no GPU."""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile

import pytest
from _pytest.python import pytest_pyfunc_call as call_test
from guard_imports import PLANS
from hypothesis import HealthCheck, settings

from vram_guard.call_room import with_room

# Nothing in the suite may download a model or a data set; libraries that would try are told so before import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("MPLBACKEND", "agg")
# Pages of reports that trainings leave behind are nobody's to keep.
if "VRAM_GUARD_CACHE" not in os.environ:
    os.environ["VRAM_GUARD_CACHE"] = tempfile.mkdtemp(prefix="vram-guard-tests-")
    atexit.register(shutil.rmtree, os.environ["VRAM_GUARD_CACHE"], ignore_errors=True)
# The tests read English, whatever the developer's terminal speaks.
os.environ["VRAM_GUARD_LANG"] = "en"
# A shell starts background jobs with these ignored, and every process that a test starts would keep that.
for number in (signal.SIGINT, getattr(signal, "SIGQUIT", signal.SIGINT)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
# A busy machine makes an example slow, not wrong.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


def pytest_configure(config: pytest.Config) -> None:
    """Let yapf, which MMEngine imports, write its cache before there are two workers.

    yapf 0.43 renames the file before all of it is written; a worker that imports it at that moment meets an EOFError.
    """
    if not hasattr(config, "workerinput") and importlib.util.find_spec("yapf"):
        importlib.import_module("yapf")


#: What a guard of this process imports in each copy, besides what it plans with.
LATE = ("budget.host", "proof.prove", "techniques._checkpointing", "parallel.collectives", "plan.gpus_request")


def pytest_collection_finish() -> None:
    """Make ready what every test, and every copy of its process, would do anew.

    That is the imports which a guard makes in each copy, and the collector's look at what was imported.
    """
    if "torch" in sys.modules:
        for late in (*PLANS, *(f"vram_guard.{name}" for name in LATE)):
            importlib.import_module(late)
        importlib.import_module("torch._subclasses.schema_check_mode")
    # Half a million objects of imported libraries: whoever collects garbage, as each recovery does, need not look at
    # them for a third of a second.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Call a test, which trains far below the calls of pytest, with room for what it calls."""
    return with_room(call_test, pyfuncitem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    of_gpus = [item for item in items if item.get_closest_marker("gpu")]
    of_releases = [(item, mark.args) for item in items for mark in item.iter_markers("torch_since")]
    if not of_gpus and not of_releases:
        return
    import torch  # only here: a run of the light tests does not wait for it

    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    for item, since in of_releases:
        if release < since:
            item.add_marker(pytest.mark.skip(reason=f"needs torch {since[0]}.{since[1]}, not {torch.__version__}"))
    if not torch.cuda.is_available():
        for item in of_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none"))
