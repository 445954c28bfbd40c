"""Chinese and English: the catalogues are complete, compiled, and chosen as the reader's environment says."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import re
import string
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from babel.messages.mofile import read_mo, write_mo
from babel.messages.pofile import read_po
from each import each

from vram_guard import cli, language
from vram_guard.errors import InvalidInputError
from vram_guard.language import CHINESE, ENGLISH, LOCALE, speaking
from vram_guard.report.picture import picture
from vram_guard.terminal import display_width, wrapped

ROOT = Path(__file__).parents[2]
CATALOGUE = LOCALE / CHINESE / "LC_MESSAGES" / "vram_guard.po"
#: One Chinese word for one thing; the others are not written.
GLOSSARY = {
    "微批": "微批次|微批量|小批量|小批次",
    "批大小": "(最大|更大的|增大|等效|减小) batch|批量大小|批次大小|批尺寸|批数据大小|batch 大小|batch size",
    "激活检查点": "梯度检查点|激活重计算|重计算",
    "方案": "计划",
    "预留": "保留显存|保留峰值|保留的显存|总共保留",
    "监控": "监视",
    "跟踪": "追踪",
    "利用率": "使用率",
    "余量": "裕量",
    "优化器状态": "优化器的状态",
    "学习率": "学习速率",
    "梯度累积": "梯度累加",
    "工作区": "工作空间",
    "你": "您",
    "vram_guard": "守卫",
}
ADVICE = "run `make messages`, and translate what it adds"


def tool():
    """``tools/messages.py``, which ``make messages`` runs."""
    spec = importlib.util.spec_from_file_location("messages_tool", ROOT / "tools" / "messages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def placeholders(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


@pytest.fixture(scope="module")
def catalogue():
    with CATALOGUE.open("rb") as file:
        return read_po(file, locale=CHINESE)


def test_every_message_of_the_code_is_in_the_catalogue(catalogue):
    code = tool().messages()
    assert code
    missing = {text for text in code if text not in catalogue}
    assert not missing, ADVICE
    stale = [message.id for message in catalogue if message.id and message.id not in code]
    assert not stale, ADVICE


def test_every_call_gives_what_its_message_has_placeholders_for():
    """Placeholders in the message, values in the call; a message that is put together is never found."""
    for where, call in tool().calls().items():
        text, given = call.args[0].value, {keyword.arg for keyword in call.keywords}
        if call.func.id in ("_", "Message") and None not in given:  # None: **values
            assert placeholders(text) == given, where


def test_every_message_is_translated_with_the_same_placeholders(catalogue):
    for message in catalogue:
        if not message.id:
            continue
        assert message.string, f"{message.id!r} is not translated: {ADVICE}"
        assert placeholders(message.string) == placeholders(message.id), message.id
        assert not message.fuzzy, message.id


def chinese(catalogue):
    """Where it stands -> every Chinese line that people read: pages without their code, the menu, messages."""
    pages = [p for where in ("docs/zh_cn/*.md", "examples/*/*_zh-CN.md", "*_zh-CN.md") for p in ROOT.glob(where)]
    for page in (*pages, ROOT / "mkdocs.yml"):
        text = re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`", "", page.read_text(encoding="utf-8"))
        for line in text.splitlines():
            if re.search("[\u4e00-\u9fff]", line):
                yield page.name, line
    yield from ((message.id, message.string) for message in catalogue if message.id)


@pytest.mark.parametrize("term", GLOSSARY)
def test_one_chinese_word_for_one_thing(term, catalogue):
    found = [(where, line) for where, line in chinese(catalogue) if re.search(GLOSSARY[term], line)]
    assert not found, f"write {term}"


@pytest.mark.parametrize("name", ["vram_guard", "argparse"])
def test_the_compiled_catalogues_are_those_that_people_edit(name):
    path = CATALOGUE.with_name(f"{name}.po")
    with path.open("rb") as file:
        catalogue = read_po(file, locale=CHINESE)
    compiled = BytesIO()
    write_mo(compiled, catalogue)
    compiled.seek(0)
    with path.with_suffix(".mo").open("rb") as file:
        assert messages_of(file) == messages_of(compiled), ADVICE


def messages_of(file):
    """Messages of a compiled catalogue with their translations; its header names the release of Babel."""
    found = {message.id: message.string for message in read_mo(file) if message.id}
    assert len(found) > 10
    return found


def test_argparses_messages_are_argparses():
    """Each of them stands in its source, with the same placeholders in the translation."""
    source = inspect.getsource(argparse)
    with CATALOGUE.with_name("argparse.po").open("rb") as file:
        messages = [message for message in read_po(file, locale=CHINESE) if message.id]
    assert len(messages) > 10
    for message in messages:
        assert message.id.encode("unicode_escape").decode() in source.replace('"\n' + " " * 15 + "'", "")
        assert re.findall(r"%(?:\(\w+\))?\w", message.id) == re.findall(r"%(?:\(\w+\))?\w", message.string)


def test_help_and_errors_of_the_command_line_in_chinese(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LANGUAGE", "en")
    with pytest.raises(SystemExit):
        cli.main(["--lang", "zh", "estimate", "--help"])
    out = capsys.readouterr().out
    assert out.startswith("用法：vram-guard estimate")
    assert "显示此帮助并退出" in out
    assert max(map(display_width, out.splitlines())) <= 80
    with pytest.raises(SystemExit) as ended:
        cli.main(["--lang", "zh", "estimate", "--no-such-option"])
    assert ended.value.code == 2
    assert "无法识别的参数：--no-such-option" in capsys.readouterr().err
    assert os.environ["LANGUAGE"] == "en"
    with pytest.raises(SystemExit):
        cli.main(["estimate", "--help"])
    assert capsys.readouterr().out.startswith("usage: vram-guard estimate")


@each(
    ("text", "width", "lines"),
    [
        ("one two three", 8, ["one two", "three"]),
        ("显存显存显存", 8, ["显存显存", "显存"]),
        ("显存，显存。", 7, ["显存，", "显存。"]),
        ("GPU 显存 of a card", 9, ["GPU 显存", "of a card"]),
        ("unbreakable", 3, ["unbreakable"]),
        ("", 8, [""]),
    ],
)
def test_lines_are_broken_where_a_terminal_would(text, width, lines):
    assert wrapped(text, width) == lines


@each(
    ("environment", "encoding", "expected"),
    [
        ({}, "utf-8", ENGLISH),
        ({"LANG": "zh_CN.UTF-8"}, "utf-8", CHINESE),
        ({"LANG": "zh_CN.GBK"}, "gbk", CHINESE),
        ({"LANG": "zh_CN.UTF-8"}, "ascii", ENGLISH),
        ({"LANG": "zh_CN.UTF-8"}, "no-such-encoding", ENGLISH),
        ({"LANG": "zh_CN.UTF-8"}, None, CHINESE),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "utf-8", ENGLISH),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_CN.UTF-8"}, "utf-8", CHINESE),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN"}, "utf-8", CHINESE),
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "fr:zh_CN:en"}, "utf-8", CHINESE),
        ({"LANG": "C", "LANGUAGE": "zh_CN"}, "utf-8", ENGLISH),
        ({"LANG": "de_DE.UTF-8"}, "utf-8", ENGLISH),
        ({"LANG": "zh_CN.UTF-8", "VRAM_GUARD_LANG": "en"}, "utf-8", ENGLISH),
        ({"LANG": "en_US.UTF-8", "VRAM_GUARD_LANG": "zh"}, "utf-8", CHINESE),
        ({"VRAM_GUARD_LANG": "klingon"}, "utf-8", ENGLISH),
    ],
)
def test_the_language_of_an_environment(monkeypatch, environment, encoding, expected):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG", "LANGUAGE", "VRAM_GUARD_LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding=encoding))
    assert language.language() == expected


@pytest.mark.parametrize("name", ["zh", "zh_CN", "zh-Hans", "ZH_cn.UTF-8"])
def test_speaking_chinese_for_a_while(name):
    before = language.language()
    with speaking(name):
        assert language.language() == CHINESE
        with pytest.raises(InvalidInputError, match="不支持语言 'xx'"), speaking("xx"):
            pass
        assert language.language() == CHINESE
    assert language.language() == before


@pytest.mark.parametrize("name", ["", "x", "zz_CN", 3])
def test_unknown_languages_are_refused(name):
    with pytest.raises(InvalidInputError, match="give en or zh"):
        language.use_language(name)


def test_a_message_without_translation_is_english():
    with speaking("zh"):
        assert language._("no such {thing}", thing="message") == "no such message"


def test_columns_are_counted_as_terminals_show_them():
    assert display_width("GiB") == 3
    assert display_width("显存") == 4
    assert display_width("显存（GiB）") == 11
    assert display_width("e\u0301") == 1


def test_an_unknown_language_is_bad_usage(capsys):
    assert cli.main(["--lang", "klingon", "gpus"]) == 2
    assert "give en or zh" in capsys.readouterr().err


@pytest.fixture(scope="module")
def made_plan():
    """A plan that changes something, made and shown in Chinese."""
    import torch
    from torch import nn

    from vram_guard import TrainingStep, plan
    from vram_guard.report.text import render

    step = TrainingStep(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
        batch=lambda size: torch.zeros(size, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
    )
    with speaking("zh"):
        found = plan(step, 8192, budget="46MiB", margin=0, allow=("accumulate",))
        return found, render(found, width=80)


def test_a_plan_in_chinese(made_plan):
    found, text = made_plan
    assert found.fits
    assert found.changed
    assert text.startswith("按原样放不下（")
    assert "\n放得下  需要" in text
    for part in ("优化器状态", "显存预算：", "方案", "微批大小", "原因", "；46.00 MiB（直接给出）"):
        assert part in text


def test_columns_of_a_chinese_report_line_up(made_plan):
    """Every amount of the table ends where its column ends."""
    lines = made_plan[1].splitlines()
    start, end = (
        next(at for at, line in enumerate(lines) if line.startswith(word)) for word in ("  峰值时", "  预留峰值")
    )
    rows = [line for line in lines[start : end + 1] if line.count("iB") == 2]
    assert len(rows) >= 5
    for column in (1, 2):
        ends = {display_width("iB".join(line.split("iB")[:column])) for line in rows}
        assert len(ends) == 1, rows
    assert max(map(display_width, lines)) <= 80


def test_no_ascii_commas_and_colons_between_chinese_words(made_plan, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.py").write_text("from torch import nn\n\ndef net():\n    return nn.Conv2d(3, 8, 3)\n")
    monkeypatch.chdir(tmp_path)
    for command in ("plan", "estimate"):
        words = [command, "--model", "model.py:net", "--input", "3x8x8", "--batch", "4", "--gpu", "4090", "-v"]
        assert cli.main(["--lang", "zh", *words]) == 0
    with speaking("zh"):
        drawn = re.findall(">([^<>]+)</text>", picture(made_plan[0]))
    shown = "\n".join([capsys.readouterr().out, *drawn, *made_plan[1:]])
    assert not re.findall("[\u4e00-\u9fff\uff09][,:;] .*|.*[,:;] [\u4e00-\u9fff]", shown)
