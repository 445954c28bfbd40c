"""What a script's own command line offers: the values of options that mean batch size, accumulation or precision."""

from __future__ import annotations

import argparse
from typing import Any


def watch(values: dict[str, Any]) -> None:
    """Remember what every parser of the script parsed, and which option strings stand for it.

    HfArgumentParser is an ``ArgumentParser``: it is seen too.
    """
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        parsed = original(self, *args, **kwargs)
        strings = {action.dest: action.option_strings for action in self._actions}
        for name, value in vars(parsed[0]).items():
            if strings.get(name):
                values[name] = {"value": value, "option": max(strings[name], key=len)}
        return parsed

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
