"""``vram-guard optimize``: real config files in people's own styles, real steps, and files that want to do harm."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from each import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vram_guard import TrainingStep, cli, trace
from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.optimize.batch import choose_batch, chosen_by_measurement, smallest_of_the_fastest
from vram_guard.optimize.document import ConfigChange, Document
from vram_guard.optimize.names import SETTINGS, find
from vram_guard.optimize.rules import Advice, Situation, usable_cores
from vram_guard.watch import throughput
from vram_guard.watch.throughput import MeasuredBatch, measure

STEP = """
import torch
from torch import nn
from vram_guard import TrainingStep

def step(base_channels=8, patch_size=32, lr=1e-4):
    return TrainingStep(
        model=lambda: nn.Sequential(nn.Conv2d(3, base_channels, 3, padding=1), nn.ReLU(),
                                    nn.Conv2d(base_channels, 3, 3, padding=1)),
        batch=lambda n: torch.rand(n, 3, patch_size, patch_size),
        loss=lambda net, images: (net(images) - images).abs().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=float(lr)),
    )
"""

GUIDE = """\
# Super-resolution, the small one
step: sr.py:step

model: {base_channels: 16, num_blocks: 4}   # width, depth

# data
train:
    batch_size: 16      # per GPU
    patch_size: 64
    num_workers: 0
    lr: 1e-4            # AdamW
    use_mixed_precision: false

val:
    batch_size: 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project of the user's own: a config and a step, and the shell in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sr.py").write_text(STEP)
    (tmp_path / "lightweight_config.yaml").write_text(GUIDE)
    monkeypatch.setattr("vram_guard.optimize.rules.usable_cores", lambda: 8)
    return tmp_path


def optimized(folder: Path, *arguments: str) -> str:
    """What is written; by default for a card by name."""
    assert cli.main(["optimize", "--config", "lightweight_config.yaml", "--gpu", "RTX 4090", *arguments]) == 0
    return (folder / "lightweight_gpu_optimized.yaml").read_text()


def changed_lines(before: str, after: str) -> tuple[list[str], list[str]]:
    lines = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    return [line[2:] for line in lines if line[0] == "-"], [line[2:] for line in lines if line[0] == "+"]


# --- the whole, as the guide has it ---


def test_the_guides_config_for_a_named_gpu(folder, capsys):
    after = optimized(folder)
    removed, new = changed_lines(GUIDE, after)
    values = yaml.safe_load(after)["train"]
    assert values["num_workers"] == 7
    assert values["pin_memory"] is values["persistent_workers"] is values["use_mixed_precision"] is True
    assert values["prefetch_factor"] == 4
    assert values["compile_model"] is True
    assert values["grad_clip"] == 1.0
    factor = values["batch_size"] / 16
    assert factor > 1
    assert float(values["lr"]) == pytest.approx(1e-4 * factor)
    assert yaml.safe_load(after)["val"] == {"batch_size": 1}
    # Nothing else: every line that went is one of those that changed, and comments stayed.
    assert [line.split(":")[0].strip() for line in removed] == [
        "batch_size",
        "num_workers",
        "lr",
        "use_mixed_precision",
    ]
    assert any(line.endswith("# per GPU") for line in new)
    out = capsys.readouterr().out
    assert "-    num_workers: 0" in out
    assert "8 processors here" in out
    assert "the linear rule" in out
    assert "samples per second by the step-time model" in out


def test_what_is_written_is_written_whole_and_the_source_is_left(folder):
    optimized(folder)
    assert (folder / "lightweight_config.yaml").read_text() == GUIDE
    assert sorted(path.name for path in folder.glob("*.yaml")) == [
        "lightweight_config.yaml",
        "lightweight_gpu_optimized.yaml",
    ]


def test_a_second_run_changes_nothing_more(folder):
    once = optimized(folder)
    (folder / "lightweight_config.yaml").write_text(once)
    assert "num_workers: 7" in optimized(folder)


def test_json_and_dry_run(folder, capsys):
    assert cli.main(["optimize", "--config", "lightweight_config.yaml", "--gpu", "T4", "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["written"] is None
    assert not (folder / "lightweight_gpu_optimized.yaml").exists()
    by_setting = {change["setting"]: change for change in answer["changes"]}
    assert by_setting["workers"] == {
        "setting": "workers",
        "path": "train.num_workers",
        "old": 0,
        "new": 7,
        "added": False,
        "reason": by_setting["workers"]["reason"],
    }
    assert "no bfloat16" in by_setting["precision"]["reason"]  # a T4 is Turing


def test_a_card_too_old_for_half_precision_and_triton(folder):
    cli.main(["optimize", "--config", "lightweight_config.yaml", "--gpu", "GTX 1080"])
    values = yaml.safe_load((folder / "lightweight_gpu_optimized.yaml").read_text())["train"]
    assert values["use_mixed_precision"] is False
    assert "compile_model" not in values


def test_without_a_model_the_batch_stays_and_it_is_said(folder, capsys):
    (folder / "lightweight_config.yaml").write_text(GUIDE.replace("step: sr.py:step", ""))
    assert "batch_size: 16" in optimized(folder)
    assert "names no model that can be built" in capsys.readouterr().out
    assert "batch_size: 16" not in optimized(folder, "--step", "sr.py:step")


# --- the batch ---


@pytest.fixture(scope="module")
def timeline():
    namespace: dict = {}
    exec(STEP, namespace)
    return trace(namespace["step"]())


def test_a_batch_that_is_too_large_is_split_or_made_smaller(timeline):
    budget = Budget.of(timeline.at(24).peak_reserved, margin=0)
    largest = timeline.max_batch_size(budget)
    split = choose_batch(timeline, 96, budget, accumulate=2, can_accumulate=True)
    assert 96 % split.batch_size == 0
    assert split.batch_size <= largest
    assert split.batch_size * split.accumulate == 96 * 2
    smaller = choose_batch(timeline, 96, budget)
    assert (smaller.batch_size, smaller.accumulate) == (largest, 1)
    nothing = choose_batch(timeline, 96, Budget.of("1MiB", margin=0))
    assert not nothing.fits
    assert nothing.batch_size == 96


def test_a_larger_batch_stays_within_the_target(timeline):
    budget = Budget.of(timeline.at(200).peak_reserved, margin=0)
    chosen = choose_batch(timeline, 2, budget)
    assert timeline.at(chosen.batch_size).peak_reserved <= 0.8 * budget.total
    assert choose_batch(timeline, 190, budget).batch_size == 190


@pytest.fixture
def larger_is_faster(monkeypatch):
    """Every larger batch is faster, so that only the limits decide."""
    speeds = "vram_guard.optimize.batch.modelled_speeds"
    monkeypatch.setattr(speeds, lambda _timeline, sizes, _budget: {size: float(size) for size in sizes})


@pytest.mark.usefixtures("larger_is_faster")
def test_a_batch_grows_to_eight_times_what_it_was_and_no_further(timeline):
    assert choose_batch(timeline, 3, Budget.of("1GiB", margin=0)).batch_size == 8 * 3


@pytest.mark.usefixtures("larger_is_faster")
def test_no_batch_reaches_into_the_margin(timeline):
    peak = timeline.replay(400).peak_reserved
    margin = Budget.of(2 * peak, margin=0.6)  # all of it would hold 400, what the margin leaves does not
    assert margin.usable < peak
    assert choose_batch(timeline, 100, margin).batch_size == 200


def test_of_equally_fast_batches_the_smallest():
    assert smallest_of_the_fastest({8: 100.0, 16: 198.0, 32: 200.0, 64: 150.0}) == 16
    assert smallest_of_the_fastest({8: 100.0}) == 8
    assert smallest_of_the_fastest({8: 95.0, 16: 100.0}) == 8  # as close as clocks can tell
    assert smallest_of_the_fastest({8: 94.9, 16: 100.0}) == 16


def test_the_config_that_fits_nowhere_ends_with_1(folder, capsys):
    assert cli.main(["optimize", "--config", "lightweight_config.yaml", "--budget", "1MiB"]) == 1
    said = capsys.readouterr().out
    (needs,) = re.findall(r"not even one sample fits: \S+ MiB of (.*)$", said, re.MULTILINE)
    assert f"For {needs} usable; 1.00 MiB" in said  # the amount that the batch was held against, with its own margin


# --- other people's styles ---


def rewritten(tmp_path: Path, text: str, changes: dict[tuple[str, ...], object], *added) -> str:
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode())
    new = [ConfigChange("x", (*behind[:-1], key), None, value, behind=behind) for behind, key, value in added]
    return Document(path).rewritten([*(ConfigChange("x", place, 0, value) for place, value in changes.items()), *new])


@each(
    ("text", "place", "value", "wanted"),
    [
        ("lr: 1e-4 # x\n", ("lr",), 2e-4, "lr: 0.0002 # x\n"),
        ("lr: 0.0001\n", ("lr",), 2e-5, "lr: 0.00002\n"),
        ("lr: 3\n", ("lr",), 6.0, "lr: 6.0\n"),
        ("lr: '1e-4'\n", ("lr",), 4e-4, "lr: '0.0004'\n"),
        ("a:\r\n  b: 1\r\nc: 2\r\n", ("a", "b"), 7, "a:\r\n  b: 7\r\nc: 2\r\n"),
        ("b:\nc: 2", ("b",), True, "b: true\nc: 2"),
        ("{a: {b: 1}, c: 2}", ("a", "b"), 7, "{a: {b: 7}, c: 2}"),
        ('{"a": 1,\n "b": false}\n', ("b",), True, '{"a": 1,\n "b": true}\n'),
        ("# 训练\n批量: 4\n", ("批量",), 8, "# 训练\n批量: 8\n"),
        ("\ufeffa: 1\n", ("a",), 2, "\ufeffa: 2\n"),
        ("a: 1   \n\n\n# end\n", ("a",), 2, "a: 2   \n\n\n# end\n"),
        ("p: 32-true\n", ("p",), "bf16-mixed", "p: bf16-mixed\n"),
        ("p: x\n", ("p",), "no", 'p: "no"\n'),
        ("p: 'no'\n", ("p",), "bf16", "p: 'bf16'\n"),
        ("7: 1\n", ("7",), 2, "7: 2\n"),
    ],
)
def test_one_value_changes_and_not_a_byte_more(tmp_path, text, place, value, wanted):
    assert rewritten(tmp_path, text, {place: value}) == wanted


def test_added_entries_stand_behind_their_neighbour(tmp_path):
    text = "t:\n    a: 1  # one\n    b: [1, 2]\nz: 0"
    assert rewritten(tmp_path, text, {}, (("t", "a"), "n", 3), (("t", "a"), "m", True)) == (
        "t:\n    a: 1  # one\n    n: 3\n    m: true\n    b: [1, 2]\nz: 0"
    )
    assert rewritten(tmp_path, text, {("z",): 5}, (("z",), "q", 1)) == text[:-1] + "5\nq: 1"
    (tmp_path / "flow.yaml").write_text('{"a": 1, "b": 2}')
    assert not Document(tmp_path / "flow.yaml").can_add_behind(("a",))


def test_anchors_tags_and_blocks_are_left_alone(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "base: &base {batch_size: 4, lr: 0.1}\ntrain:\n  <<: *base\n  n: &n 3\n  text: |\n    x\nm: *n\nok: 1\n"
    )
    editable = {entry.path for entry in Document(path).entries() if entry.editable}
    assert editable == {"ok"}
    assert {entry.path for entry in Document(path).entries()} >= {"base.batch_size", "train.n", "m"}


def test_an_anchored_batch_is_not_touched_and_it_is_said(folder, capsys):
    (folder / "lightweight_config.yaml").write_text("step: sr.py:step\nbatch_size: &b 16\nother: *b\nnum_workers: 0\n")
    assert "batch_size: &b 16" in optimized(folder)
    assert "shared by an anchor" in capsys.readouterr().out


KEYS = st.text("abcdefgh_", min_size=1, max_size=6)
SCALARS = st.one_of(st.integers(-(10**6), 10**6), st.booleans(), st.sampled_from(["x", "no", "1e-4", "a b", "#", ""]))
TREES = st.recursive(
    st.dictionaries(KEYS, SCALARS, min_size=1, max_size=4),
    lambda inner: st.dictionaries(
        KEYS, st.one_of(SCALARS, inner, st.lists(SCALARS, max_size=3)), min_size=1, max_size=4
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tree=TREES,
    flow=st.sampled_from([None, True, False]),
    new=st.one_of(st.integers(0, 99), st.booleans()),
    at=st.integers(0),
)
def test_any_config_any_value(tmp_path, tree, flow, new, at):
    """Whatever the file looks like, changing one value changes that value and nothing else that YAML reads."""
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump(tree, default_flow_style=flow, sort_keys=False))
    entries = [entry for entry in Document(path).entries() if entry.editable]
    if not entries:
        return
    entry, document = entries[at % len(entries)], Document(path)
    changes = [ConfigChange("x", entry.place, entry.value, new)]
    adds = document.can_add_behind(entry.place)
    if adds:
        changes.append(ConfigChange("y", (*entry.place[:-1], "zzz"), None, 1.5, behind=entry.place))
    text = document.rewritten(changes)
    wanted = yaml.safe_load(path.read_text())
    inner = wanted
    for key in entry.place[:-1]:
        inner = inner[key]
    inner[entry.place[-1]] = new
    inner.update({"zzz": 1.5} if adds else {})
    assert yaml.safe_load(text) == wanted


@each(
    ("text", "settings", "wanted"),
    [
        ("precision: 32\nbatch_size: 4\n", {}, {"precision": "bf16-mixed"}),
        ("mixed_precision: 'no'\nbatch_size: 4\n", {}, {"mixed_precision": "bf16"}),
        ("fp16: false\nbf16: false\nper_device_train_batch_size: 4\n", {}, {"fp16": False, "bf16": True}),
        ("fp16: false\nbf16: false\nbatch: 4\n", {"capability": (7, 5)}, {"fp16": True, "bf16": False}),
        ("precision: strange\nbatch_size: 4\n", {}, {"precision": "strange"}),
        ("batch_size: 4\nnum_workers: 99\n", {}, {"num_workers": 3}),
        ("batch_size: 4\nnum_workers: 2\nprefetch_factor: 8\n", {}, {"num_workers": 2, "prefetch_factor": 8}),
        ("batch_size: 4\nnum_workers: -1\n", {}, {"num_workers": -1}),
        ("batch_size: 4\nnum_workers: [1]\n", {}, {"num_workers": [1]}),
        ("batch_size: 4\nnum_workers: 2\nprefetch_factor: fast\n", {}, {"prefetch_factor": "fast"}),
        ("batch_size: 4\ngrad_clip: null\n", {}, {"grad_clip": 1.0}),
        ("batch_size: 4\ngrad_clip: 0\n", {}, {"grad_clip": 0}),
        ("train_batch_size: 4\ndataloader_num_workers: 1\n", {}, {"dataloader_pin_memory": True}),
    ],
)
def test_settings_by_the_names_that_people_use(tmp_path, text, settings, wanted):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    document = Document(path)
    advice = Advice(document, find(document.entries()), Situation(**{"cores": 4, "capability": (8, 9), **settings}))
    values = yaml.safe_load(document.rewritten(advice.changes))
    assert {name: values[name] for name in wanted} == wanted
    if values.get("num_workers") == 0:  # torch refuses both without workers
        assert "prefetch_factor" not in values
        assert "persistent_workers" not in values


def test_the_written_loader_settings_are_ones_that_torch_takes(folder, monkeypatch):
    monkeypatch.setattr("vram_guard.optimize.rules.usable_cores", lambda: 1)  # torch warns of more than there are
    values = yaml.safe_load(optimized(folder))["train"]
    names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    torch.utils.data.DataLoader([1, 2], **{name: values[name] for name in names})


def test_which_batch_size_is_meant(tmp_path):
    def found(text: str) -> list[str]:
        (tmp_path / "c.yaml").write_text(text)
        return [entry.path for entry in find(Document(tmp_path / "c.yaml").entries()).get("batch_size", [])]

    assert found("test: {batch_size: 1}\ndata: {batch_size: 2}\n") == ["data.batch_size"]
    assert found("a: {batch_size: 1}\ntrain_loader: {batch_size: 2}\n") == ["train_loader.batch_size"]
    assert found("batch_size: 1\na: {batch_size: 2}\n") == ["batch_size"]
    with pytest.raises(InvalidInputError, match="may be any of"):
        found("a: {batch_size: 1}\nb: {batch_size: 2}\n")


def test_every_learning_rate_is_scaled(tmp_path):
    (tmp_path / "c.yaml").write_text("batch_size: 4\noptim: {lr: 0.1}\nhead: {lr: 1e-3}\nval: {lr: 7}\n")
    document = Document(tmp_path / "c.yaml")
    from vram_guard.optimize.batch import BatchChoice

    situation = Situation(4, (8, 0), batch=BatchChoice(16, 1, "why"), lr_rule="sqrt")
    advice = Advice(document, find(document.entries()), situation)
    values = yaml.safe_load(document.rewritten(advice.changes))
    assert values["optim"]["lr"] == pytest.approx(0.2)
    assert float(values["head"]["lr"]) == pytest.approx(2e-3)
    assert values["val"]["lr"] == 7


# --- configs whose keys are arguments ---

CLI = """\
seed_everything: 1
trainer:
  max_epochs: 3    # short
  precision: {precision}
model:
  class_path: sr.Net
  init_args: {{base_channels: 16}}
data:
  class_path: sr.Data
  init_args:
    batch_size: 524288
    num_workers: 0
optimizer:
  class_path: torch.optim.AdamW
  init_args: {{lr: 1.0e-4}}
"""


def test_only_entries_that_are_there_change_in_a_lightning_cli_config(folder, capsys):
    (folder / "lightweight_config.yaml").write_text(CLI.format(precision="32-true"))
    before = yaml.safe_load(CLI.format(precision="32-true"))
    after = yaml.safe_load(optimized(folder, "--step", "sr.py:step"))
    batch = after["data"]["init_args"].pop("batch_size")
    assert batch < before["data"]["init_args"].pop("batch_size")
    assert after["optimizer"]["init_args"].pop("lr") < before["optimizer"]["init_args"].pop("lr")
    before["trainer"]["precision"] = "bf16-mixed"
    before["data"]["init_args"]["num_workers"] = 7
    assert after == before
    assert "clip: the config has no such entry" in capsys.readouterr().out


@pytest.mark.parametrize("written", [True, False])
def test_of_existing_settings_only_an_accumulation_that_is_written_may_split_the_batch(folder, written):
    text = CLI.format(precision="32-true")
    text = text.replace("max_epochs: 3", "accumulate_grad_batches: 1") if written else text
    (folder / "lightweight_config.yaml").write_text(text)
    after = yaml.safe_load(optimized(folder, "--step", "sr.py:step"))
    parts = after["trainer"].get("accumulate_grad_batches", 1)
    assert (parts > 1) is written
    assert (after["data"]["init_args"]["batch_size"] * parts == 524288) is written


def test_entries_that_refer_to_others_are_left_alone(folder, capsys):
    text = (
        "pin: false\ntrainer: {_target_: T}\ndata: {_target_: sr.Data, batch_size: 4, num_workers: 0, pin_memory: %s}\n"
    )
    (folder / "lightweight_config.yaml").write_text(text % "'${pin}'")
    after = yaml.safe_load(optimized(folder, "--step", "sr.py:step"))
    assert after["data"]["pin_memory"] == "${pin}"
    assert after["data"]["num_workers"] == 7
    assert "pin_memory: its present value is not recognised" in capsys.readouterr().out


# --- bad input: refused before any work, nothing written ---


@each(
    ("text", "said"),
    [
        ("batch_size: -3\n", "batch_size must be between 1"),
        ("batch_size: many\n", "batch_size must be"),
        ("batch_size: true\n", "batch_size must be"),
        ("batch_size: 1.5\n", "batch_size must be"),
        ("batch_size: 99999999999999999999\n", "batch_size must be"),
        ("batch_size: 4\naccumulation_steps: 0\n", "accumulation_steps must be"),
        ("x: 1\nbatch_size: 4\nlr: -1\n", "line 3: lr is -1"),
        ("batch_size: 4\nlr: .inf\n", "above 0"),
        ("batch_size: 4\nlr: fast\n", "above 0"),
        ("lr: 0.1\n", "no batch size"),
    ],
)  # fmt: skip
def test_bad_configs(folder, capsys, text, said):
    (folder / "lightweight_config.yaml").write_text(text)
    assert cli.main(["optimize", "--config", "lightweight_config.yaml", "--gpu", "RTX 4090"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err) < 2000
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".py") == ["lightweight_config.yaml"]


def test_an_unknown_gpu_and_none_at_all(folder, capsys, monkeypatch):
    assert cli.main(["optimize", "--config", "lightweight_config.yaml", "--gpu", "RTX 4099"]) == 2
    assert "RTX 4090" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["optimize", "--config", "lightweight_config.yaml"]) == 3
        assert "No GPU can be read" in capsys.readouterr().err


def test_the_limit_of_a_container(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert usable_cores(tmp_path / "cpu.max") == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path / "cpu.max") == usable_cores(tmp_path / "missing") >= 1


def test_settings_have_distinct_names():
    names = [name for known in SETTINGS.values() for name in known]
    assert len(names) == len(set(names))


# --- measuring ---


def small_step(**more) -> TrainingStep:
    namespace: dict = {}
    exec(STEP, namespace)
    return namespace["step"]().with_(**more)


@pytest.fixture
def patient(monkeypatch):
    """Every size is measured, for a moment."""
    monkeypatch.setattr(throughput, "SECONDS", 0.02)
    monkeypatch.setattr(throughput, "PATIENCE", 9)


@pytest.mark.usefixtures("patient")
def test_throughput_of_real_steps():
    told: list[MeasuredBatch] = []
    results = measure(small_step(accumulate=2), [4, 1, 2], "cpu", tell=told.append)
    assert results == told
    assert [one.batch_size for one in results] == [1, 2, 4]
    for one in results:
        assert one.steps >= throughput.FEWEST
        assert one.samples_per_second == pytest.approx(2 * one.batch_size / one.seconds)
        assert one.spread >= 0


@pytest.mark.usefixtures("patient")
def test_an_example_batch_mixed_precision_and_clipping():
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    step = TrainingStep(
        model=model,
        batch=torch.ones(2, 4),
        loss=lambda net, x: net(x).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        precision="bf16-mixed",
        clip_grad_norm=1.0,
        clip_grad_value=0.5,
    )
    (one,) = measure(step, [6], "cpu")
    assert one.samples_per_second > 0
    assert torch.equal(model.weight, before)  # the user's own model is not trained


@pytest.mark.usefixtures("patient")
def test_memory_that_runs_out_ends_the_search_and_is_cleaned_up():
    """A step that really asks for more than there is, from a batch of 8 on."""
    seen = []

    def loss(net, images):
        seen.append(len(images))
        if len(images) >= 8:
            torch.empty(2**60, dtype=torch.uint8)
        return (net(images) - images).abs().mean()

    results = measure(small_step(loss=loss), [2, 4, 8, 16], "cpu")
    assert [one.batch_size for one in results] == [2, 4, 8]
    assert "memory" in results[-1].failure
    assert results[-1].samples_per_second is None
    assert 16 not in seen
    choice = chosen_by_measurement(results, 1, "here")
    assert choice.batch_size in (2, 4)
    with pytest.raises(InvalidInputError, match="no batch size ran"):
        chosen_by_measurement(results[-1:], 1, "here")


def test_another_error_is_not_swallowed():
    def loss(net, images):
        raise ValueError("a slip of the user's")

    with pytest.raises(ValueError, match="a slip"):
        measure(small_step(loss=loss), [2], "cpu")
    with pytest.raises(UnsupportedStepError, match="optimizer"):
        measure(small_step(optimizer=None), [2], "cpu")


def test_nothing_gained_ends_the_search(monkeypatch):
    monkeypatch.setattr(
        throughput, "_one_size", lambda loop, size, device: MeasuredBatch(size, 1.0, 100.0, 0.0, 3, None)
    )
    assert [one.batch_size for one in measure(small_step(), [1, 2, 4, 8, 16], "cpu")] == [1, 2, 4]


@pytest.mark.usefixtures("patient")
def test_the_guides_benchmark(folder, capsys, monkeypatch):
    """The batch that is written is one that was measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["optimize", "--config", "lightweight_config.yaml", "--benchmark", "--gpu", "RTX 4090", "--json"]
    assert cli.main(arguments) == 0
    run = capsys.readouterr()
    answer = json.loads(run.out)
    sizes = [one["batch_size"] for one in answer["measured"]]
    assert sizes == sorted(sizes)
    assert 4 in sizes
    written_batch = yaml.safe_load((folder / "lightweight_gpu_optimized.yaml").read_text())["train"]["batch_size"]
    assert written_batch in sizes
    assert "samples/s" in run.err
    assert "the CPU's" in run.err
