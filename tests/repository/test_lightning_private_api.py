"""Every private name of Lightning that the integration leans on is there, or the table says which is not."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from each import each

pytest.importorskip("lightning")

import lightning_cases as cases

import vram_guard_lightning
from vram_guard.private_names import PrivateName
from vram_guard_lightning import private_api

pytestmark = pytest.mark.filterwarnings("ignore")


NAMESPACES = [importlib.import_module(name) for name in cases.INSTALLED]


@each("namespace", NAMESPACES)
def test_this_release_has_every_name(namespace: Any) -> None:
    assert private_api.missing(namespace, private_api.TABLE) == []


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("loops.optimization.automatic:_Gone.run", "there is no .*automatic._Gone"),
        ("loops.optimization.nowhere:Gone.run", "there is no .*optimization.nowhere "),
        (
            "loops.optimization.automatic:_AutomaticOptimization._made_up",
            "there is no .*_AutomaticOptimization._made_up",
        ),
        (
            "loops.optimization.automatic:_AutomaticOptimization._make_step_fn",
            "takes .'kwargs',., not .'something', 'else'.",
        ),
    ],
)
def test_what_a_release_changed_is_named(path: str, says: str) -> None:
    name = PrivateName(path, "a purpose", parameters=("something", "else"))
    (fault,) = private_api.missing(NAMESPACES[0], (name,))
    assert path.replace(":", ".") in fault
    assert re.search(says, fault)
    assert "a purpose" in fault


def test_private_names_in_the_sources_are_in_the_table() -> None:
    """Attributes with a leading underscore of anything but self, in every module of the package."""
    listed = {re.split(r"[.:]", name.path)[-1] for name in private_api.TABLE}
    own = {"_fields"}
    paths = sorted(Path(vram_guard_lightning.__file__).parent.rglob("*.py"))
    own |= {path.stem for path in paths}  # inner modules of our own
    for path in paths:
        used = set(re.findall(r"(?<!self)(?<!cls)\.(_[a-z]\w+)", path.read_text()))
        used -= {name for name in used if f"def {name}" in path.read_text() or f"self.{name}" in path.read_text()}
        unlisted = {name for name in used if name not in listed | own and "pytree" not in name}
        assert unlisted == set(), path.name


def test_a_release_without_a_name_keeps_the_training_whole(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    import torch

    gone = PrivateName("loops.optimization.automatic:_AutomaticOptimization._gone", "a purpose")
    monkeypatch.setattr(private_api, "MICRO_BATCHES", (gone,))
    module = cases.make_module()
    guard = vram_guard_lightning.VramGuard(budget="1MiB", mode="report")
    trainer = cases.make_trainer(cases.NAMESPACE, tmp_path, [guard], max_steps=1)
    torch.manual_seed(0)
    trainer.fit(module, cases.loader(40))
    assert "this release of Lightning is not supported" in capsys.readouterr().out
    assert set(module.seen) == {8}
