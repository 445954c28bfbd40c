"""A training as the command line describes it: a config, values in place of its own (``--set``), the name of a step."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from vram_guard.capture.config_step import NUMBERS
from vram_guard.cli._arguments import unknown_model
from vram_guard.cli._described import Described
from vram_guard.cli.options import WEIGHTS
from vram_guard.cli.ways import check_read, of_model
from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    import argparse

    from vram_guard.closed_form.from_config import EstimateRequest
    from vram_guard.plan.comparison import Configuration

_RATES = ("lr", "learning_rate")


def parsed(*words: str) -> dict[str, Any]:
    """``batch_size=8,precision=bf16-mixed`` as a mapping; values as YAML reads them."""
    import yaml

    values = dict[str, Any]()
    for part in ",".join(words).split(","):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise InvalidInputError(_("--set is NAME=VALUE,NAME=VALUE, not {text}", text=repr(part)[:60]))
        if name.strip() in values:
            raise InvalidInputError(_("--set gives {name} twice", name=name.strip()))
        try:
            values[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InvalidInputError(_("--set: {value} is not a valid value", value=repr(value)[:60])) from None
    return values


#: Options that say something before the config does, by the names that :func:`parse_request` has for them.
_SAID: Final = ("model", "input", *(name.replace("-", "_") for name in WEIGHTS))


def said(options: argparse.Namespace) -> dict[str, Any]:
    """What the options say of a training, for :func:`~vram_guard.closed_form.from_config.parse_request`."""
    return {name: getattr(options, name, None) for name in ("batch", *NUMBERS, *_SAID)}


def check_said_once(change: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Refuse a value of ``--set`` that an option says as well, which would win without a word.

    Raises:
        InvalidInputError: names both.
    """
    from vram_guard.closed_form.from_config import NAMES

    for option, names in NAMES.items():
        for name in change:
            if option in options.given and name.lower() in names:
                raise InvalidInputError(
                    _(
                        "--set {name} and {option} say the same thing: give one of them",
                        name=name,
                        option=options.given[option],
                    )
                )


def is_traced(request: EstimateRequest, config: Mapping[str, Any], *, quick: bool) -> tuple[bool, str]:
    """Whether the model of a request is built and traced, or the rule of thumb answers alone; and a remark on that.

    Raises:
        InvalidInputError: neither can be had.
    """
    from vram_guard.capture.config_step import is_buildable, other_network

    known = is_buildable(request.model)
    if quick and known and request.missing():
        lacking = ", ".join("--" + name.replace("_", "-") for name in request.missing())
        raise InvalidInputError(_("--quick is the rule of thumb alone, which needs {options}", options=lacking))
    if quick or request.model is None:
        return False, ""
    other = other_network(request, config) if known else None
    if known and other is None:
        return True, ""
    if request.missing():
        raise InvalidInputError(other or unknown_model(request.model))
    return False, other or unknown_model(request.model, suggest=False)


def described(
    name: str,
    config: dict[str, Any],
    change: dict[str, Any],
    given: Mapping[str, Any],
    options: argparse.Namespace | None = None,
) -> Described:
    """Read a training from a config, with some values changed; its batch size is among the request's numbers.

    Args:
        name: for messages and tables.
        config: a file's entries; may be empty.
        change: entries that are put in their place.
        given: what options say before the config does, see :func:`said`.
        options: those of which each that is given has to be read; None: any.

    Raises:
        InvalidInputError: it names no model that can be built, has no batch size, a value makes no sense, or the model
            does not read an option that is given.
    """
    from vram_guard.capture.config_step import is_buildable, kind_of, other_network
    from vram_guard.closed_form.from_config import parse_request

    merged = _with(config, change)
    request = parse_request(merged, given)
    if other := other_network(request, merged):
        raise InvalidInputError(other)
    if request.model is not None and not is_buildable(request.model):
        raise InvalidInputError(unknown_model(request.model))
    if request.model is None:
        raise InvalidInputError(
            _("{name} names no model that can be built: give --step module:function, or step: in the config", name=name)
        )
    if "batch" not in request.numbers:
        raise no_batch(name)
    one = Described(name, request, merged)
    if not one.is_remembered:  # what was answered has been read
        _check_used(change, config, request.model)
    if options is not None:
        check_read(options, of_model(kind_of(request)))
    return one


def configuration(one: Described) -> Configuration:
    """A training that is described, with its step built."""
    from vram_guard.plan.comparison import Configuration

    return Configuration(one.name, one.step, one.request.numbers["batch"], _rate(one.config))


def no_batch(name: str) -> InvalidInputError:
    """The error where nothing says how large the batch of a step is."""
    said = _(
        "{name} has no batch size: give --batch N (to compare --set batch_size=N), or batch_size in the config",
        name=name,
    )
    return InvalidInputError(said)


def _check_used(change: dict[str, Any], config: dict[str, Any], model: str | None) -> None:
    """Refuse values that nothing would read: a misspelt name changes nothing, and the answer would be another's.

    Raises:
        InvalidInputError: names the nearest one that is read.
    """
    from vram_guard.capture.object_reference import parameters_of
    from vram_guard.closed_form.from_config import READ
    from vram_guard.config_file import leaves

    if not change:
        return
    taken = parameters_of(model) if model is not None and ":" in model else frozenset()
    if taken is None:
        return
    known = {*READ, *_RATES, *taken, *(path.rpartition(".")[2] for path, _value in leaves(config))}
    for name in change:
        if name not in known and name.lower() not in READ:
            near = get_close_matches(name, sorted(known), n=3)
            hint = _("; did you mean {names}?", names=", ".join(near)) if near else ""
            raise InvalidInputError(_("--set {name}: nothing reads a value of this name", name=name) + hint)


def _with(config: Any, change: dict[str, Any]) -> dict[str, Any]:
    """The config with these values in place of its entries of the same names, wherever they stand; else at the top."""
    from vram_guard.closed_form.from_config import ELSEWHERE

    left = dict(change)

    def walk(section: dict[Any, Any]) -> dict[str, Any]:
        made = dict[str, Any]()
        for key, value in section.items():
            if isinstance(value, dict):
                made[str(key)] = value if str(key).lower() in ELSEWHERE else walk(value)
                continue
            made[str(key)] = change.get(str(key), value)
            left.pop(str(key), None)
        return made

    return {**walk(config), **left}


def _rate(config: Mapping[str, Any]) -> float | None:
    """The learning rate; of several, the first."""
    from vram_guard.config_file import leaves
    from vram_guard.optimize.names import number

    found = [number(value) for path, value in leaves(config) if path.rpartition(".")[2] in _RATES]
    known = [value for value in found if value is not None and value > 0]
    return known[0] if known else None
