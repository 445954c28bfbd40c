"""The table of torch's private names: complete, present, and each held by a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from each import each

from vram_guard.errors import UnsupportedStepError
from vram_guard.private_names import PrivateName, missing_in_words
from vram_guard.simulate import private_api
from vram_guard.techniques.sharding import SINCE

TESTS = Path(__file__).parents[1]
SIMULATE = TESTS.parent / "vram_guard" / "simulate"


ALL = (
    *private_api.PRIVATE_NAMES,
    *private_api.FSDP_NAMES,
    *private_api.PARALLEL_NAMES,
    *private_api.COLLECTIVE_NAMES,
    *private_api.REDUCER_NAMES,
    *private_api.COMPILER_NAMES,
    *private_api.COMPILER_EXTRAS,
    *private_api.FLEX_NAMES,
    *private_api.TF32_NAMES,
    *private_api.SAVED_NAMES,
)
NEEDED = ALL if tuple(map(int, torch.__version__.split(".")[:2])) >= SINCE else private_api.PRIVATE_NAMES


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, of imports
@each("name", NEEDED)
def test_this_torch_has_every_name(name: PrivateName) -> None:
    assert missing_in_words((name,)) == []


def test_every_row_names_a_test_that_exists() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    missing = [name.held_by for name in ALL if f"def {name.held_by}" not in source]
    assert not missing


def test_every_private_name_that_the_source_uses_is_in_the_table() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in SIMULATE.rglob("*.py"))
    used = set(re.findall(r"torch\._C\.(?:_autograd\.)?(_\w+)", source)) | set(
        re.findall(r"torch\.cuda\.(_\w+)", source)
    )
    used |= set(re.findall(r'"(_lazy_\w+|_group_tensors_\w+)"', source))
    listed = {part for name in ALL for part in re.split(r"[:.]", name.path)}
    assert used
    assert not used - listed


def test_a_missing_name_is_said_before_anything_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PrivateName("torch._C:_never_was_there", "nothing", "nowhere")
    monkeypatch.setattr(private_api, "PRIVATE_NAMES", (*private_api.PRIVATE_NAMES, gone))
    private_api.check_torch.cache_clear()
    with pytest.raises(UnsupportedStepError, match=r"torch\._C\._never_was_there"):
        private_api.check_torch()
    monkeypatch.undo()
    private_api.check_torch.cache_clear()
    private_api.check_torch()
