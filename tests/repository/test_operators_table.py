"""The table of operators, held against the code that it describes, and the pages that are made from it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each

from vram_guard.simulate import operators
from vram_guard.simulate.operators import foreach
from vram_guard.simulate.operators.handlers import HANDLERS
from vram_guard.simulate.operators.kernels import RUNNING, Matmuls
from vram_guard.simulate.operators.reductions import REDUCTIONS
from vram_guard.torch_release import torch_release

TABLE: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(operators.__file__).parent / "operators.json").read_text(encoding="utf-8")
)
ENTRIES = [entry for entries in TABLE.values() for entry in entries]
COMPOSITES = "composite_ops.cuda_composites"


def full(name: str) -> str:
    return name if "::" in name else f"aten::{name}"


def rule_of(name: str) -> str:
    """The rule that the code has for an operator, as the table writes it."""
    if name in HANDLERS:
        handler = HANDLERS[name]
        return f"{handler.__module__.rpartition('.')[2]}.{handler.__name__}"
    if name in REDUCTIONS:
        return "reductions.reduction"
    if name in RUNNING:
        return "kernels.running"
    return "kernels.Matmuls" if name in Matmuls.OPERATORS else "foreach.norm_parts"


def test_every_operator_with_a_rule_is_in_the_table_with_that_rule() -> None:
    written = {full(name): entry["rule"] for entry in ENTRIES if entry["rule"] for name in entry["operators"]}
    known = {*HANDLERS, *REDUCTIONS, *RUNNING, *Matmuls.OPERATORS, *foreach.NORMS}
    plain = {name: rule for name, rule in written.items() if rule != COMPOSITES}
    assert plain == {name: rule_of(name) for name in known}


def test_no_operator_is_both_modelled_and_not_but_for_other_releases() -> None:
    modelled = {name for entry in ENTRIES if entry["rule"] for name in entry["operators"]}
    both = modelled & {name for entry in ENTRIES if not entry["rule"] for name in entry["operators"]}
    assert both == {"addmm"}
    names = [name for entry in ENTRIES for name in entry["operators"]]
    assert len(names) == len(set(names)) + len(both)


@each("rule", sorted({entry["rule"] for entry in ENTRIES if entry["rule"]}))
def test_rules_exist(rule: str) -> None:
    module, name = rule.split(".")
    assert callable(getattr(importlib.import_module(f"vram_guard.simulate.operators.{module}"), name))


@pytest.mark.skipif(torch_release() < (2, 9), reason="older releases lack some of the operators")
def test_operators_are_torch_s() -> None:
    names = {name.partition(".")[0] for entry in ENTRIES for name in entry["operators"] if "::" not in name}
    assert [name for name in sorted(names) if not hasattr(torch.ops.aten, name)] == []


def test_every_entry_names_a_source_and_says_what_is_taken() -> None:
    for entry in ENTRIES:
        assert set(entry) == {"source", "operators", "rule", "takes"}
        assert entry["source"]
        assert entry["takes"].isascii()
