"""Finding what the rule of thumb asks for in a training config, whatever its sections are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from vram_guard.closed_form.calculator import FLOAT32, HALF, Network
from vram_guard.closed_form.dtypes import MIXED_OF, PRECISION_OF, SPELLINGS, checked_dtype
from vram_guard.config_file import leaves
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.step import PRECISIONS, checked_count

#: What a number is called in people's configs, the last part of its path, and in their scripts' options; the first
#: name is its own.
NAMES: Final[dict[str, tuple[str, ...]]] = {
    "batch": ("batch", "batch_size", "train_batch_size", "samples_per_gpu", "per_device_train_batch_size"),
    "height": ("height", "img_height", "image_height", "sample_height"),
    "width": ("width", "img_width", "image_width", "sample_width"),
    "hidden_dim": (
        *("hidden_dim", "hidden_size", "hidden_channels", "hidden", "d_model"),
        *("embed_dim", "embed_dims", "base_channels", "model_channels"),
    ),
    "num_layers": ("num_layers", "n_layers", "num_hidden_layers", "depth", "num_blocks", "num_encoder_layers"),
    "seq_length": ("seq_length", "seq_len", "sequence_length", "input_days", "num_frames", "in_steps", "time_steps"),
    "bytes_per_element": ("bytes_per_element",),
    "accumulate": (
        *("accumulate", "accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches"),
        *("accumulative_counts", "gradient_accumulation", "grad_accumulation_steps", "grad_accum_steps", "grad_accum"),
        *("accum_steps", "accum_iter"),
    ),
}
NEEDED: Final = ("batch", "height", "width", "hidden_dim", "num_layers")
RESOLUTION: Final = ("resolution", "image_size", "img_size", "input_size", "crop_size", "spatial_size", "patch_size")
MIXED: Final = ("use_amp", "amp", "use_mixed_precision", "mixed_precision", "fp16", "bf16", "use_fp16", "precision")
MEMORY: Final = ("gpu_memory", "gpu_memory_gb", "memory", "vram")
GPU: Final = ("gpu", "gpu_name", "device_name")
STEP: Final = ("step", "target", "model_path", "config_path")
_MODEL: Final = ("model", "model_name", "model_type")
#: Sections that say nothing about a training step.
ELSEWHERE: Final = frozenset({"val", "valid", "validation", "test", "eval", "evaluation", "predict", "inference"})

#: Every name that is read from a config, in lower case.
READ: Final = frozenset(
    {*(name for names in NAMES.values() for name in names), *RESOLUTION, *MIXED, *MEMORY, *GPU, *STEP, *_MODEL}
)


@dataclass(frozen=True)
class EstimateRequest:
    """A request for an estimate, from a config and its options; None: given in neither."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    """By the names of :data:`NAMES`."""
    precision: str | None = None
    """Lightning's word."""
    memory: str | int | float | None = None
    gpu: str | None = None
    model: str | None = None
    """The model's name, a path of a config.json, or ``module:callable``."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Name -> its path in the config."""
    inputs: str | None = None
    """Shapes of a plain model's inputs, as ``--input`` takes them."""
    dtype: str | None = None
    """Of the weights, where it is asked for: float32, float16 or bfloat16."""
    lora: str | None = None
    """Settings of LoRA as ``--lora`` takes them ("" for the usual ones); None: every weight is trained."""
    four_bits: bool = False
    """The weights that LoRA leaves as they are lie in 4 bits."""
    checkpointing: bool = False
    """A library's model checkpoints its blocks, as its own method switches that on."""
    optimizer: str | None = None
    """Of a model that is built by its name; None: AdamW."""

    def missing(self) -> list[str]:
        """Names of the numbers that the rule needs and that are not given."""
        return [name for name in NEEDED if name not in self.numbers]

    def network(self) -> Network:
        """The network that the rule applies to.

        Raises:
            InvalidInputError: numbers are missing; says which, and how they may be called.
        """
        missing = self.missing()
        if missing:
            options = ", ".join("--" + name.replace("_", "-") for name in missing)
            known = "; ".join(f"{name}: {', '.join(NAMES[name])}" for name in missing)
            raise InvalidInputError(
                _(
                    "missing: {options} (in a config: {names}; resolution: [height, width])",
                    options=options,
                    names=known,
                )
            )
        own = self.numbers.get("bytes_per_element")
        of_one = own or (FLOAT32 if self.precision in (None, "32-true") else HALF)
        return Network(
            **{name: self.numbers[name] for name in NEEDED},
            seq_length=self.numbers.get("seq_length", 1),
            bytes_per_element=of_one,
        )


def parse_request(config: Mapping[str, Any], options: Mapping[str, Any]) -> EstimateRequest:
    """Read a request from a config, with the options over it.

    Args:
        config: the file's entries; may be empty.
        options: numbers by the names of :data:`NAMES` and "num_frames", and "precision", "dtype", "lora", "qlora",
            "gpu_memory", "gpu", "budget", "model", "input", "checkpointing", "optimizer"; None:
            not given.

    Raises:
        InvalidInputError: a number is none, or stands in two places with different values.
    """
    found = _Entries(config)
    numbers: dict[str, int] = {}
    for name, names in NAMES.items():
        given = options.get(name)
        value = found.one(name, names) if given is None else given
        if value is not None:
            numbers[name] = checked_count(found.path_of(name) if given is None else name, value)
    if "height" not in numbers or "width" not in numbers:
        size = found.one("resolution", RESOLUTION)
        height, width = _resolution(found.path_of("resolution"), size) if size is not None else (None, None)
        numbers |= {
            name: checked_count(found.path_of("resolution"), value)
            for name, value in (("height", height), ("width", width))
            if value is not None and name not in numbers
        }
    if options.get("num_frames") is not None:
        numbers["num_frames"] = checked_count("num_frames", options["num_frames"])
    precision, dtype, lora = _wanted_precision(options)
    if precision is None:
        mixed = found.one("mixed precision", MIXED, several=_stronger)
        precision = None if mixed is None else precision_word(found.path_of("mixed precision"), mixed)
    memory, gpu = options.get("gpu_memory"), options.get("gpu")
    if memory is None and gpu is None and options.get("budget") is None:
        memory, gpu = found.one("GPU memory", MEMORY), found.text("GPU", GPU)
    model = options.get("model") or found.model()
    return EstimateRequest(
        numbers,
        precision,
        memory,
        gpu,
        model,
        found.places,
        options.get("input"),
        dtype,
        lora,
        options.get("qlora") is not None,
        bool(options.get("checkpointing")),
        options.get("optimizer"),
    )


def _wanted_precision(options: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """(Precision, type of the weights, settings of LoRA) that the options ask for; None: they do not say.

    Weights in half precision are a precision of their own ("bf16-true"). Under LoRA they are a property of the model:
    its adapters stay in float32, and autocast may come on top.

    Raises:
        InvalidInputError: a word is not known, or two of the options contradict each other.
    """
    precision, dtype, lora, qlora = (options.get(name) for name in ("precision", "dtype", "lora", "qlora"))
    precision = None if precision is None else precision_word("--precision", precision)
    dtype = None if dtype is None else checked_dtype(dtype)
    if lora and qlora:
        raise InvalidInputError(_("--lora and --qlora both give settings of LoRA: give them once"))
    lora = (lora or qlora or "") if lora is not None or qlora is not None else None
    given = [name for name in ("precision", "dtype", "bytes_per_element") if options.get(name) is not None]
    if len(given) > 1 and (lora is None or "bytes_per_element" in given):
        names = _(" and ").join("--" + name.replace("_", "-") for name in given)
        raise InvalidInputError(_("{names} say the same thing: give one of them", names=names))
    return (PRECISION_OF[dtype] if dtype is not None and lora is None else precision), dtype, lora


class _Entries:
    """The entries of a config by the last part of their path."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.all = [
            (path, value) for path, value in leaves(config) if ELSEWHERE.isdisjoint(path.lower().split(".")[:-1])
        ]
        self.places: dict[str, str] = {}

    def path_of(self, name: str) -> str:
        """The place where the number was found, for messages."""
        return self.places.get(name, name)

    def one(self, name: str, names: tuple[str, ...], several: Any = None) -> Any:
        """The value of the first of ``names`` that the config has.

        Raises:
            InvalidInputError: it occurs in two places with different values.
        """
        for candidate in names:
            found = [(path, value) for path, value in self.all if path.rpartition(".")[2].lower() == candidate]
            found = [(path, value) for path, value in found if value is not None and self._meant(path)]
            if not found:
                continue
            path, value = found[0]
            differing = [other for other in found[1:] if other[1] != value]
            if differing and several is None:
                other = differing[0]
                raise InvalidInputError(
                    _(
                        "{name} is given twice in the config: {path} is {value}, {other_path} is {other}; "
                        "pass it as an option",
                        name=name,
                        path=path,
                        value=repr(value)[:40],
                        other_path=other[0],
                        other=repr(other[1])[:40],
                    )
                )
            self.places[name] = path
            return value if several is None else several([value for _path, value in found])
        return None

    def text(self, name: str, names: tuple[str, ...]) -> str | None:
        """As :meth:`one`, where it is text."""
        value = self.one(name, names)
        return value if isinstance(value, str) else None

    def model(self) -> str | None:
        """The name of an explicit step, else of the model."""
        for candidate in STEP:
            value = self.text("model", (candidate,))
            if value is not None:
                return value
        model = self.config.get("model")
        if isinstance(model, str):
            return model
        if isinstance(model, Mapping):
            names = [model.get(key) for key in ("name", "type", "model_type")]
            return next((name for name in names if isinstance(name, str)), None)
        name = self.config.get("model_name") or self.config.get("model_type")
        return name if isinstance(name, str) else None

    def _meant(self, path: str) -> bool:
        """A width without a height is a number of channels, as Fourier operators name it."""
        section, _dot, last = path.rpartition(".")
        if last.lower() not in NAMES["width"]:
            return True
        beside = {other.rpartition(".")[2].lower() for other, _value in self.all if other.rpartition(".")[0] == section}
        return not beside.isdisjoint(NAMES["height"])


def _resolution(path: str, value: Any) -> tuple[Any, Any]:
    if isinstance(value, list) and len(value) == 2:
        return value[0], value[1]
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    raise InvalidInputError(
        _("{name} must be one number or [height, width], not {value}", name=path, value=repr(value)[:60])
    )


def _stronger(values: list[Any]) -> Any:
    """``fp16: true`` beside ``precision: 32`` of something else: what switches it on."""
    on = [value for value in values if value not in (False, "no", "none", 32, "32", "32-true")]
    return (on or values)[0]


def precision_word(path: str, value: Any) -> str:
    """Lightning's word for what a config says of precision.

    Raises:
        InvalidInputError: the word is not known.
    """
    if isinstance(value, bool):
        bf16 = path.rpartition(".")[2].lower() == "bf16"
        return ("bf16-mixed" if bf16 else "16-mixed") if value else "32-true"
    word = str(value).lower()
    if word in PRECISIONS:
        return word
    dtype = "float32" if word in ("no", "none") else SPELLINGS.get(word, word)
    if dtype not in MIXED_OF:
        near = get_close_matches(word, (*PRECISIONS, *SPELLINGS), n=1)
        raise InvalidInputError(
            _(
                "{path}: precision {value} is not known; for instance {hint}",
                path=path,
                value=repr(value)[:40],
                hint=near[0] if near else "16-mixed",
            )
        )
    return MIXED_OF[dtype]
