"""Lock files and requirements as people have them, read and compared with the releases of a prediction."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from vram_guard.errors import InvalidInputError
from vram_guard.releases import required
from vram_guard.releases._requirements import checked
from vram_guard.releases.installed import Releases
from vram_guard.releases.required import RequiredReleases

HERE = Releases("3.11.7", (("torch", "2.13.0+cpu"), ("transformers", "5.23.0"), ("open-clip-torch", "2.30.0")))


def asked(path):
    return {name: str(one) for name, one in RequiredReleases.find(str(path)).asked.items()}


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


def test_a_build_for_cuda_is_said():
    built = Releases("3.12.1", (("torch", "2.4.1"),), cuda="12.1")
    assert str(built) == "Python 3.12.1, torch 2.4.1 (CUDA 12.1)"
    assert built.as_dict() == {"python": "3.12.1", "cuda": "12.1", "torch": "2.4.1"}


# --- files -----------------------------------------------------------------------------------------------------------


REQUIREMENTS = """\
# the training
--extra-index-url https://example.org/whl
torch == 2.5.1+cu124 \\
    --hash=sha256:aaaa \\
    --hash=sha256:bbbb
Transformers[torch]>=4.40,<5  # not five
-c constraints.txt
-r more/models.txt
-e git+https://example.org/x.git#egg=trl
peft @ git+https://example.org/peft.git@main
numpy==no.number.at.all
timm==1.0.9 ; python_version < '3'
diffusers==0.31.0; extra == 'video'
https://example.org/torchvision-0.20.1%2Bcu124-cp311-cp311-linux_x86_64.whl#sha256=cc
"""


def test_requirements_as_pip_reads_them(tmp_path):
    path = write(tmp_path, "requirements.txt", REQUIREMENTS.replace("\n", "\r\n"))
    write(tmp_path, "constraints.txt", "transformers!=4.41.0\n")
    write(tmp_path, "more/models.txt", "open_clip_torch==2.29.0\n-r ../requirements.txt\n--requirement=last.txt")
    write(tmp_path, "more/last.txt", "accelerate~=1.2,\\\n!=1.2.1\nlightning==2.5.0.dev20241112")
    found = asked(path)
    assert {name: set(one.split(",")) for name, one in found.items()} == {
        "torch": {"2.5.1"},
        "transformers": {">=4.40", "<5", "!=4.41.0"},
        "torchvision": {"0.20.1"},
        "open-clip-torch": {"2.29.0"},
        "accelerate": {"~=1.2", "!=1.2.1"},
        "lightning": {"2.5.0.dev20241112"},
    }


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_requirements_that_a_windows_shell_wrote(tmp_path, encoding):
    assert asked(write(tmp_path, "requirements.txt", "torch==2.1\r\n", encoding)) == {"torch": "2.1"}


TABLES = '[[{table}]]\nname = "torch"\nversion = "2.5.1"\n[[{table}]]\nname = "torch"\nversion = "2.5.1+cu124"\n'
TABLES += '[[{table}]]\nname = "Open_CLIP.torch"\nversion = "2.29.0"\n[[{table}]]\nname = "trl"\n'
TABLES += '[[{table}]]\nname = "numpy"\nversion = "zero"\n'
PIXI = """version: 6
environments:
  default:
    packages:
      linux-64:
      - conda: https://conda.example.org/conda-forge/linux-64/pytorch-2.5.1-cuda126_py312h1763f6d_306.conda
      - conda: https://conda.example.org/conda-forge/noarch/pytorch-lightning-2.4.0-pyhd8ed1ab_0.tar.bz2
      - conda: https://conda.example.org/nvidia/linux-64/pytorch-cuda-12.4-hc786d27_7.tar.bz2
      - pypi: https://files.example.org/ab/open_clip_torch-2.29.0-py3-none-any.whl
      - pypi: https://files.example.org/torchvision-0.20.1%2Bcu124-cp311-cp311-linux_x86_64.whl#sha256=cc
      - pypi: https://files.example.org/timm-1.0.9.tar.gz
      - pypi: ./
packages:
- conda: https://conda.example.org/conda-forge/win-64/pytorch-2.5.0-cpu_py312h_0.conda
  sha256: aa
"""
PIPFILE = '{"_meta": {}, "default": {"torch": {"version": "==2.5.1", "markers": "python_version >= \'3\'"}, '
PIPFILE += '"trl": {"git": "x"}}, "develop": {"timm": {"version": "==1"}}}'
CONDA = "name: x\ndependencies:\n  - python=3.11\n  - conda-forge::pytorch=2.1.0=py3.11_cuda12.1_cudnn8.9.2_0\n"
CONDA += "  - pytorch-cuda=12.1\n  - timm >=0.9,<1\n  - torchvision 0.16.*\n  - accelerate=1.1|=1.2\n"
CONDA += "  - peft\n  - trl==0.11\n  - pip:\n      - transformers==4.45.2\n      - -r more.txt\n"
PROJECT = '[project]\ndependencies = ["torch>=2.1,<2.3", "transformers", "x @ file:///y"]\n'
PROJECT += '[project.optional-dependencies]\nvideo = ["diffusers==0.1"]\n'
TWICE = {"torch": "2.5.1", "open-clip-torch": "2.29.0"}


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("uv.lock", TABLES.format(table="package"), TWICE),
        ("poetry.lock", TABLES.format(table="package"), TWICE),
        ("pdm.lock", TABLES.format(table="package"), TWICE),
        ("pylock.toml", TABLES.format(table="packages"), TWICE),
        ("Pipfile.lock", PIPFILE, {"torch": "2.5.1"}),
        (
            "pixi.lock",
            PIXI,
            {
                "torch": "2.5.1 | 2.5.0",
                "pytorch-lightning": "2.4.0",
                "open-clip-torch": "2.29.0",
                "torchvision": "0.20.1",
            },
        ),
        (
            "environment.yml",
            CONDA,
            {
                "torch": "2.1.0.*",
                "timm": "<1,>=0.9",
                "torchvision": "0.16.*",
                "accelerate": "1.1.* | 1.2.*",
                "peft": "",
                "trl": "0.11",
                "transformers": "4.45.2",
                "diffusers": "0.31.0",
            },
        ),
        ("pyproject.toml", PROJECT, {"torch": "<2.3,>=2.1", "transformers": ""}),
        ("pyproject.toml", "[tool.other]\nx = 1\n", {}),
        ("environment.yml", "name: x\ndependencies:\n  - pytorch=2.1\n  - pip:\n", {"torch": "2.1.*"}),
        ("environment.yml", "name: x\ndependencies:\n", {}),
    ],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value and "{" not in value else "",
)
def test_files_of_other_tools(tmp_path, name, text, wanted):
    write(tmp_path, "more.txt", "diffusers==0.31.0")
    found = asked(write(tmp_path, name, text))
    assert {name: sorted(one.split(",")) for name, one in found.items()} == {
        name: sorted(one.split(",")) for name, one in wanted.items()
    }


def test_what_is_found_in_a_folder_and_what_counts(tmp_path):
    write(tmp_path, "pyproject.toml", '[project]\ndependencies = ["torch>=2", "timm>=1", "peft>=0.1", "trl>=0.1"]\n')
    write(tmp_path, "requirements-dev.txt", "timm==1.0.1\npeft==0.2\n")
    write(tmp_path, "requirements.txt", "timm==1.0.9\ntorch==2.4\n")
    write(tmp_path, "uv.lock", '[[package]]\nname = "torch"\nversion = "2.5.1"\n')
    write(tmp_path, "requirements.d/x.txt", "torch==1")
    (tmp_path / "Pipfile.lock").mkdir()
    found = RequiredReleases.find(folder=tmp_path)
    assert not found.problems
    assert {name: (str(one), Path(one.file).name) for name, one in found.asked.items()} == {
        "torch": ("2.5.1", "uv.lock"),
        "timm": ("1.0.9", "requirements.txt"),
        "peft": ("0.2", "requirements-dev.txt"),
        "trl": (">=0.1", "pyproject.toml"),
    }
    assert not RequiredReleases.find(folder=tmp_path, ignore=True).asked
    assert not RequiredReleases.find(folder=tmp_path / "requirements.d").asked


BAD = [
    ("requirements.txt", b"# models\ntorch==2.x.y\n", "requirements.txt, line 2: 'torch==2.x.y' is no requirement"),
    ("requirements.txt", b"torch==2.1 \\\n --hash=sha256:a\ntimm=>1\n", "requirements.txt, line 3: 'timm=>1' is no"),
    ("requirements.txt", b"torch>=2.5\ntorch<2.4\n", "line 2: no release of torch can be <2.4,>=2.5"),
    ("requirements.txt", b"torch==2.1,==2.2\n", "no release of torch can be"),
    ("requirements.txt", b"-r missing.txt\n", "missing.txt cannot be read: No such file"),
    ("requirements.txt", "# caf\xe9\ntorch\n".encode("latin-1"), "is not UTF-8 text (byte 5)"),
    ("requirements.txt", b"x" * (2**20 + 1), "larger than 1 MiB"),
    ("uv.lock", b'[[package]]\nname = "torch"\nversion = "2.5', "is not valid TOML"),
    ("uv.lock", b'[[package]]\nname = "torch"\nversion = "two"\n', "torch has no release 'two'"),
    ("pixi.lock", b"- conda: https://x.org/pytorch-two-py3_0.conda\n", "torch has no release 'two'"),
    ("uv.lock", b"package = 3\n", "holds no list of packages"),
    ("uv.lock", b"x = " + b"[" * 5000, "is not valid TOML"),
    ("Pipfile.lock", b'{"default": []}', "holds no list of packages"),
    ("Pipfile.lock", b'{"default": {"torch": {"version": "*.*"}}}', "'torch *.*' is no requirement"),
    ("environment.yml", b"dependencies: pytorch\n", "holds no list of packages"),
    ("environment.yml", b"dependencies:\n  - pytorch=two\n", "pytorch=two is no requirement"),
    ("environment.yml", b"dependencies:\n  - pip:\n    - torch==two\n", "'torch==two' is no requirement"),
    ("environment.yml", b"dependencies:\n  - pip: 3\n", "holds no list of packages"),
    ("pyproject.toml", b"[project]\ndependencies = 'torch'\n", "holds no list of packages"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD, ids=[f"{name} {said[-24:]}" for name, _, said in BAD])
def test_what_cannot_be_read_is_an_error_where_it_is_named_and_a_remark_where_it_is_found(
    tmp_path, name, content, said
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError) as raised:
        RequiredReleases.find(str(tmp_path / name))
    assert said in str(raised.value)
    assert "--releases" in str(raised.value)
    (remark,) = RequiredReleases.find(folder=tmp_path).remarks(HERE)
    assert said in remark
    assert str(tmp_path / name) in remark
    assert "--ignore-releases" in remark


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: None], ids=["pipe", "folder", "nothing"])
def test_a_named_file_that_is_none(tmp_path, make):
    make(tmp_path / "requirements.txt")
    with pytest.raises(InvalidInputError, match=r"requirements\.txt"):
        RequiredReleases.find(str(tmp_path / "requirements.txt"))
    assert RequiredReleases.find(folder=tmp_path) == RequiredReleases()


clauses = st.builds(
    "{}{}".format,
    st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "~="]),
    st.builds("{}.{}".format, st.integers(0, 3), st.integers(0, 2)),
) | st.builds("{}{}.*".format, st.sampled_from(["==", "!="]), st.integers(0, 3))


@pytest.mark.skipif(not hasattr(SpecifierSet, "is_unsatisfiable"), reason="packaging before 26 does not say it itself")
@example("!=3.0,<=3.0,==3.*")  # what came before 3.0
@given(st.lists(clauses, max_size=4).map(",".join))
def test_impossible_is_what_packaging_calls_unsatisfiable(text):
    impossible = False
    try:
        checked("torch", SpecifierSet(text, prereleases=True), "here")
    except InvalidInputError:
        impossible = True
    assert impossible == SpecifierSet(text, prereleases=True).is_unsatisfiable()


# --- the comparison --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "torch==2.13.0",
        "torch==2.13.0+cu130",  # the same release, built for a GPU
        "torch>=2,<3\ntransformers>=4\n",
        "torch==2.13.*",
        "numpy==1.0\npandas==0.1\nscikit-learn==0.1",  # cannot matter
        "diffusers==0.1\nlightning==1.0",  # not part of this prediction
    ],
)
def test_nothing_is_said_where_nothing_differs(tmp_path, text):
    write(tmp_path, "requirements.txt", text)
    assert RequiredReleases.find(folder=tmp_path).remarks(HERE) == []


def test_a_lock_for_several_platforms_names_one_of_them(tmp_path):
    lock = '[[package]]\nname = "torch"\nversion = "{}"\n'
    write(tmp_path, "uv.lock", lock.format("2.2.2") + lock.format("2.13.0+cu130"))
    assert RequiredReleases.find(folder=tmp_path).remarks(HERE) == []


def test_what_differs_is_said_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "uv.lock", '[[package]]\nname = "transformers"\nversion = "4.45.2"\n')
    write(tmp_path, "requirements.txt", "torch==99.0\nopen_clip_torch<2.30\ntransformers==5.23.0\n")
    said, torch = RequiredReleases.find().remarks(HERE)
    assert said == (
        "this prediction is for other releases than the training's: torch 2.13.0+cpu is installed, requirements.txt "
        "asks for 99.0; transformers 5.23.0 is installed, uv.lock asks for 4.45.2; open-clip-torch 2.30.0 is "
        "installed, requirements.txt asks for <2.30. Predict in the training's environment (vram-guard --python PATH), "
        "name another file (--releases FILE), or ignore it (--ignore-releases)"
    )
    assert torch == "the trace follows the installed torch 2.13.0+cpu, not 99.0"


@pytest.mark.parametrize(
    ("wanted", "known"),
    [
        ("==1.9.1", ["second list", "softmax", "x[:, 0]"]),
        ("==2.1.2+cu121", ["second list", "x[:, 0]"]),
        ("==2.4.0", ["x[:, 0]"]),
        ("==2.9.0", []),
        ("<2.2", []),  # which of them is not known
    ],
)
def test_rules_that_follow_the_release_of_torch(tmp_path, wanted, known):
    write(tmp_path, "requirements.txt", f"torch{wanted}")
    _first, said = RequiredReleases.find(folder=tmp_path).remarks(HERE)
    assert said.startswith("the trace follows the installed torch 2.13.0+cpu, not ")
    signs = ["second list", "softmax", "x[:, 0]"]
    assert len(signs) == len(required.TORCH_RULES)
    assert [sign for sign in signs if sign in said] == known


def test_a_release_without_a_number_is_not_compared(tmp_path):
    write(tmp_path, "requirements.txt", "torch==2.1\n")
    assert RequiredReleases.find(folder=tmp_path).remarks(Releases("3.11", (("torch", "unknown"),))) == []
