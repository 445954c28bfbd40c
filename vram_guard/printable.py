r"""Text of others, made safe to show: names of modules, files and processes, values of configs, texts of exceptions.

A terminal obeys escape sequences and carriage returns, and both a page and a terminal reorder text at bidirectional
controls: with them, a name can forge a line of a report. They are shown as Python's literals have them (``\x1b``).
"""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager, nullcontext

#: Controls (Unicode's C0, DEL and C1) but tab and line feed; line and paragraph separators; the controls of Unicode's
#: bidirectional algorithm (Standard Annex 9); and halves of surrogate pairs, which no encoding takes.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, lines: bool = True) -> str:
    """The text with everything escaped that a terminal would obey; text that is safe comes back as it is.

    Args:
        text: of whatever origin.
        lines: whether it may have several; False: a name, whose line feeds are escaped too.
    """
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
    if not lines and "\n" in text:
        text = text.replace("\n", "\\n")
    return _HARMFUL.sub(_escaped, text)


def beside_progress_bars() -> AbstractContextManager[None]:
    """Lines that are printed inside it stand by themselves, above progress bars that tqdm shows.

    tqdm leaves the cursor at the end of a bar. Its own context clears the bars and shows them again; where nothing
    imported tqdm, there are none.
    """
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    inside: AbstractContextManager[None] = nullcontext() if bars is None else bars.external_write_mode()
    return inside


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "backslashreplace").decode("ascii")
