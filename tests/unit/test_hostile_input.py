"""Bad input on the command line: one clear line on standard error, exit code 2, no answer, in both languages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from each import each
from folders import SMALL, SMALL_TEXT, write_cogvideox

from vram_guard import cli
from vram_guard.language import CHINESE, ENGLISH

#: A terminal's escape sequence and a control that turns the direction of text around.
ESCAPES = "\x1b[31m\u202e"
CARD = ("--gpu", "RTX 4090")

FILES = {
    "ok.yaml": "batch_size: 4\nstep: ok.py:step\nheight: 64\nwidth: 64\nhidden_dim: 8\nnum_layers: 2\n",
    "ok.py": "import torch\nfrom vram_guard import TrainingStep\n\n"
    "def main(): pass\n\ndef step():\n    return TrainingStep("
    "model=lambda: torch.nn.Linear(8, 8), batch=lambda size: torch.zeros(size, 8), "
    "loss=lambda model, x: model(x).sum(), optimizer=torch.optim.SGD)\n\n"
    "def sized(width=8):\n    return step()\n",
    "ok-bare.yaml": "batch_size: 4\n",
    "raises.py": f"def net(): raise RuntimeError({ESCAPES!r} + '\\nno weights')\n",
    "config.json": json.dumps({"model_type": "gpt2", "architectures": [ESCAPES], "n_layer": ESCAPES}),
    "binary": bytes(range(256)),
    "nul.yaml": b"batch_size: 4\0\n",
    "empty.yaml": "",
    "types.yaml": "batch_size: [1]\nmodel: {a: 1}\n",
    "escapes.yaml": 'batch_size: "\\e[2J\\u202e"\nmodel: "\\e[31mred\\u202e"\n',
    "broken.yaml": "a:\n\t- b: {\n",
}
#: Files of which nothing can be read that describes a training.
BAD_FILES = (
    *(name for name in FILES if not name.startswith("ok") and not name.endswith((".py", ".json"))),
    "missing.yaml",
    "folder",
    ESCAPES,
    "a\0b",
    "x" * 5000,
)
BAD_COUNTS = ("0", "-1", "nan", "1.5", "", "1e9", "9" * 40, "١", "four", ESCAPES)
BAD_NAMES = ("ok.py:nothing", "missing.py:a", "folder:a", ":", "a:", ":b", "no_such_module:a")

#: A complete command of each, to which one bad thing is added.
BASES = {
    "estimate": ("estimate", "--config", "ok.yaml", "--quick"),
    "plan": ("plan", "ok.yaml"),
    "compare": ("compare", "ok.yaml"),
    "variants": ("variants", "ok.py:main", "--batch", "4"),
    "optimize": ("optimize", "ok.yaml", "--dry-run"),
    "mmengine": ("mmengine", "compare", "ok.py"),
}
AMOUNTS = ("24", "-1GiB", "nan", "", "1e400GiB", "lots", ESCAPES)
MARGINS = ("2", "nan", "", "-1", "inf", "a tenth", ESCAPES)


def cases():
    for base in BASES.values():
        for amount in AMOUNTS:
            yield *base, "--budget", amount
        for margin in MARGINS:
            yield *base, *CARD, "--margin", margin
        for name in ("RTX 9999", "", ESCAPES):
            yield *base, "--gpu", name
        for more in (
            ("--margn", "0.1"),
            ("--json=1",),
            ("--gpu",),
            ("--gpu", "RTX 4090"),
            ("--budget", "24GiB", "--budget", "8GiB"),
            ("--gpu-memory", "x"),
            ("--gpu-memory", "24", "--budget", "24GiB"),
            ("--device", "0"),
        ):
            yield *base, *CARD, *more
    for base in (BASES[name] for name in ("plan", "compare", "variants")):
        for name in ("everything", ESCAPES):
            yield *base, *CARD, "--allow", name
    for base in (BASES[name] for name in ("estimate", "plan")):
        yield *base, *CARD, "--cudnn", "nowhere"
    for base in (BASES[name] for name in ("plan", "compare")):
        for change in ("batchsize=3", "=", "batch_size", "batch_size=", ESCAPES, "batch_size=1,batch_size=2"):
            yield *base, *CARD, "--set", change
    for name in BAD_FILES:
        yield "plan", name, *CARD
        yield "compare", name, *CARD
        yield "estimate", "--config", name, *CARD
        yield "optimize", name, "--dry-run", *CARD
        yield "gpus", "--config", name
        yield "variants", name, "--batch", "2", *CARD
        yield "estimate", "--model-path", name, *CARD
        yield "plan", "--step", name, "--batch", "2", *CARD
        yield "mmengine", "compare", name, *CARD
    for name in BAD_NAMES:
        yield "plan", name, "--batch", "2", *CARD
        yield "plan", "--model", name, "--batch", "2", *CARD
        yield "variants", name, "--batch", "2", *CARD
        yield "optimize", "ok.yaml", "--dry-run", "--step", name, *CARD
    for number in BAD_COUNTS:
        yield *BASES["plan"], "--batch", number, *CARD
        yield "variants", "ok.py:main", "--batch", number, *CARD
        yield "estimate", "--config", "ok.yaml", "--batch", number, *CARD
        yield *BASES["plan"], "--gpus", number, *CARD
        yield *BASES["plan"], "--gpus", "2", "--node-gpus", number, *CARD
        yield "gpus", "--hidden-dim", "8", "--num-layers", "2", "--resolutions", number
        yield "plan", "--step", "ok.py:main", "--batch", "2", "--input", number, *CARD
    for number in ("-1", "nan", "inf", "", "soon", ESCAPES):
        yield "monitor", number
        yield "monitor", "1", "--device", number
    spread = (*BASES["plan"], *CARD, "--gpus", "4")
    for link in ("", ESCAPES, "nvlink,ib400,ib400", "nvlink;ib400"):
        yield *spread, "--link", link
    for layouts in ("", ESCAPES, "fsdp", "fsdp2;ddp"):
        yield *spread, "--layouts", layouts
    for option, value in (("--node-gpus", "4"), ("--link", "nvlink"), ("--layouts", "ddp")):
        yield *BASES["plan"], *CARD, option, value  # of one GPU
    for allowed in ("selective checkpoint", "selective_checkpoint=matmul"):
        yield *BASES["plan"], *CARD, "--allow", allowed
        yield "launch", "--budget", "24GiB", "--allow", allowed, "ok.py"
    yield "launch", "--budget", "24GiB", "--advanced", "host_budget=24", "ok.py"
    yield "plan", "raises.py:net", "--input", "8", "--batch", "2", *CARD
    yield "estimate", "--model", "config.json", "--batch", "2", *CARD
    yield from (tuple(text.split()) for text in OTHERS)
    yield from (tuple(shlex.split(text)) for text in NAMED)


OTHERS = (
    "estmate",
    "--lang",
    "--lang xx gpus",
    "gpus nothing-like-it",
    "gpus --jsn",
    "gpus --gpu 4090 A100",
    "doctor --x",
    "doctor extra",
    "plan",
    "compare",
    "variants",
    "optimize",
    "launch",
    "launch --buget 24GiB ok.py",
    "launch --budget 24GiB --budget 8GiB --dry-run ok.py",
    "launch --budget 24GiB missing.py",
    "launch --budget 24GiB folder",
    "launch --budget 24 ok.py",
    "launch --margin 2 --budget 24GiB ok.py",
    "launch --margin x ok.py",
    "launch --longest lots --budget 24GiB ok.py",
    "launch --advanced start_seconds=nan --budget 24GiB ok.py",
    "launch --advanced whole_job --budget 24GiB ok.py",
    "launch --budget 24GiB --advanced whole_jobs=no ok.py",
    "launch --budget 24GiB --no-whole-jobs ok.py",
    "plan ok.yaml --gpu 4090 --gpus 3 --node-gpus 2",
    "plan ok.yaml --gpu 4090 --gpus auto --node-gpus 0",
    "plan ok.yaml --gpu 4090 --gpus 2 --gpus 4",
    "plan ok.yaml --gpu 4090 --snapshot folder",
    "mmengine",
    "mmengine compare",
    "plan ok.yaml --gpu 4090 --html folder",
    "plan ok.yaml --gpu 4090 --plot folder",
    "plan ok.yaml --gpu 4090 --plot x.docx",
    "plan ok.yaml --gpu 4090 --gpus 2 --link x",
    "plan ok.yaml --gpu 4090 --gpus 2 --layouts x",
    "plan ok.yaml ok.yaml --gpu 4090",
    "plan ok.yaml --config ok.yaml --gpu 4090",
    "plan ok.py:main --model ok.py:main --gpu 4090",
    "optimize ok.yaml --gpu 4090 --output /proc/a.yaml",
    "optimize ok.yaml --gpu 4090 --lr-rule cubic",
)


#: What the rule of thumb needs besides a batch.
RULE = "--height 128 --width 128 --hidden_dim 256 --num_layers 10"
#: Command lines, and the part of the line that names what is wrong with each.
NAMED = {
    "plan missing.yaml --gpu 4090": "missing.yaml",
    "plan missing.py --gpu 4090": "missing.py is unknown",
    "plan --gpu 4090": "name what to plan for",
    "plan ok.yaml --gpu 4090 --plot x.bmp": ".svg",
    "plan ok.yaml --gpu 4090 --set batch_size=0": "batch_size",
    "plan ok.yaml --gpu 4090 --set batchsize=3": "nothing reads a value of this name; did you mean batch",
    "plan ok.yaml --gpu 4090 --set batch_size=3 --set batch_size=4": "--set gives batch_size twice",
    "plan ok.yaml --gpu 4090 --margin 5": "0.05 for 5%",
    "plan ok.yaml --budget 24": '--budget 24 is 24 bytes: with a unit, such as "24GiB"',
    "plan ok.yaml --budget '24 parsecs'": "--budget '24 parsecs' has a unit other than",
    "plan ok.yaml --gpu 4090 --gpus 12": "12 GPUs are no whole number of nodes of 8",
    "plan ok.yaml --gpu 4090 --gpus 8 --link token-ring": "unknown link 'token-ring'; known are nvlink",
    "plan ok.yaml --gpu 4090 --gpus few": "--gpus must be a whole number",
    "plan ok.yaml --gpu 4090 --gpus 8 --node-gpus 0": "--node-gpus must be between 1",
    "plan ok.yaml --gpu 4090 --gpus 8 --layouts fsdp": "layouts: unknown 'fsdp'",
    "plan ok.yaml --gpu 4090 --link nvlink": "it needs --gpus",
    "compare --gpu 4090": "nothing to compare",
    "compare ok.yaml --gpu 4090 --set batch_size": "NAME=VALUE",
    "compare ok.yaml --gpu 4090 --set batch_size=many": "whole number",
    "compare ok.yaml --gpu 4090 --set batch_size=[1": "not a valid value",
    "compare --step ok.py:sized --gpu 4090 --set width=3": "no batch size",
    "compare --gpu 4090 --set batch_size=3": "no model that can be built",
    "compare ok.yaml --step ok.py:nothing --gpu 4090": "nothing",
    "compare ok.yaml ok.yaml --gpu 4090": "two configurations",
    "compare ok.yaml --gpu 4090 --allow magic": "magic",
    "variants ok.py:nothing --batch 4 --gpu 4090": "nothing",
    "variants ok.py:step ok.py:step --batch 4 --gpu 4090": "two variants",
    "variants ok.py:step --gpu 4090": "--batch",
    "gpus --model diffsr --hidden_dim 8": "diffsr is unknown",
    "gpus --hidden_dim 8": "missing: --height",
    "gpus --hidden_dim 8 --num_layers 2 --resolutions 64x": "--resolutions must be",
    "gpus --hidden_dim 8 --num_layers 2 --resolutions ,": "--resolutions must be",
    "gpus 'RTX 4099' --model fno": "RTX 4090",
    "estimate --model-path no-such-folder": "nothing is downloaded",
    "estimate --model-path folder": "holds no model",
    "estimate --model-path okay --train vae": "there is no vae",
    "estimate --model-path okay --dtype int4": "--dtype must be one of",
    "estimate --model-path okay --batch 0": "--batch must be between",
    "estimate --model-path okay --num_frames -1": "--num-frames must be",
    "estimate --model-path okay --device 0 --gpu T4": "either",
    "estimate --model-path okay --device cpu": "CUDA device",
    f"estimate --gpu T4 {RULE} --batch 0": "--batch must be between 1 and",
    f"estimate --gpu T4 {RULE} --batch 1.5": "--batch must be a whole number",
    f"estimate --gpu T4 {RULE} --batch \uff18": "--batch must be a whole number",
    f"estimate --gpu T4 {RULE} --batch {2**63}": "--batch must be between",
    f"estimate --gpu T4 {RULE} --batch 8 --threshold 70": "threshold must be above 0 and at most 1",
    f"estimate --gpu T4 {RULE} --batch 8 --threshold x": "--threshold must be a number",
    f"estimate {RULE} --batch 8 --gpu_memory inf": "--gpu-memory inf is not an amount",
    f"estimate {RULE} --batch 8 --gpu_memory 100MB": "less than the",
    f"estimate {RULE} --batch 8 --gpu_memory 24 --budget 1GiB": "not both",
    f"estimate {RULE} --batch 8 --gpu RTX4099": "RTX 4090",
    f"estimate {RULE} --batch 8 --model ok.py:stpe --gpu_memory 24": "did you mean step",
    f"estimate {RULE} --batch 8 --model ok.py:step --gpu_memory 24": "--height is not read for a training step of your",
    "estimate --config folder --gpu T4": "is a folder",
    f"estimate {RULE} --gpu_memory 24": "missing: --batch",
    "optimize --config ok.yaml --gpu T4 --output ok.yaml": "another name",
    "optimize --config ok.yaml --gpu T4 --output folder": "folder",
    "optimize --config ok.yaml --gpu T4 --output ok.py/x.yaml": "not written",
    "optimize --config ok.yaml --gpu T4 --step nothing": "module:callable",
    "optimize --config ok-bare.yaml --gpu T4 --benchmark": "--step",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hostile")
    for name, content in FILES.items():
        (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (made / "folder").mkdir()
    write_cogvideox(made / "okay", SMALL, SMALL_TEXT)
    (made / "folder.png").mkdir()
    return made


def faults(arguments, language, capsys):
    """What is wrong with the answer to a bad command line."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:  # noqa: BLE001 - a traceback is what this looks for
        capsys.readouterr()
        return f"{type(error).__name__}: {error}"[:200]
    out, err = capsys.readouterr()
    if code != 2:
        return f"exit code {code}"
    if out:
        return f"an answer: {out[:60]}"
    if err.count("\n") != 1 or not err.endswith("\n"):
        return f"{err.count(chr(10))} lines: {err[:200]}"
    if not err.startswith("vram-guard"):
        return f"whose it is: {err}"
    if re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]|\\{[a-z_]+\\}", err):
        return f"controls, or a placeholder: {err!r}"
    if language == CHINESE and not re.search("[\u4e00-\u9fff]", err):
        return f"not Chinese: {err}"
    return ""


@pytest.mark.parametrize("language", [ENGLISH, CHINESE])
def test_one_clear_line_and_exit_code_2(language, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("VRAM_GUARD_LANG", language)
    found = {}
    for arguments in cases():
        if fault := faults(arguments, language, capsys):
            found[tuple(word[:40] for word in arguments)] = fault
    assert not found, f"{len(found)}:\n" + "\n".join(f"{' '.join(words)!r}: {fault}" for words, fault in found.items())


def test_what_is_wrong_is_named(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    found = {}
    for line, named in NAMED.items():
        with contextlib.suppress(SystemExit):  # argparse's own
            cli.main(shlex.split(line))
        said = capsys.readouterr()
        if named not in said.err or said.out:
            found[line] = said
    assert not found


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("plan --margn 0.1", "--margin"),
        ("estimate --buget 1GiB", "--budget"),
        ("gpus --jsn", "--json"),
        ("estmate", "estimate"),
        ("mmengine compar", "compare"),
        ("launch --buget 24GiB train.py", "--budget"),
    ],
)
def test_the_nearest_right_one_is_named(typed, meant, capsys):
    with pytest.raises(SystemExit):
        cli.main(typed.split())
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["plan model.py:net --batch 8 --gpu RTX 4090", "plan gpt2 --batch 8 --budget 24 GB"])
def test_a_value_in_two_words_is_told_to_be_quoted(typed, capsys):
    with pytest.raises(SystemExit):
        cli.main(typed.split())
    assert f"{typed.split()[-1]}; if they belong to a value: one with spaces needs quotes" in capsys.readouterr().err


def test_a_model_that_no_installed_library_has_is_no_missing_file_alone(monkeypatch, capsys):
    """The documentation names `plan resnet50`: where torchvision is missing, that is what to know."""
    monkeypatch.setattr("vram_guard.capture.model_names.absent_libraries", lambda: ["torchvision"])
    monkeypatch.setattr("vram_guard.capture.model_names.library_of", lambda _name: None)
    assert cli.main(["plan", "resnet50", "--batch", "8", "--gpu", "4090"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vram-guard: the model resnet50 is unknown")
    assert "Not installed here" in said
    assert "torchvision" in said


def run(shell, **environment):
    """A command in a shell of its own, where a stream can be closed; $VG is vram-guard."""
    own = {name: value for name, value in os.environ.items() if name not in environment}
    own |= {name: value for name, value in environment.items() if value is not None}
    command = f"{sys.executable} -m vram_guard.cli"
    return subprocess.run(["bash", "-c", shell], env={**own, "VG": command}, capture_output=True, check=False)


@each(
    ("shell", "code", "environment"),
    [
        ("$VG gpus >&-", 0, {}),
        ("$VG gpus > /dev/full", 3, {}),
        ("set -o pipefail; $VG gpus | true", 0, {}),
        ("$VG gpus nothing-like-it 2>&-", 2, {}),
        ("$VG gpus $'\\xff\\xfe'", 2, {}),
        ("$VG gpus > /dev/null", 0, {"HOME": None, "XDG_CACHE_HOME": None}),
        ("$VG gpus > /dev/null", 0, {"HOME": "/proc/nothing", "VRAM_GUARD_CACHE": "/proc/nothing"}),
        ("$VG gpus nothing-like-it", 2, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}),
        ("d=$(mktemp -d); cd $d; rmdir $d; $VG gpus > /dev/null", 0, {}),
    ],
)
def test_streams_and_surroundings(shell, code, environment):
    done = run(shell, **environment)
    said = done.stderr.decode()
    assert (done.returncode, "Traceback" in said, "Exception" in said) == (code, False, False), said
    assert said.count("\n") == (1 if code and "2>&-" not in shell else 0), said


# --- one grammar of options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("plan", "ok.yaml"), ("plan", "--config", "ok.yaml"), ("estimate", "ok.yaml")])
@pytest.mark.parametrize("amount", [("--gpu-memory", "24GiB", "--margin", "0.1"), ("--budget", "24GiB")])
def test_both_ways_to_name_a_config_and_every_amount(arguments, amount, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert cli.main([*arguments, *amount, "--batch", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    symbolic = answer["report"] if "report" in answer else answer["symbolic"]
    assert '"batch_size": 2' in json.dumps(symbolic)


def test_the_language_behind_a_command(capsys):
    for words in (["gpus", "--language", "zh", "4090"], ["--lang=zh", "gpus", "4090"]):
        assert cli.main(words) == 0
        assert "架构" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["mmengine", "--lang", "zh"])
    assert "vram-guard mmengine" in capsys.readouterr().err


def test_margin_of_the_cards(capsys):
    assert cli.main(["gpus", "--gpu", "4090", "--margin", "0.5", "--json"]) == 0
    (half,) = json.loads(capsys.readouterr().out)["gpus"]
    assert cli.main(["gpus", "4090", "--margin", "0", "--json"]) == 0
    (whole,) = json.loads(capsys.readouterr().out)["gpus"]
    assert half["usable_bytes"] == pytest.approx(whole["usable_bytes"] / 2, rel=1e-6)
