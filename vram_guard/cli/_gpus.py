"""``vram-guard gpus``: the cards that are known by name, and the largest batch of one model on each of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vram_guard.budget import GPU
from vram_guard.cli._configuration import is_traced, said
from vram_guard.cli._described import Described
from vram_guard.cli.exits import EXIT_DONE
from vram_guard.cli.options import NETWORK, add_options, whole_number
from vram_guard.cli.printing import print_columns, print_json, progress_shown, say, tell
from vram_guard.cli.ways import CARDS, RULE, check_read, of_model
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.settings import filled

if TYPE_CHECKING:
    from vram_guard.closed_form.calculator import Network
    from vram_guard.closed_form.from_config import EstimateRequest
    from vram_guard.plan.every_gpu import OnGpu
    from vram_guard.releases import Releases
    from vram_guard.timeline import Timeline

#: (height, width) -> what every card holds; None: the size is not said.
Tables = dict[tuple[int, int] | None, tuple["OnGpu", ...]]


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
    if any(value is not None for value in (options.model, options.config, options.hidden_dim, options.input)):
        return _gpus_for_model(options, cards)
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

    head = ("GPU", _("architecture"), "cc", "GiB", _("usable"), "GB/s", "fp32", "fp16", "bf16")
    rows: list[tuple[str, ...]] = [head]
    for card in cards:
        major, minor = card.compute_capability
        memory, usable = card.memory_bytes / 2**30, Budget.of(card, margin).usable / 2**30
        figures = [_tera(flops) for flops in (card.fp32_flops, card.fp16_flops, card.bf16_flops)]
        sizes = (f"{memory:.2f}", f"{usable:.2f}", f"{card.memory_bandwidth / 1e9:.0f}")
        rows.append((card.name, card.architecture, f"{major}.{minor}", *sizes, *figures))
    print_columns(rows, left=2)
    kept = f"{100 * (DEFAULT_MARGIN if margin is None else margin):g}%"
    say()
    say(
        _(
            "usable: less what the driver and the CUDA context take (partly estimates) and a margin of {kept}.",
            kept=kept,
        )
    )
    say(_("fp32, fp16, bf16: dense TFLOP/s, the latter two on tensor cores. --json names each figure's source."))


def _tera(flops: int | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:.1f}"


# --- what each card holds of a model ---------------------------------------------------------------------------------


def _gpus_for_model(options: argparse.Namespace, cards: Sequence[GPU]) -> int:
    """Print what each card holds of the model."""
    tables, releases = _tables(options, cards)
    if options.json:
        by = {"method": "rule of thumb"} if releases is None else {"method": "symbolic", "releases": releases.as_dict()}
        print_json({"kind": "gpus", **by, "tables": [_dict(size, rows) for size, rows in tables.items()]})
        return EXIT_DONE
    if releases is None:
        say(_("The largest batch by the rule of thumb: activations alone, one tensor per layer."))
    else:
        model = options.model or options.config
        say(_("The largest batch of {model} as written, and its predicted peak.", model=model))
    say()
    _print_tables(tables)
    if releases is not None:
        say()
        say(_("Releases: {releases}", releases=releases))
    return EXIT_DONE


def _tables(options: argparse.Namespace, cards: Sequence[GPU]) -> tuple[Tables, Releases | None]:
    """What every card holds, and the releases that it is known with; None: it is the rule of thumb."""
    from vram_guard.capture.config_step import kind_of
    from vram_guard.closed_form.calculator import USUAL_SHARE
    from vram_guard.closed_form.from_config import parse_request
    from vram_guard.config_file import load_config
    from vram_guard.releases import Releases

    config = {} if options.config is None else load_config(options.config)
    given = {**said(options), "batch": 1}
    sizes = _resolutions(options.resolutions)
    if sizes and options.input is not None:
        raise InvalidInputError(_("--resolutions and --input both say how large a sample is: leave one out"))
    if sizes:
        given |= dict(zip(("height", "width"), sizes[0], strict=True))
    found = parse_request(config, given)
    is_built, remark = is_traced(found, config, quick=options.quick)
    if remark:
        tell(remark)
    check_read(options, of_model(kind_of(found)) if is_built else RULE)
    if not is_built:
        share, own = USUAL_SHARE if options.threshold is None else options.threshold, found.network()
        every = sizes or [(own.height, own.width)]
        return {size: _by_rule(_sized(found, size).network(), cards, share) for size in every}, None
    wanted: list[tuple[int, int] | None] = [*sizes] or [None]
    trainings = {size: Described(found.model or "", _sized(found, size), config) for size in wanted}
    tables = {size: _symbolic(one, cards, options.margin) for size, one in trainings.items()}
    first = next(iter(trainings.values()))
    first.tell_assumed()
    return tables, first.releases or Releases.here()


def _by_rule(network: Network, cards: Sequence[GPU], share: float) -> tuple[OnGpu, ...]:
    from vram_guard.closed_form.calculator import Calculation
    from vram_guard.plan.every_gpu import OnGpu

    answers = [(card, Calculation(network, card.memory_bytes, share)) for card in cards]
    return tuple(
        OnGpu(card, one.allowed, one.largest_batch, max(one.largest_batch, 1) * network.total_bytes)
        for card, one in answers
    )


def _symbolic(one: Described, cards: Sequence[GPU], margin: float | None) -> tuple[OnGpu, ...]:
    from vram_guard.plan.every_gpu import on_every_gpu
    from vram_guard.simulate import trace

    cudnn = filled({}, ("cudnn",)).get("cudnn")
    with progress_shown() as progress:

        def traced(capability: tuple[int, int]) -> Timeline:
            known = one.known(capability, cudnn=cudnn)
            if known is not None:
                return known
            progress(_("tracing for compute capability {version}", version="{}.{}".format(*capability)))
            return one.traced(lambda step: trace(step, compute_capability=capability))

        return on_every_gpu(traced, cards, margin=margin)


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
