"""``vram-guard estimate --model-path``: what training a downloaded model takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.cli._arguments import count, counts
from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.options import asked_budget, listed
from vram_guard.cli.printing import Notes, print_json, print_now, progress_shown
from vram_guard.cli.ways import FOLDER, check_needed, check_read
from vram_guard.errors import InvalidInputError, NoDeviceError
from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.closed_form.folder import ModelFolder
    from vram_guard.closed_form.inputs import InputSizes
    from vram_guard.closed_form.tuning import Tuning
    from vram_guard.report.closed_form import SymbolicAnswer


def estimate_folder(options: argparse.Namespace) -> int:
    """Say what the folder holds and what training it takes; the exit code says whether it fits."""
    from vram_guard.closed_form.folder import read_folder
    from vram_guard.closed_form.inputs import InputSizes
    from vram_guard.report.closed_form import LINE, folder_dict, folder_lines

    check_read(options, FOLDER)
    if options.quick:
        check_needed(options, ("cudnn", "recommend"), needs=_("the symbolic answer (no --quick)"))
    batch = count("batch_size", options.batch) or 1
    folder = read_folder(Path(options.model_path).expanduser())
    check_sizes(folder, options)
    sizes = InputSizes(**counts(options, "height", "width", "num_frames", "seq_length"))
    tuning = tuning_of_folder(folder, options, sizes, batch)
    budget = _budget(options)
    if not options.json:
        print_now([LINE, _("🧮 GPU memory of a training"), LINE, *folder_lines(folder, tuning, budget)])
    notes = Notes()
    symbolic = None
    if not options.quick and len(tuning.trained) != 1:
        notes.add(_("no symbolic answer: {reason}", reason=_("it is available only for training one component")))
    elif not options.quick:
        symbolic = notes.attempt(lambda: _symbolic(tuning, sizes, budget, options.cudnn, recommend=options.recommend))
    # The symbolic answer's word where there is one; None where there is nothing to fit into.
    known = tuning.complete and budget is not None and tuning.total <= budget.usable
    fits = None if budget is None else known if symbolic is None else symbolic.fits
    if options.json:
        answer = {
            "kind": "model folder",
            "fits": fits,
            "decided_by": None if fits is None else "closed form" if symbolic is None else "symbolic",
            **folder_dict(folder, tuning, budget),
            "symbolic": None if symbolic is None else _symbolic_dict(symbolic),
            "notes": notes,
        }
        print_json(answer)
    elif symbolic is not None:
        print_now(["", *symbolic.lines(verbose=bool(options.verbose))])
    return EXIT_DOES_NOT_FIT if fits is False else EXIT_DONE


def check_sizes(folder: ModelFolder, options: argparse.Namespace) -> None:
    """Refuse sizes that the model that is trained does not have.

    Raises:
        InvalidInputError: it has no such size.
    """
    from vram_guard.closed_form.inputs import sizes_read

    one = (*folder.chosen("--train", listed(options.train) or [folder.usually_trained]), *folder.components.values())[0]
    read = sizes_read(one.config)
    for name in ("height", "width", "num_frames", "seq_length"):
        if name in options.given and name not in read:
            others = _(", ").join("--" + one.replace("_", "-") for one in sorted(read))
            said = _(
                "{option} is not read for {name}, only {others}",
                option=options.given[name],
                name=one.name,
                others=others,
            )
            raise InvalidInputError(said)


def tuning_of_folder(folder: ModelFolder, options: argparse.Namespace, sizes: InputSizes, batch: int) -> Tuning:
    """The training that the options mean.

    Raises:
        InvalidInputError: a component is not there, or has no weights that can be read.
    """
    from vram_guard.closed_form.inputs import sample_of, sample_shape
    from vram_guard.closed_form.tuning import Tuning, checked_dtype, stored_dtype, transformer_shape

    trained = folder.chosen("--train", listed(options.train) or [folder.usually_trained])
    if options.frozen is None:
        rest = [name for name in folder.components if name not in {one.name for one in trained}]
        # Prompts are encoded while training; latents are usually made beforehand.
        names = rest if not trained else [name for name in rest if name.startswith("text_encoder")]
        frozen = folder.chosen("--frozen", names)
    else:
        frozen = folder.chosen("--frozen", listed(options.frozen))
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
        sample=() if main is None else sample_shape(main.config, sizes),
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
    """The budget; None where no option names one and there is no GPU here."""
    try:
        return asked_budget(options)
    except NoDeviceError:
        if options.device is not None:
            raise
        return None


def _symbolic(
    tuning: Tuning, sizes: InputSizes, budget: Budget | None, cudnn: str | None, *, recommend: bool
) -> SymbolicAnswer:
    """The symbolic answer for training one component, where its config can be built."""
    from vram_guard.capture.hugging_face import tuning_of
    from vram_guard.closed_form.tuning import PRECISION_OF
    from vram_guard.plan import PlanOptions, plan
    from vram_guard.plan.on_card import traced_on_card
    from vram_guard.plan.techniques import TECHNIQUES
    from vram_guard.report.closed_form import SymbolicAnswer

    (trained,) = tuning.trained
    twin = "original" if trained in tuning.frozen else ""
    frozen = {("original" if one is trained else one.name): one.config for one in tuning.frozen}
    precision: Any = PRECISION_OF[tuning.dtype]
    step = tuning_of(trained.config, frozen, twin=twin, sizes=sizes, precision=precision)
    timeline = traced_on_card(step, budget, cudnn=cudnn)
    largest = None if budget is None else timeline.max_batch_size(budget, limit=4096)
    made = None
    if recommend and budget is not None:
        with progress_shown() as progress:
            made = plan(
                step, tuning.batch, budget, allow=tuple(TECHNIQUES), options=PlanOptions(cudnn=cudnn), progress=progress
            )
    return SymbolicAnswer(timeline.at(tuning.batch), budget, largest, made)


def _symbolic_dict(symbolic: SymbolicAnswer) -> dict[str, Any]:
    from vram_guard.report.as_json import as_dict

    return {**symbolic.as_dict(), "plan": None if symbolic.plan is None else as_dict(symbolic.plan)}
