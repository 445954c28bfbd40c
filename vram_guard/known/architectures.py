"""Published architectures by name, and the timelines of their training that the package brings along.

``architectures.json`` has what the authors' own config.json says of the network, the type in which it is usually
trained, and the number of its parameters where they publish it. The timelines lie in ``timelines/``, a file for each
architecture; ``tools/known_timelines.py`` makes them from traces, and a test traces again what it finds there.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

from vram_guard.known.form import unpacked
from vram_guard.timeline import Timeline

#: Tokens that a text's length has to be a multiple of: the backward pass of flash attention rounds it up to so many
#: (``flash_api.cpp``, ``seqlen_q_rounded``), and what lies between follows no polynomial.
LENGTH_STEP: Final = 128


@dataclass(frozen=True)
class Architecture:
    """A published network.

    Attributes:
        name: the name used here ("llama-3-8b").
        aliases: other names, those of the authors' repositories among them.
        config: entries of its config.json, as far as they say what the network is.
        parameters: their number as published; None: only rounded.
    """

    name: str
    aliases: tuple[str, ...]
    config: Mapping[str, Any]
    parameters: int | None = None


class Variant(NamedTuple):
    """One way to train an architecture."""

    dtype: str
    """Of the weights, under LoRA of those that are not trained."""
    precision: str
    """Lightning's word."""
    adapters: str = ""
    """"lora" or "qlora", with peft's own settings for the architecture; "": every weight is trained."""
    checkpointing: bool = False
    """Every block runs its forward again in the backward pass, as the model's own method switches it on."""

    optimizer: str = "adamw"
    """As ``--optimizer`` names it."""

    @property
    def key(self) -> str:
        """As a word: "bfloat16 bf16-mixed qlora checkpointing adamw"."""
        return " ".join(filter(None, (*self[:3], "checkpointing" if self.checkpointing else "", self.optimizer)))


@cache
def architectures() -> tuple[Architecture, ...]:
    """All of them."""
    entries = json.loads(files(__package__).joinpath("architectures.json").read_text(encoding="utf-8"))
    return tuple(
        Architecture(one["name"], tuple(one["aliases"]), one["config"], one.get("parameters")) for one in entries
    )


def architecture(name: str) -> Architecture | None:
    """The architecture of this name, in any case of letters; None where there is none.

    Example:
        >>> architecture("meta-llama/Llama-3.1-8B").name
        'llama-3-8b'
    """
    return _by_name().get(name.lower())


@cache
def texts_of(name: str) -> Mapping[str, list[str]]:
    """Key of a variant of an architecture -> the texts of its timelines, see :mod:`vram_guard.known.form`."""
    kept = files(__package__).joinpath("timelines").joinpath(f"{name}.xz")
    if not kept.is_file():
        return {}
    found: dict[str, list[str]] = json.loads(lzma.decompress(kept.read_bytes()))
    return found


def variants_of(name: str) -> list[str]:
    """The keys of the variants of an architecture whose timelines the package has."""
    return list(texts_of(name))


def timelines_of(name: str, variant: Variant, length: int | None) -> Iterator[Timeline]:
    """The timelines of a training, one for each class of compute capabilities; none where it has to be traced.

    Args:
        name: of the architecture.
        variant: how it is trained.
        length: tokens of a text; None: the model is given no text.
    """
    if length is not None and length % LENGTH_STEP:
        return
    for text in texts_of(name).get(variant.key, ()):
        found = unpacked(text, length or 0)
        if found is not None:
            yield found


@cache
def _by_name() -> dict[str, Architecture]:
    return {name.lower(): one for one in architectures() for name in (one.name, *one.aliases)}
