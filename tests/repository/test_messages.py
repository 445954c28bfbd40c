"""What errors and warnings say goes through the catalogues: no text in them is English in every language."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from each import each
from message_texts import bare_texts, error_classes, messages, parsed

from vram_guard import errors

ROOT = Path(__file__).parents[2]
BASE = "VramGuardError"


@pytest.fixture(scope="module")
def trees():
    return parsed(ROOT / "vram_guard", ROOT / "integrations")


def test_the_errors_are_found(trees):
    found = error_classes(trees.values(), BASE)
    assert found > {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert "CannotSplitError" in found
    assert sum(1 for tree in trees.values() for _ in messages(tree, found)) > 300


def test_errors_and_warnings_are_looked_up_in_the_catalogues(trees):
    found = list(bare_texts(trees, error_classes(trees.values(), BASE)))
    assert not found, f"{len(found)} texts outside of _() and marked()\n" + "\n".join(
        str(one).replace(f"{ROOT}/", "") for one in found
    )


def found_in(tmp_path, source):
    (tmp_path / "some.py").write_text(textwrap.dedent(source))
    trees = parsed(tmp_path)
    return [one.text for one in bare_texts(trees, error_classes(trees.values(), BASE))]


@each(
    "source",
    [
        'raise InvalidError("no such thing")',
        'raise errors.InvalidError("no such thing") from None',
        'raise InvalidError(f"no such thing")',
        'raise InvalidError(_("fine") + "no such thing")',
        'raise InvalidError(", ".join(["no such thing", name]))',
        'raise InvalidError(why or "no such thing")',
        'raise InvalidError(_("fine") if why else "no such thing")',
        'def f():\n    why = "no such thing"\n    raise InvalidError(why)',
        'def f():\n    why = [_("fine")]\n    why.append("no such thing")\n    raise InvalidError("; ".join(why))',
        'WHY = "no such thing"\ndef f():\n    return InvalidError(WHY)',
        'class Own(InvalidError):\n    def __init__(self):\n        super().__init__("no such thing")',
        'raise InvalidError("part", "no such thing")',
        'raise InvalidError("no such thing", _("fine"))',
        "def f(path):\n    raise InvalidError(f\"{path / 'part'}no such thing\")",
        'warnings.warn("no such thing", stacklevel=2)',
        'warnings.warn(f"vram_guard: {error}no such thing", OwnWarning, stacklevel=2)',
    ],
)
def test_a_bare_text_is_found(tmp_path, source):
    source = f"class {BASE}(Exception): ...\nclass InvalidError({BASE}): ...\n{source}\n"
    assert found_in(tmp_path, source) == ["no such thing"]


@each(
    "source",
    [
        'raise InvalidError(_("no {thing}", thing="such thing"))',
        'raise InvalidError(f"{name}: " + _("no such thing"))',
        'WHY = marked("no such thing")\ndef f():\n    raise InvalidError(_(WHY))',
        "def f(why):\n    raise InvalidError(why)",
        "raise InvalidError(said(self.why, 'a key'))",
        'KNOWN = ("one", "two")\nraise InvalidError(_("one of {known}", known=", ".join(KNOWN)) + ", ".join(KNOWN))',
        'raise InvalidError("part", _("no such thing"))',
        'def f(folder):\n    path = folder / "part" / "some.py"\n    raise InvalidError(_("no {path}", path=path))',
        'raise ValueError("somebody else\'s")',
        'warnings.warn(f"vram_guard: {error}", OwnWarning, stacklevel=2)',
    ],
)
def test_what_is_looked_up_is_left_alone(tmp_path, source):
    source = f"class {BASE}(Exception): ...\nclass InvalidError({BASE}): ...\n{source}\n"
    assert found_in(tmp_path, source) == []


def test_a_single_word_is_found_where_it_is_the_whole_message(tmp_path):
    source = f'class {BASE}(Exception): ...\nraise {BASE}("unsupported")\n'
    assert found_in(tmp_path, source) == ["unsupported"]


def test_a_message_that_is_put_together_is_found(tmp_path):
    source = f'class {BASE}(Exception): ...\nraise {BASE}(_(f"no {{thing}}"))\n'
    assert len(found_in(tmp_path, source)) == 1
