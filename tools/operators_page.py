"""Write docs/lab/operators.md from the table beside the code.

python tools/operators_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "vram_guard" / "simulate" / "operators" / "operators.json"

HEAD = """# Operators

Memory that CUDA's kernels take from the allocator besides their results: copies, buffers, workspaces. Results are
counted too, but not listed. The list follows the folders of PyTorch's `ATen`; it is made by `python
tools/operators_page.py` from a table next to the code, which the tests compare with the code. Operators that are
not named take nothing besides their results, as far as their sources were read: the headers of torch 2.4, 2.13 and
2.15, and most kernels as they are in 2.4. Where releases are known to differ, the one that is installed decides.

Buffers of large reductions depend on the card: on its multiprocessors, and on how many threads each of them holds.
Name the card to be exact. Where only a compute capability is known, the largest card that has it is assumed (8.0:
an A100 with 108 multiprocessors); where nothing is known, an A100.
"""
COLUMNS = ("operator", "source", "what it takes")


def page() -> str:
    """The page."""
    table: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    parts = [HEAD]
    for title, modelled in (("Modelled", True), ("Not modelled", False)):
        parts.append(f"## {title}\n")
        for folder, entries in table.items():
            chosen = [entry for entry in entries if (entry["rule"] is not None) == modelled]
            if chosen:
                parts.append(f"**{folder}**\n\n{_table(chosen)}\n")
    return "\n".join(parts)


def _table(entries: list[dict[str, Any]]) -> str:
    rows = [COLUMNS, ("---",) * 3]
    rows += [(", ".join(f"`{name}`" for name in each["operators"]), each["source"], each["takes"]) for each in entries]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    (ROOT / "docs" / "lab" / "operators.md").write_text(page(), encoding="utf-8")
