"""A training step as a config describes it: a callable's name, a config.json, or one of the example networks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.config_file import leaves, load_json

if TYPE_CHECKING:
    from vram_guard.closed_form.from_config import Asked
    from vram_guard.step import TrainingStep

#: Names of :mod:`vram_guard.capture.example_models`, known here without torch.
EXAMPLE_NAMES = ("ddpm", "fno", "transformer", "unet")


def is_buildable(model: str | None) -> bool:
    """True if a model's name says how to build it. Imports nothing."""
    return model is not None and (":" in model or _is_config(model) or model.lower() in EXAMPLE_NAMES)


def step_from_config(asked: Asked, config: Mapping[str, Any]) -> TrainingStep:
    """The training step that a config describes.

    Args:
        asked: what the config and the options say; ``asked.model`` is buildable.
        config: all entries of the config: a named callable is given those that it has parameters for.

    Raises:
        InvalidInputError: it names something that is not there or is no step.
        MissingLibraryError: a library is not installed.
        UnsupportedStepError: it is not known what the model's input looks like.
    """
    model = asked.model or ""
    if ":" in model:
        return _named(model, asked, config)
    if _is_config(model):
        from vram_guard.capture.hugging_face import step_of
        from vram_guard.closed_form.inputs import InputSizes

        numbers = asked.numbers
        sizes = InputSizes(numbers.get("height"), numbers.get("width"), None, numbers.get("seq_length"))
        precision: Any = asked.precision or "32-true"
        return step_of(load_json(_config_path(model)), sizes, precision, numbers.get("accumulate", 1))
    return _example(model, asked)


def _named(name: str, asked: Asked, config: Mapping[str, Any]) -> TrainingStep:
    from vram_guard.capture.object_reference import load_step

    entries = {path.rpartition(".")[2]: value for path, value in leaves(config)}
    return load_step(name, {**entries, **asked.numbers})


def _example(name: str, asked: Asked) -> TrainingStep:
    import torch

    from vram_guard.capture.example_models import CHANNELS, example
    from vram_guard.step import TrainingStep

    network = asked.network()
    precision: Any = asked.precision or "32-true"
    shape = (network.seq_length, CHANNELS, network.height, network.width)
    return TrainingStep(
        model=example(name, network),
        batch=lambda size: torch.zeros(size, *shape),
        loss=lambda model, maps: model(maps.flatten(0, 1)).float().square().mean(),
        optimizer=torch.optim.AdamW,
        precision=precision,
        accumulate=asked.numbers.get("accumulate", 1),
    )


def _is_config(model: str) -> bool:
    return model.endswith(".json") or (Path(model) / "config.json").is_file()


def _config_path(model: str) -> Path:
    return Path(model) if model.endswith(".json") else Path(model) / "config.json"
