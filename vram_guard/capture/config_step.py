"""A training step as a config describes it: a callable's name, a config.json, or a library's model by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vram_guard.config_file import leaves, load_json
from vram_guard.errors import InvalidInputError
from vram_guard.language import _, marked

if TYPE_CHECKING:
    from vram_guard.closed_form.from_config import EstimateRequest
    from vram_guard.step import TrainingStep

#: What a request may say of a sample and of a network, by the names of its numbers.
NUMBERS: Final = frozenset(
    {"height", "width", "hidden_dim", "num_layers", "seq_length", "bytes_per_element", "num_frames"}
)
#: What may be asked of the weights of a model that is built here.
_WEIGHTS: Final = frozenset({"precision", "dtype", "lora", "qlora"})

#: Names beside a model's own that say nothing about its network.
_SAYS_NOTHING: Final = frozenset({"name", "type", "model_type", "pretrained", "weights", "checkpoint"})


class ConfigKind(NamedTuple):
    """One way of naming a model, and what is read besides its name."""

    words: str
    """In English, a message of the catalogues."""
    reads: frozenset[str]


STEP: Final = ConfigKind(marked("a training step of your own (module:function)"), frozenset({"precision", "dtype"}))
PLAIN: Final = ConfigKind(marked("a model with --input"), _WEIGHTS | {"input"})
TEXT: Final = ConfigKind(marked("a model of texts"), _WEIGHTS | {"seq_length"})
PICTURE: Final = ConfigKind(marked("a model of pictures"), _WEIGHTS | {"height", "width"})
LATENTS: Final = ConfigKind(marked("a diffusion model"), _WEIGHTS | {"height", "width"})
VIDEO: Final = ConfigKind(marked("a diffusion model of videos"), LATENTS.reads | {"num_frames"})
KINDS: Final = (STEP, PLAIN, TEXT, PICTURE, LATENTS, VIDEO)


def is_buildable(model: str | None) -> bool:
    """True if a model's name says how to build it. Imports nothing but libraries that may have a model of this name."""
    if model is None:
        return False
    return ":" in model or _is_config(model) or _by_name(model)


def other_network(request: EstimateRequest, config: Mapping[str, Any]) -> str | None:
    """The reason why a library's model is not the network that a config describes; None where nothing says so.

    A library's model of a name has sizes of its own, and a config that gives others means another network.
    """
    model = request.model
    if model is None or ":" in model or _is_config(model):
        return None
    section = config.get("model")
    inside = sorted(map(str, section.keys() - _SAYS_NOTHING)) if isinstance(section, Mapping) else []
    sizes = [request.places[name] for name in ("hidden_dim", "num_layers") if name in request.places]
    named = dict.fromkeys([*(f"model.{name}" for name in inside), *sizes])
    if not named:
        return None
    return _(
        "the config's {names} are no settings of a library's {model}, which has sizes of its own: name what builds "
        "your network (step: module:function), or a config.json",
        names=", ".join(named),
        model=model,
    )


def kind_of(request: EstimateRequest) -> ConfigKind:
    """The way in which a buildable model is named, with the numbers that it reads.

    Raises:
        InvalidInputError: the name means nothing, or a file of it cannot be read.
    """
    model = request.model or ""
    if ":" in model:
        from vram_guard.capture.object_reference import parameters_of

        kind, taken = STEP if request.inputs is None else PLAIN, parameters_of(model)
        return kind._replace(reads=kind.reads | (NUMBERS if taken is None else NUMBERS & taken))
    if request.inputs is not None and not _is_config(model):
        return PLAIN
    from vram_guard.capture.model_names import library_of, transformers_config
    from vram_guard.closed_form.inputs import sizes_read

    if _is_config(model):
        config: Mapping[str, Any] = load_json(_config_path(model))
    elif library_of(model) == "transformers":
        config = transformers_config(model)
    else:
        return PICTURE
    read = sizes_read(config)
    if "num_frames" in read:
        return VIDEO
    return TEXT if "seq_length" in read else LATENTS if "_class_name" in config else PICTURE


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
        step = _named(model, request, config)
    elif _is_config(model):
        from vram_guard.capture.hugging_face import step_of, weights_of
        from vram_guard.closed_form.inputs import InputSizes

        path, numbers = _config_path(model), request.numbers
        described = load_json(path)
        sizes = InputSizes(*(numbers.get(name) for name in ("height", "width", "num_frames", "seq_length")))
        step = step_of(described, sizes, weights_of(request, described))
    else:
        from vram_guard.capture.model_names import step_by_name

        step = step_by_name(model, request)
    return step.with_(
        precision=request.precision or step.precision, accumulate=request.numbers.get("accumulate", step.accumulate)
    )


def _named(name: str, request: EstimateRequest, config: Mapping[str, Any]) -> TrainingStep:
    from vram_guard.capture.object_reference import load_model, load_step

    entries = {path.rpartition(".")[2]: value for path, value in leaves(config)}
    arguments = {**entries, **request.numbers}
    if request.inputs is None:
        return load_step(name, arguments)
    from vram_guard.capture.lora import AdapterWeights
    from vram_guard.plain_model import InputShape, step_of_model

    if request.four_bits:
        raise InvalidInputError(_("--qlora is for models of transformers"))
    weights = AdapterWeights.of(request)
    model = weights.applied(load_model(name, arguments))
    return step_of_model(model, InputShape.parse(request.inputs), precision=weights.precision)


def _by_name(model: str) -> bool:
    from vram_guard.capture.model_names import library_of

    return library_of(model) is not None


def _is_config(model: str) -> bool:
    return model.endswith(".json") or (Path(model) / "config.json").is_file()


def _config_path(model: str) -> Path:
    return Path(model) if model.endswith(".json") else Path(model) / "config.json"
