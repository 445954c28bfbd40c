"""``vram-guard --python``: a command in another real environment, which has its own releases and no vram_guard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

import vram_guard
import vram_guard_lightning
from vram_guard.errors import InvalidInputError
from vram_guard.releases.installed import Releases

if sys.platform == "win32":
    pytest.skip("environments and signals as POSIX has them", allow_module_level=True)

ROOTS = [str(Path(package.__file__).parents[1]) for package in (vram_guard, vram_guard_lightning)]
#: vram_guard as it is installed here, without PYTHONPATH, which the other environment would get too.
MAIN = f"import sys; sys.path[:0] = {ROOTS}; from vram_guard.cli import main; sys.exit(main())"
OWN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

STEP = """
import json, os, sys, time
import torch, timm
from vram_guard import TrainingStep

print("typed:", sys.stdin.read().strip(), file=sys.stderr)

def build(width=64):
    return TrainingStep(
        model=lambda: timm.Layer(width, width),
        batch=lambda size: torch.zeros(size, width),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )
"""
WAITS = """
import os, time
from pathlib import Path
Path("begun").write_text(str(os.getpid()))
time.sleep(60)
"""


def made(folder, *, seen=True, **releases):
    """A virtual environment that sees the packages of this one, and has releases of its own."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    if seen:
        (packages / "seen.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name, release in releases.items():
        described = packages / f"{name}-{release}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    return packages


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("envs") / "training env ü"
    packages = made(folder, timm="1.0.9")
    (packages / "timm").mkdir()
    (packages / "timm" / "__init__.py").write_text("import torch\nclass Layer(torch.nn.Linear): pass\n")
    (packages / "sitecustomize.py").write_text("print('welcome to the cluster')\n")
    return folder


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "größe.py").write_text(STEP, encoding="utf-8")
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "requirements.txt").write_text("timm==1.0.8\n")
    monkeypatch.setitem(OWN, "VRAM_GUARD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run(*arguments, code=MAIN, **more):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=OWN, capture_output=True, encoding="utf-8", check=False, **more)


PLAN = ("plan", "--step", "größe.py:build", "--set", "batch_size=8")


def test_it_runs_there_with_what_is_there(environment, project):
    imported = [environment / "bin" / "python", "-c", "import vram_guard"]
    alone = subprocess.run(imported, env=OWN, capture_output=True, check=False)
    assert alone.returncode == 1, "vram_guard must not be installed there"
    done = run("--python", environment, *PLAN, "--gpu", "T4", "--json", input="früh\n")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.removeprefix("welcome to the cluster\n"))
    here, there = Releases.here().as_dict(), answer["report"]["estimate"]["releases"]
    assert there == {"python": here["python"], "torch": version("torch"), "timm": "1.0.9"} | {
        name: release for name, release in there.items() if here.get(name) == release
    }
    # Its own lines are no part of the user's code there either, where it lies behind links.
    assert answer["report"]["estimate"]["peak"]["source"] == ""
    assert "typed: früh" in done.stderr
    assert "timm 1.0.9 is installed, requirements.txt asks for 1.0.8" in done.stderr
    (folder,) = (project / "cache" / "python").iterdir()
    assert sorted(path.name for path in (folder / "site-packages").iterdir()) == [
        "vram-guard",
        *(["vram_guard", f"vram_guard-{vram_guard.__version__}.dist-info"]),
        *("vram_guard_accelerate", "vram_guard_lightning", "vram_guard_mmengine"),
    ]


def test_a_cache_that_cannot_be_written(environment, project, monkeypatch):
    (project / "cache").write_text("a file")
    (project / "tmp").mkdir()
    monkeypatch.setitem(OWN, "TMPDIR", str(project / "tmp"))
    done = run("--python", environment, "--version")
    assert (done.returncode, done.stdout.split()[-1]) == (0, vram_guard.__version__), done.stderr


def test_exit_codes_and_the_language_pass_through(environment):
    done = run("--lang", "zh", f"--python={environment}/bin/python", *PLAN, "--budget", "1MiB", "--allow", "", input="")
    assert done.returncode == 1, done.stderr
    assert "放不下" in done.stdout
    assert run("--python", environment, "plan", "--gpu", "no such card", *PLAN[1:], input="").returncode == 2
    assert run("--python", environment, "no-such-command").returncode == 2


def test_the_commands_of_adapters_are_there(environment):
    done = run("--python", environment, "mmengine", "init", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: vram-guard mmengine init" in done.stdout


@pytest.mark.parametrize("waiting", [False, True], ids=["in its place", "waited for"])
def test_ctrl_c_ends_it_as_it_does_here(environment, project, waiting):
    def interrupted(*arguments, code=MAIN):
        (project / "begun").unlink(missing_ok=True)
        named = ("--step", "waits.py:build", "--set", "batch_size=8", "--gpu", "T4")
        command = [sys.executable, "-c", code, *arguments, "plan", *named]
        process = subprocess.Popen(command, env=OWN, stderr=subprocess.PIPE, text=True, start_new_session=True)
        while process.poll() is None and not ((project / "begun").exists() and (project / "begun").read_text()):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _out, err = process.communicate(timeout=60)
        return process, int((project / "begun").read_text()), err

    if waiting:
        there, pid, err = interrupted(str(environment / "bin" / "python"), code=WAITED)
        assert there.returncode != 0, err
        assert pid != there.pid
    else:
        here, _pid, _err = interrupted()
        there, pid, err = interrupted("--python", str(environment))
        assert there.returncode == here.returncode == -signal.SIGINT, err
        assert pid == there.pid
    assert err.count("KeyboardInterrupt") == 1  # the one that waits says nothing


#: As on Windows, where a process cannot be replaced.
WAITED = f"""
import sys
sys.path[:0] = {ROOTS}
from pathlib import Path
from vram_guard.cli._python import run_and_wait
sys.exit(run_and_wait(Path(sys.argv[1]), sys.argv[2:]))
"""


def test_where_a_process_cannot_be_replaced_it_is_waited_for(environment, project, monkeypatch):
    (project / "tmp").mkdir()
    monkeypatch.setitem(OWN, "TMPDIR", str(project / "tmp"))
    python = environment / "bin" / "python"
    done = run(python, *PLAN, "--verbose", "--budget", "1MiB", "--allow", "", code=WAITED, input="x")
    assert done.returncode == 1, done.stderr
    assert "timm 1.0.9" in done.stdout
    assert list((project / "tmp").glob("vram-guard-*")) == []


def test_what_is_missing_there_is_named_with_the_command_that_installs_it(tmp_path):
    made(tmp_path / "bare env", seen=False, torch="2.1.0", rich="13.0", safetensors="local")
    done = run("--python", tmp_path / "bare env", "doctor")
    assert done.returncode == 3
    python = tmp_path / "bare env" / "bin" / "python"
    assert f"{python} lacks what vram_guard needs there: torch>=2.4 (it has 2.1.0), nvidia-ml-py>=12" in done.stderr
    assert f"'{python}' -m pip install 'torch>=2.4' 'nvidia-ml-py>=12' 'PyYAML>=6' 'packaging>=23'" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("script", "said", "code"),
    [
        ("""echo '{"python": [3, 8, 19], "releases": {}}'""", "is Python 3.8.19; vram_guard needs 3.10 or later", 2),
        ("echo no module named site >&2; exit 1", "is no Python interpreter that works: no module named site", 2),
        ("exit 7", "is no Python interpreter that works: exit code 7", 2),
        ("echo '[]'", "is no Python interpreter that works", 2),
        (None, "does not run: ", 2),
    ],
)
def test_an_interpreter_that_will_not_do(tmp_path, script, said, code):
    python = tmp_path / "python"
    python.write_text("" if script is None else f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    if script is None:
        python.write_bytes(b"\x7fELF")
    done = run("--python", python, "doctor")
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr


@pytest.mark.parametrize("name", ["missing", "folder", "file", "no-such-command", ""])
def test_no_interpreter(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("print()")  # may not be executed
    done = run("--python", name, "doctor")
    assert done.returncode == 2
    assert f"there is no interpreter at {name}" in done.stderr


def test_a_name_on_the_search_path(environment, monkeypatch):
    from vram_guard.cli._python import interpreter_of

    monkeypatch.setenv("PATH", str(environment / "bin"))
    assert interpreter_of("python") == environment / "bin" / "python"  # the link, not what it leads to
    with pytest.raises(InvalidInputError, match="no interpreter"):
        interpreter_of("python4")


def test_it_stands_before_the_command(capsys):
    from vram_guard.cli import main

    for arguments in (["--python"], ["doctor", "--python", "x"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "--python" in capsys.readouterr().err
