"""Training steps from the configs that diffusers and transformers write: models built symbolically, weights not read.

Only classes of the two libraries are used, by the names in the config: code that a folder brings along is never run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vram_guard.capture.lora import AdapterWeights
from vram_guard.closed_form.inputs import (
    LATENT_CHANNELS,
    InputSizes,
    image_size,
    is_video,
    latent_patch,
    latent_size,
    prompt_tokens,
    sequence_length,
    text_width,
    whole,
)
from vram_guard.errors import InvalidInputError, MissingLibraryError, UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import MOST_LAYERS
from vram_guard.plain_model import own_loss
from vram_guard.quiet import quiet_imports
from vram_guard.step import Precision, TrainingStep


def constructor(config: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """A constructor of the model of a config.json.

    Raises:
        InvalidInputError: the config names no class of diffusers or transformers.
        MissingLibraryError: the library is not installed.
        UnsupportedStepError: its weights are quantised by a library that is not followed.
    """
    _check_depth(config)
    name = config.get("_class_name")
    if isinstance(name, str):
        diffusers_class = _class("diffusers", name)
        return lambda: _built(diffusers_class.from_config(dict(config)))
    if "model_type" not in config:
        raise InvalidInputError(_("the config names neither a diffusers class (_class_name) nor a model_type"))
    made = _transformers_config(config)
    names = config.get("architectures") or ()
    if not isinstance(names, (list, tuple)) or not names or not isinstance(names[0], str):
        raise InvalidInputError(_("the config names no class: architectures is missing"))
    transformers_class = _class("transformers", names[0])
    quantise = _quantiser(config)
    return lambda: quantise(_built(transformers_class(made)))


def step_of(
    config: Mapping[str, Any], sizes: InputSizes, weights: AdapterWeights, *, checkpointing: bool = False
) -> TrainingStep:
    """Training of one model alone, by AdamW.

    Args:
        config: the entries of its config.json.
        sizes: of one sample; None: as the config says.
        weights: their type, and what is trained of them.
        checkpointing: whether the model's own gradient checkpointing is on.

    Raises:
        InvalidInputError, MissingLibraryError: as :func:`constructor`.
        UnsupportedStepError: it is not known what this model's input looks like.
    """
    built = constructor(weights.quantised(config))
    build = weights.applied(_checkpointed(built) if checkpointing else built)
    make = inputs_of(config, sizes)
    return TrainingStep(
        model=lambda: build().train(),
        batch=make,
        loss=_loss,
        optimizer=torch.optim.AdamW,
        precision=weights.precision,
    )


def _checkpointed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The model with its own gradient checkpointing, as transformers and diffusers call it.

    Raises:
        InvalidInputError: when it is built: it has none.
    """

    def built() -> nn.Module:
        model: Any = build()
        name = next(name for name in _CHECKPOINTING_METHODS if hasattr(model, name))
        try:
            getattr(model, name)()
        except ValueError:  # of both libraries, for a model without
            kind = type(model).__name__
            raise InvalidInputError(_("{model} has no gradient checkpointing of its own", model=kind)) from None
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # as transformers itself does then, after a warning
        made: nn.Module = model
        return made

    return built


#: The methods that switch it on: of transformers from version 5 on, of transformers before, of diffusers.
_CHECKPOINTING_METHODS = (
    "activation_checkpointing_enable",
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
)


class Assumed(NamedTuple):
    """What :func:`step_of` took for a model of transformers, for want of anything that says it."""

    sample: tuple[int, ...]
    """Shape of one sample: (tokens,), (channels, height, width), or that of a video's latents."""
    has_own_loss: bool
    """The model is given labels, and makes its loss of them."""


def assumed_of(step: TrainingStep) -> Assumed | None:
    """What was assumed of a step; None where :func:`step_of` did not make it of a model of transformers."""
    if step.loss is not _loss:
        return None
    batch = step.batch(1)
    samples = [batch[name] for name in ("input_ids", "pixel_values", "sample", "hidden_states") if name in batch]
    return Assumed(tuple(samples[0].shape[1:]), "labels" in batch) if samples else None


def inputs_of(config: Mapping[str, Any], sizes: InputSizes) -> Callable[[int], dict[str, Any]]:
    """Batch size -> what the model's forward is called with.

    Raises:
        UnsupportedStepError: it is not known what this model's input looks like.
    """
    if isinstance(config.get("_class_name"), str):
        return _diffusers_inputs(config, sizes)
    return _transformers_inputs(config, sizes)


class Pieces(nn.Module):
    """The models of a fine-tuning on the GPU: one that learns, and others that do not."""

    def __init__(self, trained: nn.Module, frozen: Mapping[str, nn.Module], *, twin: str, text: str) -> None:
        super().__init__()
        self.trained = trained.train()
        self.frozen = nn.ModuleDict({name: model.eval().requires_grad_(False) for name, model in frozen.items()})
        self.twin, self.text = twin, text

    def loss(self, inputs: dict[str, Any]) -> Tensor:
        """The trained model against its frozen twin, or against noise where there is none."""
        given = dict(inputs)
        tokens = given.pop("tokens", None)
        with torch.no_grad():
            if self.text:
                given["encoder_hidden_states"] = self.frozen[self.text](tokens)[0]
            target = self.frozen[self.twin](**given, return_dict=False)[0] if self.twin else None
        out: Tensor = self.trained(**given, return_dict=False)[0]
        return nn.functional.mse_loss(out.float(), torch.randn_like(out).float() if target is None else target.float())


def tuning_of(
    trained: Mapping[str, Any],
    frozen: Mapping[str, Mapping[str, Any]],
    *,
    twin: str,
    sizes: InputSizes,
    precision: Precision,
) -> TrainingStep:
    """Training of one model together with others that are frozen.

    Args:
        trained: the config of the model that learns.
        frozen: name -> config of every other model. One whose output is as wide as the text that the trained model
            takes encodes the prompts; the rest only take memory.
        twin: the one of them that is a copy of the trained model and says where to go ("" where there is none).
        sizes: of the trained model's input.
        precision: Lightning's word.

    Raises:
        as :func:`step_of`.
    """
    if not isinstance(trained.get("_class_name"), str) and not frozen:
        return step_of(trained, sizes, AdapterWeights()).with_(precision=precision)
    builders = {name: constructor(config) for name, config in frozen.items()}
    build, make = constructor(trained), inputs_of(trained, sizes)
    text = _text_encoder(trained, {name: config for name, config in frozen.items() if name != twin})

    def batch(size: int) -> dict[str, Any]:
        data = make(size)
        if text:
            data["tokens"] = torch.zeros(data.pop("encoder_hidden_states").shape[:2], dtype=torch.long)
        return {name: _as(value, precision) for name, value in data.items()}

    return TrainingStep(
        model=lambda: Pieces(build(), {name: make_one() for name, make_one in builders.items()}, twin=twin, text=text),
        batch=batch,
        loss=lambda model, data: model.loss(data),
        optimizer=lambda parameters: torch.optim.AdamW([one for one in parameters if one.requires_grad]),
        precision=precision,
    )


def _text_encoder(trained: Mapping[str, Any], frozen: Mapping[str, Mapping[str, Any]]) -> str:
    """The one frozen model that makes of tokens what the trained one takes ("" where there is none, or several)."""
    wanted = text_width(trained)
    fitting = [
        name
        for name, config in frozen.items()
        if "model_type" in config and (config.get("d_model") or config.get("hidden_size")) == wanted
    ]
    return fitting[0] if wanted is not None and len(fitting) == 1 else ""


def _as(value: Any, precision: Precision) -> Any:
    """The input in the weights' own type, where the weights are in half precision."""
    kinds = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
    if isinstance(value, Tensor) and value.is_floating_point() and precision in kinds:
        return value.to(kinds[precision])
    return value


def _loss(model: Any, data: dict[str, Any]) -> Tensor:
    """The model's own loss where it has one, else the mean square of its first output.

    Raises:
        InvalidInputError: the model takes no inputs of these sizes.
    """
    try:
        out = model(**data)
    except ValueError as error:  # what the libraries raise for a picture of another size than the config's
        raise InvalidInputError(
            _(
                "the model fails on an input of {shapes}: {problem}",
                shapes=", ".join("x".join(map(str, one.shape[1:])) for one in data.values() if isinstance(one, Tensor)),
                problem=" ".join(str(error).split()),
            )
        ) from error
    own = own_loss(out)
    if own is not None:
        return own
    first: Tensor = out[0] if not isinstance(out, Mapping) else next(iter(out.values()))
    return first.float().square().mean()


def takes_tokens(config: Mapping[str, Any]) -> bool:
    """True if the model of a config.json of transformers is called with the tokens of a text."""
    return bool(_main_input(_class("transformers", str((config.get("architectures") or [""])[0]))) == "input_ids")


def _main_input(model: Any) -> Any:
    return getattr(model, "main_input_name", "input_ids")


def _class(library: str, name: str) -> Any:
    try:
        with quiet_imports():
            module = importlib.import_module(library)
            found = getattr(module, name, None) if name.isidentifier() else None
    except ImportError as error:
        raise MissingLibraryError(
            _("building {name} needs {library}: {error}", name=name, library=library, error=error)
        ) from error
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise InvalidInputError(_("{library} has no model called {name}", library=library, name=name[:60]))
    return found


def _check_depth(config: Mapping[str, Any]) -> None:
    """Layers cost time to build, even symbolically: a config of a billion of them is a mistake."""
    for name, value in config.items():
        if name.endswith(("layers", "depth", "blocks")) and isinstance(value, int) and value > MOST_LAYERS:
            raise InvalidInputError(_("{name} is {value}: no model has so many layers", name=name, value=value))


def _transformers_config(config: Mapping[str, Any]) -> Any:
    kind = config["model_type"]
    try:
        with quiet_imports():
            from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise MissingLibraryError(
            _("building {name} needs {library}: {error}", name=kind, library="transformers", error=error)
        ) from error
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise InvalidInputError(_("{library} has no model called {name}", library="transformers", name=str(kind)[:60]))
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:  # whatever transformers makes of a damaged config
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidInputError(_("{path} cannot be read: {reason}", path="config.json", reason=why)) from error


def _quantiser(config: Mapping[str, Any]) -> Callable[[nn.Module], nn.Module]:
    """Layers in 4 or 8 bits where the config asks for bitsandbytes; they are transformers' own choice.

    Raises:
        MissingLibraryError: bitsandbytes is not installed.
        UnsupportedStepError: the config asks for another library's weights (GPTQ, AWQ, ...).
    """
    wanted = config.get("quantization_config")
    if not isinstance(wanted, Mapping):
        return lambda model: model
    in_bits = wanted.get("load_in_4bit") or wanted.get("load_in_8bit")
    method = str(wanted.get("quant_method") or ("bitsandbytes" if in_bits else ""))
    if method != "bitsandbytes":
        raise UnsupportedStepError(
            _(
                "the config's weights are quantised by {method}: its layers run compiled kernels, and what these "
                "allocate is not known; bitsandbytes (4 and 8 bits) is followed",
                method=method or "?",
            )
        )
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise MissingLibraryError(
            _("building {name} needs {library}: {error}", name="quantization_config", library=method, error=error)
        ) from error
    configs: Any = importlib.import_module("transformers").BitsAndBytesConfig
    quantizers: Any = importlib.import_module("transformers.quantizers").AutoHfQuantizer
    quantizer = quantizers.from_config(configs.from_dict(dict(wanted)), pre_quantized=False)

    def quantise(model: nn.Module) -> nn.Module:
        quantizer.preprocess_model(model=model, device_map=None)
        return model

    return quantise


def _built(model: Any) -> nn.Module:
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers takes for it too, after a warning
    assert isinstance(model, nn.Module)
    return model


def _diffusers_inputs(config: Mapping[str, Any], sizes: InputSizes) -> Callable[[int], dict[str, Any]]:
    model = _class("diffusers", config["_class_name"])
    parameters = inspect.signature(model.forward).parameters
    known = {name: one for name, one in _diffusers_shapes(model.__name__, config, sizes).items() if name in parameters}
    unknown = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in known and name != "self"
    ]
    if unknown or not known:
        what = ", ".join(unknown) or model.__name__
        raise UnsupportedStepError(_("the shapes of {names} of {model} are unknown", names=what, model=model.__name__))

    def make(size: int) -> dict[str, Any]:
        return {name: one(size) for name, one in known.items()}

    return make


def _diffusers_shapes(name: str, config: Mapping[str, Any], sizes: InputSizes) -> dict[str, Callable[[int], Any]]:
    """Argument of forward -> batch size -> its value, for the arguments that are known."""
    frames, height, width = latent_size(config, sizes)
    channels = whole(config, "in_channels", LATENT_CHANNELS)
    if "CogVideoX" in name:
        shape: tuple[int, ...] = (frames, channels, height, width)
    elif is_video(config):
        shape = (channels, frames, height, width)
    else:
        shape = (channels, height, width)
    tokens, text = prompt_tokens(config), text_width(config)
    known: dict[str, Callable[[int], Any]] = {
        "sample": lambda size: torch.zeros(size, *shape),
        "hidden_states": lambda size: torch.zeros(size, *shape),
        "timestep": lambda size: torch.zeros(size, dtype=torch.long),
    }
    if text is not None:
        known["encoder_hidden_states"] = lambda size: torch.zeros(size, tokens, text)
    pooled = config.get("pooled_projection_dim")
    if isinstance(pooled, int):
        known["pooled_projections"] = lambda size: torch.zeros(size, pooled)
    if config.get("num_class_embeds") or name.startswith("DiT"):
        known["class_labels"] = lambda size: torch.zeros(size, dtype=torch.long)
    if config.get("use_rotary_positional_embeddings"):
        _across, down, along = latent_patch(config)
        points = frames * (height // down) * (width // along)
        turns = torch.zeros(points, whole(config, "attention_head_dim"))
        known["image_rotary_emb"] = lambda _size: (turns, turns)
    if config.get("addition_embed_type") == "text_time":
        of_time = whole(config, "addition_time_embed_dim")
        of_text = whole(config, "projection_class_embeddings_input_dim") - 6 * of_time
        known["added_cond_kwargs"] = lambda size: {
            "text_embeds": torch.zeros(size, of_text),
            "time_ids": torch.zeros(size, 6),
        }
    return known


def _transformers_inputs(config: Mapping[str, Any], sizes: InputSizes) -> Callable[[int], dict[str, Any]]:
    name = str((config.get("architectures") or [""])[0])
    model = _class("transformers", name)
    main = _main_input(model)
    length = sequence_length(config, sizes)
    whole_text = any(part in name for part in ("ForCausalLM", "LMHead", "MaskedLM", "ConditionalGeneration", "Token"))
    if main == "pixel_values":
        pixels = image_size(config, sizes)

        def images(size: int) -> dict[str, Any]:
            data = {"pixel_values": torch.zeros(size, *pixels)}
            return data | ({"labels": torch.zeros(size, dtype=torch.long)} if "Classification" in name else {})

        return images
    if main != "input_ids":
        raise UnsupportedStepError(_("the shapes of {names} of {model} are unknown", names=main, model=name))

    def text(size: int) -> dict[str, Any]:
        data = {"input_ids": torch.zeros(size, length, dtype=torch.long)}
        if whole_text:
            data["labels"] = torch.zeros(size, length, dtype=torch.long)
        elif "SequenceClassification" in name:
            data["labels"] = torch.zeros(size, dtype=torch.long)
        return data

    return text
