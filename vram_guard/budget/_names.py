"""Comparing the names of graphics cards as people and drivers write them."""

from __future__ import annotations

import difflib
import re

#: A name as the set of its telling words: "NVIDIA GeForce RTX 4090" -> {"rtx", "4090"}.
Form = frozenset[str]

_NO_MEANING = frozenset({"nvidia", "geforce", "tesla", "gpu", "graphics", "card", "generation", "edition"})
_LONGEST = 100


def form_of(name: str) -> Form:
    """The telling words of ``name`` in lower case: no brand words, "RTX4090Ti" split, "40 GB" joined."""
    text = re.sub(r"[^a-z0-9]+", " ", name[:_LONGEST].lower())
    text = re.sub(r"\b(rtx|gtx|titan|quadro)(?=[0-9])", r"\1 ", text)
    text = re.sub(r"(?<=[0-9])(ti|super)\b", r" \1", text)
    text = re.sub(r"\b([0-9]+) ?gi?b\b", r"\1gb", text)
    return frozenset(text.split()) - _NO_MEANING


def differences(wanted: Form, known: Form, size: str) -> int | None:
    """The number of words of ``known`` that are missing from ``wanted``; None where ``wanted`` is another name.

    Args:
        wanted: what was asked for.
        known: a card's name.
        size: the card's memory ("40gb"): understood without its unit, and never missed.
    """
    known = known | {size}
    named = frozenset(word if word in known else f"{word}gb" for word in wanted)
    if not named - {size} or not named <= known:  # an amount of memory alone names no card
        return None
    return len(known - named - {size})


def nearest_names(name: str, names: list[str], count: int = 3) -> list[str]:
    """Up to ``count`` of ``names`` that look most like ``name``."""
    plain = {" ".join(sorted(form_of(known))): known for known in names}
    wanted = " ".join(sorted(form_of(name)))
    return [plain[near] for near in difflib.get_close_matches(wanted, plain, n=count, cutoff=0.5)]
