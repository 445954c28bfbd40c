"""The options that the benchmarks' commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path


def arguments_of(program: str, description: str | None, *, only: str = "", json: str = "") -> argparse.ArgumentParser:
    """A parser with ``--only`` for the things of that name, and ``--json`` for a file that holds more."""
    parser = argparse.ArgumentParser(prog=program, description=(description or "").splitlines()[0])
    if only:
        help_ = f"only {only} whose names contain a WORD"
        parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help=help_)
    if json:
        parser.add_argument("--json", type=Path, metavar="FILE", help=f"also write {json} to FILE")
    return parser


def chosen(names: Iterable[str], words: Sequence[str]) -> list[str]:
    """The names that contain one of the words; all of them for no word."""
    return [name for name in names if is_chosen(name, words)]


def is_chosen(name: str, words: Sequence[str]) -> bool:
    """True where the name contains one of the words, or there are no words; a word "=NAME" is that very name."""
    return not words or any(word[1:] == name if word.startswith("=") else word in name for word in words)
