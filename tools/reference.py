"""``make reference``: the pages of options, settings, Python names and operators, made from the code.

The commands' options are those of their parsers, settings those of the guards with their defaults, the Python names
those of ``vram_guard.__all__`` with their docstrings, and operators those of the table beside their rules.
``tests/pages/test_docs.py`` says which page is not current.
"""

# ruff: noqa: SLF001, argparse has no public way to list the options of a parser
from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import vram_guard
from vram_guard.cli import _parser
from vram_guard.guard.settings import ADVANCED, GuardSettings, PlanSettings
from vram_guard.known.architectures import LENGTH_STEP, architectures, variants_of
from vram_guard.language import speaking
from vram_guard.plan import PlanOptions
from vram_guard.settings import KINDS
from vram_guard_accelerate._settings import add_options

ROOT = Path(__file__).parents[1]
NOTE = "Made by `make reference` from the code."
OPERATORS = """# Operators

Memory that CUDA's kernels take from the allocator besides their results: copies, buffers, workspaces. Results are
counted too, but not listed. The list follows the folders of PyTorch's `ATen`; it is made by `make
reference` from a table next to the code, which the tests compare with the code. Operators that are
not named take nothing besides their results, as far as their sources were read: the headers of torch 2.4, 2.13 and
2.15, and most kernels as they are in 2.4. Where releases are known to differ, the one that is installed decides.

Buffers of large reductions depend on the card: on its multiprocessors, and on how many threads each of them holds.
Name the card to be exact. Where only a compute capability is known, the largest card that has it is assumed (8.0:
an A100 with 108 multiprocessors); where nothing is known, an A100.
"""


ARCHITECTURES = f"""# Published architectures

{NOTE} Names for `--model` of `estimate`, `plan` and `gpus`. A training is named by the
type of the weights, the precision, LoRA or QLoRA with peft's own settings, checkpointing, and the optimizer; texts may
have any multiple of {LENGTH_STEP} tokens. What is not there is traced, with the libraries that are installed.
"""


def cli() -> str:
    """Every command with its options."""
    with speaking("en"):
        found = dict(_commands(_parser([]), ""))
        # Beside its own options ``launch`` has all of accelerate's.
        description = (
            "accelerate's options are passed on to accelerate, and what follows the script belongs to the script."
        )
        found["launch"] = argparse.ArgumentParser(description=description, add_help=False)
        add_options(found["launch"])
        parts = [f"# Commands\n\n{NOTE} `vram-guard COMMAND --help` prints the same; with `--lang zh` in Chinese.\n"]
        parts += [_command(name, parser) for name, parser in found.items()]
    return "\n".join(parts)


def _commands(parser: argparse.ArgumentParser, above: str) -> list[tuple[str, argparse.ArgumentParser]]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    found = []
    for name, command in below[0].choices.items() if below else ():
        path = f"{above}{name}"
        found += _commands(command, f"{path} ") or [(path, command)]
    return found


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = [("option", "meaning"), ("---", "---")]
    for action in sorted(parser._actions, key=lambda action: not action.option_strings):
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            takes = "" if action.nargs == 0 else f" {_metavar(action)}"
            names = ", ".join(action.option_strings) + takes if action.option_strings else _metavar(action)
            rows.append((f"`{names}`", _cell(action.help or "")))
    table = "\n".join(f"| {option} | {meaning} |" for option, meaning in rows)
    return f"## `vram-guard {name}`\n\n{_cell(parser.description or '')}\n\n{table}\n"


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _cell(text: str) -> str:
    return " ".join(text.replace("%%", "%").split()).replace("|", "\\|")


def settings() -> str:
    """Every setting with its default and what it means."""
    meanings = {**_arguments(PlanSettings), **_arguments(GuardSettings)}
    defaults = {field.name: field.default for field in dataclasses.fields(GuardSettings)}
    variables = {name: f"`VRAM_GUARD_{name.upper()}`" for name in KINDS}
    rows = {
        name: f"| `{name}` | {variables.get(name, '')} | `{_default(defaults[name])}` | "
        f"{meaning.replace('|', chr(92) + '|')} |"
        for name, meaning in meanings.items()
    }
    heading = ("| setting | variable | default | meaning |", "| --- | --- | --- | --- |")
    others = sorted(set(KINDS) - set(meanings))
    return "\n".join(
        [
            f"# Settings\n\n{NOTE}",
            "Arguments of `VramGuard` and keys of `vram_guard = dict(...)`;",
            "[where else they may stand](../en/index.md#settings).\n",
            *heading,
            *(row for name, row in rows.items() if name not in ADVANCED),
            "",
            "`advanced={...}` of all three holds the others (`vram-guard launch --advanced NAME=VALUE`); files and",
            "variables have them beside the rest.\n",
            *heading,
            *(row for name, row in rows.items() if name in ADVANCED),
            f"\nOf single commands and adapters: {', '.join(f'`{name}`' for name in others)}.\n",
        ]
    )


def _arguments(settings_class: type) -> dict[str, str]:
    """Name -> meaning, of the section Args of a docstring."""
    section = (inspect.getdoc(settings_class) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (?=\w[\w, ]*: )", section, flags=re.MULTILINE)
    found = (re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(entry.split())).replace("``", "`") for entry in entries)
    return dict(entry.partition(": ")[::2] for entry in found if entry)


def _default(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def api() -> str:
    """Every public name with its signature and its docstring."""
    parts = [f"# Python\n\n{NOTE} `import vram_guard` imports neither torch nor a framework.\n"]
    public = {name: getattr(vram_guard, name) for name in vram_guard.__all__}
    for name, value in sorted([*public.items(), ("plan.PlanOptions", PlanOptions)], key=lambda item: item[0]):
        if not isinstance(value, str):
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.getdoc(value) or "")
            parts.append(f"## {name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def operators() -> str:
    """Every operator with its source, and what it takes besides its results."""
    path = ROOT / "vram_guard" / "simulate" / "operators" / "operators.json"
    table: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    parts = [OPERATORS]
    for title, modelled in (("Modelled", True), ("Not modelled", False)):
        parts.append(f"## {title}\n")
        for folder, entries in table.items():
            rows = [
                f"| {', '.join(f'`{name}`' for name in entry['operators'])} | {entry['source']} | {entry['takes']} |"
                for entry in entries
                if (entry["rule"] is not None) == modelled
            ]
            if rows:
                head = ["| operator | source | what it takes |", "| --- | --- | --- |"]
                parts.append("\n".join([f"**{folder}**\n", *head, *rows, ""]))
    return "\n".join(parts)


def known() -> str:
    """Every published architecture, its names, and the trainings of it that are answered without a trace."""
    head = ["| name | other names | parameters | answered without a trace |", "| --- | --- | --- | --- |"]
    rows = [
        f"| `{one.name}` | {', '.join(f'`{name}`' for name in one.aliases)} | "
        f"{'' if one.parameters is None else f'{one.parameters:,}'} | "
        f"{'<br>'.join(f'`{training}`' for training in variants_of(one.name))} |"
        for one in architectures()
    ]
    return "\n".join([ARCHITECTURES, *head, *rows, ""])


PAGES = {
    "reference/cli": cli,
    "reference/settings": settings,
    "reference/api": api,
    "reference/architectures": known,
    "lab/operators": operators,
}

if __name__ == "__main__":
    for page, make in PAGES.items():
        path, text = ROOT / "docs" / f"{page}.md", make()
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what the code says")
