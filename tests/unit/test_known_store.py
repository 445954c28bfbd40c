"""Traces that are remembered: only where all that they had read is as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Run by itself: what this process has read, other tests have read too.
KINDS = """
import importlib, json, os, pathlib, sys
from vram_guard.known.inputs import reading

here = pathlib.Path.cwd()
sys.path.insert(0, str(here))
trained, data, sizes, helper = here / "trained.pt", here / "data", here / "sizes.json", here / "helper.py"


def same_size_and_time(path, text):
    state = path.stat()
    path.write_text(text)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def variable(name, value):
    os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def opened(path, mode="r"):
    try:
        return open(path, mode).read()
    except FileNotFoundError:
        return None


def there(path, new):
    path.write_text("x") if new else path.unlink(missing_ok=True)
    importlib.invalidate_caches()


def renamed(new):
    data.rename(here / "d") if new else (here / "d").rename(data)


#: What is read, and what changes it (True) and puts it back (False).
kinds = {
    "a file that is opened": (lambda: opened(sizes), lambda new: same_size_and_time(sizes, f"[{64 + new}]")),
    "a file that may be written": (lambda: opened(sizes, "r+"), lambda new: same_size_and_time(sizes, f"[{64 + new}]")),
    "a module": (lambda: importlib.import_module("helper"), lambda new: same_size_and_time(helper, f"x = {64 + new}")),
    "a variable": (lambda: os.environ["WIDTH"], lambda new: variable("WIDTH", f"{64 + new}")),
    "a variable that is not there": (lambda: os.getenv("ABSENT"), lambda new: variable("ABSENT", "1" if new else None)),
    "all variables": (lambda: [one for one in os.environ], lambda new: variable("ABSENT", "1" if new else None)),
    "a folder that is listed": (lambda: sorted(os.listdir(data)), lambda new: there(data / "b.txt", new)),
    "a folder that is walked": (lambda: list(data.rglob("*")), lambda new: there(data / "b.txt", new)),
    "a folder that is asked for": (lambda: data.is_dir(), renamed),
    "a file that is asked for": (lambda: os.path.exists(trained), lambda new: there(trained, new)),
    "a file that is asked for by its path": (lambda: trained.is_file(), lambda new: there(trained, new)),
    "a file that cannot be opened": (lambda: opened(trained), lambda new: there(trained, new)),
    "a library's name": (lambda: importlib.import_module("colorsys"), lambda new: there(here / "colorsys.py", new)),
}
wrong = []
for name in sys.argv[1:]:
    read, change = kinds[name]
    with reading() as seen:
        with reading():
            pass
        read()
    inputs = seen.inputs()
    found = [inputs.hold()]
    for new in (True, False):
        change(new)
        found.append(inputs.hold())
    if found != [True, False, True]:
        wrong.append((name, found))
print(json.dumps([list(kinds), wrong]))
"""

#: What cannot be looked at again.
BEYOND = {
    "another program": "import subprocess; subprocess.run(['true'])",
    "a shell": "import os; os.system('true')",
    "a connection": "import socket; socket.socket().connect_ex(('127.0.0.1', 9))",
    "a copy of the process": "import os; os.fork() or os._exit(0)",
    "a database": "import sqlite3; sqlite3.connect(':memory:')",
    "the memory of this moment": "open('/proc/meminfo').read()",
}


READS = """
from vram_guard.known.inputs import reading
with reading() as seen:
    import own
print(seen.inputs(), seen.beyond)
"""


def run(folder, *arguments, **variables):
    """A process in a folder, with an empty cache beside that."""
    environment = {**os.environ, "VRAM_GUARD_CACHE": f"{folder}-cache", **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_every_kind_of_input_is_compared(tmp_path):
    """Each in a process of its own: what was written since a process began is not remembered."""
    wrong, kinds, number = [], ["a variable"], 0
    while number < len(kinds):
        folder = tmp_path / str(number)
        folder.joinpath("data").mkdir(parents=True)
        for name, text in (("data/a.txt", "1"), ("sizes.json", "[64]"), ("helper.py", "x = 64")):
            (folder / name).write_text(text)
        ran = run(folder, "-c", KINDS, kinds[number], WIDTH="64")
        assert ran.returncode == 0, (kinds[number], ran.stderr)
        kinds, found = json.loads(ran.stdout)
        wrong += found
        number += 1
    assert number > 10
    assert wrong == []


def test_what_changes_while_it_is_read_is_not_remembered(tmp_path):
    (tmp_path / "own.py").write_text("import pathlib\npathlib.Path(__file__).write_text('x = 2')")
    ran = run(tmp_path, "-c", READS)
    assert ran.stdout.startswith("None"), (ran.stdout, ran.stderr)


@pytest.mark.parametrize("name", BEYOND)
def test_what_cannot_be_looked_at_again_is_not_remembered(name, tmp_path):
    (tmp_path / "own.py").write_text(BEYOND[name])
    ran = run(tmp_path, "-c", READS)
    assert "None " in ran.stdout, (ran.stdout, ran.stderr)


TRAVELS = """
import json, pathlib
from vram_guard.codec import to_plain
from vram_guard.known.inputs import Inputs, reading
with reading() as seen:
    pathlib.Path("own.py").read_text()
found = seen.inputs()
assert found is not None
assert Inputs(**json.loads(json.dumps(to_plain(found)))).hold()
"""


def test_inputs_travel_as_plain_values(tmp_path):
    """In a process of its own: others have read what cannot be looked at again."""
    (tmp_path / "own.py").write_text("x = 1")
    ran = run(tmp_path, "-c", TRAVELS)
    assert ran.returncode == 0, ran.stderr


MODEL = """
import json, pathlib
from torch import nn
from helper import layers


def build():
    width = json.loads(pathlib.Path(__file__).with_name("sizes.json").read_text())[0]
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)], nn.Linear(64, width))
"""
ASKED = """
import sys
from vram_guard.cli import main
code = main(["estimate", "--model", "net.py:build", "--input", "64", "--gpu", "RTX 4090", "--json", *sys.argv[1:]])
print("with torch" if "torch" in sys.modules else "without torch", file=sys.stderr)
sys.exit(code)
"""


STEP = """
import torch
from vram_guard import TrainingStep


def step(width=8):
    return TrainingStep(
        lambda: torch.nn.Linear(64, width), torch.ones(4, 64), lambda model, x: model(x).sum(), torch.optim.AdamW
    )
"""


def test_a_plan_that_was_asked_before_is_answered_without_torch_with_the_values_that_it_was_asked_with(tmp_path):
    (tmp_path / "steps.py").write_text(STEP)
    words = ("-m", "vram_guard", "plan", "--step", "steps.py:step", "--batch", "8", "--gpu", "RTX 4090", "--json")

    def ask(value):
        ran = run(tmp_path, "-X", "importtime", *words, "--set", value)
        imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
        return ran.returncode, "with torch" if "torch" in imported else "without torch"

    assert [ask("width=16") for _ in range(2)] == [(0, "with torch"), (0, "without torch")]
    assert ask("width=32") == (0, "with torch")
    assert [ask("breadth=16")[0] for _ in range(2)] == [2, 2]


def test_a_training_that_was_asked_before_is_answered_without_torch(tmp_path):
    """Other batches too; and anew where a file of it has changed, or what was kept is damaged or somebody else's."""
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text("layers = 3")
    (tmp_path / "sizes.json").write_text("[64]")

    def ask(batch, **variables):
        ran = run(tmp_path, "-c", ASKED, "--batch", str(batch), **variables)
        assert ran.returncode == 0, ran.stderr
        peak = json.loads(ran.stdout)["symbolic"]["estimate"]["breakdown"]["parameters"]
        return ran.stderr.splitlines()[-1], peak, "AdamW" in ran.stderr

    first = ask(8)
    assert first == ("with torch", first[1], True)
    again = ("without torch", *first[1:])
    assert ask(8) == again
    assert ask(4096) == again
    assert ask(8, VRAM_GUARD_REMEMBER="0") == first
    (tmp_path / "helper.py").write_text("layers = 5")
    changed = ask(8)
    assert changed[0] == "with torch"
    assert changed[1] > first[1]
    assert ask(8) == ("without torch", *changed[1:])
    (kept,) = Path(f"{tmp_path}-cache", "timelines").glob("*.xz")
    content = kept.read_bytes()
    kept.write_bytes(content[: len(content) // 2])
    assert ask(8) == changed
    if hasattr(os, "getuid"):
        kept.chmod(0o666)
        assert ask(8) == changed
