"""``make schemas``: the JSON schemas of the commands' answers, for ``docs/schemas.json``.

Parts that come from dataclasses are read from their types; the rest stands here, next to nothing else, in a short
notation: ``"int"``, ``"str?"`` (or null), ``[each]``, ``{"key": ..., "key?": ...}`` (one that may be missing), and
``{"*": each}`` (keys that are data). ``tests/unit/test_json_schemas.py`` holds real answers of every command against
it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vram_guard.cli.printing import JSON_SCHEMA
from vram_guard.report.as_json import SCHEMA

PATH = Path(__file__).parents[1] / "docs" / "schemas.json"

_PLAIN = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "null": "null"}
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def schema(notation: Any) -> dict[str, Any]:
    """A JSON schema of the notation."""
    if isinstance(notation, str):
        if notation.startswith("#"):
            name = notation.removeprefix("#").removesuffix("?")
            one = {"$ref": f"#/$defs/{name}"}
            return {"anyOf": [one, {"type": "null"}]} if notation.endswith("?") else one
        if notation == "any":
            return {}
        if notation.startswith("="):
            return {"enum": notation.removeprefix("=").split("|")}
        plain = _PLAIN[notation.removesuffix("?")]
        return {"type": [plain, "null"]} if notation.endswith("?") else {"type": plain}
    if isinstance(notation, list):
        return {"type": "array", "items": schema(notation[0])}
    if isinstance(notation, tuple):  # one of several
        return {"anyOf": [schema(one) for one in notation]}
    if set(notation) == {"*"}:
        return {"type": "object", "additionalProperties": schema(notation["*"])}
    return {
        "type": "object",
        "properties": {name.removesuffix("?"): schema(one) for name, one in notation.items()},
        "required": [name for name in notation if not name.endswith("?")],
        "additionalProperties": False,
    }


def of_class(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass or a named tuple, as ``asdict`` and ``_asdict`` have them."""
    hints = get_type_hints(kind)
    names = [one.name for one in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind._fields
    return {
        "type": "object",
        "properties": {name: of_type(hints[name]) for name in names},
        "required": list(names),
        "additionalProperties": False,
    }


def of_type(hint: Any) -> dict[str, Any]:
    """A type's JSON schema."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is Literal:
        return {"enum": list(inside)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(one) for one in inside]}
    if origin in (tuple, list):
        return {"type": "array", "items": of_type(inside[0])}
    return of_class(hint)


#: A plan's report, alone and within others.
PLAN: dict[str, Any] = {
    "schema": f"={SCHEMA}",
    "kind": "=plan",
    "fits": "bool",
    "changed": "bool",
    "precision": {"before": "str", "after": "str"},
    **{
        name: {"before": "int", "after": "int"}
        for name in ("batch_size", "micro_batch_size", "accumulate", "effective_batch_size")
    },
    "learning_rate_factor": "float",
    "checkpointed_modules": ["str"],
    "offload": ["str"],
    "recipe": "#recipe",
    "slowdown": "float?",
    "correction": "float",
    "estimate": "#estimate",
    "before": "#estimate",
    "reasons": ["str"],
    "rejected": [{"option": "str", "peak_reserved": "int?", "missing": "int?", "why": "str"}],
    "spread?": "#spread",
    "evaluation?": {"phase": "str", "batch_size_before": "int", "batch_size": "int"},
    "compiled?": {"followed": "bool", "why": "str", "graphs": "int", "breaks": ["str"], "eager": "#estimate"},
    "budget": "#budget",
}


def definitions() -> dict[str, Any]:
    """What several answers have in common."""
    from vram_guard.closed_form.calculator import Network
    from vram_guard.techniques.recipe import Recipe
    from vram_guard.timeline import Leak, PhasePeak
    from vram_guard.watch.throughput import MeasuredBatch

    place = {"module": "str", "source": "str", "operator": "str"}
    phase = {"phase": "str", "step": "int", "label?": "str"}
    estimate = {
        **dict.fromkeys(("batch_size", "peak_allocated", "peak_reserved"), "int"),
        **dict.fromkeys(("peak_reserved_lower", "peak_reserved_upper", "host_peak"), "int"),
        "upper_reasons": ["str"],
        "by_stream": ["int"],
        "breakdown": {"*": "int"},
        "by_module": {"*": "int"},
        "peak": {**phase, **place},
        "tier": "str",
        "releases": ({"*": "str?"}, "null"),
        "network": "str?",
        "cudnn": ({"*": "any"}, "null"),
        "notes": [{"message": "str", "source": "str", "operator": "str"}],
        "out_of_memory": (
            {**dict.fromkeys(("requested", "allocated", "reserved", "fragmented"), "int"), **phase, **place},
            "null",
        ),
        "phases?": ["#phase_peak"],
        "leaks?": ["#leak"],
    }
    budget = {
        **dict.fromkeys(("usable", "available", "total"), "int"),
        "margin": "float",
        "margin_source": "str",
        "source": "str",
        "gpu": "str?",
        "compute_capability": (["int"], "null"),
        "notes": ["str"],
    }
    layout = ({"*": "any"}, "null")
    way = {
        "gpus": "int",
        "layout": layout,
        "words": "str",
        "fits": "bool",
        "peak_reserved": "int?",
        "seconds_per_step": "float?",
        "why": "str",
    }
    spread = {
        "gpus": "int",
        "nodes": "int",
        "fewest": "bool",
        "layout": layout,
        "link": {"inside": "str", "between": "str"},
        "samples_per_step": "int",
        "seconds_per_step": "float?",
        "samples_per_second": "float?",
        "communication": {"seconds": "float", "waiting": "float", "calls": "int"},
        "outside_allocator": (dict.fromkeys(("communicators", "low", "high", "most"), "int"), "null"),
        "host_bytes_per_node": "int",
        "assumptions": ["str"],
        "ways": ["#way"],
    }
    symbolic = {
        "schema": f"={SCHEMA}",
        "kind": "=estimate",
        "estimate": "#estimate",
        "budget?": "#budget",
        "fits?": "bool",
        "largest_batch": "int?",
        "plan?": "#plan?",
    }
    rule = {
        "method": "=rule of thumb",
        "network": "#network",
        **dict.fromkeys(("gpu_memory", "allowed", "layer_bytes", "total_bytes", "remaining"), "int"),
        "threshold": "float",
        "fits": "bool",
        "remaining_percent": "float",
        "fixes": {
            "largest_batch": "int",
            "largest_resolution": (["int"], "null"),
            "accumulation": ({"micro_batch": "int", "accumulate": "int"}, "null"),
            "amp": ({"total_bytes": "int", "fits": "bool", "largest_batch": "int"}, "null"),
        },
    }
    written = {"estimate": estimate, "budget": budget, "plan": PLAN, "way": way, "spread": spread}
    written |= {"symbolic": symbolic, "rule_of_thumb": rule}
    made = {name: schema(one) for name, one in written.items()}
    classes = {"recipe": Recipe, "network": Network, "leak": Leak, "phase_peak": PhasePeak, "measured": MeasuredBatch}
    return {**made, **{name: of_class(kind) for name, kind in classes.items()}}


def answers() -> dict[str, Any]:
    """The answer of each command."""
    amounts = {"usable": "int", "total": "int", "budget": "str"}
    rates = ("learning_rate", "suggested_learning_rate", "utilization", "modelled_seconds", "relative_speed")
    row = {
        **dict.fromkeys(("name", "precision"), "str"),
        **dict.fromkeys(("batch_size", "accumulate"), "int"),
        **dict.fromkeys(("parameters", "largest_batch_size", "peak_reserved"), "int?"),
        **dict.fromkeys(rates, "float?"),
        **dict.fromkeys(("fits", "fits_as_written"), "bool"),
        "plan": "#plan?",
        "error": "str?",
    }
    figures = ("memory_bandwidth", "fp32_flops", "tf32_flops", "fp16_flops", "bf16_flops")
    bytes_ = dict.fromkeys(("memory_total_bytes", "memory_mean_bytes", "memory_peak_bytes"), "int")
    component = {
        "class_name": "str?",
        "parameters": "int",
        "numbers_by_dtype": {"*": "int"},
        "stored_bytes": "int",
        "files": ["str"],
        "pickles_not_opened": ["str"],
    }
    found = {
        "estimate": {
            "kind": "=calculator",
            "fits": "bool",
            "decided_by": "=rule of thumb|symbolic",
            "rule_of_thumb": "#rule_of_thumb?",
            "symbolic": "#symbolic?",
            "model": "str?",
            "found_in_config": {"*": "str"},
            "notes": ["str"],
        },
        "estimate --model-path": {
            "kind": "=model folder",
            "fits": "bool?",
            "path": "str",
            "class_name": "str?",
            "components": {"*": component},
            "trained": "str",
            "frozen": ["str"],
            "batch": "int",
            "dtype": "str",
            "sample": ["int"],
            "usable": "int?",
            "symbolic": "#symbolic",
        },
        "plan": {"kind": "=plan", "report": "#plan"},
        "compare": {"kind": "=comparison", "all_fit": "bool", **amounts, "configurations": [row]},
        "variants": {"kind": "=variants", "chosen": "str?", **amounts, "variants": [row]},
        "gpus": {
            "kind": "=cards",
            "gpus": [
                {
                    "name": "str",
                    "aliases": ["str"],
                    "architecture": "str",
                    "compute_capability": ["int"],
                    "memory_bytes": "int",
                    "usable_bytes": "int",
                    **dict.fromkeys(figures, "int?"),
                    "sources": {"*": "str"},
                }
            ],
        },
        "gpus --model": {
            "kind": "=gpus",
            "method": "=rule of thumb|symbolic",
            "releases?": {"*": "str?"},
            "tables": [
                {
                    "resolution": (["int"], "null"),
                    "gpus": [
                        {
                            "name": "str",
                            "usable": "int",
                            "largest_batch": "int?",
                            "bytes": "int",
                            "lower_bound": "bool",
                        }
                    ],
                }
            ],
        },
        "optimize": {
            "kind": "=optimize",
            "written": "str?",
            "budget": "str",
            "changes": [
                {"setting": "str", "path": "str", "old": "any", "new": "any", "reason": "str", "added": "bool"}
            ],
            "kept": [{"setting": "str", "reason": "str"}],
            "measured": ["#measured"],
        },
        "monitor": {
            "kind": "=monitor",
            "samples": "int",
            "gpus": [
                {
                    "gpu": "str",
                    "name": "str",
                    "samples": "int",
                    **dict.fromkeys(("utilization_mean", "utilization_peak"), "float?"),
                    **bytes_,
                    "processes": [
                        {
                            "pid": "int",
                            "name": "str",
                            "memory_peak_bytes": "int?",
                            "utilization_mean": "float?",
                            "predicted_bytes": "int?",
                        }
                    ],
                }
            ],
        },
    }
    found["launch"] = {
        **PLAN,
        "notes": ["str"],
        "only_told": "str",
        "script_arguments": ["str"],
        "own_options": ["str"],
        "log": "str",
    }
    made = {name: schema({"schema": "int", **one}) for name, one in found.items()}
    made["mmengine compare"] = made["compare"]
    doctor = dict.fromkeys(("vram_guard", "python", "torch", "gpu", "host_memory", "allocator_settings"), "str")
    settings = {"*": {"value": "any", "source": "str"}}
    made["doctor"] = schema(
        {
            "schema": "int",
            **doctor,
            "gpu_unreadable": "bool",
            "language": "str",
            "disabled": "bool",
            "settings": settings,
            "settings_problem": "str?",
            "unknown_variables": {"*": "str"},
        }
    )
    made["doctor"] |= {"additionalProperties": {"type": "string"}}  # "integration NAME": its state
    return made


def document() -> str:
    """The file's text."""
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Answers of vram-guard's commands with --json, format {JSON_SCHEMA}",
        "description": "The schema of one command's answer is at #/$defs/answers/NAME, such as NAME = plan.",
        "$defs": {**definitions(), "answers": answers()},
    }
    return json.dumps(whole, indent=1) + "\n"


def main() -> int:
    """Write the file."""
    PATH.write_text(document(), encoding="utf-8")
    print(f"wrote {PATH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
