"""The page that answers in a browser says what the package says, to the byte."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from html import unescape
from itertools import cycle
from pathlib import Path
from urllib.parse import urlencode

import pytest

from vram_guard import cli
from vram_guard.budget import Budget
from vram_guard.known.architectures import LENGTH_STEP, Variant, architectures, timelines_of, variants_of

ROOT = Path(__file__).parents[2]
NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium") or shutil.which("google-chrome")

#: Of each class of kernels and placement of segments, small and large; of one that few tables are for.
CARDS = ("GTX 1650", "Tesla T4", "RTX 3050 6GB", "A100 SXM4 80GB", "RTX 4090", "H100 SXM", "RTX 5090", "B200")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page with every architecture."""
    path = tmp_path_factory.mktemp("page") / "calculator.html"
    subprocess.run([sys.executable, ROOT / "tools" / "known_page.py", "--out", path], check=True)
    return path


def variant(key):
    dtype, precision, *rest, optimizer = key.split()
    adapters = next((word for word in rest if word != "checkpointing"), "")
    return Variant(dtype, precision, adapters, "checkpointing" in rest, optimizer)


def questions():
    """Every training of every architecture once, with lengths, batches and cards that differ from one to the next."""
    turns = cycle(((1, 1), (3, 5), (8, 37)))
    for one in architectures():
        for index, key in enumerate(variants_of(one.name)):
            known = (each for each in (8192, 1024, 512) if any(timelines_of(one.name, variant(key), each)))
            most, (eighths, batch) = next(known, 0), next(turns)
            length = most and max(LENGTH_STEP, most * eighths // 8 // LENGTH_STEP * LENGTH_STEP)
            gpu, seek = CARDS[3 * index % len(CARDS)], index % 6 == 0
            yield {"model": one.name, "index": index, "gpu": gpu, "length": length, "batch": batch, "seek": seek}


def expected(model, index, gpu, length, batch, seek):
    """What the package says; None where it has no timeline."""
    budget = Budget.resolve(gpu=gpu)
    served = (
        found
        for each in timelines_of(model, variant(variants_of(model)[index]), length or None)
        if (found := each.of_capability(budget.compute_capability)) is not None
    )
    timeline = next(served, None)
    if timeline is None:
        return None
    timeline = timeline.on(budget.multiprocessors, budget.placement)
    taken = timeline.at(batch)
    return {
        "reserved": taken.peak_reserved,
        "allocated": taken.peak_allocated,
        "lower": taken.peak_lower,
        "upper": taken.peak_upper,
        "breakdown": {name: size for name, size in taken.breakdown.items() if size},
        "phase": taken.peak_phase.name,
        "step": taken.peak_phase.step,
        "usable": budget.for_tier(timeline.tier, timeline.network).usable,
        "largest": timeline.max_batch_size(budget) if seek else None,
    }


@pytest.fixture(scope="module")
def answered(page):
    """Each question, and what the page's script answers to it."""
    if NODE is None:
        pytest.skip("node is not installed")
    asked = list(questions())
    run = subprocess.run(
        [NODE, Path(__file__).with_name("calculator.js"), ROOT / "tools" / "calculator" / "replay.js", page],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    return list(zip(asked, json.loads(run.stdout), strict=True))


def test_the_script_answers_as_the_package_does(answered):
    differ, told = [], 0
    for question, answer in answered:
        said = expected(**question)
        told += said is not None
        if figures(answer) != said:
            differ.append(f"{question}: {answer}, not {said}")
    assert told > len(answered) / 2
    assert not differ, f"{len(differ)} of {len(answered)} differ:\n" + "\n".join(differ[:20])


def figures(answer):
    """What the script found, without categories that have nothing; None where it found no timeline."""
    if "reserved" not in answer:
        return None
    held = {name: size for name, size in answer["breakdown"].items() if size}
    return {name: value for name, value in {**answer, "breakdown": held}.items() if name != "command"}


def of_command(command, capsys):
    """What the command prints, as JSON."""
    code = cli.main([*shlex.split(command)[1:], "--json"])
    printed = capsys.readouterr()
    assert code in (0, 1), printed.err
    return json.loads(printed.out)["symbolic"]


def test_the_command_of_the_page_gives_its_answer(answered, capsys):
    """One training of each architecture, each time another one."""
    some = [each for each in answered if each[0]["batch"] == 1 and "reserved" in each[1]]
    of_each = {question["model"]: (question, answer) for question, answer in some}
    assert len(of_each) > 5
    for _question, answer in of_each.values():
        assert of_command(answer["command"], capsys)["estimate"]["peak_reserved"] == answer["reserved"], answer[
            "command"
        ]


# --- in a browser -----------------------------------------------------------------------------------------------------


#: What the page became, without scripts, once it has answered.
FRAME = """<!doctype html>
<iframe width="{width}" height="900" style="border: 0" src="{page}"></iframe><pre></pre>
<script>
setInterval(() => {{
  const page = document.querySelector("iframe").contentDocument.documentElement.cloneNode(true);
  for (const each of page.querySelectorAll("script")) each.remove();
  document.querySelector("pre").textContent = page.outerHTML;
}}, 5000);
</script>"""


@pytest.fixture(scope="module")
def browsed(page, tmp_path_factory):
    """Opens the page as a file, with a state, in a window of a width; the answer is what the document became."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")

    def opened(width, page=page, **state):
        folder = tmp_path_factory.mktemp("browser")
        frame = folder / "frame.html"  # a window has a least width, a frame has not
        frame.write_text(FRAME.format(width=width, page=f"{page.as_uri()}#{urlencode(state)}"), encoding="utf-8")
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            "--disable-component-update --disable-sync --virtual-time-budget=30000 --dump-dom --window-size=1300,900 "
            f"--allow-file-access-from-files --user-data-dir={folder / 'profile'}"
        )
        run = subprocess.run(
            [CHROMIUM, *flags.split(), frame.as_uri()], capture_output=True, text=True, check=True, timeout=120
        )
        text = unescape(re.search(r"<pre>(.*)</pre>", run.stdout, re.DOTALL)[1])
        (root,) = re.findall(r"<html[^>]*>", text)
        return {name: unescape(value) for name, value in re.findall(r'([\w-]+)="([^"]*)"', root)}, text

    return opened


LORA = {"model": "llama-3-8b", "adapters": "lora", "checkpointing": "on", "length": 2048, "batch": 1, "gpu": "RTX 4090"}
TEXTS = {"model": "gpt2", "length": 512, "batch": 8, "gpu": "RTX 4090"}
PICTURES = {"model": "resnet-50", "numbers": "float32,32-true", "optimizer": "sgd", "batch": 64, "gpu": "Tesla T4"}


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("state", [LORA, PICTURES], ids=lambda state: state["model"])
def test_the_page_answers_in_a_browser(browsed, capsys, width, language, state):
    root, text = browsed(width, lang=language, **state)
    assert root["lang"] == {"en": "en", "zh": "zh-CN"}[language]
    assert ("激活检查点" in text) == (language == "zh")
    assert int(root["data-width"]) <= width
    assert int(root["data-width"]) >= width - 20  # less a scroll bar
    said = of_command(unescape(re.search(r'<code id="command">(.*?)</code>', text)[1]), capsys)
    estimate = said["estimate"]
    assert int(root["data-reserved"]) == estimate["peak_reserved"]
    assert (int(root["data-lower"]) or estimate["peak_reserved"]) == estimate["peak_reserved_lower"]
    assert (int(root["data-upper"]) or estimate["peak_reserved"]) == estimate["peak_reserved_upper"]
    assert int(root["data-usable"]) == said["budget"]["usable"]
    assert int(root["data-largest"]) == said["largest_batch"]
    assert root["data-verdict"] == ("fits" if said["fits"] else "over")


def test_the_page_says_what_it_does_not_know(browsed):
    for state in ({**LORA, "length": 2000}, {**LORA, "batch": 0}, {**LORA, "batch": 1.5}, {**LORA, "gpu": "Tesla T4"}):
        root, _text = browsed(390, **state)
        assert root["data-verdict"] == "unknown", state
        assert "data-reserved" not in root


def test_a_rule_that_the_script_does_not_know_is_not_guessed(page, browsed, tmp_path):
    """Every rule of the tables is one of the script's; another one is said."""
    text = page.read_text(encoding="utf-8")
    assert text.count("RadixSort(rule") == 1
    other = tmp_path / "calculator.html"
    other.write_text(text.replace("RadixSort(rule", "OtherSort(rule"), encoding="utf-8")
    root, said = browsed(390, page=other, lang="en", **TEXTS)
    assert root["data-verdict"] == "unknown"
    assert "RadixSort" in re.search(r'id="verdict">(.*?)</p>', said)[1]
