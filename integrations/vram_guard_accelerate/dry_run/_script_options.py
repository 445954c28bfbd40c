"""Options of a script's own command line that mean batch size, accumulation or precision."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from vram_guard.closed_form.from_config import NAMES
from vram_guard_accelerate._patching import wrap

#: Switches by which scripts multiply their learning rate with their batch size (diffusers' training scripts).
SCALING_OPTIONS = ("scale_lr", "auto_scale_lr")


@dataclass(frozen=True)
class ParsedOption:
    """An option as the script parsed it."""

    value: Any
    option: str
    """As it is typed: "--batch_size"."""


class ScriptOptions:
    """All options that a script has parsed, by name."""

    def __init__(self) -> None:
        self._parsed: dict[str, ParsedOption] = {}

    def watch(self) -> None:
        """From now on, remember what every parser of the script parses.

        HfArgumentParser is an ``ArgumentParser``: it is seen too. What comes from a file of settings has no option.
        """

        def watched(original: Any, parser: Any, *args: Any, **kwargs: Any) -> Any:
            parsed = original(parser, *args, **kwargs)
            strings = {action.dest: action.option_strings for action in parser._actions}  # noqa: SLF001 - nothing else lists them
            for name, value in vars(parsed[0]).items():
                if strings.get(name):
                    self._parsed[name] = ParsedOption(value, max(strings[name], key=len))
            return parsed

        wrap(argparse.ArgumentParser, "parse_known_args", watched)

    def precision(self, given: str) -> str:
        """The option for mixed precision, where its value is what the Accelerator was given; "" where none is."""
        known = self._parsed.get("mixed_precision")
        return known.option if known is not None and given and str(known.value or "") == given else ""

    def batch_size(self, size: int) -> str:
        """The option for the batch size, where its value is what the loader delivers; "" where none is."""
        # What is named last says most: a script may have a batch size of its sampling too.
        return self._with_value(NAMES["batch"][::-1], size)

    def accumulation(self, batches_per_step: int) -> str:
        """The option for accumulation, where its value is what the loop was seen to do; "" where none is."""
        return self._with_value(NAMES["accumulate"], batches_per_step)

    @property
    def scales_rates(self) -> bool:
        """True if the script itself multiplies its learning rate with the batch size that its options name."""
        return any(name in self._parsed and bool(self._parsed[name].value) for name in SCALING_OPTIONS)

    def _with_value(self, names: tuple[str, ...], value: int) -> str:
        for name in names:
            known = self._parsed.get(name)
            if known is not None and type(known.value) is int and known.value == value:
                return known.option
        return ""
