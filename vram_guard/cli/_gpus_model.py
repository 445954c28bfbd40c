"""``vram-guard gpus --model``: the largest batch of one model on every GPU, at one or several resolutions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vram_guard.cli._arguments import checked_margin, number, whole_number
from vram_guard.cli._configuration import is_traced, said
from vram_guard.cli._described import Described
from vram_guard.cli.exits import EXIT_DONE
from vram_guard.cli.printing import print_columns, print_json, progress_shown, say, tell
from vram_guard.cli.ways import RULE, check_read, of_model
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.settings import filled

if TYPE_CHECKING:
    from vram_guard.budget import GPU
    from vram_guard.closed_form.from_config import EstimateRequest
    from vram_guard.plan.every_gpu import OnGpu
    from vram_guard.releases import Releases
    from vram_guard.step import TrainingStep
    from vram_guard.timeline import Timeline

#: (height, width) -> what every card holds.
Tables = dict[tuple[int, int] | None, tuple["OnGpu", ...]]


def asks_about_a_model(options: argparse.Namespace) -> bool:
    """True where more is asked for than the list of cards."""
    return any(value is not None for value in (options.model, options.config, options.hidden_dim, options.input))


def gpus_for_model(options: argparse.Namespace, cards: Sequence[GPU]) -> int:
    """Print what each card holds of the model."""
    from vram_guard.releases import Releases

    title, tables, known = _network_tables(options, cards)
    releases = (known or Releases.here()) if title == _SYMBOLIC else None
    if options.json:
        held_for = {} if releases is None else {"releases": releases.as_dict()}
        found = [_dict(size, rows) for size, rows in tables.items()]
        print_json({"kind": "gpus", "method": title, **held_for, "tables": found})
    else:
        say(_about(options, title))
        say()
        _print_tables(tables)
        if releases is not None:
            say()
            say(_("Releases: {releases}", releases=releases))
    return EXIT_DONE


def _network_tables(options: argparse.Namespace, cards: Sequence[GPU]) -> tuple[str, Tables, Releases | None]:
    """How it was found, what every card holds, and the releases that it was known with; None: those that are here."""
    from vram_guard.capture.config_step import kind_of
    from vram_guard.closed_form.from_config import parse_request
    from vram_guard.config_file import load_config

    config = {} if options.config is None else load_config(options.config)
    given = said(options)
    sizes = _resolutions(options.resolutions)
    if sizes and options.input is not None:
        raise InvalidInputError(_("--resolutions and --input both say how large a sample is: leave one out"))
    if sizes:
        given |= dict(zip(("height", "width"), sizes[0], strict=True))
    found = parse_request(config, {**given, "batch": 1})
    is_built, remark = is_traced(found, config, quick=options.quick)
    if remark:
        tell(remark)
    if not is_built:
        check_read(options, RULE)
        own = found.network()
        wanted = sizes or [(own.height, own.width)]
        rows: Tables = {size: _by_rule(_sized(found, size), options, cards) for size in wanted}
        return _RULE, rows, None
    check_read(options, of_model(kind_of(found)))
    margin = checked_margin(options.margin)
    every: list[tuple[int, int] | None] = [*sizes] or [None]
    trainings = {size: Described(found.model or "", _sized(found, size), config) for size in every}
    rows = {size: _symbolic(one, cards, margin) for size, one in trainings.items()}
    first = next(iter(trainings.values()))
    first.tell_assumed()
    return _SYMBOLIC, rows, first.releases


_RULE, _SYMBOLIC = "rule of thumb", "symbolic"


def _by_rule(found: EstimateRequest, options: argparse.Namespace, cards: Sequence[GPU]) -> tuple[OnGpu, ...]:
    from vram_guard.closed_form.calculator import USUAL_SHARE, Calculation, checked_share
    from vram_guard.plan.every_gpu import OnGpu

    share = checked_share(number("threshold", options.threshold, USUAL_SHARE))
    network = replace(found.network(), batch=1)

    def one(card: GPU) -> OnGpu:
        answer = Calculation(network, card.memory_bytes, share)
        largest = answer.largest_batch
        return OnGpu(card, answer.allowed, largest, max(largest, 1) * network.total_bytes)

    return tuple(map(one, cards))


def _symbolic(one: Described, cards: Sequence[GPU], margin: float | None) -> tuple[OnGpu, ...]:
    from vram_guard.plan.every_gpu import on_every_gpu

    with progress_shown() as progress:

        def traced(capability: tuple[int, int]) -> Timeline:
            known = one.known(capability, cudnn=filled({}, ("cudnn",)).get("cudnn"))
            if known is not None:
                return known
            major, minor = capability
            progress(_("tracing for compute capability {version}", version=f"{major}.{minor}"))
            return one.traced(partial(_trace, capability))

        return on_every_gpu(traced, cards, margin=margin)


def _trace(capability: tuple[int, int], step: TrainingStep) -> Timeline:
    from vram_guard.simulate import trace

    return trace(step, compute_capability=capability)


def _resolutions(words: list[str] | None) -> list[tuple[int, int]]:
    """Resolutions of "64,128x256": [(64, 64), (128, 256)].

    Raises:
        InvalidInputError: a part is not a resolution.
    """
    sizes = []
    for part in [one for word in words or () for one in word.split(",")]:
        height, times, width = part.strip().lower().replace("×", "x").partition("x")
        first = whole_number("resolutions", height)
        sizes.append((first, whole_number("resolutions", width) if times else first))
    return sizes


def _sized(found: EstimateRequest, size: tuple[int, int] | None) -> EstimateRequest:
    if size is None:
        return found
    return replace(found, numbers={**found.numbers, "height": size[0], "width": size[1]})


def _about(options: argparse.Namespace, title: str) -> str:
    if title == _RULE:
        return _("The largest batch by the rule of thumb: activations alone, one tensor per layer.")
    model = options.model or options.config or ""
    return _("The largest batch of {model} as written, and its predicted peak.", model=model)


def _print_tables(tables: Tables) -> None:
    """A row for each card, or for each resolution on each card, as the guide has it."""
    sized = [_("resolution")] if None not in tables else []
    lines = [["GPU", *sized, _("largest batch"), _("expected"), _("usable")]]
    for rows in zip(*tables.values(), strict=True):
        for size, row in zip(tables, rows, strict=True):
            side = [] if size is None else [f"{size[0]}×{size[1]}"]
            peak, usable = (f"{amount / 2**30:.2f} GiB" for amount in (row.peak, row.usable))
            largest = str(row.largest_batch) if row.known else "?"
            lines.append([row.gpu.name, *side, largest, peak if row.largest_batch else f"> {peak}", usable])
    print_columns(lines, left=1)


def _dict(size: tuple[int, int] | None, rows: tuple[OnGpu, ...]) -> dict[str, Any]:
    return {
        "resolution": None if size is None else list(size),
        "gpus": [
            {
                "name": row.gpu.name,
                "usable": row.usable,
                "largest_batch": row.largest_batch if row.known else None,
                "bytes": row.peak,
                "lower_bound": not row.known,
            }
            for row in rows
        ],
    }
