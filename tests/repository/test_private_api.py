"""The tables of other libraries' private names: complete, and present."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vram_guard.errors import UnsupportedStepError
from vram_guard.private_names import PrivateName, missing_in_words
from vram_guard.simulate import private_api
from vram_guard.techniques import compiled_graphs
from vram_guard.techniques.sharding import SINCE

pytestmark = pytest.mark.filterwarnings("ignore")  # of imports of other libraries

ROOT = Path(__file__).parents[2]


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
    *compiled_graphs.PRIVATE_NAMES,
)
NEEDED = ALL if tuple(map(int, torch.__version__.split(".")[:2])) >= SINCE else private_api.PRIVATE_NAMES
#: Attributes with a leading underscore that are Python's own, torch's or ours.
OTHERS = {
    "lightning": {"_fields", "_pytree"},
    "accelerate": {
        *("_getframe", "_exit", "_original_forward", "_cdata", "_BatchNorm", "_actions", "_dynamo", "_fields"),
        "_orig_mod",
        # What Accelerate's optimizer keeps about skipped steps is written as patch_optimizer_step expects it.
        *("_accelerate_step_called", "_optimizer_original_step_method", "_optimizer_patched_step_method"),
    },
}


def table(framework: str) -> Any:
    """An integration's module with its table."""
    pytest.importorskip(framework)
    return importlib.import_module(f"vram_guard_{framework}.private_api")


def namespaces() -> list[ModuleType]:
    import lightning_cases

    return [importlib.import_module(name) for name in lightning_cases.INSTALLED]


def test_this_torch_has_every_name() -> None:
    assert missing_in_words(NEEDED) == []


def test_these_releases_of_frameworks_have_every_name() -> None:
    assert missing_in_words(table("accelerate").TABLE) == []
    of_lightning = table("lightning")
    for namespace in namespaces():
        assert of_lightning.missing(namespace, of_lightning.TABLE) == []


@pytest.mark.parametrize(
    ("path", "lacking"),
    [
        ("torch.gone:Anything", "there is no torch.gone"),
        ("torch.nn:Gone", "there is no torch.nn.Gone"),
        ("torch.nn:Module._made_up", "there is no torch.nn.Module._made_up"),
        ("torch.nn:Module._apply", "takes ('fn', 'recurse'), not ('something', 'else')"),
    ],
)
def test_what_a_release_changed_is_named(path: str, lacking: str) -> None:
    (fault,) = missing_in_words((PrivateName(path, "a purpose", parameters=("something", "else")),))
    assert fault.startswith(f"{path.replace(':', '.')}: ")
    assert lacking in fault
    assert "a purpose" in fault


def listed(names: Iterable[PrivateName]) -> set[str]:
    return {part for name in names for part in re.split(r"[:.]", name.path)}


def test_every_private_name_that_the_core_uses_is_in_the_table() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "vram_guard" / "simulate").rglob("*.py"))
    used = {*re.findall(r"torch\._C\.(?:_autograd\.)?(_\w+)", source), *re.findall(r"torch\.cuda\.(_\w+)", source)}
    used |= set(re.findall(r'"(_lazy_\w+|_group_tensors_\w+)"', source))
    assert used
    assert not used - listed(ALL)


@pytest.mark.parametrize("framework", OTHERS)
def test_every_private_name_that_an_integration_uses_is_in_its_table(framework: str) -> None:
    """Attributes with a leading underscore of anything but self, in every module of the package."""
    paths = sorted((ROOT / "integrations" / f"vram_guard_{framework}").rglob("*.py"))
    known = listed(table(framework).TABLE) | OTHERS[framework] | {path.stem for path in paths}
    assert len(paths) > 5
    for path in paths:
        source = path.read_text(encoding="utf-8")
        used = set(re.findall(r"(?<!self)(?<!cls)\.(_[a-z]\w+)", source))
        own = {name for name in used if f"def {name}" in source or f"self.{name}" in source}
        assert used - own <= known, path.name


def test_a_missing_name_of_torch_is_said_before_anything_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PrivateName("torch._C:_never_was_there", "nothing")
    monkeypatch.setattr(private_api, "PRIVATE_NAMES", (*private_api.PRIVATE_NAMES, gone))
    private_api.check_torch.cache_clear()
    with pytest.raises(UnsupportedStepError, match=r"torch\._C\._never_was_there"):
        private_api.check_torch()
    monkeypatch.undo()
    private_api.check_torch.cache_clear()
    private_api.check_torch()


def test_a_release_of_lightning_without_a_name_keeps_the_training_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lightning_cases as cases

    from vram_guard_lightning import VramGuard

    gone = PrivateName("loops.optimization.automatic:_AutomaticOptimization._gone", "a purpose")
    monkeypatch.setattr(table("lightning"), "MICRO_BATCHES", (gone,))
    module = cases.make_module()
    trainer = cases.make_trainer(cases.NAMESPACE, tmp_path, [VramGuard(budget="1MiB", mode="report")], max_steps=1)
    torch.manual_seed(0)
    trainer.fit(module, cases.loader(40))
    assert "this release of Lightning is not supported" in capsys.readouterr().out
    assert set(module.seen) == {8}


def test_a_function_of_accelerate_that_is_not_there_is_only_passed_over_where_that_is_said() -> None:
    pytest.importorskip("accelerate")
    from vram_guard_accelerate._patching import wrap

    owner = SimpleNamespace(there=lambda number: number)
    wrap(owner, "there", lambda original, number: original(number) + 1)
    assert owner.there(1) == 2
    with pytest.raises(AttributeError, match="gone"):
        wrap(owner, "gone", lambda original: None)
    wrap(owner, "gone", lambda original: None, optional=True)
    wrap(None, "gone", lambda original: None, optional=True)
    assert vars(owner).keys() == {"there"}
