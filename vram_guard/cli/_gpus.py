"""``vram-guard gpus``: the cards that are known by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vram_guard.budget import GPU
from vram_guard.cli._gpus_model import asks_about_a_model, gpus_for_model
from vram_guard.cli.exits import EXIT_DONE
from vram_guard.cli.options import NETWORK, add_options
from vram_guard.cli.printing import print_columns, print_json, say
from vram_guard.cli.ways import CARDS, check_read
from vram_guard.language import _


def add(commands: Any) -> None:
    """The parser of ``gpus``."""
    parser = commands.add_parser(
        "gpus",
        help=_("GPUs that are known by name, and what fits on each of them"),
        description=_(
            "List the GPUs that can be given by name, with memory, what a training may use of it, and throughput. "
            "With a model: the largest batch of it on every GPU."
        ),
    )
    name = _('one GPU, by any of its names ("4090", "A100 40GB")')
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help=name,
    )
    add_options(parser, "gpu", dest="name", help=name)  # not the settings' gpu: all cards are listed
    add_options(parser, "margin", "json")
    group = parser.add_argument_group(_("a model: what fits on each GPU"))
    add_options(group, "config", *NETWORK)
    group.add_argument(
        "--resolutions",
        action="list",
        nargs="+",
        metavar="LIST",
        help=_('several in one table: "64,128,256x512" (height x width)'),
    )
    parser.set_defaults(run=_gpus)


def _gpus(options: argparse.Namespace) -> int:
    """List the GPUs that can be given by name, with memory, what a training may use of it, and throughput."""
    from vram_guard.budget import catalogue, find_gpu

    cards = catalogue() if options.name is None else (find_gpu(options.name),)
    if asks_about_a_model(options):
        return gpus_for_model(options, cards)
    check_read(options, CARDS)
    margin = options.margin
    if options.json:
        print_json({"kind": "cards", "gpus": [_gpu_facts(card, margin) for card in cards]})
    else:
        _print_gpus(cards, margin)
    return EXIT_DONE


def _gpu_facts(card: GPU, margin: float | None) -> dict[str, Any]:
    """A card for programs: bytes, bytes a second, FLOP a second; null where unknown."""
    from vram_guard.budget import Budget

    names = ("memory_bandwidth", "fp32_flops", "tf32_flops", "fp16_flops", "bf16_flops")
    return {
        "name": card.name,
        "aliases": list(card.aliases),
        "architecture": card.architecture,
        "compute_capability": list(card.compute_capability),
        "memory_bytes": card.memory_bytes,
        "usable_bytes": Budget.of(card, margin).usable,
        **{name: getattr(card, name) for name in names},
        "sources": {figure: card.source_of(figure) for figure, _document in card.sources},
    }


def _print_gpus(cards: Sequence[GPU], margin: float | None) -> None:
    from vram_guard.budget import DEFAULT_MARGIN, Budget
    from vram_guard.budget.margins import measured_margin

    head = ("GPU", _("architecture"), "cc", "GiB", _("usable"), "GB/s", "fp32", "fp16", "bf16")
    rows: list[tuple[str, ...]] = [head]
    for card in cards:
        major, minor = card.compute_capability
        memory, usable = card.memory_bytes / 2**30, Budget.of(card, margin).usable / 2**30
        figures = [_tera(flops) for flops in (card.fp32_flops, card.fp16_flops, card.bf16_flops)]
        sizes = (f"{memory:.2f}", f"{usable:.2f}", f"{card.memory_bandwidth / 1e9:.0f}")
        rows.append((card.name, card.architecture, f"{major}.{minor}", *sizes, *figures))
    print_columns(rows, left=2)
    source = measured_margin().source
    taken = _("less the default margin of {margin} ({source})", margin=f"{100 * DEFAULT_MARGIN:g}%", source=source)
    if margin is not None:
        taken = _("less a margin of {margin}", margin=f"{100 * margin:g}%")
    say()
    say(_("usable: GiB less what the driver and the CUDA context take (partly estimates), {margin}.", margin=taken))
    say(_("fp32, fp16, bf16: dense TFLOP/s, the latter two on tensor cores. --json names each figure's source."))


def _tera(flops: int | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:.1f}"
