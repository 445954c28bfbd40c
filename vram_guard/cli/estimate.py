"""``vram-guard estimate``: what a training takes, from a few numbers, a config, or a folder with a model."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from vram_guard.cli.arguments import count, gpu_memory, number
from vram_guard.cli.estimate_folder import add_options, estimate_folder
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.printing import print_json
from vram_guard.errors import InvalidInputError, UnsupportedStepError, VramGuardError
from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.closed_form.calculator import Calculation
    from vram_guard.closed_form.from_config import Asked
    from vram_guard.step import TrainingStep
    from vram_guard.timeline import Estimate, Timeline

#: The numbers of the rule of thumb: option -> name in :data:`vram_guard.closed_form.from_config.NAMES`.
_COUNTS = ("batch", "height", "width", "hidden_dim", "num_layers", "seq_length", "bytes_per_element")


def add(commands: Any) -> None:
    """The parser of ``estimate``."""
    parser = commands.add_parser(
        "estimate",
        help=_("what a training takes: from numbers, a config, or a model's folder"),
        description=_(
            "What a training takes. From numbers or a config: a rule of thumb at once, and beside it the symbolic "
            "answer where the config names a model that can be built. From a folder (--model-path): parameters, "
            "gradients and optimizer states by component, without loading weights."
        ),
        epilog=_(
            "Exit codes: 0 it fits, 1 it does not, 2 bad usage, 3 the environment cannot be read. "
            "Underscores in options are understood too (--hidden_dim)."
        ),
    )
    _add_calculator(parser.add_argument_group(_("the calculator")))
    add_options(parser.add_argument_group(_("a model's folder")))
    _add_common(parser)
    parser.set_defaults(run=_estimate)


def _add_calculator(group: Any) -> None:
    group.add_argument("--config", metavar="FILE", help=_("a training config in YAML: the numbers are found in it"))
    group.add_argument("--batch", "--batch-size", metavar="N", help=_("samples at once"))
    group.add_argument("--height", metavar="N", help=_("of the input"))
    group.add_argument("--width", metavar="N", help=_("of the input"))
    group.add_argument("--hidden-dim", metavar="N", help=_("channels between the layers"))
    group.add_argument("--num-layers", metavar="N", help=_("layers"))
    group.add_argument("--seq-length", metavar="N", help=_("time steps or tokens; 1 if not given"))
    group.add_argument("--bytes-per-element", metavar="N", help=_("4 in float32, 2 in half precision"))
    group.add_argument("--threshold", metavar="SHARE", help=_("of the GPU for activations: 0.7; cautious: 0.6"))
    group.add_argument(
        "--model", metavar="MODEL", help=_("module:callable, a config.json, or an example: fno, unet, transformer")
    )
    group.add_argument("--quick", action="store_true", help=_("the closed form alone: nothing is built"))


def _add_common(parser: Any) -> None:
    parser.add_argument("--gpu-memory", metavar="SIZE", help=_('of the GPU: 24 is 24 GB, "24GiB", "80GB"'))
    parser.add_argument("--budget", metavar="SIZE", help=_('what PyTorch may reserve of it: "20GiB"'))
    parser.add_argument("--margin", metavar="SHARE", help=_("share of the budget to leave free"))
    parser.add_argument("--gpu", metavar="NAME", help=_('a card by name: "RTX 4090"'))
    parser.add_argument("--json", action="store_true", help=_("answer as JSON"))


def _estimate(options: argparse.Namespace) -> int:
    if options.model_path is not None:
        return estimate_folder(options)
    from vram_guard.closed_form.calculator import USUAL_SHARE, Calculation, checked_share
    from vram_guard.closed_form.from_config import asked
    from vram_guard.config_file import load_config
    from vram_guard.settings import AMOUNTS

    share = checked_share(number("threshold", options.threshold, USUAL_SHARE))
    given: dict[str, Any] = {name: count(name, getattr(options, name)) for name in _COUNTS}
    given["model"] = options.model
    amounts: dict[str, Any] = {"memory": options.gpu_memory, "gpu": options.gpu, "budget": options.budget}
    given |= {} if options.from_settings.keys() & AMOUNTS else amounts
    config = {} if options.config is None else load_config(options.config)
    found = asked(config, given)
    if found.memory is not None or found.gpu is not None:
        # The config's own, which stands between the settings and the options; or the options, which asked() gave back.
        amounts = {**amounts, "memory": found.memory, "gpu": found.gpu}
        amounts["budget"] = None if options.from_settings.keys() & AMOUNTS else options.budget
    calculation = None
    memory, source, budget = gpu_memory(**amounts, margin=options.margin)
    if options.quick or not _tells_its_sizes(found):
        calculation = Calculation(found.network(), memory, share)
    printer = _Printer(options, found)
    step = None if options.quick else _step(found, config, printer)
    printer.rule(calculation, source)
    symbolic = None if step is None else _symbolic(step, found.numbers["batch"], budget, printer)
    if calculation is None and symbolic is None:
        raise UnsupportedStepError(_("no answer: the model cannot be built, and the rule of thumb has no numbers"))
    return printer.end(calculation, symbolic)


def _tells_its_sizes(found: Asked) -> bool:
    """Whether the model brings its sizes itself, and the numbers that the rule asks for are not all there."""
    from vram_guard.capture.config_step import EXAMPLE_NAMES, is_buildable

    known = is_buildable(found.model) and (found.model or "").lower() not in EXAMPLE_NAMES
    return known and "batch" in found.numbers and bool(found.missing())


class _Symbolic:
    """The symbolic answer beside the rule."""

    def __init__(self, timeline: Timeline, estimate: Estimate, budget: Budget) -> None:
        self.timeline, self.estimate = timeline, estimate
        self.budget = budget.for_tier(estimate.tier)
        self.fits = estimate.fits(budget)
        self.largest_batch = timeline.max_batch_size(budget)


class _Printer:
    """Says things in the order in which they are known, or all at once as JSON."""

    def __init__(self, options: argparse.Namespace, found: Asked) -> None:
        self.options, self.found = options, found
        self.notes: list[str] = []

    def rule(self, calculation: Calculation | None, source: str) -> None:
        if self.options.json:
            return
        from vram_guard.report.calculator import LINE, calculator_lines

        print("\n".join([LINE, _("🧮 GPU memory calculator"), LINE]))
        if calculation is None:
            return
        read_from, model = self.options.config or "", self.found.model or ""
        for line in calculator_lines(calculation, memory_source=source, read_from=read_from, model=model):
            print(line)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"vram-guard: {text}", file=sys.stderr)

    def end(self, calculation: Calculation | None, symbolic: _Symbolic | None) -> int:
        """The symbolic answer, where there is one, decides: it knows the network."""
        fits = symbolic.fits if symbolic is not None else calculation is not None and calculation.fits
        if self.options.json:
            self._json(calculation, symbolic, fits=fits)
        else:
            self._last_lines(symbolic, fits=fits)
        return EXIT_DONE if fits else EXIT_DOES_NOT_FIT

    def _last_lines(self, symbolic: _Symbolic | None, *, fits: bool) -> None:
        from vram_guard.report.calculator import LINE

        print()
        if symbolic is not None:
            for line in symbolic_lines(symbolic.estimate, symbolic.budget, symbolic.largest_batch, fits=symbolic.fits):
                print(line)
            print()
        print(_verdict(fits=fits, known=symbolic is not None))
        print(LINE)

    def _json(self, calculation: Calculation | None, symbolic: _Symbolic | None, *, fits: bool) -> None:
        from vram_guard.report.as_json import as_dict
        from vram_guard.report.calculator import calculator_dict

        beside = None
        if symbolic is not None:
            beside = {
                **as_dict(symbolic.estimate, budget=symbolic.budget),
                "largest_batch": symbolic.largest_batch,
            }
        answer = {
            "kind": "calculator",
            "fits": fits,
            "decided_by": "rule of thumb" if symbolic is None else "symbolic",
            "rule_of_thumb": None if calculation is None else calculator_dict(calculation),
            "symbolic": beside,
            "model": self.found.model,
            "found_in_config": dict(self.found.places),
            "notes": self.notes,
        }
        print_json(answer)


def _verdict(*, fits: bool, known: bool) -> str:
    if fits and known:
        return _("✅ SAFE: the training fits")
    if fits:
        return _("✅ SAFE by the rule of thumb; name the model for an answer that knows it (--model)")
    return _("⚠️  OVER: this configuration may run out of memory (OOM)")


def symbolic_lines(estimate: Estimate, budget: Budget | None, largest: int | None, *, fits: bool) -> list[str]:
    """The symbolic answer beside a closed form."""
    from vram_guard.report.calculator import amount

    head = _(
        "🔬 symbolic: the step of this very model, replayed through PyTorch's allocator ({tier})", tier=estimate.tier
    )
    peak = estimate.peak_reserved
    lines = [head, _("   - peak reserved: {peak}", peak=amount(peak))]
    for name in ("parameters", "gradients", "optimizer_states", "activations", "batch", "temporaries", "workspace"):
        held = estimate.breakdown.get(name, 0)
        if held:
            lines.append(f"     {category(name)}: {amount(held)}")
    if budget is None:
        return lines
    usable = budget.usable
    share = f"{abs(usable - peak) / usable:.1%}" if usable else "-"
    if fits:
        lines.append(_("   ✅ fits; to spare: {amount} ({share})", amount=amount(usable - peak), share=share))
    elif peak > usable:
        lines.append(_("   ❌ does not fit; too much: {amount} ({share})", amount=amount(peak - usable), share=share))
    else:
        lines.append(_("   ❓ not known to fit: the number is a lower bound"))
    lines.append(_("   - usable: {amount}", amount=amount(usable)))
    if largest is not None:
        lines.append(_("   - largest batch: {count}", count=largest))
    return lines


def category(name: str) -> str:
    """A category of :data:`vram_guard.timeline.CATEGORIES` in the reader's language."""
    from vram_guard.report.categories import category_name

    return category_name(name)


def _step(found: Asked, config: dict[str, Any], printer: _Printer) -> TrainingStep | None:
    """The step that is described, where it can be built; what stands in its way is said, and the rule remains."""
    from vram_guard.capture.config_step import is_buildable, step_from_config

    if found.model is None:
        return None
    if not is_buildable(found.model):
        printer.note(
            _(
                "the model {model} is not known here: name it as module:callable for a symbolic answer",
                model=found.model,
            )
        )
        return None
    try:
        return step_from_config(found, config)
    except InvalidInputError:
        raise  # a slip of the user's: nothing to fall back from
    except VramGuardError as error:
        printer.note(_("no symbolic answer: {reason}", reason=error))
        return None


def _symbolic(step: TrainingStep, batch: int, budget: Budget, printer: _Printer) -> _Symbolic | None:
    from vram_guard.plan import ASSUMED_COMPUTE_CAPABILITY
    from vram_guard.simulate import trace

    try:
        timeline = trace(step, compute_capability=budget.compute_capability or ASSUMED_COMPUTE_CAPABILITY)
        return _Symbolic(timeline, timeline.at(batch), budget)
    except VramGuardError as error:
        printer.note(_("no symbolic answer: {reason}", reason=error))
    except Exception as error:  # noqa: BLE001 - the model's own code runs here and may raise anything
        printer.note(_("no symbolic answer: {reason}", reason=f"{type(error).__name__}: {error}"))
    return None
