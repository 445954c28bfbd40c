"""Models that a library knows by name: torchvision's, timm's, and those of transformers by the kind of their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vram_guard.capture.named_optimizer import named_optimizer
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.language import _
from vram_guard.plain_model import InputShape, step_of_model
from vram_guard.quiet import quiet_imports

if TYPE_CHECKING:
    import torch

    from vram_guard.closed_form.from_config import EstimateRequest
    from vram_guard.step import TrainingStep

#: What torchvision's classification models are trained with where nothing else is said.
_PICTURE: Final = (3, 224, 224)
#: torchvision's models that take more than one picture, by the modules that they are in.
_SEVERAL_PICTURES: Final = ("torchvision.models.optical_flow.", "torchvision.models.video.")

#: Tables of transformers' classes by the kind of the config; the first that has the kind counts.
_HEADS: Final = (
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def library_of(name: str) -> str | None:
    """The installed library that has a model of this name. Imports the libraries that may have it."""
    if name != name.lower() or not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        return None  # all of their names are in lower case
    known = {"torchvision": _in_torchvision, "timm": _in_timm, "transformers": _in_transformers}
    return next((library for library, knows in known.items() if find_spec(library) and knows(name)), None)


def absent_libraries() -> list[str]:
    """The libraries whose models have names, as far as they are not installed."""
    return [library for library in ("torchvision", "timm", "transformers") if not find_spec(library)]


def similar_name(name: str) -> str | None:
    """The name of an installed library's model that is nearest to this one. Imports these libraries.

    That of a published model ("bert-base-uncased", "facebook/opt-125m") begins with its kind's.
    """
    known: set[str] = set()
    if find_spec("torchvision"):
        known.update(_library("torchvision.models").list_models())
    if find_spec("timm"):
        known.update(_library("timm").list_models())
    if find_spec("transformers"):
        auto: Any = _library("transformers.models.auto.modeling_auto")
        known.update(*(getattr(auto, head) for head in _HEADS))
    plain = name.lower().rpartition("/")[2]
    kinds = (one for one in known if plain.startswith(one))
    return next(iter(get_close_matches(plain, known, n=1)), max(kinds, key=len, default=None))


def step_by_name(name: str, request: EstimateRequest) -> TrainingStep:
    """A training step of a library's model, with random weights.

    Args:
        name: that :func:`library_of` finds.
        request: the numbers and the inputs that were given.

    Raises:
        UnsupportedStepError: it is not known what the model's input looks like, or it is more than tensors.
    """
    from vram_guard.capture.lora import AdapterWeights

    library, numbers = library_of(name), request.numbers
    learning = named_optimizer(request.optimizer)
    build: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    if request.four_bits and library != "transformers":
        raise InvalidInputError(_("--qlora is for models of transformers"))
    if request.checkpointing and (library != "transformers" or request.inputs is not None):
        raise InvalidInputError(_("--checkpointing is for models of transformers and diffusers, without --input"))
    if library == "transformers":
        from vram_guard.capture.hugging_face import constructor, step_of, takes_tokens
        from vram_guard.capture.lora import weights_of
        from vram_guard.closed_form.inputs import InputSizes

        config = transformers_config(name)
        length = numbers.get("seq_length") if request.inputs is None else _tokens(request.inputs)
        # The tokens of a text are its labels as well, of which the model makes its loss.
        if request.inputs is None or (length is not None and takes_tokens(config)):
            sizes = InputSizes(numbers.get("height"), numbers.get("width"), None, length)
            weights = weights_of(request, config)
            step = step_of(config, sizes, weights, checkpointing=request.checkpointing)
            return step.with_(optimizer=learning)
        build, shape = constructor(AdapterWeights.of(request).quantised(config)), _PICTURE
    elif library == "timm":
        timm: Any = _library("timm")
        build = lambda: timm.create_model(name)  # noqa: E731 - as the others are: built symbolically, later
        shape = tuple(timm.get_pretrained_cfg(name).input_size) if timm.is_model_pretrained(name) else _PICTURE
    else:
        build, shape = _torchvision_model(name, is_shape_given=request.inputs is not None)
    weights = AdapterWeights.of(request)
    inputs = _inputs(request, shape)
    return step_of_model(weights.applied(build), inputs, optimizer=learning, precision=weights.precision)


def _torchvision_model(name: str, *, is_shape_given: bool) -> tuple[Callable[[], torch.nn.Module], tuple[int, ...]]:
    """What builds a model, and the picture that its first published weights were evaluated with.

    Raises:
        UnsupportedStepError: its input is more than a picture.
    """
    models: Any = _library("torchvision.models")
    builder = models.get_model_builder(name)
    if builder.__module__.startswith("torchvision.models.detection."):
        raise UnsupportedStepError(_("{model} learns from boxes beside its pictures: give a TrainingStep", model=name))
    if builder.__module__.startswith(_SEVERAL_PICTURES) and not is_shape_given:
        raise UnsupportedStepError(
            _(
                "{model} takes more than one picture: give the shape of its input, such as --input 3x16x112x112 for a "
                "video, or --input 3x368x496,3x368x496 for two pictures",
                model=name,
            )
        )
    # Models of segmentation would otherwise download weights for their backbones.
    nothing = {part: None for part in ("weights", "weights_backbone") if part in signature(builder).parameters}
    published = getattr(models.get_model_weights(name), "IMAGENET1K_V1", None)
    side = _PICTURE[1] if published is None else published.transforms().crop_size[0]

    def build() -> torch.nn.Module:
        with quiet_imports():  # Inception warns that its random weights will be drawn otherwise one day
            made: torch.nn.Module = builder(**nothing)
        return made

    return build, (_PICTURE[0], side, side)


def transformers_config(kind: str) -> Mapping[str, Any]:
    """The config.json of a kind of model with the library's own defaults: usually the smallest that was published."""
    auto: Any = _library("transformers.models.auto.modeling_auto")
    with quiet_imports():  # each config is a module of its own
        made: dict[str, Any] = import_module("transformers").CONFIG_MAPPING[kind]().to_dict()
    found = next(table[kind] for table in (getattr(auto, head) for head in _HEADS) if kind in table)
    return {**made, "architectures": [found if isinstance(found, str) else found[0]]}


def _tokens(inputs: str) -> int | None:
    """The length of the one text that a model is called with; None where the inputs are others."""
    shapes = InputShape.parse(inputs)
    is_text = len(shapes) == 1 and shapes[0].dtype == "int64" and len(shapes[0].shape) == 1
    return shapes[0].shape[0] if is_text else None


def _inputs(request: EstimateRequest, shape: tuple[int, ...]) -> tuple[InputShape, ...]:
    if request.inputs is not None:
        return InputShape.parse(request.inputs)
    sides = (request.numbers.get("height", shape[1]), request.numbers.get("width", shape[2]))
    return (InputShape((shape[0], *sides)),)


def _in_torchvision(name: str) -> bool:
    return name in _library("torchvision.models").list_models()


def _in_timm(name: str) -> bool:
    return bool(_library("timm").is_model(name))


def _in_transformers(name: str) -> bool:
    spec = find_spec("transformers")
    folders = [
        one for root in (spec and spec.submodule_search_locations) or () for one in Path(root, "models").iterdir()
    ]
    if _beginning(name) not in {_beginning(one.name) for one in folders}:
        return False  # a kind is called after its folder: told without an import that takes seconds
    auto: Any = _library("transformers.models.auto.modeling_auto")
    return any(name in getattr(auto, head) for head in _HEADS)


def _library(name: str) -> Any:
    with quiet_imports():
        return import_module(name)


def _beginning(name: str) -> str:
    return "".join(filter(str.isalnum, name))[:3]
