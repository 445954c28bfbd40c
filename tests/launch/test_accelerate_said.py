"""What `vram-guard launch` says of a script that it cannot plan for: the reason, in the words of what was typed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

from vram_guard import cli  # noqa: E402 - what is tested has to be there

SCRIPTS = {
    "options": "import argparse\nparser = argparse.ArgumentParser()\n"
    "parser.add_argument('--rate', required=True)\nparser.parse_args()\n",
    "reason": "import sys\nsys.exit('no data in the folder')\n",
    "silent": "import sys\nsys.exit(3)\n",
    "over": "print('nothing left to train')\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (made / f"{name}.py").write_text(text)
    return made


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("options", "ended itself with exit code 2: options.py: error: the following arguments are required: --rate."),
        ("reason", "ended itself: no data in the folder. What it printed:"),
        ("silent", "ended itself with exit code 3. What it printed:"),
        ("over", "ended without asking for a training batch; give the options with which it trains"),
    ],
)
def test_the_reason_why_a_script_does_not_train_is_its_own(name: str, says: str, folder: Path, capsys: Any) -> None:
    assert cli.main(["launch", "--dry-run", "--budget", "1GiB", str(folder / f"{name}.py")]) == 3
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("first", [[], ["--num_processes", "1"]])
@pytest.mark.parametrize("behind", [["--budget", "1GiB"], ["--gpu=T4"]])
def test_an_option_behind_the_scripts_name_is_said_to_be_the_scripts(
    first: list[str], behind: list[str], folder: Path, capsys: Any
) -> None:
    script = str(folder / "over.py")
    assert cli.main(["launch", "--dry-run", *first, script, *behind]) == 3
    name = behind[0].partition("=")[0]
    assert f"{name} stands behind the script's name, and is handed to the script" in capsys.readouterr().err
    assert cli.main(["launch", "--dry-run", *first, script, "--rate", "1"]) == 3
    assert "stands behind" not in capsys.readouterr().err
