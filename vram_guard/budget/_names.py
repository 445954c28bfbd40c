"""Comparing the names of graphics cards as people and drivers write them."""

from __future__ import annotations

import difflib
import re

from vram_guard.limits import LONGEST_NAME

#: A name as the set of its telling words: "NVIDIA GeForce RTX 4090" -> {"rtx", "4090"}.
Form = frozenset[str]

_NO_MEANING = frozenset({"nvidia", "geforce", "tesla", "gpu", "graphics", "card", "generation", "edition"})
_MOBILE = frozenset({"laptop", "mobile", "max"})  # "Max-Q" is two words
_FASTER = frozenset({"ti", "super"})
_NUMBERED = re.compile("([a-z]*)([0-9]{1,6})[a-z]?")
#: GeForce cards, by the last digits of their numbers.
_CLASSES = frozenset(range(10, 100, 10))


def form_of(name: str) -> Form:
    """The telling words of ``name`` in lower case: no brand words, "RTX4090Ti" split, "40 GB" joined."""
    text = re.sub(r"[^a-z0-9]+", " ", name[:LONGEST_NAME].lower())
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
    if (_FASTER & known) - wanted:  # a 5070 of 12 GB is no 5070 Ti
        return None
    known = known | {size}
    named = frozenset(word if word in known else f"{word}gb" for word in wanted)
    if not named - {size} or not named <= known:  # an amount of memory alone names no card
        return None
    return len(known - named - {size})


def nearest_names(name: str, names: list[str]) -> list[str]:
    """Up to three of ``names`` that look most like ``name``, and are by their numbers no larger cards."""
    # "4O90", and "H 100"
    typed = re.sub("(?<=[0-9])o(?=[0-9])", "0", re.sub(r"\b([a-z]{1,2}) (?=[0-9])", r"\1", name.lower()))
    asked = form_of(typed)
    plain = {" ".join(sorted(form_of(known))): known for known in names if not _larger(form_of(known), asked)}
    wanted = " ".join(sorted(asked))
    return [plain[near] for near in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.5)]


def _larger(known: Form, wanted: Form) -> bool:
    """True if a card may be larger than the one that was asked for, which would then run out of memory."""
    if (_MOBILE & wanted and not _MOBILE & known) or (_FASTER & known) - wanted:
        return True
    asked, has = _number(wanted), _number(known)
    if asked is None or has is None:
        return False  # a typo: there is no such number
    (letters, number), (others, other) = asked, has
    if letters == others and sorted(str(number)) == sorted(str(other)):
        return False  # digits in another order
    if letters or others or number < 1000:
        return letters != others or other > number
    generation, kind = divmod(number, 100)  # RTX 4070: generation 40, class 70
    if kind not in _CLASSES:
        return other > number
    return other // 100 > generation or other % 100 > kind or other % 100 not in _CLASSES


def _number(form: Form) -> tuple[str, int] | None:
    """The letters and the number that tell the card within its family: ("", 4090), ("h", 100)."""
    found = [match for word in sorted(form) if (match := _NUMBERED.fullmatch(word))]
    return (found[0][1], int(found[0][2])) if found else None
