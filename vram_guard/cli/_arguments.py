"""Values of the commands' options: numbers, spellings, what the settings say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.cli.options import whole_number
from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from vram_guard.settings import Setting

#: Settings that are options of some commands.
_FROM_SETTINGS = frozenset(
    {
        *("allow", "budget", "cudnn", "gpu", "gpu_memory", "host_budget", "lr_rule", "margin"),
        *("target_utilization", "threshold", "verbose"),
    }
)

_WHOLE_NUMBERS = (
    *("batch", "batch_size", "height", "width", "hidden_dim", "num_layers", "bytes_per_element"),
    *("num_frames", "seq_length", "node_gpus"),
)
_NUMBERS = ("margin", "threshold")


def with_dashes(words: Sequence[str]) -> Iterator[str]:
    """``--hidden_dim`` as ``--hidden-dim``: both spellings are understood. What follows ``--`` stays."""
    words = list(words)
    end = words.index("--") if "--" in words else len(words)
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if index < end and option.startswith("--"):
            option = option.replace("_", "-")
        yield option + equals + value


def fill_from_settings(options: argparse.Namespace, found: Mapping[str, Setting]) -> None:
    """Settings for the options that are not given; ``options.from_settings`` says which, and from where."""
    from vram_guard.settings import AMOUNTS

    given = {name for name in (*AMOUNTS, "device") if getattr(options, name, None) is not None}
    options.from_settings = {}
    for name in _FROM_SETTINGS & found.keys():
        if not hasattr(options, name) or getattr(options, name) is not None or (name in AMOUNTS and given):
            continue
        value = found[name].value
        setattr(options, name, list(value) if isinstance(value, tuple) else value)
        options.from_settings[name] = found[name].source


def read_numbers(options: argparse.Namespace) -> None:
    """The values of options that are numbers, in place of what was typed.

    Raises:
        InvalidInputError: one is none, or a whole number below 1.
    """
    for read, names in ((whole_number, _WHOLE_NUMBERS), (number, _NUMBERS)):
        for name in names:
            text = getattr(options, name, None)
            if isinstance(text, str):
                setattr(options, name, read(name, text))


def unknown_model(name: str, *, suggest: bool = True) -> str:
    """The message where a model cannot be built from its name.

    Args:
        name: of the model.
        suggest: look for names that are like it, which imports the libraries that have models by name.
    """
    from vram_guard.capture.model_names import absent_libraries, similar_name

    near, absent = similar_name(name) if suggest else None, ", ".join(absent_libraries())
    said = _(
        "the model {model} is unknown{hint}; a model of your own is given as module:callable",
        model=name,
        hint=_(" (did you mean {name}?)", name=near) if near else "",
    )
    if not absent:
        return said
    return _("{said}. Not installed here, so their model names are unknown: {libraries}", said=said, libraries=absent)


def number(name: str, text: str) -> float:
    """A number from an option.

    Raises:
        InvalidInputError: it is none.
    """
    try:
        return float(text)
    except ValueError:
        raise InvalidInputError(
            _("{name} must be a number, not {text}", name=f"--{name}", text=repr(text)[:40])
        ) from None
