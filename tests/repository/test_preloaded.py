"""Processes that begin with libraries imported are processes as Python starts them, but for the imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="copies of processes need Linux's /proc")

LOOKS = """
import json, os, signal, sys
loaded = "colorsys" in sys.modules  # of all modules the one that nothing else imports
seen = {
    "loaded": loaded, "arguments": sys.argv, "original": sys.orig_argv[1:], "name": __name__, "file": __file__,
    "first": sys.path[0], "folder": os.getcwd(), "given": os.environ.get("GIVEN"), "extra": os.environ.get("EXTRA"),
    "names": sorted(name for name in globals() if not name.startswith("__")), "input": sys.stdin.read(),
    "signals": [str(signal.getsignal(n)) for n in (1, 2, 3, 13, 15)], "mask": os.umask(0),
    "main": sys.modules["__main__"].__dict__ is globals(),
}
json.dump(seen, sys.stdout)
"""
WAITS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "looks.py").write_text(LOOKS)
    (tmp_path / "waits.py").write_text(WAITS)
    return tmp_path


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    return preloaded.environment({**os.environ, "GIVEN": "yes"}, "colorsys", others={"looks": ("colorsys", "sndhdr")})


def seen(folder: Path, *command: str, env: dict[str, str], **more: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        input="words",
        capture_output=True,
        text=True,
        check=True,
        **more,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", [("looks.py", "a b", "-c"), ("-m", "looks", "a b", "-c")])
def test_a_process_is_as_one_that_starts_everywhere(folder: Path, variables: Any, command: tuple[str, ...]) -> None:
    as_everywhere = {name: value for name, value in variables.items() if name != "PRELOADED_AT"}
    ours, everywhere = (seen(folder, *command, env=one, umask=0o27) for one in (variables, as_everywhere))
    assert (ours.pop("loaded"), everywhere.pop("loaded")) == (True, False)
    assert ours == everywhere


def test_what_python_reads_when_it_starts_starts_it_as_everywhere(folder: Path, variables: Any) -> None:
    assert seen(folder, "looks.py", env={**variables, "EXTRA": "1"})["loaded"]
    assert not seen(folder, "looks.py", env={**variables, "PYTHONHASHSEED": "1"})["loaded"]
    assert not seen(folder, "-W", "ignore", "looks.py", env=variables)["loaded"]


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("import sys\nsys.exit(7)", 7, ""),
        ("raise ValueError('its own')", 1, 'Traceback (most recent call last):\n  File "ends.py", line 1, in <module>'),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        (
            "import os\nopen('ran', 'a').write('x')\nos.kill(os.getpid(), 9 if open('ran').read() == 'x' else 15)",
            -9,
            "",
        ),
        ("import atexit\natexit.register(print, 'at its end')", 0, ""),
    ],
)
def test_it_ends_as_the_script_does(folder: Path, variables: Any, code: str, expected: int, said: str) -> None:
    (folder / "ends.py").write_text(code)
    command = [sys.executable, "ends.py"]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == expected
    assert said in done.stderr
    assert done.stdout == ("at its end\n" if "atexit" in code else "")
