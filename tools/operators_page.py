"""Write the pages about operators from the table beside the code.

python tools/operators_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "vram_guard" / "simulate" / "operators" / "operators.json"

HEADS = {
    "en": """# Operators

[中文](../zh_cn/operators.md)

Memory that CUDA's kernels take from the allocator besides their results: copies, buffers, workspaces. Results are
counted too, but not listed. The list follows the folders of PyTorch's `ATen`; it is made by `python
tools/operators_page.py` from a table next to the code, which the tests compare with the code. Operators that are
not named take nothing besides their results, as far as their sources were read: the headers of torch 2.4, 2.13 and
2.15, and most kernels as they are in 2.4. Where releases are known to differ, the one that is installed decides.

Buffers of large reductions depend on the card: on its multiprocessors, and on how many threads each of them holds.
Name the card to be exact. Where only a compute capability is known, the largest card that has it is assumed (8.0:
an A100 with 108 multiprocessors); where nothing is known, an A100.
""",
    "zh": """# 算子

[English](../en/operators.md)

CUDA 内核从分配器拿走、而任何张量都看不出来的显存：副本、缓冲区、工作区。结果张量也计入，但不在此列出。
顺序按 PyTorch `ATen` 的目录；本页由 `python tools/operators_page.py` 从代码旁的表生成，测试会用代码核对这张表。
未列出的算子，就读过的源码而言，除结果外不占显存：头文件读的是 torch 2.4、2.13 和 2.15，多数内核读的是 2.4。
已知版本之间有差异之处，以所装版本为准。

大型归约的缓冲区取决于显卡：多处理器的数量，以及每个多处理器能容纳的线程数。要准确就请指明显卡。
只知道计算能力时，按具有该能力的最大显卡估算（8.0：108 个多处理器的 A100）；什么都不知道时，按 A100 估算。
""",
}
COLUMNS = {"en": ("operator", "source", "what it takes"), "zh": ("算子", "源文件", "占用")}
MODELLED = {"en": "Modelled", "zh": "已建模"}
NOT_MODELLED = {"en": "Not modelled", "zh": "未建模"}


def page(language: str) -> str:
    """The page in "en" or "zh"."""
    table: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    parts = [HEADS[language]]
    for title, modelled in ((MODELLED[language], True), (NOT_MODELLED[language], False)):
        parts.append(f"## {title}\n")
        for folder, entries in table.items():
            chosen = [entry for entry in entries if (entry["rule"] is not None) == modelled]
            if chosen:
                parts.append(f"**{folder}**\n\n{_table(chosen, language)}\n")
    return "\n".join(parts)


def _table(entries: list[dict[str, Any]], language: str) -> str:
    rows = [COLUMNS[language], ("---",) * 3]
    rows += [(", ".join(f"`{name}`" for name in each["operators"]), each["source"], each[language]) for each in entries]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Write both pages."""
    for folder, language in (("en", "en"), ("zh_cn", "zh")):
        (ROOT / "docs" / folder / "operators.md").write_text(page(language), encoding="utf-8")


if __name__ == "__main__":
    main()
