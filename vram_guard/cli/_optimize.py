"""``vram-guard optimize``: a config rewritten for a GPU and its host, with the diff and the reasons."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.cli._arguments import unknown_model
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.options import DEVICE, add_config, add_options, asked_budget
from vram_guard.cli.printing import print_json, say, tell
from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.optimize.batch import BatchChoice
    from vram_guard.optimize.document import Document, Entry
    from vram_guard.optimize.rules import Advice
    from vram_guard.step import TrainingStep
    from vram_guard.watch.throughput import MeasuredBatch


def add(commands: Any) -> None:
    """The parser of ``optimize``."""
    parser = commands.add_parser(
        "optimize",
        help=_("rewrite a training config for a GPU: batch, loader, precision, learning rate"),
        description=_(
            "Write a config for this machine's GPU or a named one: batch size, loader workers, pinned "
            "memory, precision, compilation, clipping, and the learning rate that goes with the batch. "
            "Comments, order and everything else stay as they are; the differences and their reasons are "
            "shown."
        ),
    )
    add_config(parser)
    add_options(parser, *DEVICE, "model", "lr-rule", "json")
    parser.add_argument("--output", metavar="FILE", help=_("where to write it (FILE_gpu_optimized.yaml)"))
    parser.add_argument("--dry-run", action="store_true", help=_("show what would change; write nothing"))
    parser.add_argument(
        "--benchmark", action="store_true", help=_("run the step at several batch sizes; take the best")
    )
    parser.set_defaults(run=_optimize)


def _optimize(options: argparse.Namespace) -> int:
    from vram_guard.files import write_atomically
    from vram_guard.optimize.document import Document
    from vram_guard.optimize.names import SETTINGS, find, holds_arguments
    from vram_guard.optimize.rules import Advice, Situation, usable_cores

    if not options.config:
        raise InvalidInputError(_("name the config to rewrite: CONFIG, or --config FILE"))
    document = Document(options.config)
    output = _output(options)
    found = find(document.entries())
    if "batch_size" not in found:
        names = ", ".join(SETTINGS["batch_size"])
        raise InvalidInputError(_("the config has no batch size ({names})", names=names))
    budget = asked_budget(options)
    step, precision = _step(options, document)
    batch, measured = None, list[Any]()
    if step is not None:
        batch, measured = _batch(options, step, precision, found, budget)
    elif options.benchmark:  # without a step
        raise InvalidInputError(_("--benchmark runs your own step: name it with --step module:function"))
    arguments = holds_arguments(document.values)
    situation = Situation(usable_cores(), budget.compute_capability, precision, batch, options.lr_rule, arguments)
    advice = Advice(document, found, situation)
    text = document.rewritten(advice.changes)
    if not options.dry_run:
        write_atomically(output, text)
    held_against = budget if batch is None else batch.budget or budget
    if options.json:
        print_json(_as_dict(options, advice, held_against, measured, output))
    else:
        _print(options, document, text, advice, held_against, output)
    return EXIT_DONE if batch is None or batch.fits else EXIT_DOES_NOT_FIT


def _output(options: argparse.Namespace) -> Path:
    """The path of the result; never that of the config itself."""
    source = Path(options.config)
    stem = source.stem.removesuffix("_config")
    output = Path(options.output) if options.output else source.with_name(f"{stem}_gpu_optimized{source.suffix}")
    if output.resolve() == source.resolve():
        raise InvalidInputError(_("--output is the config itself: give it another name"))
    if output.is_dir():
        raise InvalidInputError(_("{path} is a folder: give the name of a file", path=output))
    return output


def _step(options: argparse.Namespace, document: Document) -> tuple[TrainingStep | None, str]:
    """The step that the config (or --step) names, where it names one that can be built; and the precision."""
    from vram_guard.capture.config_step import is_buildable, step_from_config
    from vram_guard.closed_form.from_config import parse_request

    given = parse_request(document.values, {"model": options.model})
    precision = given.precision or "32-true"
    if not is_buildable(given.model):
        if options.model:
            raise InvalidInputError(unknown_model(options.model))
        return None, precision
    step = step_from_config(given, document.values)
    return step, step.precision if given.precision is None else precision


def _batch(
    options: argparse.Namespace,
    step: TrainingStep,
    precision: str,
    found: dict[str, list[Entry]],
    budget: Budget,
) -> tuple[BatchChoice, list[MeasuredBatch]]:
    """The batch size, predicted or measured, in the precision that the config will have."""
    from vram_guard.optimize.batch import choose_batch, chosen_by_measurement
    from vram_guard.plan.layout_facts import budget_of_rank
    from vram_guard.plan.techniques import mixed_precision
    from vram_guard.simulate import trace

    budget = budget_of_rank(budget, step.layout)
    batch_size: int = found["batch_size"][0].value
    accumulate: int = found["accumulate"][0].value if "accumulate" in found else 1
    target, _why = mixed_precision(precision, budget.compute_capability)
    step = step.with_(precision=target or precision, accumulate=1)
    timeline = trace(step, budget=budget)
    if options.benchmark:
        results, device = _measured(step, batch_size, timeline.max_batch_size(budget))
        return chosen_by_measurement(results, accumulate, device, timeline.optimizer), results
    can_split = "accumulate" in found
    return choose_batch(timeline, batch_size, budget, accumulate=accumulate, can_accumulate=can_split), []


def _measured(step: TrainingStep, batch_size: int, largest: int) -> tuple[list[MeasuredBatch], str]:
    """Throughput from a quarter of the batch up to its largest growth, as far as the prediction says that it fits."""
    import torch

    from vram_guard.optimize.batch import MOST_GROWTH
    from vram_guard.watch.throughput import measure

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else _("this machine's CPU")
    if device == "cpu":
        tell(_("no GPU here: the measurement and its choice are the CPU's"))
    sizes = {batch_size, *(max(1, batch_size * 2**power // 4) for power in range((4 * MOST_GROWTH).bit_length()))}
    fitting = {size for size in sizes if size <= max(largest, 1)} or {1}

    def show(one: MeasuredBatch) -> None:
        said = _("out of memory")
        if one.seconds is not None and one.spread is not None:
            said = f"{one.samples_per_second:.1f} samples/s ({1e3 * one.seconds:.1f} ms, +-{one.spread:.0%})"
        say(f"  {_('batch {count}', count=one.batch_size)}: {said}", sys.stderr)

    return measure(step, fitting, device, tell=show), name


def _print(
    options: argparse.Namespace, document: Document, text: str, advice: Advice, budget: Budget, output: Path
) -> None:
    from difflib import unified_diff

    old, new = (document.mark + document.text).splitlines(), text.splitlines()
    for line in unified_diff(old, new, str(options.config), str(output), lineterm="", n=1):
        say(line)
    say(_("\nFor {budget}", budget=budget.explain()))
    reasons = [(change.path, change.reason) for change in advice.changes]
    for title, why in ((_("\nChanged:"), reasons), (_("\nLeft as it is:"), advice.kept)):
        if why:
            say("\n".join([title, *(f"  {name}: {reason}" for name, reason in why)]))
    if any(change.behind for change in advice.changes):
        say(_("\nAdded entries take effect only where your program reads them."))
    if not options.dry_run:
        say(_("wrote {path}", path=output), sys.stderr)


def _as_dict(
    options: argparse.Namespace, advice: Advice, budget: Budget, measured: list[MeasuredBatch], output: Path
) -> dict[str, Any]:
    from dataclasses import asdict

    names = ("setting", "path", "old", "new", "reason")
    changes = [
        {**{name: getattr(change, name) for name in names}, "added": change.behind is not None}
        for change in advice.changes
    ]
    return {
        "kind": "optimize",
        "written": None if options.dry_run else str(output),
        "budget": budget.explain(),
        "changes": changes,
        "kept": [{"setting": setting, "reason": why} for setting, why in advice.kept],
        "measured": [asdict(one) for one in measured],
    }
