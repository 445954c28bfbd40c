"""Whether DeepSpeed can be imported here, for tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from vram_guard.parallel.deepspeed import TESTED

INSTALLED = importlib.util.find_spec("deepspeed") is not None and importlib.metadata.version("deepspeed") in TESTED
engine = pytest.mark.skipif(not INSTALLED, reason=f"deepspeed {TESTED[-1]} is not installed")
