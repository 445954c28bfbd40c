"""Every command of the documentation is run, and prints what the page says that it prints."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from docs_blocks import FENCE, commands_of, files_of, missing, pinned
from each import each
from folders import write_cogvideox

from vram_guard import cli, settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*/*.md"), *ROOT.glob("README*.md")])
WITH_COMMANDS = [page for page in PAGES if commands_of(page)]


def shown(page):
    """What a page runs and expects; a Chinese page with the same as its English one is not run a second time."""
    return [(one.text, one.expected, one.code) for one in commands_of(page)], files_of(page)


def twice(page):
    english = ROOT / "docs" / "en" / page.name
    return page.parent.name == "zh_cn" and english.exists() and shown(page) == shown(english)


#: Outputs are those of the releases that everything is run with; elsewhere numbers may differ, exit codes may not.
SAME_TORCH = pinned("torch")


#: Amounts of pages with commands that none of these prints or is given: measured, or from another document.
NOT_PRINTED = {
    "fidelity.md": {"2.2 GiB", "512 MiB", "1 KiB"},
    # A guide's own figures; GiB are of its command with two models, which takes a minute.
    "guides.md": {
        *("85.90 GB", "64.28 GB", "52.2 GB", "0.44 GB", "0.14 GB", "0.1 MB", "0.7 GB", "14.2 GB"),
        *("20 GB", "12 GB", "8 GB", "160 GiB", "103 GiB", "2.2 MB", "7.4 MB"),
    },
    "how-it-works.md": {"2 MiB", "20 MiB", "32 MiB"},
    # Measured, or from reports.
    "limits.md": {"0.26 GiB", "0.56 GiB", "0.7 GiB"},
    # Of a network of its own, see the page.
    "plan.md": {"756 MiB", "574 MiB", "346 MiB"},
}
AMOUNT = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?) ?([GMK]i?B)\b")


def not_printed(page, printed):
    """Amounts in a page's text and tables, outside of code, that no printed one rounds to."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    shown = {(float(amount), unit) for amount, unit in AMOUNT.findall(printed)}

    def is_printed(figure, unit):
        half = 0.5 * 10 ** -len(figure.partition(".")[2]) + 0.0005  # what is printed is rounded too
        return any(unit == other and abs(amount - float(figure)) <= half for amount, other in shown)

    return {f"{figure} {unit}" for figure, unit in AMOUNT.findall(text) if not is_printed(figure, unit)}


def test_amounts_of_the_text_are_compared(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("1.34 GB, 21.5 GiB, 3.3 MB, 4 GiB, `5 GiB`\n```text\n9.9 GB\n```\n| 8.8 GB | 12 GB | 25 GiB |\n")
    assert not_printed(page, "1.342 GB, 21.475 GiB, 3.4 MB, 11.7 GB --budget 25GiB") == {"3.3 MB", "4 GiB", "8.8 GB"}


def named(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a page's commands run: a copy of the examples, as in a checkout; the page's own files come on top."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in settings.KINDS:
        monkeypatch.delenv(f"VRAM_GUARD_{name.upper()}", raising=False)
    settings.forget()
    yield tmp_path
    settings.forget()


@pytest.mark.parametrize("language", ["en", "zh_cn"])
def test_every_page_is_found_from_the_first_one(language):
    folder = ROOT / "docs" / language
    first = (folder / "index.md").read_text(encoding="utf-8")
    others = {page.name for page in folder.glob("*.md")} - {"index.md"}
    assert {name for name in others if f"({name})" not in first} == set()


@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if not twice(page)], ids=named)
def test_commands_of_a_page(page, folder, monkeypatch, capsys):
    for name, content in files_of(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    if "CogVideoX-5b" in page.read_text(encoding="utf-8"):
        write_cogvideox(folder / "CogVideoX-5b")
    printed = ""  # and what is typed
    for command in commands_of(page):
        where = f"{named(page)}:{command.line}: {command.text}"
        with monkeypatch.context() as patched:
            # A Chinese page may show what the command says in English, which is shorter to keep right.
            patched.setenv("VRAM_GUARD_LANG", "zh" if re.search("[\u4e00-\u9fff]", str(command.expected)) else "en")
            for name, value in command.environment.items():
                patched.setenv(name, value)
            settings.forget()
            code = run(command.words)
        captured = capsys.readouterr()
        printed += command.text + captured.out + captured.err
        assert code == command.code, f"{where}\n{captured.out}\n{captured.err}"
        if command.expected and SAME_TORCH:
            lost = missing(command.expected, captured.out + captured.err)
            assert lost is None, f"{where}\nnot printed: {lost!r}\n{captured.out}\n{captured.err}"
    for one in {page, ROOT / "docs" / "zh_cn" / page.name} if SAME_TORCH else ():
        if one == page or (one.exists() and twice(one)):
            assert not_printed(one, printed) <= NOT_PRINTED.get(page.name, set()), named(one)


def run(words):
    """Our own command in this process, which saves importing torch for each; everything else as a program."""
    if words[0] == "vram-guard":
        try:
            return cli.main(words[1:])
        except SystemExit as end:
            return end.code
    program = [sys.executable, *words[1:]] if words[0] == "python" else words
    run = subprocess.run(program, capture_output=True, text=True, check=False)
    print(run.stdout)
    print(run.stderr, file=sys.stderr)
    return run.returncode


def test_the_pages_are_the_same_in_both_languages():
    names = [{page.name for page in ROOT.glob(f"docs/{language}/*.md")} for language in ("en", "zh_cn")]
    assert names[0] == names[1]


@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if "en" in page.parts], ids=named)
def test_both_languages_show_the_same_commands_and_files(page):
    other = ROOT / "docs" / "zh_cn" / page.name
    assert [one.text for one in commands_of(page)] == [one.text for one in commands_of(other)]
    assert list(files_of(page)) == list(files_of(other))


def test_the_text_quotes_the_example_above_it():
    page = ROOT / "docs" / "lab" / "how-it-works.md"
    (printed,) = (line for one in commands_of(page) for line in one.expected if line.split()[:1] == ["4096"])
    allocated, reserved = (round(float(figure)) for figure in re.findall(r"([\d.]+) MiB", printed))
    assert re.search(rf"{allocated} MiB.{{,25}}{reserved} MiB", page.read_text(encoding="utf-8"))


def test_reference_pages_are_those_of_the_code():
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / "reference.py", "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"run: make reference\n{run.stdout}{run.stderr}"


@each("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{named(page)} links to {target}"


@each("page", PAGES)
def test_yaml_on_pages_can_be_read(page):
    """What people copy into a workflow or a config."""
    for block in FENCE.finditer(page.read_text(encoding="utf-8")):
        if block["info"].partition(" ")[0] == "yaml":
            assert yaml.safe_load(textwrap.dedent(block["body"])), block[0]


@pytest.mark.parametrize(
    ("expected", "printed", "lost"),
    [
        (["a", "...", "c"], "a\nb\nc\n", None),
        (["a", "c"], "a\nb\nc\n", "a c"),
        (["...", "c", "...", "b"], "a\nb\nc\n", "b"),
        (["a b  c ..."], "a\n\nb c d\n", None),
        (["a d"], "a\nb\n", "a d"),
    ],
)
def test_the_comparison_can_fail(expected, printed, lost):
    assert missing(expected, printed) == lost


def test_a_page_of_commands(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n```yaml title=\"a/b.yaml\"\nx: 1\n```\n\n```console\n$ A=1 vram-guard x \\\n    --y 'z w'\n"
        "one\n$ false\n$ echo $?\n1\n```\n\n```sh\n$ not this\n```\n"
        "<!-- not run: needs a GPU -->\n```console\n$ nor this\n```\n"
    )
    first, second = commands_of(page)
    assert (first.environment, first.words) == ({"A": "1"}, ["vram-guard", "x", "--y", "z w"])
    assert (first.expected, first.code, second.text, second.code) == (["one"], 0, "false", 1)
    assert first.line == 8
    assert files_of(page) == {"a/b.yaml": "x: 1\n"}
