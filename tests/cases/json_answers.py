"""Answers of commands, held against the JSON schemas in the documentation."""

from __future__ import annotations

import json
from pathlib import Path

SCHEMAS = json.loads((Path(__file__).parents[2] / "docs" / "schemas.json").read_text(encoding="utf-8"))

#: What each kind of value is in Python; True is a bool and no number.
KINDS = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "null": type(None)}


def problems(value, schema, where="answer"):
    """What of a value is not as its schema says: the part of JSON Schema 2020-12 that the file uses."""
    unknown = schema.keys() - {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "anyOf",
        "$ref",
    }
    assert not unknown, unknown
    if "$ref" in schema:
        return problems(value, SCHEMAS["$defs"][schema["$ref"].rpartition("/")[2]], where)
    if "anyOf" in schema:
        found = [problems(value, one, where) for one in schema["anyOf"]]
        return [] if any(not one for one in found) else max(found, key=len)
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{where}: {value!r} is none of {schema['enum']}"]
    kinds = schema.get("type")
    if kinds == "array":
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [line for at, one in enumerate(value) for line in problems(one, schema["items"], f"{where}[{at}]")]
    if kinds == "object":
        if not isinstance(value, dict):
            return [f"{where}: no object"]
        known, more = schema.get("properties", {}), schema["additionalProperties"]
        found = [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, one in value.items():
            if name in known or more is not False:
                found += problems(one, known.get(name, more), f"{where}.{name}")
            else:
                found.append(f"{where}: {name} is not in the schema")
        return found
    wanted = [] if kinds is None else [kinds] if isinstance(kinds, str) else kinds
    right = any(isinstance(value, KINDS[one]) and (one == "boolean" or value is not True) for one in wanted)
    right = right and (not isinstance(value, bool) or "boolean" in wanted)
    return [] if right or not wanted else [f"{where}: {value!r} is no {kinds}"]


def held_against(name, answer):
    """Problems of a command's answer, and of the same with a key too few and a key too many: there have to be some."""
    schema = SCHEMAS["$defs"]["answers"][name]
    first = next(iter(schema["required"]))
    assert problems({key: value for key, value in answer.items() if key != first}, schema)
    assert problems({**answer, "no such key": {}}, schema)
    return problems(answer, schema)
