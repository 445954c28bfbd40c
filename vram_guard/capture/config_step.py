"""A training step as a config describes it: a callable's name, a config.json, or a library's model by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vram_guard.capture.named_optimizer import named_optimizer
from vram_guard.closed_form.inputs import InputSizes, sizes_read
from vram_guard.config_file import leaves, load_json
from vram_guard.errors import InvalidInputError
from vram_guard.known.architectures import architecture
from vram_guard.language import _, marked

if TYPE_CHECKING:
    from vram_guard.closed_form.from_config import EstimateRequest
    from vram_guard.step import TrainingStep

#: What a request may say of a sample and of a network, by the names of its numbers.
NUMBERS: Final = frozenset(
    {"height", "width", "hidden_dim", "num_layers", "seq_length", "bytes_per_element", "num_frames"}
)
#: What may be asked of the training of a model that is built here, and of a library's model.
_WEIGHTS: Final = frozenset({"precision", "dtype", "lora", "qlora", "optimizer"})
_LIBRARY: Final = _WEIGHTS | {"checkpointing"}

#: Names beside a model's own that say nothing about its network.
_SAYS_NOTHING: Final = frozenset({"name", "type", "model_type", "pretrained", "weights", "checkpoint"})


class ConfigKind(NamedTuple):
    """One way of naming a model, and what is read besides its name."""

    words: str
    """In English, a message of the catalogues."""
    reads: frozenset[str]


STEP: Final = ConfigKind(marked("a training step of your own (module:function)"), frozenset({"precision", "dtype"}))
PLAIN: Final = ConfigKind(marked("a model with --input"), _WEIGHTS | {"input"})
TEXT: Final = ConfigKind(marked("a model of texts"), _LIBRARY | {"seq_length"})
PICTURE: Final = ConfigKind(marked("a model of pictures"), _LIBRARY | {"height", "width"})
LATENTS: Final = ConfigKind(marked("a diffusion model"), _LIBRARY | {"height", "width"})
VIDEO: Final = ConfigKind(marked("a diffusion model of videos"), LATENTS.reads | {"num_frames"})
KINDS: Final = (STEP, PLAIN, TEXT, PICTURE, LATENTS, VIDEO)


def is_buildable(model: str | None) -> bool:
    """True if a model's name says how to build it. Imports nothing but libraries that may have a model of this name."""
    if model is None:
        return False
    return ":" in model or named_config(model) is not None or _by_name(model)


def other_network(request: EstimateRequest, config: Mapping[str, Any]) -> str | None:
    """The reason why a library's model is not the network that a config describes; None where nothing says so.

    A library's model of a name has sizes of its own, and a config that gives others means another network.
    """
    model = request.model
    if model is None or ":" in model or _is_file(model):
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
        kind = STEP if request.inputs is None else PLAIN
        if not NUMBERS & request.numbers.keys():
            return kind
        from vram_guard.capture.object_reference import parameters_of

        taken = parameters_of(model)  # imports the user's code
        return kind._replace(reads=kind.reads | (NUMBERS if taken is None else NUMBERS & taken))
    config = _config_of(request)
    if config is None:
        if request.inputs is not None:
            return PLAIN
        from vram_guard.capture.model_names import library_of, transformers_config

        if library_of(model) != "transformers":
            return PICTURE
        config = transformers_config(model)
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
    elif (described := _config_of(request)) is not None:
        from vram_guard.capture.hugging_face import step_of
        from vram_guard.capture.lora import weights_of

        weights = weights_of(request, described)
        step = step_of(described, sizes_of(request), weights, checkpointing=request.checkpointing)
        step = step.with_(optimizer=named_optimizer(request.optimizer))
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
    shapes, learning = InputShape.parse(request.inputs), named_optimizer(request.optimizer)
    return step_of_model(model, shapes, optimizer=learning, precision=weights.precision)


def _by_name(model: str) -> bool:
    from vram_guard.capture.model_names import library_of

    return library_of(model) is not None


def named_config(model: str) -> Mapping[str, Any] | None:
    """The entries of the config.json that a name means: a file's, or a published architecture's; None for neither.

    Raises:
        InvalidInputError: the file cannot be read.
    """
    if _is_file(model):
        return load_json(Path(model) if model.endswith(".json") else Path(model) / "config.json")
    published = architecture(model)
    return None if published is None else published.config


def _config_of(request: EstimateRequest) -> Mapping[str, Any] | None:
    """The config.json that a request means; None for a library's model, also one that is given its inputs."""
    model = request.model or ""
    takes_inputs = request.inputs is not None and not _is_file(model) and _by_name(model)
    return None if takes_inputs else named_config(model)


def sizes_of(request: EstimateRequest) -> InputSizes:
    """The sizes of a sample that a request gives."""
    return InputSizes(*(request.numbers.get(name) for name in ("height", "width", "num_frames", "seq_length")))


def _is_file(model: str) -> bool:
    return model.endswith(".json") or (Path(model) / "config.json").is_file()
