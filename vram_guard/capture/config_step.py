"""A training step as a config describes it: a callable's name, a config.json, or one of the example networks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.config_file import leaves, load_json

if TYPE_CHECKING:
    from vram_guard.closed_form.from_config import EstimateRequest
    from vram_guard.step import TrainingStep

#: Names of :mod:`vram_guard.capture._example_models`, known here without torch.
EXAMPLE_NAMES = ("ddpm", "fno", "transformer", "unet")


def is_buildable(model: str | None) -> bool:
    """True if a model's name says how to build it. Imports nothing but libraries that may have a model of this name."""
    if model is None:
        return False
    return ":" in model or _is_config(model) or model.lower() in EXAMPLE_NAMES or _by_name(model)


def step_from_config(request: EstimateRequest, config: Mapping[str, Any]) -> TrainingStep:
    """The training step that a config describes.

    Args:
        request: what the config and the options say; ``request.model`` is buildable.
        config: all entries of the config: a named callable is given those that it has parameters for.

    Raises:
        InvalidInputError: it names something that is not there or is no step.
        MissingLibraryError: a library is not installed.
        UnsupportedStepError: it is not known what the model's input looks like.
    """
    model = request.model or ""
    if ":" in model:
        return _named(model, request, config)
    if _is_config(model):
        from vram_guard.capture.hugging_face import step_of
        from vram_guard.closed_form.inputs import InputSizes

        numbers = request.numbers
        sizes = InputSizes(numbers.get("height"), numbers.get("width"), None, numbers.get("seq_length"))
        precision: Any = request.precision or "32-true"
        return step_of(load_json(_config_path(model)), sizes, precision, numbers.get("accumulate", 1))
    if model.lower() in EXAMPLE_NAMES:
        return _example(model, request)
    from vram_guard.capture.model_names import step_by_name

    return step_by_name(model, request)


def _named(name: str, request: EstimateRequest, config: Mapping[str, Any]) -> TrainingStep:
    from vram_guard.capture.object_reference import load_model, load_step

    entries = {path.rpartition(".")[2]: value for path, value in leaves(config)}
    arguments = {**entries, **request.numbers}
    if request.inputs is None:
        return load_step(name, arguments)
    from vram_guard.plain_model import InputShape, step_of_model

    inputs = InputShape.parse(request.inputs)
    precision: Any = request.precision or "32-true"
    accumulate = request.numbers.get("accumulate", 1)
    return step_of_model(load_model(name, arguments), inputs, precision=precision, accumulate=accumulate)


def _by_name(model: str) -> bool:
    from vram_guard.capture.model_names import library_of

    return library_of(model) is not None


def _example(name: str, request: EstimateRequest) -> TrainingStep:
    import torch

    from vram_guard.capture._example_models import CHANNELS, example
    from vram_guard.step import TrainingStep

    network = request.network()
    precision: Any = request.precision or "32-true"
    shape = (network.seq_length, CHANNELS, network.height, network.width)
    return TrainingStep(
        model=example(name, network),
        batch=lambda size: torch.zeros(size, *shape),
        loss=lambda model, maps: model(maps.flatten(0, 1)).float().square().mean(),
        optimizer=torch.optim.AdamW,
        precision=precision,
        accumulate=request.numbers.get("accumulate", 1),
    )


def _is_config(model: str) -> bool:
    return model.endswith(".json") or (Path(model) / "config.json").is_file()


def _config_path(model: str) -> Path:
    return Path(model) if model.endswith(".json") else Path(model) / "config.json"
