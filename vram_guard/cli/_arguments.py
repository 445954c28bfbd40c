"""Values of the commands' options: amounts of GPU memory, counts, spellings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from vram_guard.budget import Budget
    from vram_guard.settings import Setting

#: Settings that are options of some commands.
_FROM_SETTINGS = frozenset(
    {
        *("allow", "budget", "cudnn", "gpu", "gpu_memory", "host_budget", "lr_rule", "margin"),
        *("target_utilization", "threshold", "verbose"),
    }
)


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


def gpu_memory(
    memory: str | float | None = None,
    gpu: str | None = None,
    budget: str | int | None = None,
    margin: str | float | None = None,
    device: str | None = None,
) -> tuple[int, str, Budget]:
    """(Bytes of the whole GPU, where the number comes from, what PyTorch may use of it).

    Args:
        memory: of the whole GPU: an amount; a number without a unit is GB, as the makers of cards and the guides
            write. The CUDA context's part is taken off.
        gpu: a card by name; with neither of the three, the device at hand.
        budget: what PyTorch's allocator may reserve; nothing is taken off but the margin.
        margin: the share to leave free; None: the default.
        device: a CUDA device of this machine; what is free on it.

    Raises:
        InvalidInputError: it is no amount, or no card is known by that name.
        NoDeviceError: nothing is given, and there is no GPU here.
        DeviceQueryError: nothing is given, and the GPU here cannot be read.
    """
    from vram_guard.budget import Budget

    kept = checked_margin(margin)
    if device is not None and not (memory is None and gpu is None and budget is None):
        raise InvalidInputError(_("give either --device (what is free there) or --gpu, --budget, --gpu-memory"))
    if memory is not None and budget is not None:
        raise InvalidInputError(_("give --gpu-memory (of the whole GPU) or --budget (of PyTorch), not both"))
    which = int(device) if device is not None and device.isdigit() and device.isascii() else device
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=kept, device=which, gpu_memory=memory)
    return resolved.total, resolved.source_text, resolved


def counts(options: argparse.Namespace, *names: str) -> dict[str, int | None]:
    """Name -> the whole number that the option of this name gives; None where it is not given.

    Raises:
        InvalidInputError: one is none, or below 1.
    """
    return {name: count(name, getattr(options, name)) for name in names}


def checked_margin(text: str | float | None) -> float | None:
    """The value of ``--margin``."""
    return None if text is None else number("margin", text, 0)


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


def count(name: str, text: str | None) -> int | None:
    """A whole number from an option; None where it is not given.

    Raises:
        InvalidInputError: it is none, or below 1.
    """
    return None if text is None else whole_number(name, text)


def whole_number(name: str, text: str) -> int:
    """As :func:`count`, of an option that is given."""
    option = "--" + name.replace("_", "-")
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) < 30):
        raise InvalidInputError(
            _("{option} must be a whole number of at least 1, not {text}", option=option, text=repr(text)[:40])
        )
    from vram_guard.step import checked_count

    return checked_count(option, int(text))


def number(name: str, text: str | float | None, default: float, *, option: bool = True) -> float:
    """A number from an option (or an argument without dashes), the default where it is not given.

    Raises:
        InvalidInputError: it is none.
    """
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        shown = f"--{name}" if option else name
        raise InvalidInputError(_("{name} must be a number, not {text}", name=shown, text=repr(text)[:40])) from None
