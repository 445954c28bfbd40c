"""``python tools/first_hour.py``: ``docs/lab/first-hour.md``, what the commands of the start pages print, all of it.

The commands run for real, each page's in a folder of its own with that page's files.
``tests/pages/test_docs.py`` holds the result against the start pages, whose commands it runs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cases"))

from docs_blocks import START_PAGES, commands_of, files_of  # type: ignore[import-not-found]  # noqa: E402

_TITLE = """# A first hour, with all that is printed

The commands of the start pages, run on a machine without a GPU, and everything that they print, also what other \
libraries print. Dates, speeds and random numbers are replaced, and MMEngine's description of the machine is left out \
(`[...]`). MMEngine imports transformers where it is installed, and with it torchao, whose warnings are the first \
lines of that run. `python tools/first_hour.py` makes this page.
"""
_PROGRAMS = {"python": [sys.executable], "vram-guard": [sys.executable, "-m", "vram_guard.cli"]}


def transcript() -> str:
    """The page. Raises `RuntimeError` where a command ends otherwise than its page says."""
    text = _TITLE
    for name, heading in START_PAGES.items():
        page = ROOT / "docs" / "en" / f"{name}.md"
        text += f"\n## {heading}\n\nThe files stand on [its page](../en/{name}.md).\n\n```text\n"
        with tempfile.TemporaryDirectory() as above:
            folder = Path(above, "first-hour")
            for file, content in files_of(page).items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(content, encoding="utf-8")
            for command in commands_of(page):
                own = {
                    "VRAM_GUARD_LANG": "en",
                    "VRAM_GUARD_CACHE": str(folder / "cache"),
                    "COLUMNS": "80",
                    "PYTHONUNBUFFERED": "1",
                }
                run = subprocess.run(  # noqa: S603
                    [*_PROGRAMS.get(command.words[0], command.words[:1]), *command.words[1:]],
                    cwd=folder,
                    env={**os.environ, **command.environment, **own},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,  # as on a terminal: each line where it is printed
                    check=False,
                )
                if run.returncode != command.code:
                    raise RuntimeError(f"{command.text}: {run.returncode}\n{run.stdout.decode()}")
                text += f"$ {command.text}\n{_readable(run.stdout.decode(), above)}"
        text += "```\n"
    return text


#: What differs from run to run, or describes this machine, and what stands in its place.
_PASSING = (
    (r"\d\d/\d\d \d\d:\d\d:\d\d - mmengine", "MM/DD hh:mm:ss - mmengine"),
    (r"\bW\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ", "WMMDD hh:mm:ss PID "),
    (r"\d{8}[-_]\d{6}(-\d+)?", "DATE-TIME"),
    (r"\b(seed: )\d+", r"\1N"),
    (r"(\b(?:data_)?time: )[\d.]+", r"\1S"),
    (r"(  loss: )[\d.]+", r"\1L"),
    (r"\d:\d\d:\d\d • \d:\d\d:\d\d +[\d.]+it/s", "h:mm:ss • h:mm:ss N it/s"),
    (r"(System environment:\n).*?(\n *MMEngine: )", r"\1    [...]\2"),
)


def _readable(printed: str, above: str) -> str:
    """Without the places, dates and speed of this machine, the earlier states of a progress bar, and colours."""
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed)
    printed = re.sub(r"[^\n]*\r(?!\n)", "", printed)
    for place, short in (
        (f"{above}/first-hour", "."),
        (sys.prefix, ".venv"),
        (str(Path(sys.prefix).resolve()), ".venv"),
    ):
        printed = printed.replace(place, short)
    for passing, lasting in _PASSING:
        printed = re.sub(passing, lasting, printed, flags=re.DOTALL)
    return "".join(f"{line.rstrip()}\n" for line in printed.splitlines())


if __name__ == "__main__":
    for name in ("SIGINT", "SIGQUIT"):  # `launch` says so where a shell's background job ignores them
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    (ROOT / "docs" / "lab" / "first-hour.md").write_text(transcript(), encoding="utf-8")
