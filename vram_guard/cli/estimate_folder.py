"""``vram-guard estimate --model-path``: what training a downloaded model takes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.cli.arguments import count, gpu_memory, number
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.printing import print_json
from vram_guard.errors import InvalidInputError, NoDeviceError, VramGuardError
from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.closed_form.folder import ModelFolder
    from vram_guard.closed_form.inputs import InputSizes
    from vram_guard.closed_form.tuning import Tuning
    from vram_guard.plan import Plan
    from vram_guard.timeline import Estimate


def add_options(group: Any) -> None:
    """The options that ask for a folder."""
    group.add_argument("--model-path", metavar="DIR", help=_("a local folder of diffusers or transformers"))
    group.add_argument("--train", metavar="NAMES", help=_("components that learn; none: inference"))
    group.add_argument("--frozen", metavar="NAMES", help=_("components that do not; one in both is there twice"))
    group.add_argument("--num-frames", metavar="N", help=_("frames of one sample, as the model is given it"))
    group.add_argument("--dtype", metavar="TYPE", help=_("of the weights: float32, float16, bfloat16; as stored"))
    group.add_argument("--recommend", action="store_true", help=_("what would make it fit, with numbers"))
    group.add_argument(
        "--device", "--device-id", metavar="N", help=_("the CUDA device whose free memory counts (0, cuda:1)")
    )


def estimate_folder(options: argparse.Namespace) -> int:
    """Say what the folder holds and what training it takes; the exit code says whether it fits."""
    from vram_guard.closed_form.folder import read_folder
    from vram_guard.closed_form.inputs import InputSizes

    counts = {name: count(name, getattr(options, name)) for name in ("height", "width", "num_frames", "seq_length")}
    sizes, batch = InputSizes(**counts), count("batch_size", options.batch) or 1
    folder = read_folder(Path(options.model_path).expanduser())
    tuning = tuning_of_folder(folder, options, sizes, batch)
    budget = _budget(options)
    if not options.json:
        _print_closed_form(folder, tuning, budget, options)
    notes: list[str] = []
    symbolic = None if options.quick else _symbolic(tuning, sizes, budget, options, notes)
    for note in notes:
        print(f"vram-guard: {note}", file=sys.stderr)
    fits = _fits(tuning, budget, symbolic)
    if options.json:
        _print_json(folder, tuning, budget, symbolic, fits, notes, options)
    elif symbolic is not None:
        _print_symbolic(symbolic, budget)
    return EXIT_DOES_NOT_FIT if fits is False else EXIT_DONE


def tuning_of_folder(folder: ModelFolder, options: argparse.Namespace, sizes: InputSizes, batch: int) -> Tuning:
    """The training that the options mean.

    Raises:
        InvalidInputError: a component is not there, or has no weights that can be read.
    """
    from vram_guard.closed_form.inputs import sample_of
    from vram_guard.closed_form.tuning import Tuning, checked_dtype, stored_dtype, transformer_shape

    trained = folder.chosen("--train", options.train or folder.usually_trained)
    if options.frozen is None:
        rest = [name for name in folder.components if name not in {one.name for one in trained}]
        # Prompts are encoded while training; latents are usually made beforehand.
        names = rest if not trained else [name for name in rest if name.startswith("text_encoder")]
        frozen = folder.chosen("--frozen", ",".join(names))
    else:
        frozen = folder.chosen("--frozen", options.frozen)
    for one in (*trained, *frozen):
        if not one.weights.numbers:
            raise InvalidInputError(_no_weights(one.name, one.weights.pickles))
    main = (trained or frozen)[0] if trained or frozen else None
    numbers, text, tokens = (0, 0, 0) if main is None else sample_of(main.config, sizes)
    return Tuning(
        trained=trained,
        frozen=frozen,
        batch=batch,
        dtype=checked_dtype(options.dtype) if options.dtype else stored_dtype((*trained, *frozen)),
        sample_numbers=numbers,
        text_numbers=text,
        shape=None if main is None else transformer_shape(main.config, tokens),
    )


def _no_weights(name: str, pickles: tuple[str, ...]) -> str:
    if pickles:
        return _(
            "{name} has only pickles ({files}), which are never loaded: save it as safetensors "
            "(save_pretrained(..., safe_serialization=True))",
            name=name,
            files=", ".join(pickles),
        )
    return _("{name} has no weights: no .safetensors file is in its folder", name=name)


def _budget(options: argparse.Namespace) -> Budget | None:
    """What there is; None where nobody says and there is no GPU here."""
    from vram_guard.budget import Budget

    if options.device is not None:
        if options.gpu or options.budget or options.gpu_memory:
            raise InvalidInputError(_("give either --device (what is free there) or --gpu, --budget, --gpu-memory"))
        device = options.device
        which = int(device) if device.isdigit() and device.isascii() else device
        return Budget.resolve(device=which, margin=_margin(options))
    if options.gpu is None and options.budget is None and options.gpu_memory is None:
        try:
            return Budget.resolve(margin=_margin(options))
        except NoDeviceError:
            return None
    return gpu_memory(options.gpu_memory, options.gpu, options.budget, options.margin)[2]


def _margin(options: argparse.Namespace) -> float | None:
    return None if options.margin is None else number("margin", options.margin, 0)


class _Symbolic:
    def __init__(self, estimate: Estimate, largest: int | None, plan: Plan | None) -> None:
        self.estimate, self.largest, self.plan = estimate, largest, plan


def _symbolic(
    tuning: Tuning, sizes: InputSizes, budget: Budget | None, options: argparse.Namespace, notes: list[str]
) -> _Symbolic | None:
    """The symbolic answer where the configs can be built; otherwise a note says why not."""
    if len(tuning.trained) != 1:
        why = _("it is made for training one component")
        notes.append(_("no symbolic answer: {reason}", reason=why))
        return None
    try:
        return _traced(tuning, sizes, budget, options)
    except VramGuardError as error:
        notes.append(_("no symbolic answer: {reason}", reason=error))
    except Exception as error:  # noqa: BLE001 - diffusers' and transformers' code runs here on guessed inputs
        notes.append(_("no symbolic answer: {reason}", reason=f"{type(error).__name__}: {error}"))
    return None


def _traced(tuning: Tuning, sizes: InputSizes, budget: Budget | None, options: argparse.Namespace) -> _Symbolic:
    from vram_guard.capture.hugging_face import tuning_of
    from vram_guard.closed_form.tuning import PRECISION_OF
    from vram_guard.plan import ASSUMED_COMPUTE_CAPABILITY, plan
    from vram_guard.plan.techniques import TECHNIQUES
    from vram_guard.simulate import trace

    (trained,) = tuning.trained
    twin = "original" if trained in tuning.frozen else ""
    frozen = {("original" if one is trained else one.name): one.config for one in tuning.frozen}
    precision: Any = PRECISION_OF[tuning.dtype]
    step = tuning_of(trained.config, frozen, twin=twin, sizes=sizes, precision=precision)
    capability = (None if budget is None else budget.compute_capability) or ASSUMED_COMPUTE_CAPABILITY
    timeline = trace(step, compute_capability=capability)
    estimate = timeline.at(tuning.batch)
    largest = None if budget is None else timeline.max_batch_size(budget, limit=4096)
    made = None
    if options.recommend and budget is not None:
        made = plan(step, tuning.batch, budget, allow=tuple(TECHNIQUES), progress=_progress)
    return _Symbolic(estimate, largest, made)


def _progress(line: str) -> None:
    print(f"vram-guard: {line}", file=sys.stderr)


def _fits(tuning: Tuning, budget: Budget | None, symbolic: _Symbolic | None) -> bool | None:
    """The symbolic answer's word where there is one; None where nobody knows, or there is nothing to fit into."""
    if budget is None:
        return None
    if symbolic is not None:
        return symbolic.estimate.fits(budget)
    return tuning.complete and tuning.total <= budget.usable


def _print_closed_form(folder: ModelFolder, tuning: Tuning, budget: Budget | None, options: argparse.Namespace) -> None:
    from vram_guard.closed_form.recommend import measures, together
    from vram_guard.report.calculator import LINE
    from vram_guard.report.folder import folder_lines, recommendation_lines, tuning_lines, verdict_lines

    print("\n".join([LINE, _("🧮 GPU memory of a training"), LINE]))
    lines = [*folder_lines(folder), "", *tuning_lines(tuning), ""]
    if budget is None:
        lines.append(_("no GPU here: give --gpu, --budget or --gpu-memory to hear whether it fits"))
    else:
        lines += verdict_lines(tuning, budget)
        if options.recommend:
            usable = budget.usable
            lines += ["", *recommendation_lines(tuning, measures(tuning), together(tuning, usable), usable)]
    for line in lines:
        print(line)
    sys.stdout.flush()


def _print_symbolic(symbolic: _Symbolic, budget: Budget | None) -> None:
    from vram_guard.cli.estimate import symbolic_lines

    print()
    estimate = symbolic.estimate
    held = None if budget is None else budget.for_tier(estimate.tier)
    known = held is not None and estimate.fits(held)
    for line in symbolic_lines(estimate, held, symbolic.largest, fits=known):
        print(line)
    if symbolic.plan is not None:
        print()
        print(symbolic.plan.explain())


def _print_json(
    folder: ModelFolder,
    tuning: Tuning,
    budget: Budget | None,
    symbolic: _Symbolic | None,
    fits: bool | None,
    notes: list[str],
    options: argparse.Namespace,
) -> None:
    from vram_guard.closed_form.recommend import measures, together
    from vram_guard.report.as_json import as_dict
    from vram_guard.report.folder import folder_dict, measure_dict, tuning_dict

    answer: dict[str, Any] = {
        "kind": "model folder",
        "fits": fits,
        "decided_by": None if fits is None else "closed form" if symbolic is None else "symbolic",
        **folder_dict(folder),
        "closed_form": tuning_dict(tuning),
        "usable": None if budget is None else budget.usable,
        "symbolic": None,
        "notes": notes,
    }
    if budget is not None:
        answer["closed_form"]["largest_batch"] = tuning.largest_batch(budget.usable) if tuning.complete else None
    if options.recommend and budget is not None:
        usable = budget.usable
        answer["recommended"] = {
            "each": [measure_dict(one, usable) for one in measures(tuning)],
            "together": [measure_dict(one, usable) for one in together(tuning, usable)],
        }
    if symbolic is not None:
        answer["symbolic"] = {
            **as_dict(symbolic.estimate, budget=budget),
            "largest_batch": symbolic.largest,
            "plan": None if symbolic.plan is None else as_dict(symbolic.plan),
        }
    print_json(answer)
