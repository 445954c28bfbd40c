"""``vram-guard estimate --model-path``: what training a downloaded model takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.cli.exits import EXIT_DOES_NOT_FIT, EXIT_DONE
from vram_guard.cli.options import asked_budget, listed
from vram_guard.cli.printing import print_json, print_now, progress_shown
from vram_guard.cli.ways import FOLDER, check_read
from vram_guard.errors import InvalidInputError, NoDeviceError
from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.closed_form.folder import Component, FineTuning, ModelFolder
    from vram_guard.report.closed_form import SymbolicAnswer


def estimate_folder(options: argparse.Namespace) -> int:
    """Say what the folder holds and what training it takes; the exit code says whether it fits."""
    from vram_guard.closed_form.folder import read_folder
    from vram_guard.report.as_json import as_dict
    from vram_guard.report.closed_form import LINE, folder_dict, folder_lines

    check_read(options, FOLDER)
    folder = read_folder(Path(options.model_path).expanduser())
    tuning = tuning_of_folder(folder, options)
    budget = _budget(options)
    if not options.json:
        print_now([LINE, _("🧮 GPU memory calculator"), LINE, *folder_lines(folder, tuning)])
    symbolic = _symbolic(tuning, budget, options.cudnn, recommend=options.recommend)
    fits = None if budget is None else symbolic.fits
    if options.json:
        answer = {
            "kind": "model folder",
            "fits": fits,
            **folder_dict(folder, tuning),
            "usable": None if budget is None else budget.usable,
            "symbolic": {**symbolic.as_dict(), "plan": None if symbolic.plan is None else as_dict(symbolic.plan)},
        }
        print_json(answer)
    else:
        print_now(["", *symbolic.lines(verbose=bool(options.verbose))])
        if budget is None:
            print_now([_("no GPU here: give --gpu, --budget or --gpu-memory to check whether it fits")])
    return EXIT_DOES_NOT_FIT if fits is False else EXIT_DONE


def tuning_of_folder(folder: ModelFolder, options: argparse.Namespace) -> FineTuning:
    """The training that the options mean.

    Raises:
        InvalidInputError: a component is not there, has no weights that can be read, or has no such sizes.
    """
    from vram_guard.closed_form.dtypes import checked_dtype
    from vram_guard.closed_form.folder import FineTuning, stored_dtype
    from vram_guard.closed_form.inputs import InputSizes

    trained = folder.component("--train", options.train or folder.usually_trained)
    _check_sizes(trained, options)
    # Prompts are encoded while training; latents are usually made beforehand.
    names = [name for name in folder.components if name != trained.name and name.startswith("text_encoder")]
    if options.frozen is not None:
        names = [] if options.frozen == ["none"] else listed(options.frozen)
    frozen = tuple(folder.component("--frozen", name) for name in dict.fromkeys(names))
    for one in (trained, *frozen):
        if not one.weights.numbers:
            raise InvalidInputError(_no_weights(one.name, one.weights.pickles))
    return FineTuning(
        trained=trained,
        frozen=frozen,
        batch=options.batch or 1,
        dtype=checked_dtype(options.dtype) if options.dtype else stored_dtype((trained, *frozen)),
        sizes=InputSizes(options.height, options.width, options.num_frames, options.seq_length),
    )


def _check_sizes(trained: Component, options: argparse.Namespace) -> None:
    """Refuse sizes that the model that is trained does not have.

    Raises:
        InvalidInputError: it has no such size.
    """
    from vram_guard.closed_form.inputs import sizes_read

    read = sizes_read(trained.config)
    for name in ("height", "width", "num_frames", "seq_length"):
        if name in options.given and name not in read:
            others = _(", ").join("--" + one.replace("_", "-") for one in sorted(read))
            said = _(
                "{option} is not read for {name}, only {others}",
                option=options.given[name],
                name=trained.name,
                others=others,
            )
            raise InvalidInputError(said)


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


def _symbolic(tuning: FineTuning, budget: Budget | None, cudnn: str | None, *, recommend: bool) -> SymbolicAnswer:
    """The training, run symbolically, and the plan for it where one is asked for."""
    from vram_guard.capture.hugging_face import tuning_of
    from vram_guard.closed_form.dtypes import PRECISION_OF
    from vram_guard.plan import PlanOptions, plan
    from vram_guard.plan.techniques import TECHNIQUES
    from vram_guard.report.closed_form import SymbolicAnswer
    from vram_guard.simulate import trace

    twin = "original" if tuning.trained in tuning.frozen else ""
    frozen = {("original" if one is tuning.trained else one.name): one.config for one in tuning.frozen}
    precision: Any = PRECISION_OF[tuning.dtype]
    step = tuning_of(tuning.trained.config, frozen, twin=twin, sizes=tuning.sizes, precision=precision)
    timeline = trace(step, budget=budget, cudnn=cudnn)
    largest = None if budget is None else timeline.max_batch_size(budget, limit=4096)
    made = None
    if recommend and budget is not None:
        with progress_shown() as progress:
            made = plan(
                step, tuning.batch, budget, allow=tuple(TECHNIQUES), options=PlanOptions(cudnn=cudnn), progress=progress
            )
    return SymbolicAnswer(timeline.at(tuning.batch), budget, largest, made)
