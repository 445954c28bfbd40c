"""``vram-guard gpus --model``: the largest batch of one model on every GPU, at one or several resolutions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.cli.arguments import count, number
from vram_guard.cli.exits import EXIT_DONE
from vram_guard.cli.printing import print_columns, print_json
from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.budget import GPU
    from vram_guard.closed_form.from_config import Asked
    from vram_guard.plan.every_gpu import OnGpu

_COUNTS = ("height", "width", "hidden_dim", "num_layers", "seq_length", "bytes_per_element")

#: (height, width) -> what every card holds.
Tables = dict[tuple[int, int] | None, tuple["OnGpu", ...]]


def add_options(group: Any) -> None:
    """The options that ask about a model."""
    group.add_argument(
        "--model", metavar="MODEL", help=_("module:callable, a config.json, or an example: fno, unet, transformer")
    )
    group.add_argument("--model-path", metavar="DIR", help=_("a local folder of diffusers or transformers"))
    group.add_argument("--config", metavar="FILE", help=_("a training config in YAML: the numbers are found in it"))
    group.add_argument(
        "--resolutions", metavar="LIST", help=_('several in one table: "64,128,256x512" (height x width)')
    )
    for name, text in (
        ("--height", _("of the input")),
        ("--width", _("of the input")),
        ("--hidden-dim", _("channels between the layers")),
        ("--num-layers", _("layers")),
        ("--seq-length", _("time steps or tokens; 1 if not given")),
        ("--num-frames", _("frames of one sample, as the model is given it")),
        ("--bytes-per-element", _("4 in float32, 2 in half precision")),
    ):
        group.add_argument(name, metavar="N", help=text)
    group.add_argument("--train", metavar="NAMES", help=_("components that learn; none: inference"))
    group.add_argument("--frozen", metavar="NAMES", help=_("components that do not; one in both is there twice"))
    group.add_argument("--dtype", metavar="TYPE", help=_("of the weights: float32, float16, bfloat16; as stored"))
    group.add_argument("--threshold", metavar="SHARE", help=_("of the GPU for activations: 0.7; cautious: 0.6"))
    group.add_argument("--quick", action="store_true", help=_("the closed form alone: nothing is built"))


def asks_about_a_model(options: argparse.Namespace) -> bool:
    """Whether more is asked than the list of cards."""
    return bool(options.model or options.model_path or options.config or options.hidden_dim)


def gpus_for_model(options: argparse.Namespace, cards: Sequence[GPU]) -> int:
    """Print what each card holds of the model."""
    title, tables = _folder_tables(options, cards) if options.model_path else _network_tables(options, cards)
    if options.json:
        print_json({"kind": "gpus", "method": title, "tables": [_dict(size, rows) for size, rows in tables.items()]})
    else:
        print(_about(options, title))
        print()
        _print_tables(tables)
    return EXIT_DONE


def _network_tables(options: argparse.Namespace, cards: Sequence[GPU]) -> tuple[str, Tables]:
    from vram_guard.capture.config_step import EXAMPLE_NAMES, is_buildable
    from vram_guard.closed_form.from_config import asked
    from vram_guard.config_file import load_config

    config = {} if options.config is None else load_config(options.config)
    given: dict[str, Any] = {name: count(name, getattr(options, name)) for name in _COUNTS}
    sizes = _resolutions(options.resolutions)
    if sizes:
        given |= dict(zip(("height", "width"), sizes[0], strict=True))
    found = asked(config, {**given, "model": options.model, "batch": 1})
    if options.quick or found.model is None:
        rows: Tables = {size: _by_rule(_sized(found, size), options, cards) for size in sizes or [_own(found)]}
        return _RULE, rows
    if not is_buildable(found.model):
        raise InvalidInputError(
            _(
                "the model {model} is not known here: name it as module:callable for a symbolic answer",
                model=found.model,
            )
        )
    own = found.model.lower() in EXAMPLE_NAMES
    if own:
        found.network()  # tells what is missing
    wanted: list[tuple[int, int] | None] = list(sizes) or [_own(found) if own else None]
    return _SYMBOLIC, {size: _symbolic(_sized(found, size), config, cards) for size in wanted}


_RULE, _SYMBOLIC, _CLOSED = "rule of thumb", "symbolic", "closed form"


def _by_rule(found: Asked, options: argparse.Namespace, cards: Sequence[GPU]) -> tuple[OnGpu, ...]:
    from vram_guard.closed_form.calculator import USUAL_SHARE, Calculation, checked_share
    from vram_guard.plan.every_gpu import OnGpu

    share = checked_share(number("threshold", options.threshold, USUAL_SHARE))
    network = replace(found.network(), batch=1)

    def one(card: GPU) -> OnGpu:
        answer = Calculation(network, card.memory_bytes, share)
        largest = answer.largest_batch
        return OnGpu(card, answer.allowed, largest, max(largest, 1) * network.total_bytes)

    return tuple(map(one, cards))


def _symbolic(found: Asked, config: Mapping[str, Any], cards: Sequence[GPU]) -> tuple[OnGpu, ...]:
    from vram_guard.capture.config_step import step_from_config
    from vram_guard.plan.every_gpu import on_every_gpu
    from vram_guard.simulate import trace

    step = step_from_config(found, config)

    def traced(capability: tuple[int, int]) -> Any:
        major, minor = capability
        print(_("vram-guard: tracing for compute capability {version}", version=f"{major}.{minor}"), file=sys.stderr)
        return trace(step, compute_capability=capability)

    return on_every_gpu(traced, cards)


def _folder_tables(options: argparse.Namespace, cards: Sequence[GPU]) -> tuple[str, Tables]:
    """By the closed form: the symbolic answer for one card is ``estimate --model-path``'s."""
    from vram_guard.budget import Budget
    from vram_guard.cli.estimate_folder import tuning_of_folder
    from vram_guard.closed_form.folder import read_folder
    from vram_guard.closed_form.inputs import InputSizes
    from vram_guard.plan.every_gpu import OnGpu

    counts = {name: count(name, getattr(options, name)) for name in ("height", "width", "num_frames", "seq_length")}
    folder = read_folder(Path(options.model_path).expanduser())

    def table(size: tuple[int, int] | None) -> tuple[OnGpu, ...]:
        own = counts if size is None else {**counts, "height": size[0], "width": size[1]}
        tuning = tuning_of_folder(folder, options, InputSizes(**own), 1)

        def one(card: GPU) -> OnGpu:
            usable = Budget.of(card).usable
            largest = tuning.largest_batch(usable)
            return OnGpu(card, usable, largest, replace(tuning, batch=max(largest, 1)).total, tuning.complete)

        return tuple(map(one, cards))

    wanted: list[tuple[int, int] | None] = list(_resolutions(options.resolutions)) or [None]
    return _CLOSED, {size: table(size) for size in wanted}


def _resolutions(text: str | None) -> list[tuple[int, int]]:
    """What "64,128x256" means: [(64, 64), (128, 256)].

    Raises:
        InvalidInputError: a part is no resolution.
    """
    if text is None:
        return []
    sizes = []
    for part in text.split(","):
        height, times, width = part.strip().lower().replace("×", "x").partition("x")
        first = count("resolutions", height)
        second = count("resolutions", width) if times else first
        assert first is not None
        assert second is not None
        sizes.append((first, second))
    return sizes


def _sized(found: Asked, size: tuple[int, int] | None) -> Asked:
    if size is None:
        return found
    return replace(found, numbers={**found.numbers, "height": size[0], "width": size[1]})


def _own(found: Asked) -> tuple[int, int]:
    network = found.network()
    return network.height, network.width


def _about(options: argparse.Namespace, title: str) -> str:
    model = options.model_path or options.model or options.config or ""
    words: dict[str, Callable[[], str]] = {
        _RULE: lambda: _("The largest batch by the rule of thumb: activations alone, one tensor per layer."),
        _SYMBOLIC: lambda: _("The largest batch of {model} as written, and its predicted peak.", model=model),
        _CLOSED: lambda: _("The largest batch of {model} by the closed form, and what it takes.", model=model),
    }
    return words[title]()


def _print_tables(tables: Tables) -> None:
    """Cards down, resolutions across; one card alone: resolutions down, as the guide has it."""
    sizes = list(tables)
    cards = [row.gpu for row in tables[sizes[0]]]
    if len(cards) == 1:
        rows = [(_("resolution"), _("largest batch"), _("expected"), _("usable"))]
        rows += [(_size(size), *_cells(found[0])) for size, found in tables.items()]
        print(cards[0].name)
        print_columns(rows, left=1)
        return
    head = [
        "GPU",
        _("usable"),
        *(part for size in sizes for part in (_size(size) or _("largest batch"), _("expected"))),
    ]
    lines = [tuple(head)]
    for index, card in enumerate(cards):
        cells = [_cells(tables[size][index]) for size in sizes]
        lines.append((card.name, cells[0][2], *(part for one in cells for part in one[:2])))
    print_columns(lines, left=1)


def _cells(found: OnGpu) -> tuple[str, str, str]:
    """(Largest batch, what it takes, what may be used) in GiB."""
    largest = str(found.largest_batch) if found.known else "?"
    taken = f"{found.peak / 2**30:.2f} GiB"
    return largest, taken if found.largest_batch else f"> {taken}", f"{found.usable / 2**30:.2f} GiB"


def _size(size: tuple[int, int] | None) -> str:
    return "" if size is None else f"{size[0]}×{size[1]}"


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
