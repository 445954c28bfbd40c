"""Make the timelines of published architectures that the package brings along: ``make known``.

Each variant of an architecture is traced at two batch sizes and three lengths, which give a timeline for every batch
and length, and at others, which check it. What follows no law is left out, and is traced where it is asked for.

    python tools/known_timelines.py [NAME ...]
"""

from __future__ import annotations

import json
import lzma
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vram_guard.capture.hugging_face import step_of
from vram_guard.capture.lora import AdapterWeights
from vram_guard.capture.named_optimizer import named_optimizer
from vram_guard.closed_form.inputs import InputSizes, sizes_read
from vram_guard.known.architectures import LENGTH_STEP, Architecture, Variant, architectures
from vram_guard.known.form import packed, unpacked
from vram_guard.simulate import holds_at, law_of_two
from vram_guard.simulate.device.capability import Capability
from vram_guard.simulate.tracing.run import run_step, with_built_model
from vram_guard.step import TrainingStep
from vram_guard.timeline import Timeline

FOLDER = Path(__file__).parents[1] / "vram_guard" / "known" / "timelines"

#: One of each class of compute capabilities for which kernels differ: Ampere and Ada, Hopper.
CAPABILITIES = ((8, 0), (9, 0))
#: Batch sizes that give the law, as in any trace, and those that check it.
SIZES = (2, 3)
CHECKED_SIZE = 7
#: Parameters above which nobody trains every weight on one GPU.
ADAPTERS_ONLY = 20e9


def variants_of(one: Architecture) -> Iterator[Variant]:
    """Ways to train an architecture that people ask about."""
    is_text = "seq_length" in sizes_read(one.config)
    half = str(one.config.get("dtype", "float32"))
    mixed = "16-mixed" if half == "float16" else "bf16-mixed"
    for checkpointing in (False, True):
        if (one.parameters or 0) < ADAPTERS_ONLY:
            yield Variant("float32", mixed, "", checkpointing)
            if half == "float32":
                yield Variant("float32", "32-true", "", checkpointing)
            for optimizer in ("adamw", "adamw-8bit") if half != "float32" else ():
                yield Variant(half, mixed.replace("mixed", "true"), "", checkpointing, optimizer)
        for adapters in ("lora", "qlora") if half != "float32" else ():
            yield Variant(half, mixed, adapters, checkpointing)
    if not is_text:
        yield Variant("float32", "32-true", optimizer="sgd")
        yield Variant("float32", mixed, optimizer="sgd")


def lengths_of(one: Architecture) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths that give the law, and lengths that check it; one that means nothing where there are no texts."""
    if "seq_length" not in sizes_read(one.config):
        return (0,), ()
    longest = int(one.config.get("max_position_embeddings", one.config.get("n_positions", 0)))
    window = int(one.config.get("sliding_window") or longest)
    if window < min(longest, 2048):  # longer texts have a mask, and another law
        lengths = [window * part // 4 // LENGTH_STEP * LENGTH_STEP for part in (1, 2, 3)]
        return tuple(lengths), (128, window // LENGTH_STEP * LENGTH_STEP)
    if longest >= 4096:
        return (512, 1024, 2048), (128, min(longest, 8192))
    return (longest // 4, longest // 2, longest), (128, longest - 128)


def made(one: Architecture, variant: Variant, capability: tuple[int, int]) -> str | None:
    """The text of a variant's timeline; None where there is no law, or a check fails.

    Args:
        one: the architecture.
        variant: how it is trained.
        capability: of the card.
    """
    lengths, checks = lengths_of(one)
    weights = AdapterWeights(variant.dtype, {} if variant.adapters else None, variant.adapters == "qlora")

    def step(length: int) -> TrainingStep:
        sizes = InputSizes(seq_length=length or None)
        written = step_of(one.config, sizes, weights, checkpointing=variant.checkpointing)
        learning = named_optimizer(variant.optimizer)
        return with_built_model(written.with_(precision=variant.precision, optimizer=learning), capability)

    def traced(built: TrainingStep, size: int) -> Timeline:
        asked = Capability(capability)
        timeline = run_step(built, size, asked, marked=True)
        return replace(timeline, asked=asked.answers)

    laws = dict[int, Timeline]()
    for length in lengths:
        built = step(length)
        merged = law_of_two(*(traced(built, size) for size in SIZES))
        if merged is None:
            return None
        laws[length] = merged
    covers = (min((*lengths, *checks)), max((*lengths, *checks)))
    text = packed(laws, covers)
    if text is None:
        return None
    for length in checks or lengths:
        known = unpacked(text, length)
        if known is None or not holds_at(traced(step(length), CHECKED_SIZE), known, CHECKED_SIZE):
            return None
    return text


def write(one: Architecture) -> None:
    """The file of an architecture."""
    begun, found = time.process_time(), defaultdict[str, list[str]](list)
    for variant in variants_of(one):
        for capability in CAPABILITIES:
            try:
                text = made(one, variant, capability)
            except Exception as error:  # noqa: BLE001 - a model without checkpointing of its own, among others
                text = None
                print(f"  {one.name} {variant.key}: {type(error).__name__}: {error}"[:200], flush=True)
            if text is None:
                print(f"  {one.name} {variant.key} {capability}: left out", flush=True)
                continue
            found[variant.key].append(text)
    packed_bytes = lzma.compress(json.dumps(found).encode(), preset=9 | lzma.PRESET_EXTREME)
    FOLDER.mkdir(exist_ok=True)
    FOLDER.joinpath(f"{one.name}.xz").write_bytes(packed_bytes)
    seconds = time.process_time() - begun
    print(f"{one.name}: {len(found)} variants, {len(packed_bytes):,} bytes, {seconds:.0f} s", flush=True)


def main(names: Sequence[str]) -> None:
    """All architectures, or those that are named."""
    for one in architectures():
        if not names or one.name in names:
            write(one)


if __name__ == "__main__":
    main(sys.argv[1:])
