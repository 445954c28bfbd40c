"""A local model folder of diffusers or transformers: its components, their configs and what their weights hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vram_guard.closed_form.inputs import InputSizes, sample_shape
from vram_guard.closed_form.weights import Weights, read_weights
from vram_guard.config_file import load_json
from vram_guard.errors import InvalidInputError
from vram_guard.language import _

#: Components that are trained, in the order in which a pipeline is looked through for one.
TRAINED_FIRST = ("transformer", "unet", "model", "prior", "decoder")


@dataclass(frozen=True)
class Component:
    """One model of a folder."""

    name: str
    """Its subfolder ("transformer"); "model" where the folder holds one model alone."""
    config: Mapping[str, Any]
    weights: Weights

    @property
    def class_name(self) -> str:
        """The class that its config names; "" where it names none."""
        classes = self.config.get("architectures")
        named = [self.config.get("_class_name"), *(classes if isinstance(classes, list) else ())]
        return next((name for name in named if isinstance(name, str)), "")


@dataclass(frozen=True)
class ModelFolder:
    """The models of a folder."""

    path: Path
    class_name: str
    """The pipeline's class; "" where the folder is not a pipeline."""
    components: Mapping[str, Component] = field(default_factory=dict)

    @property
    def usually_trained(self) -> str:
        """The component that a training changes unless another one is named."""
        for name in TRAINED_FIRST:
            if name in self.components:
                return name
        return max(self.components, key=lambda name: self.components[name].weights.parameters)

    def component(self, option: str, name: str) -> Component:
        """The component of this name, which an option gives.

        Raises:
            InvalidInputError: there is none.
        """
        if name not in self.components:
            raise InvalidInputError(
                _(
                    "{option}: there is no {name} in {path}, only {known}",
                    option=option,
                    name=name[:60],
                    path=self.path,
                    known=", ".join(self.components),
                )
            )
        return self.components[name]


#: What the files call the types that are trained in.
_STORED: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def stored_dtype(components: Sequence[Component]) -> str:
    """The type that the largest component is stored in; float32 where that is not a type to train in."""
    largest = max(components, key=lambda one: one.weights.parameters)
    return _STORED.get(largest.weights.dtype or "", "float32")


@dataclass(frozen=True)
class FineTuning:
    """A training of one model of a folder."""

    trained: Component
    frozen: tuple[Component, ...]
    """What lies on the GPU beside it; the trained one is among them where a frozen copy of it does."""
    batch: int
    dtype: str
    """Of all weights."""
    sizes: InputSizes

    @property
    def sample(self) -> tuple[int, ...]:
        """Shape of one sample: (tokens,), or (channels, frames, height, width); without frames for pictures."""
        return sample_shape(self.trained.config, self.sizes)


def read_folder(path: Path) -> ModelFolder:
    """The components of a local folder.

    Raises:
        InvalidInputError: there is no such folder, no model in it, or a file in it is damaged.
    """
    if not path.is_dir():
        raise InvalidInputError(
            _("there is no folder {path}: give the path of a downloaded model; nothing is downloaded", path=path)
        )
    index = path / "model_index.json"
    name = ""
    if index.is_file():
        own = load_json(index).get("_class_name")
        name = own if isinstance(own, str) else ""
    elif (path / "config.json").is_file() or _has_weights(path):
        return ModelFolder(path, name, {"model": _component("model", path)})
    found = {inner.name: _component(inner.name, inner) for inner in _model_folders(path)}
    if not found:
        raise InvalidInputError(
            _("{path} holds no model: neither a config.json nor a model_index.json with models beside it", path=path)
        )
    return ModelFolder(path, name, found)


def _model_folders(path: Path) -> list[Path]:
    inner = sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
    return [one for one in inner if (one / "config.json").is_file() or _has_weights(one)]


def _has_weights(path: Path) -> bool:
    return any(one.name.endswith(".safetensors") for one in path.iterdir())


def _component(name: str, path: Path) -> Component:
    config = path / "config.json"
    return Component(name, load_json(config) if config.is_file() else {}, read_weights(path))
