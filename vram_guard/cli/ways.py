"""What each way of asking reads of the options, so that none is ignored: one that is not read is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vram_guard.capture.config_step import KINDS, NUMBERS, ConfigKind
from vram_guard.errors import InvalidInputError
from vram_guard.language import _, marked

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

_CONFIG: Final = frozenset({"config", "set", "model", "batch", "quick"})
#: What a trace of a step reads, whatever the step is.
_TRACE: Final = frozenset({"margin", "cudnn"})

#: Options that describe a training. Each way of asking reads some of them; all others are the commands' own.
DESCRIBING: Final = frozenset(
    {
        *(_CONFIG | _TRACE | NUMBERS),
        *("input", "precision", "dtype", "lora", "qlora", "checkpointing", "optimizer", "threshold", "resolutions"),
        *("model_path", "train", "frozen", "recommend"),
    }
)

RULE: Final = ConfigKind(
    marked("the rule of thumb"),
    _CONFIG | (NUMBERS - {"num_frames"}) | {"precision", "dtype", "threshold", "resolutions"},
)
FOLDER: Final = ConfigKind(
    marked("a model folder (--model-path)"),
    NUMBERS & {"height", "width", "num_frames", "seq_length"}
    | {"model_path", "train", "frozen", "recommend", "dtype", "batch"}
    | _TRACE,
)
CARDS: Final = ConfigKind(marked("the list of GPUs"), frozenset({"margin"}))


def of_model(kind: ConfigKind) -> ConfigKind:
    """What is read where a model is named in this way and traced."""
    sized = frozenset({"resolutions"}) if "height" in kind.reads else frozenset[str]()
    return ConfigKind(kind.words, kind.reads | (_CONFIG - {"quick"}) | _TRACE | sized)


def check_read(options: argparse.Namespace, way: ConfigKind) -> None:
    """Refuse an option that is given and that this way of asking does not read.

    Args:
        options: of a command; ``options.given`` has those that were given, as they were written.
        way: of asking.

    Raises:
        InvalidInputError: names the option and the ways that read it.
    """
    for name, written in options.given.items():
        if name in DESCRIBING and name not in way.reads:
            models = [one.words for one in map(of_model, KINDS) if name in one.reads]
            every = [marked("a model that is built (--model)")] if len(models) == len(KINDS) else models
            others = [*(one.words for one in (RULE, FOLDER) if name in one.reads), *every]
            known = _(", ").join(map(_, others))
            raise InvalidInputError(
                _("{option} is not read for {way}, only for {others}", option=written, way=_(way.words), others=known)
            )


def check_needed(options: argparse.Namespace, names: Iterable[str], *, needs: str) -> None:
    """Refuse options that say something only beside another one, which is not given.

    Raises:
        InvalidInputError: names the option, and what it needs.
    """
    for name in names:
        if name in options.given:
            raise InvalidInputError(
                _("{option} is not read here: it needs {needs}", option=options.given[name], needs=needs)
            )
