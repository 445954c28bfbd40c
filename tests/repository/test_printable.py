"""Names and values of others reach neither a terminal nor a page with controls that these would obey."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from vram_guard import TrainingStep, cli, plan
from vram_guard.language import Message, _
from vram_guard.printable import beside_progress_bars, printable
from vram_guard.report import html_report, render, show
from vram_guard.report.as_json import as_json
from vram_guard.report.picture import picture

ROOT = Path(__file__).parents[2]
#: Erases the screen and the line, writes another one, goes back, and turns the order of what follows around.
FORGED = "\x1b[2J\x1b[1A\x9b31mFITS\r\x07\u202egnorw\u2066\u2028\x00\udc80"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def assert_plain(text: str) -> None:
    assert not RAW.findall(text)
    assert "\\x1b[2J" in text, "it is shown, escaped"


class Forging(torch.nn.Module):
    """Modules may have any name without a dot."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.add_module(f"{FORGED}\n{number}[/red]$x_{{", torch.nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


NAMES = tuple(name for name, _module in Forging().named_children())
STEP = TrainingStep(Forging, lambda size: torch.zeros(size, 64), lambda net, x: net(x).sum(), torch.optim.AdamW)


@pytest.fixture(scope="module")
def made() -> Any:
    return plan(STEP, 4096, "1GiB", pin={"checkpoint": NAMES})


def test_what_is_escaped_and_what_is_not() -> None:
    assert printable(FORGED) == ("\\x1b[2J\\x1b[1A\\x9b31mFITS\\r\\x07\\u202egnorw\\u2066\\u2028\\x00\\udc80")
    plain = "two\nlines\tof Grüße, 显存, ✅ ⚠️ é, שלום: 100%"
    assert printable(plain) == plain
    assert printable("from Windows\r\n") == "from Windows\n"
    assert printable("a\nb", lines=False) == "a\\nb"
    assert printable(printable(FORGED)) == printable(FORGED)


def test_values_of_messages() -> None:
    assert_plain(_("no such file: {path}", path=Path(FORGED.replace("\x00", ""))))
    assert_plain(_("it failed: {error}", error=ValueError(FORGED)))
    assert_plain(str(Message("module {name}", name=Message("the {which}", which=FORGED))))
    assert f"{_('{share:.1%} of {count:,}', share=0.5, count=1000)}" == "50.0% of 1,000"


def test_reports_in_a_file_and_on_a_terminal(made: Any) -> None:
    assert made.checkpointed_modules
    assert_plain(render(made))
    assert not re.search(r"^\d\[/red\]", render(made), re.MULTILINE), "a name is one line"
    file = io.StringIO()
    assert show(made, file=file)
    assert_plain(file.getvalue())


def test_the_page_and_the_picture(made: Any) -> None:
    page = html_report(made, title=f"</title><script>{FORGED}")
    assert_plain(page)
    assert "</title><script>" not in page
    page.encode()
    drawn = picture(made)
    assert_plain(drawn)
    ET.fromstring(drawn)


def test_json_stays_ascii(made: Any) -> None:
    text = as_json(made)
    assert text.isascii()
    assert not RAW.findall(text)
    assert any(FORGED in name for name in json.loads(text)["checkpointed_modules"])


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        (["no\x1b[2Jcommand"], None),
        (["gpus", "RTX \x1b[2J"], None),
        (["plan", "--step", "\x1b[2J:step", "--gpu", "RTX 4090"], None),
        (["estimate", "--config", "{file}", "--gpu", "RTX 4090"], 'batch: "\\x1b[2J"\n'),
        (
            ["optimize", "--config", "{file}", "--gpu", "RTX 4090"],
            'model: gpt2\n"\\x1b[2Jbatch": "\\x1b[2J"\nbatch_size: "\\x1b[2J"\n',
        ),
        (["plan", "{file}", "--gpu", "RTX 4090"], '"\\x1b[2J": 1\nmodel: "\\x1b[2J"\n'),
    ],
)
def test_commands(arguments: list[str], content: str | None, tmp_path: Path, capsys: Any) -> None:
    """What was typed, and keys and values of a config."""
    file = tmp_path / "config\x1b[2J.yaml"
    if content is not None:
        file.write_text(content)
    with contextlib.suppress(SystemExit):
        cli.main([argument.format(file=file) for argument in arguments])
    captured = capsys.readouterr()
    assert not RAW.findall(captured.out + captured.err)
    assert "\\x1b[2J" in captured.out + captured.err


@pytest.mark.filterwarnings("ignore", "error:vram_guard")
def test_a_guarded_training(tmp_path: Path, capsys: Any) -> None:
    """Standard output and warnings; a warning's text, too, goes to a terminal."""
    pytest.importorskip("lightning")
    import lightning_cases as cases

    from vram_guard_lightning import VramGuard

    class Module(type(cases.make_module())):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.extra = Forging()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ones = torch.ones(len(batch[0]), 64, device=batch[0].device)
            return super().training_step(batch, batch_idx) + 0 * self.extra(ones).sum()

    fitting = VramGuard(budget="1GiB", pin={"checkpoint": [f"extra.{name}" for name in NAMES]}, verbose=True)
    cases.make_trainer("lightning.pytorch", tmp_path, [fitting], max_epochs=1).fit(Module(), cases.loader(16))
    assert_plain(capsys.readouterr().out)

    class Failing(type(cases.make_module())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError(FORGED)

    guard = VramGuard(budget="1GiB", mode="report")
    trainer = cases.make_trainer("lightning.pytorch", tmp_path, [guard], max_epochs=1)
    with pytest.warns(UserWarning, match="no prediction") as told, pytest.raises(ValueError, match="FITS"):
        trainer.fit(Failing(), cases.loader(16))
    ours = [str(one.message) for one in told if str(one.message).startswith("vram_guard")]
    assert ours
    for text in ours:
        assert_plain(text)


def test_every_way_out_goes_through_one_place() -> None:
    """``print`` stands where text is made printable, and ``html.escape`` in one module."""
    printing, escaping = set(), set()
    for folder in ("vram_guard", "integrations"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    printing.add(name)
                if isinstance(node, ast.ImportFrom | ast.Import) and re.match(
                    r"(import|from) html\b", ast.unparse(node)
                ):
                    escaping.add(name)
    assert escaping == {"vram_guard/report/picture.py"}
    assert printing == {
        "vram_guard/cli/printing.py",
        "integrations/vram_guard_accelerate/_messages.py",
        "integrations/vram_guard_accelerate/cli/launch.py",  # JSON
    }


def test_progress_bars_are_out_of_the_way_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = pytest.importorskip("tqdm").tqdm
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    with bars(total=2, file=stream, mininterval=0, desc="bar") as bar:
        bar.update()
        with beside_progress_bars():
            print("a line")
        shown = stream.getvalue().partition("a line\n")
    assert shown[0].endswith("\r")  # cleared, and the cursor at the left
    assert shown[2].lstrip("\r").startswith("bar:")


def test_without_progress_bars_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tqdm.std", raising=False)
    with beside_progress_bars():
        assert "tqdm.std" not in sys.modules
