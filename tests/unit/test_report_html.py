"""The HTML report, in a real headless browser where one is at hand."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
import torch

from vram_guard import Budget, Plan, TrainingStep, plan, trace
from vram_guard.language import speaking
from vram_guard.report import html_report
from vram_guard.timeline import Note, Timeline
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
HOSTILE = '</script><script src="https://example.org/x.js"></script><img src=x onerror=alert(1)>&"\''

STEP = TrainingStep(
    model=lambda: torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 3, 3, padding=1)
    ),
    batch=lambda size: torch.zeros(size, 3, 64, 64),
    loss=lambda model, images: torch.nn.functional.mse_loss(model(images), images),
    optimizer=torch.optim.AdamW,
)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return trace(STEP)


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(STEP, 64, "40MiB", margin=0, allow="accumulate")


# --- the page as text ---


class Page(HTMLParser):
    """Tags, attributes and text; raises where tags do not match."""

    void = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words += data + " "


def test_the_page_says_what_the_plan_says(made: Plan) -> None:
    page = Page(html_report(made, title="Two convolutions"))
    for word in (
        "Two convolutions",
        "Fits",
        format_bytes(made.peak),
        format_bytes(made.before.peak_reserved),
        "micro-batch size",
        "two are drawn",
        *made.reasons,
        made.estimate.peak_operator,
    ):
        assert word in page.words
    assert page.words.count("allocations and frees, in order") == 2  # before, after
    assert page.words.index("micro-batch size") < page.words.index("Memory use") < page.words.index("Over the step")


def test_a_plan_that_lacks_the_timeline_as_written_is_drawn_as_planned(made: Plan) -> None:
    page = Page(html_report(replace(made, timeline_before=None)))
    assert "planned: 32-true" in page.words
    assert "as written: 32-true" not in page.words


def test_an_estimate_with_and_without_charts_and_budget(timeline: Timeline) -> None:
    full = Page(html_report(timeline.at(16), timeline=timeline, budget=Budget.of("1GiB")))
    assert full.tags.count("svg") == 1
    assert "Fits" in full.words
    short = Page(html_report(timeline.at(16)))
    assert "svg" not in short.tags
    assert "Fits" not in short.words
    assert "fit" in Page(html_report(timeline.at(64), budget=Budget.of("1MiB"))).words
    assert "Does not fit" in Page(html_report(timeline.at(64), budget=Budget.of("1MiB"))).words
    lower_bound = replace(timeline.at(2), tier="formula")
    assert "Not known to fit" in Page(html_report(lower_bound, budget=Budget.of("4GiB"))).words


def test_a_page_traces_nothing_anew(timeline: Timeline) -> None:
    traced = []

    def retrace(size: int) -> Timeline:
        traced.append(size)
        return timeline

    branching = replace(timeline, retrace=retrace)
    html_report(branching.at(timeline.traced[0]), timeline=branching)
    assert traced == []


def test_nothing_in_the_page_points_outside(made: Plan) -> None:
    page = Page(html_report(made))
    assert not {"script", "link", "img", "iframe", "a", "base", "object"} & set(page.tags)
    assert not {"src", "href", "srcset", "action", "data"} & {name for name, _ in page.attributes}
    text = html_report(made)
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://", text)


def test_names_from_the_users_code_cannot_break_out(timeline: Timeline) -> None:
    blocks = tuple(block._replace(module=HOSTILE, source=HOSTILE) for block in timeline.blocks)
    odd = replace(timeline, blocks=blocks, notes=(Note(HOSTILE, HOSTILE),))
    page = Page(html_report(odd.at(4), timeline=odd, title=HOSTILE))
    assert not any(name in ("src", "onerror") for name, _ in page.attributes)
    assert HOSTILE in page.words


def test_the_page_in_chinese_says_so(timeline: Timeline) -> None:
    with speaking("zh"):
        assert '<html lang="zh-CN">' in html_report(timeline.at(4))


# --- the page in a browser ---

#: Leaves in the page's title what a reader sees.
PROBE = """<script>
const seen = {};
seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
seen.page = getComputedStyle(document.body).backgroundColor;
seen.ink = getComputedStyle(document.body).color;
seen.area = getComputedStyle(document.querySelector("svg path")).fill;
document.body.style.width = "390px";
const tables = [...document.querySelectorAll(".scroll > table")].map(table => table.parentElement);
seen.tables = tables.length;
seen.cut = tables.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText.slice(0, 30));
document.title = JSON.stringify(seen);
</script>"""


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two "rgb(r, g, b)" colours (WCAG 2.1, relative luminance)."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_readable_in_the_dark_and_on_a_telephone(made: Plan, tmp_path: Path, dark: bool) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "headless_shell"))), None)
    if browser is None:
        pytest.skip("no headless browser is installed here")
    page = tmp_path / "report.html"
    page.write_text(
        html_report(made).replace("default-src", "script-src 'unsafe-inline'; default-src") + PROBE, "utf-8"
    )
    theme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900", theme, "--dump-dom"]
    command = [browser, *options, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", run.stdout, re.DOTALL)
    assert title is not None, run.stdout[-2000:]
    seen = json.loads(unescape(title[1]))
    assert (seen["wide"], seen["cut"]) == (0, [])  # wide charts scroll by themselves, and tables are whole
    assert seen["tables"] > 3
    assert contrast(seen["page"], seen["ink"]) > 7
    assert (contrast(seen["page"], "rgb(255, 255, 255)") > 10) == dark
    assert not dark or contrast(seen["page"], seen["area"]) > 3
