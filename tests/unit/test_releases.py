"""Lock files and requirements as people have them, read and compared with the releases of a prediction."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from vram_guard.errors import InvalidInputError
from vram_guard.releases.installed import Releases
from vram_guard.releases.required import RequiredReleases

HERE = Releases("3.11.7", (("torch", "2.13.0+cpu"), ("transformers", "5.23.0"), ("open-clip-torch", "2.30.0")))


def write(folder, name, text, encoding="utf-8"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


# --- what a prediction is for ----------------------------------------------------------------------------------------


def test_those_that_are_imported_and_no_others(tmp_path):
    write(tmp_path, "timm/__init__.py", "__version__ = '1.0.9'\n")  # on the path, without metadata
    write(tmp_path, "diffusers/__init__.py", "raise SystemError\n")
    write(tmp_path, "transformers/__init__.py", "")
    write(tmp_path, "transformers/modeling_utils.py", "")
    write(tmp_path, "transformers-4.45.2.dist-info/METADATA", "Name: transformers\nVersion: 4.45.2\n")
    code = """
import torch, timm, yaml, transformers
from vram_guard.releases.installed import Releases
print(Releases.here())
import transformers.modeling_utils
print(Releases.here())
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    looked_at, used = (line.split(", ") for line in run.stdout.strip().splitlines())
    assert used[0] == "Python " + ".".join(map(str, sys.version_info[:3]))
    assert used[1].startswith(f"torch {version('torch')}")
    assert used[2:] == ["transformers 4.45.2", "timm 1.0.9"]
    assert looked_at == [used[0], used[1], used[3]]


# --- files -----------------------------------------------------------------------------------------------------------


def asked(path):
    found = RequiredReleases.read(str(path)).allowed
    return {name: " | ".join(str(one).removeprefix("==") for one in sets) for name, sets in found.items()}


REQUIREMENTS = """\
# the training
--extra-index-url https://example.org/whl
torch == 2.5.1+cu124 \\
    --hash=sha256:aaaa \\
    --hash=sha256:bbbb
Transformers[torch]>=4.40,<5  # not five
open_clip_torch==2.29.0
accelerate~=1.2,\\
!=1.2.1
-e git+https://example.org/x.git#egg=trl
peft @ git+https://example.org/peft.git@main
numpy==no.number.at.all
timm==1.0.9 ; python_version < '3'
diffusers==0.31.0; extra == 'video'
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_requirements_as_pip_reads_them(tmp_path, encoding):
    path = write(tmp_path, "requirements.txt", REQUIREMENTS.replace("\n", "\r\n"), encoding)
    assert {name: set(one.split(",")) for name, one in asked(path).items()} == {
        "torch": {"2.5.1"},
        "transformers": {">=4.40", "<5"},
        "open-clip-torch": {"2.29.0"},
        "accelerate": {"~=1.2", "!=1.2.1"},
    }


LOCK = """
[[{table}]]
name = "torch"
version = "2.5.1"
[[{table}]]
name = "torch"
version = "2.5.1+cu124"
[[{table}]]
name = "torch"
version = "2.5.0"
[[{table}]]
name = "Open_CLIP.torch"
version = "2.29.0"
[[{table}]]
name = "trl"
[[{table}]]
name = "numpy"
version = "zero"
"""


def test_locks_in_which_a_package_stands_once_for_each_platform(tmp_path):
    for name, table in {"uv.lock": "package", "poetry.lock": "package", "pylock.toml": "packages"}.items():
        path = write(tmp_path, name, LOCK.format(table=table))
        assert asked(path) == {"torch": "2.5.1 | 2.5.0", "open-clip-torch": "2.29.0"}, name


BAD = [
    ("requirements.txt", b"# models\ntorch==2.x.y\n", "requirements.txt: 'torch==2.x.y' is no requirement"),
    ("requirements.txt", b"-r other.txt\n", "is neither requirements nor a lock"),
    ("requirements.txt", "# caf\xe9\ntorch\n".encode("latin-1"), "is not UTF-8 text (byte 5)"),
    ("uv.lock", b'[[package]]\nname = "torch"\nversion = "2.5', "is not valid TOML"),
    ("uv.lock", b'[[package]]\nname = "torch"\nversion = "two"\n', "torch has no release 'two'"),
    ("uv.lock", b"package = 3\n", "holds no list of packages"),
    ("uv.lock", b"package = [3]\n", "holds no list of packages"),
    ("vram_guard.toml", b"", "holds no list of packages"),
    ("uv.lock", b"x = " + b"[" * 5000, "is not valid TOML"),
    ("environment.yml", b"dependencies:\n  - pytorch=2.1\n", "is neither requirements nor a lock"),
    ("pyproject.toml", b"[project]\ndependencies = ['torch']\n", "is neither requirements nor a lock"),
    ("nothing.txt", None, "nothing.txt cannot be read"),
]


def test_what_cannot_be_read_is_an_error(tmp_path):
    for name, content, said in BAD:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidInputError) as raised:
            RequiredReleases.read(str(tmp_path / name))
        assert said in str(raised.value), (name, content)


# --- the comparison --------------------------------------------------------------------------------------------------


SAME = [
    "",
    "torch==2.13.0",
    "torch==2.13.0+cu130",  # the same release, built for a GPU
    "torch>=2,<3\ntransformers>=4\n",
    "torch==2.13.*",
    "numpy==1.0\npandas==0.1\nscikit-learn==0.1",  # cannot matter
    "diffusers==0.1\nlightning==1.0",  # not part of this prediction
]


def test_nothing_is_said_where_nothing_differs(tmp_path):
    for text in SAME:
        assert RequiredReleases.read(str(write(tmp_path, "requirements.txt", text))).remarks(HERE) == [], text
    lock = '[[package]]\nname = "torch"\nversion = "{}"\n'
    path = write(tmp_path, "uv.lock", lock.format("2.2.2") + lock.format("2.13.0+cu130"))
    assert RequiredReleases.read(str(path)).remarks(HERE) == []
    assert RequiredReleases.read(None).remarks(HERE) == []


def test_what_differs_is_said_in_one_sentence(tmp_path):
    path = write(tmp_path, "requirements.txt", "torch==99.0\nopen_clip_torch<2.30\ntransformers==5.23.0\n")
    required = RequiredReleases.read(str(path))
    (said,) = required.remarks(HERE)
    assert f"it is for torch 2.13.0+cpu, {path} asks for 99.0; it is for open-clip-torch 2.30.0" in said
    assert "transformers" not in said
    # A release without a number is not compared.
    assert required.remarks(Releases("3.11", (("torch", "unknown"),))) == []
