"""``vram-guard estimate``: training memory from a few numbers, a config, or a folder with a model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vram_guard.cli._configuration import is_traced, no_batch, said
from vram_guard.cli._described import Described
from vram_guard.cli._estimate_folder import estimate_folder
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.options import DEVICE, FOLDER, NETWORK, add_config, add_options, asked_budget
from vram_guard.cli.printing import print_json, print_now, say, tell
from vram_guard.cli.ways import RULE, check_needed, check_read, of_model
from vram_guard.language import _
from vram_guard.state.collector import collector_paused

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.closed_form.from_config import EstimateRequest
    from vram_guard.report.closed_form import SymbolicAnswer


def add(commands: Any) -> None:
    """The parser of ``estimate``."""
    parser = commands.add_parser(
        "estimate",
        help=_("estimate training memory from numbers, a config or a model folder"),
        description=_(
            "Estimate training memory. From numbers or a config: a rule of thumb, or the symbolic answer where "
            "a model that can be built is named. From a folder (--model-path): its components, and the symbolic "
            "answer for training one of them, without loading weights."
        ),
        epilog=_(
            "Exit codes: 0 it fits, 1 it does not, 2 bad usage, 3 no answer. "
            "Underscores in options are understood too (--hidden_dim)."
        ),
    )
    add_config(parser)
    add_options(parser.add_argument_group(_("the calculator")), "batch", *NETWORK)
    folder = parser.add_argument_group(_("a model folder"))
    add_options(folder, *FOLDER)
    folder.add_argument("--recommend", action="store_true", help=_("plan what makes it fit, as the command plan does"))
    add_options(parser, *DEVICE, "cudnn", "json")
    add_options(parser, "verbose", default=None)
    parser.set_defaults(run=_estimate)


@collector_paused()  # imports make hundreds of thousands of objects that all stay
def _estimate(options: argparse.Namespace) -> int:
    from vram_guard.plan.checks import check_cudnn

    check_cudnn(options.cudnn)
    if options.model_path is not None:
        return estimate_folder(options)
    from vram_guard.capture.config_step import kind_of
    from vram_guard.closed_form.calculator import USUAL_SHARE, Calculation
    from vram_guard.config_file import load_config
    from vram_guard.report.closed_form import LINE, calculator_dict, calculator_lines

    config = {} if options.config is None else load_config(options.config)
    request, amounts = _request(options, config)
    is_built, remark = is_traced(request, config, quick=options.quick)
    check_read(options, of_model(kind_of(request)) if is_built else RULE)
    if not is_built and options.gpu is not None and not {"gpu_memory", "budget"}.isdisjoint(options.given):
        check_needed(options, ("gpu",), needs=_("a model that is built (--model)"))
    if is_built and "batch" not in request.numbers:
        raise no_batch(request.model or "")
    budget = asked_budget(options, **amounts)
    if remark:
        tell(remark)
    calculation = symbolic = one = None
    if is_built:
        one = Described(request.model or "", request, config)
        symbolic = _symbolic(one, budget, options.cudnn)
    else:
        share = USUAL_SHARE if options.threshold is None else options.threshold
        calculation = Calculation(request.network(), budget.total, share)
    fits = symbolic.fits if symbolic is not None else calculation is not None and calculation.fits
    if options.json:
        answer = {
            "kind": "calculator",
            "fits": fits,
            "decided_by": "rule of thumb" if symbolic is None else "symbolic",
            "rule_of_thumb": None if calculation is None else calculator_dict(calculation),
            "symbolic": None if symbolic is None else symbolic.as_dict(),
            "model": request.model,
            "found_in_config": dict(request.places),
            "notes": [remark] if remark else [],
        }
        print_json(answer)
    else:
        print_now([LINE, _("🧮 GPU memory calculator"), LINE])
        if calculation is not None:
            print_now([*calculator_lines(calculation, memory_source=budget.source_text), ""])
        _print_verdict(symbolic, fits=fits, verbose=bool(options.verbose))
    if one is not None:
        one.tell_assumed()
    return EXIT_DONE if fits else EXIT_DOES_NOT_FIT


def _request(options: argparse.Namespace, config: dict[str, Any]) -> tuple[EstimateRequest, dict[str, Any]]:
    """The request of the config and the options over it, and the amounts of memory in it.

    An amount in the config stands between the settings and the options.
    """
    from vram_guard.closed_form.from_config import parse_request
    from vram_guard.settings import AMOUNTS

    amounts: dict[str, Any] = {"gpu_memory": options.gpu_memory, "gpu": options.gpu, "budget": options.budget}
    own = {} if options.from_settings.keys() & AMOUNTS else amounts
    request = parse_request(config, {**said(options), **own})
    if options.device is None and (request.memory is not None or request.gpu is not None):
        amounts = {"gpu_memory": request.memory, "gpu": request.gpu, "budget": own.get("budget")}
    return request, amounts


def _symbolic(one: Described, budget: Budget, cudnn: str | None) -> SymbolicAnswer:
    from vram_guard.report.closed_form import SymbolicAnswer

    timeline, budget = one.on_card(budget, cudnn=cudnn)
    return SymbolicAnswer(timeline.at(one.request.numbers["batch"]), budget, timeline.max_batch_size(budget))


def _print_verdict(symbolic: SymbolicAnswer | None, *, fits: bool, verbose: bool) -> None:
    from vram_guard.report.closed_form import LINE

    if symbolic is not None:
        print_now([*symbolic.lines(verbose=verbose), ""])
    if fits and symbolic is not None:
        say(_("✅ SAFE: the training fits"))
    elif fits:
        say(_("✅ SAFE by the rule of thumb; pass --model for a prediction from the model itself"))
    else:
        say(_("⚠️  OVER: this configuration may run out of memory (OOM)"))
    say(LINE)
