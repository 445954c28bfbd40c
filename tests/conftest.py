"""What every test gets: no network, and ``gpu`` tests skipped where there is no GPU."""

from __future__ import annotations

import os

import pytest

# Nothing in the suite may download a model or a data set; libraries that would try are told so before import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("MPLBACKEND", "agg")
# The tests read English, whatever the developer's terminal speaks.
os.environ["VRAM_GUARD_LANG"] = "en"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only here: a run of the light tests does not wait for it

    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device; torch {torch.__version__} sees none"
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))
