"""What an installed copy contains and asks for, and that the files people start from agree with each other."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import vram_guard
from vram_guard.config_file import load_toml

ROOT = Path(__file__).parents[2]
PACKAGES = {"vram_guard", "vram_guard_lightning", "vram_guard_mmengine", "vram_guard_accelerate"}
MALICIOUS = ("2.6.2", "2.6.3")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel, opened."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def requirements(metadata, extra=""):
    """What is asked for with this extra, and not without it."""
    found = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    if not extra:
        return {need.name: need.specifier for need in found if need.marker is None}
    return {need.name: need for need in found if need.marker and need.marker.evaluate({"extra": extra})}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    roots = {name.split("/")[0] for name in wheel.namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == PACKAGES


def test_every_source_file_is_in_the_wheel(wheel):
    names = set(wheel.namelist())
    for package in PACKAGES:
        root = ROOT if (ROOT / package).is_dir() else ROOT / "integrations"
        sources = [path for path in (root / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert sources
        assert {path.relative_to(root).as_posix() for path in sources} <= names


def test_type_checkers_may_use_the_annotations(wheel):
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_version_is_one(metadata):
    assert metadata["Version"] == vram_guard.__version__
    assert f"## {vram_guard.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def test_no_link_of_the_index_page_leads_nowhere(metadata):
    page = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "## Quick start: Lightning" in page
    assert "What is not supported (`docs/en/limits.md`)" in page
    targets = LINK.findall(page)
    assert targets
    assert all(target.startswith("https://") for target in targets), targets


def test_with_an_address_links_and_urls_lead_to_it():
    hook = load_hook()
    page = hook.index_page("![A](a/b.png) and [more](docs/x.md), [out](https://pytorch.org)", "https://host/o/n")
    assert LINK.findall(page) == ["https://host/o/n/raw/main/a/b.png", "https://host/o/n/blob/main/docs/x.md",
                                  "https://pytorch.org"]  # fmt: skip
    paths = [url.partition("/blob/main/")[2] for url in hook.urls("https://host/o/n").values()]
    assert [path for path in paths if path] == ["docs/en/index.md", "CHANGELOG.md"]
    assert all((ROOT / path).exists() for path in paths)
    assert hook.urls("") == {}


def load_hook():
    spec = importlib.util.spec_from_file_location("index_page", ROOT / "tools" / "index_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_entry_points(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "vram-guard = vram_guard.cli:main" in text
    groups = configparser.ConfigParser()
    groups.read_string(text)
    adapters = {"lightning", "mmengine", "accelerate"}
    assert dict(groups["vram_guard.integrations"]) == {name: f"vram_guard_{name}" for name in adapters}
    assert groups["vram_guard.commands"]["mmengine"] == "vram_guard_mmengine.commands:add"
    assert "[pytest11]\nvram_guard = vram_guard.pytest_plugin" in text
    assert "callbacks_factory" not in text, "installing a package must not add a callback to every Trainer"


def test_the_core_asks_for_no_framework(metadata):
    assert set(requirements(metadata)) == {"torch", "rich", "nvidia-ml-py", "pyyaml"}


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
@pytest.mark.parametrize("version", MALICIOUS)
def test_malicious_uploads_are_excluded(metadata, name, version):
    specifier = requirements(metadata, extra=name)[name].specifier
    assert not specifier.contains(version)
    assert specifier.contains("2.6.6")


def test_mmengine_gets_a_setuptools_that_still_has_pkg_resources(metadata):
    specifier = requirements(metadata, extra="mmengine")["setuptools"].specifier
    assert specifier.contains("80.9.0")
    assert not specifier.contains("81.0.0")


def test_what_only_a_checkout_needs_is_not_published(metadata):
    adapters = {"lightning", "pytorch-lightning", "mmengine", "accelerate"}
    assert set(metadata.get_all("Provides-Extra")) == {*adapters, "torchao", "all"}


def test_all_means_all(metadata):
    parts = [requirements(metadata, extra=extra) for extra in ("lightning", "mmengine", "accelerate")]
    everything = requirements(metadata, extra="all")
    assert everything.keys() == {name for part in parts for name in part}
    for part in parts:
        for name, need in part.items():
            assert everything[name].specifier == need.specifier


def test_supported_versions(metadata):
    assert metadata["Requires-Python"] == ">=3.10"
    assert requirements(metadata)["torch"] == SpecifierSet(">=2.4")


def test_constraints_are_exact_and_within_what_is_asked_for(metadata):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    groups = load_toml(ROOT / "pyproject.toml")["dependency-groups"]
    of_groups = [text for group in groups.values() for text in group if isinstance(text, str)]
    asked = [Requirement(text) for text in [*metadata.get_all("Requires-Dist"), *of_groups]]
    for need in asked:
        need.name = canonicalize_name(need.name)
    for pin in pins:
        (clause,) = pin.specifier
        assert clause.operator == "=="
        for need in asked:
            assert need.name != pin.name or need.specifier.contains(clause.version)
    unpinned = {need.name for need in asked} - {pin.name for pin in pins} - {"vram-guard"}
    assert unpinned == set()


def committed_files():
    """Files that belong to the project: what git knows, or, without git, what is not ignored by name."""
    run = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in run.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_names_an_index_to_install_from():
    """Where packages come from is the installing machine's business."""
    index = re.compile(r"(--(extra-)?index-url|find-links|--trusted-host)[ =]")
    for path in committed_files():
        if path.suffix in {".toml", ".txt", ".sh", ".md", ".cfg", ""} and path != Path(__file__):
            assert not index.search(path.read_text(encoding="utf-8")), path


def test_the_readmes_two_commands_are_the_makefiles_and_cis():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in ("README.md", "README_zh-CN.md"):
        readme = (ROOT / name).read_text(encoding="utf-8")
        for command in re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE):
            assert f"\n{command}:" in makefile, f"{name}: make {command}"
        assert {"make demo", "make test"} <= set(readme.splitlines())
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


WITHOUT_FRAMEWORKS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"lightning", "pytorch_lightning", "mmengine", "accelerate"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import vram_guard, vram_guard.plan, vram_guard.budget
try:
    from vram_guard_lightning import VramGuard
except ImportError as error:
    print(error)
try:
    from vram_guard_mmengine import VramGuardHook
except ImportError as error:
    print(error)
try:
    from vram_guard_accelerate import guard
except ImportError as error:
    print(error)
"""


def test_a_missing_framework_is_an_import_error_that_says_what_to_install():
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_FRAMEWORKS],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    # The package itself is on no index: what is offered can be installed.
    assert "pip install lightning" in run.stdout
    assert "pip install mmengine" in run.stdout
    assert "pip install accelerate" in run.stdout
    assert "vram-guard[" not in run.stdout


WITHOUT_NUMPY = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from vram_guard.cli import main
sys.exit(main(["plan", "net.py:net", "--input", "8", "--batch", "2", "--budget", "1GiB"]))
"""


def test_the_wheel_alone_which_has_no_numpy_prints_nothing_but_its_own_words(tmp_path):
    (tmp_path / "net.py").write_text("from torch import nn\n\nnet = nn.Linear(8, 8)\n", encoding="utf-8")
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path))),
        "VRAM_GUARD_CACHE": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY],
        cwd=tmp_path, capture_output=True, text=True, check=True, env={**os.environ, **own},
    )  # fmt: skip
    assert "FITS" in run.stdout
    assert all(line.startswith("vram-guard: ") for line in run.stderr.splitlines()), run.stderr
