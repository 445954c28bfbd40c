"""Make pages of the documentation anew that are too dear to make in the tests, and show which of their figures differ.

    python tools/compare_pages.py [PAGE ...]

Without a PAGE: all of them. Nothing under ``docs`` changes. Seconds and the machine are not compared: they differ from
run to run. The exit status is 1 where a figure differs.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Page -> the benchmark that writes it, and about how long that takes on two cores.
PAGES = {
    "plans": ("benchmarks.plans", "6 minutes"),
    "recorded": ("benchmarks.recorded", "a minute"),
    "sharded": ("benchmarks.sharded", "10 minutes"),
}
#: A time as a page's tables write it, and the line that names the machine.
_TIME = re.compile(r"\b\d+(\.\d+)?(?= (s|ms|min)\b)")
_MACHINE = re.compile(r"torch [^,]+, Python [^,]+, CPU x \d+")


def differing(page: str, made: str) -> list[str]:
    """The lines in which a page and the one that was made anew differ, as a difference without context."""
    before, after = ([_MACHINE.sub("", _TIME.sub("", line)) for line in text.splitlines()] for text in (page, made))
    lines = difflib.unified_diff(before, after, "docs", "now", lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


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
