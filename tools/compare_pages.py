"""Make pages of the documentation anew that are too dear to make in the tests, and show which of their figures differ.

    python tools/compare_pages.py [PAGE ...]

Without a PAGE: all of them. Nothing under ``docs`` changes. The tools' own seconds, the memory of their processes and
the machine are not compared: they differ from run to run. The exit status is 1 where a figure differs.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Page -> the benchmark that writes it, and about how long that takes on two cores.
PAGES = {
    "plans": ("benchmarks.plans", "6 minutes"),
    "recorded": ("benchmarks.recorded", "a minute"),
    "sharded": ("benchmarks.sharded", "10 minutes"),
}
#: Heads of the columns that measure a tool, not a training, in both languages. (The Chinese page of plans has the last
#: one for a figure of the plan, which the English page has too.)
_OF_TOOLS = {
    *("seconds", "traced in", "planned in", "processor time", "host memory"),
    *("秒", "跟踪用时", "规划用时", "处理器时间", "主机内存"),
}
#: A time in a page's text, and the line that names the machine.
_TIME = re.compile(r"\b\d+(\.\d+)?(?= (s|ms|min)\b)")
_MACHINE = re.compile(r"torch [^,]+, Python [^,]+, CPU x \d+")


def differing(page: str, made: str) -> list[str]:
    """The lines in which a page and the one that was made anew differ, as a difference without context."""
    before, after = (list(_lasting(text)) for text in (page, made))
    lines = difflib.unified_diff(before, after, "docs", "now", lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def _lasting(page: str) -> Iterator[str]:
    """The lines of a page without what differs from run to run."""
    heads: list[str] = []
    for line in page.splitlines():
        if not line.startswith("|"):
            heads = []
            yield _MACHINE.sub("", _TIME.sub("", line))
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        heads = heads or cells
        yield " | ".join("" if head in _OF_TOOLS else cell for head, cell in zip(heads, cells, strict=False))


def main(names: list[str]) -> int:
    """Make each page in a folder of its own and compare it, in both languages."""
    unknown = set(names) - PAGES.keys()
    if unknown:
        print(f"no such page: {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}", file=sys.stderr)
        return 2
    different = False
    for name in names or PAGES:
        module, lasting = PAGES[name]
        print(f"{name}: python -m {module}, about {lasting}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            # What it says of its progress, and why it fails, is for whoever waits.
            command = [sys.executable, "-m", module, "--out", folder]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
            for language in ("en", "zh_cn"):
                page, made = (root / language / f"{name}.md" for root in (ROOT / "docs", Path(folder)))
                lines = differing(page.read_text(encoding="utf-8"), made.read_text(encoding="utf-8"))
                print(f"{page.relative_to(ROOT)}: {len(lines)} lines differ", *lines, sep="\n")
                different = different or bool(lines)
    return int(different)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
