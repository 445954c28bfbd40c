"""Timelines that are there before anything is traced: what is written is what is read, and what a trace says."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vram_guard import Budget, TrainingStep, plan, trace
from vram_guard.known.architectures import LENGTH_STEP, Variant, architecture, architectures, timelines_of, variants_of
from vram_guard.known.form import packed, unpacked
from vram_guard.plan.as_written import plan_as_written
from vram_guard.simulate import trace_at


class Reader(nn.Module):
    """Embeds tokens, and looks at all pairs of them."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(512, 64), nn.Linear(64, 512)

    def forward(self, tokens):
        states = self.embed(tokens)
        scores = (states @ states.transpose(1, 2)).softmax(-1)
        return self.out(scores @ states)


def reading(length):
    return TrainingStep(
        model=Reader,
        batch=lambda size: torch.zeros(size, length, dtype=torch.long),
        loss=lambda model, tokens: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()),
        optimizer=torch.optim.AdamW,
    )


@pytest.fixture(scope="module")
def text():
    return packed({length: trace(reading(length)) for length in (64, 128, 256)}, covers=(32, 512))


@settings(max_examples=8, deadline=None)
@given(length=st.integers(2, 32).map(lambda number: 16 * number), size=st.integers(2, 40))
def test_every_length_and_batch_is_what_a_trace_says(text, length, size):
    traced, known = trace_at(reading(length), size), unpacked(text, length)
    assert known.events == traced.events
    assert known.sizes(size) == traced.sizes(size)
    assert [(b.category, b.module, b.operator, b.source) for b in known.blocks] == [
        (b.category, b.module, b.operator, b.source) for b in traced.blocks
    ]
    assert known.at(size).peak_reserved == traced.at(size).peak_reserved


def test_it_is_the_same_on_cards_that_answer_alike(text):
    known = unpacked(text, 64)
    for card in ("RTX 4090", "A100 80GB", "H100 PCIe"):
        gpu = Budget.of(card).gpu
        traced = trace(reading(64), compute_capability=gpu.compute_capability)
        served = known.of_capability(gpu.compute_capability)
        assert (served is not None) == (trace(reading(64)).of_capability(gpu.compute_capability) is not None)
        if served is not None:
            where = gpu.multiprocessors, gpu.placement
            assert served.on(*where).at(8).peak_reserved == traced.on(*where).at(8).peak_reserved


def test_what_follows_no_law_is_not_written():
    def by_value(length):
        return reading(length).with_(loss=lambda model, tokens: model(tokens[: 1 + tokens.shape[0] // 3]).sum())

    assert packed({64: trace(by_value(64))}) is None
    uneven = {length: trace(reading(length)) for length in (64, 128)}
    uneven[256] = trace(reading(256).with_(accumulate=2))
    assert packed(uneven) is None


def test_other_lengths_are_not_answered_and_damage_is_an_error(text):
    assert unpacked(text, 31) is None
    assert unpacked(text, 513) is None
    document = json.loads(text)
    others = [json.dumps({**document, **change}) for change in ({"version": 0}, {"kinds": 3}, {"blocks": [10**6]})]
    for damaged in ("{}", "[]", text[:-9], *others):
        with pytest.raises(ValueError, match=r"damaged|another version|char"):
            unpacked(damaged, 64)


# --- published architectures ------------------------------------------------------------------------------------------


def kept(name, *variants):
    """The timelines of an architecture, of whichever of its variants and lengths are there."""
    return [
        (variant, timeline)
        for variant in variants
        for length in (512, None)
        for timeline in timelines_of(name, variant, length)
    ]


FULL = [
    Variant(dtype, precision, "", checkpointing)
    for dtype, precision in (
        ("float32", "32-true"),
        ("float32", "bf16-mixed"),
        ("bfloat16", "bf16-true"),
        ("float16", "16-true"),
    )
    for checkpointing in (False, True)
]


def test_names_are_unique_and_lead_to_their_architecture():
    names = [name.lower() for one in architectures() for name in (one.name, *one.aliases)]
    assert len(names) == len(set(names))
    assert all(architecture(name.upper()) is not None for name in names)
    assert architecture("llama-9-8b") is None


def test_every_architecture_has_timelines():
    assert not [one.name for one in architectures() if not variants_of(one.name)]


def test_timelines_have_as_many_parameters_as_were_published():
    wrong, found = [], 0
    for one in architectures():
        for variant, timeline in kept(one.name, *FULL) if one.parameters else ():
            found += 1
            sizes = [block.size.base for block in timeline.blocks if block.category == "parameters"]
            if sum(sizes) != one.parameters * (4 if variant.dtype == "float32" else 2):
                wrong.append((one.name, variant, sum(sizes)))
    assert found > 15
    assert not wrong


def main_releases(timeline):
    """Of torch and transformers, without what a build adds to them."""
    packages = dict(timeline.releases.packages)
    return [packages.get(name, "").split("+")[0] for name in ("torch", "transformers")]


@pytest.mark.parametrize(
    ("name", "variant", "length", "size"),
    [
        ("gpt2", Variant("float32", "bf16-mixed", "", True), 3 * LENGTH_STEP, 11),
        ("vit-b-16", Variant("float32", "32-true", optimizer="sgd"), None, 19),
        ("qwen2.5-0.5b", Variant("bfloat16", "bf16-mixed", "lora"), 5 * LENGTH_STEP, 5),
    ],
)
def test_a_published_architecture_is_what_a_trace_says(name, variant, length, size):
    """To the byte, at a length and a batch that nothing was made of; where this release is the one it was made with."""
    pytest.importorskip("transformers")
    if variant.adapters:
        pytest.importorskip("peft")
    from vram_guard.capture.hugging_face import step_of
    from vram_guard.capture.lora import AdapterWeights
    from vram_guard.capture.named_optimizer import named_optimizer
    from vram_guard.closed_form.inputs import InputSizes

    weights = AdapterWeights(variant.dtype, {} if variant.adapters else None)
    step = step_of(
        architecture(name).config, InputSizes(seq_length=length), weights, checkpointing=variant.checkpointing
    ).with_(precision=variant.precision, optimizer=named_optimizer(variant.optimizer))
    known = list(timelines_of(name, variant, length))
    assert known
    for timeline in known:
        traced = trace_at(step, size, compute_capability=timeline.compute_capability)
        if main_releases(timeline) != main_releases(traced):
            pytest.skip(f"made with {timeline.releases}, and here is {traced.releases}")
        assert traced.events == timeline.events
        assert traced.sizes(size) == timeline.sizes(size)
        assert traced.at(size).peak_reserved == timeline.at(size).peak_reserved


def test_the_plan_of_a_known_timeline_is_the_plan_of_its_step():
    budget = Budget.of("64MiB")
    step = reading(64)
    known, traced = plan_as_written(trace(step), 8, budget), plan(step, 8, budget)
    assert known == traced
    assert known.fits
    assert known.reasons == traced.reasons
    assert plan_as_written(trace(step), 4096, budget) is None


def test_a_published_architecture_is_answered_without_torch(tmp_path):
    """Commands whose answer is there import no torch: here is one that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    answers = {}
    asked = ["--model", "openai-community/GPT2", "--seq-length", "512", "--batch", "8", "--gpu", "RTX4090", "--json"]
    for command in ("estimate", "plan"):
        ran = subprocess.run(
            [sys.executable, "-m", "vram_guard.cli", command, *asked],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        answers[command] = json.loads(ran.stdout)
    assert answers["estimate"]["fits"]
    peaks = answers["estimate"]["symbolic"], answers["plan"]["report"]
    assert peaks[0]["estimate"]["peak_reserved"] == peaks[1]["before"]["peak_reserved"]
