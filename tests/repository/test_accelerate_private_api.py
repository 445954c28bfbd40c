"""Every private name of Accelerate that the integration leans on is there, or the table says which is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from each import each

pytest.importorskip("accelerate")

import vram_guard_accelerate
from vram_guard.private_names import PrivateName, missing_in_words
from vram_guard_accelerate import private_api


@each("name", private_api.TABLE)
def test_this_release_has_it(name: PrivateName) -> None:
    assert missing_in_words((name,)) == []


@pytest.mark.parametrize(
    ("path", "lacking"),
    [
        ("accelerate.gone:Anything", "accelerate.gone"),
        ("accelerate.state:Gone", "accelerate.state.Gone"),
        ("accelerate.accelerator:Accelerator._made_up", "accelerate.accelerator.Accelerator._made_up"),
    ],
)
def test_what_a_release_dropped_is_named(path: str, lacking: str) -> None:
    (fault,) = missing_in_words((PrivateName(path, "a purpose"),))
    assert fault == f"{path.replace(':', '.')}: there is no {lacking} (used for: a purpose)"


def test_private_names_in_the_sources_are_in_the_table() -> None:
    """Attributes with a leading underscore of anything but self, in every module of the package."""
    listed = {part for name in private_api.TABLE for part in re.split("[:.]", name.path)}
    others = {
        "_getframe",
        "_exit",
        "_original_forward",
        "_cdata",
        "_BatchNorm",
        "_actions",
        "_dynamo",
        "_fields",
        "_orig_mod",
    }
    # What Accelerate's optimizer keeps about skipped steps is written as patch_optimizer_step expects it.
    others |= {"_accelerate_step_called", "_optimizer_original_step_method", "_optimizer_patched_step_method"}
    paths = sorted(Path(vram_guard_accelerate.__file__).parent.rglob("*.py"))
    others |= {path.stem for path in paths}  # inner modules of our own
    for path in paths:
        source = path.read_text(encoding="utf-8")
        used = set(re.findall(r"(?<!self)(?<!cls)\.(_[a-z]\w+)", source))
        own = {name for name in used if f"def {name}" in source or f"self.{name}" in source}
        assert used - own <= listed | others, path.name


def test_a_function_that_is_not_there_is_only_passed_over_where_that_is_said() -> None:
    from types import SimpleNamespace

    from vram_guard_accelerate._patching import wrap

    owner = SimpleNamespace(there=lambda number: number)
    wrap(owner, "there", lambda original, number: original(number) + 1)
    assert owner.there(1) == 2
    with pytest.raises(AttributeError, match="gone"):
        wrap(owner, "gone", lambda original: None)
    wrap(owner, "gone", lambda original: None, optional=True)
    wrap(None, "gone", lambda original: None, optional=True)
    assert vars(owner).keys() == {"there"}
