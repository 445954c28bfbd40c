"""Every option of every command, for every way of asking: it changes the answer, or it is refused by its name."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
from each import each
from folders import SMALL, SMALL_TEXT, write_cogvideox

from vram_guard import cli
from vram_guard.watch import throughput

STEPS = """\
import torch
from torch import nn
from vram_guard import TrainingStep

net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def build(height=512, layers=1):
    def model():
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))

    return TrainingStep(
        model=model,
        batch=lambda size: torch.zeros(size, height, 512),
        loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )


def larger():
    return build(layers=3)
"""
TEXT = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
CONFIG = "step: steps.py:build\nbatch_size: 4\nheight: 512\nlr: 0.001\n"

#: Option -> its words; "{}" is a new name.
VALUES = {
    "--allow": "precision",
    "--batch": "5",
    "--benchmark": "",
    "--budget": "70MiB",
    "--bytes-per-element": "2",
    "--checkpointing": "",
    "--config": "other.yaml",
    "--cudnn": "nowhere.so",
    "--device": "0",
    "--dry-run": "",
    "--dtype": "float16",
    "--frozen": "transformer",
    "--gpu": "'A100 80GB'",
    "--gpu-memory": "20",
    "--gpus": "2",
    "--height": "16",
    "--hidden-dim": "24",
    "--html": "{}.html",
    "--input": "3x24x24",
    "--json": "",
    "--layouts": "ddp",
    "--link": "pcie",
    "--lora": "r=2,target=q_proj",
    "--lr-rule": "none",
    "--margin": "0.4",
    "--model": "steps.py:larger",
    "--model-path": "folder",
    "--node-gpus": "1",
    "--num-frames": "5",
    "--num-layers": "7",
    "--optimizer": "sgd",
    "--output": "{}.yaml",
    "--plot": "{}.svg",
    "--precision": "bf16-mixed",
    "--qlora": "r=2",
    "--quick": "",
    "--quiet": "",
    "--recommend": "",
    "--resolutions": "16,24",
    "--seq-length": "48",
    "--set": "batch_size=6",
    "--snapshot": "{}.pickle",
    "--threshold": "0.1",
    "--title": "titled",
    "--train": "text_encoder",
    "--verbose": "",
    "--width": "16",
}

#: Where another value changes something.
BY_WAY = {("--dtype", "folder"): "float32", ("--config", "video"): "half.yaml"}

ON = '--gpu "RTX 4090"'
ESTIMATE = {
    "rule": "--batch 8 --height 64 --width 64 --hidden-dim 16 --num-layers 4 --gpu-memory 24",
    "folder": f"--model-path folder {ON}",
    "step": f"--model steps.py:build --batch 4 {ON}",
    "plain": f"--model steps.py:net --input 3x16x16 --batch 4 {ON}",
    "text": f"--model text.json --batch 4 {ON}",
    "video": f"--model folder/transformer/config.json --batch 1 --width 8 {ON}",
}
ASKED = {
    "estimate": ESTIMATE,
    "plan": {
        **{way: ESTIMATE[way] for way in ("step", "plain")},
        "several": f"--model steps.py:build --batch 4 --gpus 4 {ON}",
    },
    "gpus": {
        "cards": "T4",
        "rule": "T4 --height 64 --width 64 --hidden-dim 16 --num-layers 4",
        "step": "4090 --model steps.py:build",
        "plain": "4090 --model steps.py:net --input 3x16x16",
    },
    "compare": {
        "configs": f"config.yaml --set batch_size=9 {ON}",
        "step": f"--model steps.py:build --set batch_size=4 --set batch_size=8 {ON}",
    },
    "variants": {"": f"steps.py:build steps.py:larger --batch 4 {ON}"},
    "optimize": {"": "config.yaml --budget 120MiB"},
    "doctor": {"": ""},
}
#: What says what is done anyway, or only how it is shown.
SAME = {
    *(("--quick", asked) for asked in ("estimate rule", "gpus rule")),
    ("--verbose", "estimate rule"),
    # The step fits as it is; that no learning rate is there for a rule to scale.
    *(("--allow", f"{command} {way}") for command in ("plan", "compare", "variants") for way in ASKED[command]),
    ("--lr-rule", "compare step"),
    # Of the page that is kept.
    *(("--title", f"plan {way}") for way in ASKED["plan"]),
}
#: One number of the rule of thumb alone: those that are missing are named. A config whose step does not read numbers
#: that are given: these are named.
LACKING = {("--hidden-dim", "gpus cards"), ("--config", "gpus rule"), ("--config", "estimate rule")}
#: Options whose values are seen in what is written for people alone.
SHOWN = {"--json", "--title", "--verbose"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    write_cogvideox(folder / "folder", SMALL, SMALL_TEXT)
    (folder / "folder" / "vae").mkdir()
    (folder / "folder" / "vae" / "config.json").write_text('{"block_out_channels": [1, 2]}')
    (folder / "steps.py").write_text(STEPS)
    (folder / "text.json").write_text(json.dumps(TEXT))
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "other.yaml").write_text(CONFIG.replace("size: 4", "size: 7") + "use_amp: true\n")
    (folder / "half.yaml").write_text("use_amp: true\n")
    return folder


def run(capsys, *words):
    """(Exit code, what is said on standard output, and on standard error)."""
    try:
        code = cli.main(list(words))
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, *(re.sub(r"/\S*reports/\S*|[0-9.]+ (ms|samples/s)|\+-\S+%", "", one) for one in (said.out, said.err))


@pytest.mark.timeout(900)  # three hundred answers: on a busy machine that takes more than other tests may
@each(("command", "way"), [(command, way) for command, ways in ASKED.items() for way in ways])
def test_an_option_is_read_or_refused_by_its_name(place, monkeypatch, capsys, command, way):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    monkeypatch.setattr(throughput, "SECONDS", 0.02)
    asked = shlex.split(ASKED[command][way])
    _code, listed, _err = run(capsys, command, "--help")
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", listed)) & (VALUES.keys() | {"--help"})
    known = re.findall(r"^ +(?:-v, )?(--[a-z-]+)", listed, re.MULTILINE)
    assert set(known) <= VALUES.keys() | {"--help", "--step", "--batch-size"}, "an option without a value here"
    as_json = [] if command in ("doctor", "monitor") else ["--json"]
    plain = {option: run(capsys, command, *asked, *option) for option in ((), tuple(as_json))}
    assert plain[()][0] in (0, 1), plain
    if as_json:  # doctor says how much memory is free just now
        assert run(capsys, command, *asked, *as_json) == plain[tuple(as_json)]
    ignored = []
    for option in sorted(options - {"--help", *(word for word in asked if word.startswith("--"))}):
        name = f"{command}-{way}{option}"
        words = shlex.split(BY_WAY.get((option, way), VALUES[option]).replace("{}", name))
        shown = [] if option in SHOWN else as_json
        code, *said = run(capsys, command, *asked, *shown, option, *words)
        refused = code in (2, 3) and option.strip("-") in said[1]
        written = any(place.glob(f"{name}*"))
        if not (refused or written or said != list(plain[tuple(shown)][1:]) or (option, f"{command} {way}") in SAME):
            ignored.append(option)
        elif code not in (0, 1) and not refused and (option, f"{command} {way}") not in LACKING:
            ignored.append(f"{option}: {code} {said[1]}")
    assert not ignored


def test_lora_without_settings_has_those_of_peft(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    asked = ("estimate", "--model", "text.json", "--batch", "2", "--budget", "1GiB", "--json")
    code, bare, said = run(capsys, *asked, "--lora")
    assert (code, "Warning" in said) == (0, False)
    assert bare == run(capsys, *asked, "--lora", "r=8,alpha=8")[1]
    assert bare != run(capsys, *asked, "--lora", "r=32")[1]
