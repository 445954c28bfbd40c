"""Timelines composed of a few traces, held against direct traces: random options of ten architectures.

Blocks that are checkpointed (some keep results of operators) or kept on the host, micro-batches, precisions and forms
of the optimizer are drawn by chance. Plans are never built on a composed peak alone: the option that is taken is
traced, and so is the nearest miss. Here every option is. Exits with 1 where fewer than 99% have an equal reserved peak.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import of_suite
from vram_guard.plan.search_space import Option
from vram_guard.plan.source import source_of
from vram_guard.plan.tracing import Traces
from vram_guard.techniques.blocks import find_blocks
from vram_guard.techniques.kept import KEEPABLE
from vram_guard.techniques.recipe import OptimizerForm, Recipe
from vram_guard.units import format_bytes

BATCH = 12
CAPABILITY = (8, 0)
ARCHITECTURES = ("resnet50", "small_cnn", "unet", "fno", "video", "gpt2", "bert", "llama", "vit", "twins")
GOAL = 0.99

#: What checkpointed blocks keep: nothing, what is dearest to compute again, or all that may be kept.
_KEPT: tuple[tuple[str, ...], ...] = ((), ("attention", "convolution"), KEEPABLE)


@dataclass(frozen=True)
class Compared:
    """One option."""

    network: str
    option: str
    composed: int | None
    """Reserved peak; None: it is not composed but traced."""
    direct: int


def main(arguments: list[str] | None = None) -> int:
    """Compare, and print one line for each architecture and one for each option that differs."""
    parser = arguments_of("bench_compose.py", __doc__, only="architectures")
    parser.add_argument("--candidates", type=int, default=1000, help="options in total (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = chosen(ARCHITECTURES, options.only)
    each = -(-options.candidates // max(1, len(names)))
    found: list[Compared] = []
    print(f"{'architecture':<14}{'options':>8}{'composed':>10}{'equal':>8}{'too low':>9}{'too high':>10}", flush=True)
    for name in names:
        heard = ask(compared, name, each, options.seed, limit=None)
        if heard.error:
            print(f"{name}: {heard.error.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        rows = [Compared(**row) for row in heard.result]
        found += rows
        print(_line(name, rows), flush=True)
    print(_line("all", found))
    for row in found:
        if row.composed not in (None, row.direct):
            off = (row.composed or 0) - row.direct
            sign = "+" if off > 0 else "-"
            print(f"  {row.network}, {row.option}: {sign}{format_bytes(abs(off))} ({off / row.direct:+.3%})")
    composed = [row for row in found if row.composed is not None]
    return int(not composed or sum(row.composed == row.direct for row in composed) < GOAL * len(composed))


def _line(name: str, rows: list[Compared]) -> str:
    differences = [row.composed - row.direct for row in rows if row.composed is not None]
    low, high = (sum(sign * difference > 0 for difference in differences) for sign in (-1, 1))
    equal = len(differences) - low - high
    return f"{name:<14}{len(rows):>8}{len(differences):>10}{equal:>8}{low:>9}{high:>10}"


def compared(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """In a worker: so many options of one architecture."""
    return [asdict(row) for row in rows_of(name, of_suite(name, lr=1e-4), count, seed)]


def rows_of(name: str, step: Any, count: int, seed: int, batch_size: int = BATCH) -> Iterator[Compared]:
    """So many different options of one step."""
    source = source_of(step, CAPABILITY)
    traces = Traces(source, batch_size, lambda _line: None)
    blocks = tuple(block.name for block in find_blocks(source.model))
    traces.compose_with(blocks, blocks)
    draw = random.Random(f"{name} {seed}")  # noqa: S311 - options, no secrets
    seen: set[Option] = set()
    for _ in range(20 * count):
        option = drawn(draw, blocks, batch_size)
        if option.unordered in seen or len(seen) == count:
            continue
        seen.add(option.unordered)
        size = batch_size // option.splits
        made = traces.exact(option, size).at(size).peak_reserved
        composed = made if traces.composed(option, size) else None
        direct = traces.direct(option, size).at(size).peak_reserved
        yield Compared(name, option.words(batch_size), composed, direct)


def drawn(draw: random.Random, blocks: tuple[str, ...], batch_size: int) -> Option:
    """A random option."""
    some = draw.sample(blocks, draw.randint(0, len(blocks)))
    rest = tuple(block for block in blocks if block not in some)
    checkpoint, offload = draw.choice(((tuple(some), ()), (tuple(some), ()), ((), tuple(some)), (rest, tuple(some))))
    form: OptimizerForm = draw.choice(("as-written", "for-loop"))
    splits = draw.choice([count for count in range(1, batch_size + 1) if batch_size % count == 0])
    # As plans have it: no results are kept beside blocks on the host.
    keeps = () if offload else draw.choice(_KEPT)
    recipe = Recipe(checkpoint=checkpoint, offload_activations=offload, optimizer=form, checkpoint_keeps=keeps)
    return Option(draw.choice(("32-true", "bf16-mixed", "16-mixed")), splits, recipe)


if __name__ == "__main__":
    raise SystemExit(main())
