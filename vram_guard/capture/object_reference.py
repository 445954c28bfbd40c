"""A training step by its object reference, as commands and configs give it.

An object reference is ``package.module:callable`` (as in Python packaging's entry points), or ``file.py:callable``.

Naming a module imports it, which runs its code: names come from the person at the command line or from that person's
own config, as with ``python -m``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError, VramGuardError
from vram_guard.known.inputs import reading
from vram_guard.language import _, marked
from vram_guard.limits import LONGEST_NAME
from vram_guard.step import TrainingStep

if TYPE_CHECKING:
    from torch import nn

_ADVICE = marked(
    "name a TrainingStep, or a function that returns one: package.module:function, or path/to/file.py:function "
    "(from vram_guard import TrainingStep)"
)


def load_object(name: str) -> Any:
    """Import the object that ``package.module:attribute`` or ``path/to/file.py:attribute`` names.

    The attribute may be dotted. The current folder is looked in first, as ``python -m`` does; for a file, its own
    folder.

    Raises:
        InvalidInputError: the name is malformed, there is no such module or attribute, or importing it fails.
    """
    module_name, attribute = _parts(name)
    _look_in(Path.cwd())
    if _is_file(module_name):
        _look_in(Path(module_name).resolve().parent)
    found: Any = _module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = _nearest(part, dir(found))
            raise InvalidInputError(
                _("{name}: {module} has no {part}", name=name, module=module_name, part=repr(part)) + near
            )
        found = getattr(found, part)
    return found


def load_step(name: str, arguments: Mapping[str, Any] | None = None) -> TrainingStep:
    """The training step that a name stands for.

    Args:
        name: of a TrainingStep, or of a callable that returns one.
        arguments: entries of a config: the callable is given those that its parameters are called after, no others.

    Raises:
        InvalidInputError: as :func:`load_object`; it names something else; the callable needs an argument that is
            not there, or raises.
    """
    made = load_value(name, arguments)
    if not isinstance(made, TrainingStep):
        _refuse_plain(name, made)
        raise _invalid(_("{name} gives a value of type {kind}, not a TrainingStep", name=name, kind=_kind(made)))
    return made


def load_model(name: str, arguments: Mapping[str, Any] | None = None) -> nn.Module | Callable[[], nn.Module]:
    """The plain model that a name stands for: a module, or a builder of it where it names a class or a function.

    Raises:
        InvalidInputError: as :func:`load_object`; it names a step; the callable needs an argument that is not there.
    """
    from torch import nn

    found = load_object(name)
    if isinstance(found, nn.Module):
        return found
    if isinstance(found, TrainingStep) or not callable(found):
        raise InvalidInputError(
            _(
                "{name} gives a value of type {kind}; --input needs a torch.nn.Module, or what builds one",
                name=name,
                kind=_kind(found),
            )
        )
    return partial(_plain, name, found, _fitting(name, found, arguments or {}))


def _plain(name: str, builder: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The model that a builder makes.

    Raises:
        InvalidInputError: it makes a step.
    """
    made = _called(name, builder, arguments)
    if isinstance(made, TrainingStep):
        raise InvalidInputError(_("--input is for a plain model; {name} makes a TrainingStep with its own", name=name))
    return made


def _refuse_plain(name: str, made: object) -> None:
    from torch import nn

    if isinstance(made, nn.Module) or (inspect.isclass(made) and issubclass(made, nn.Module)):
        raise InvalidInputError(
            _(
                "{name} is a model, not a step: give the shape of its input without the batch, --input 3x224x224 (or "
                "name a function that returns a TrainingStep)",
                name=name,
            )
        )


def load_steps(name: str) -> dict[str, TrainingStep]:
    """Several steps from one name: a mapping of names to steps (or a callable that returns one), or a single step.

    Raises:
        InvalidInputError: as :func:`load_step`.
    """
    made = load_value(name)
    if isinstance(made, TrainingStep):
        return {name.rpartition(":")[2]: made}
    if not isinstance(made, Mapping) or not made:
        raise _invalid(
            _(
                "{name} gives a value of type {kind}, neither a TrainingStep nor a dict of them",
                name=name,
                kind=_kind(made),
            )
        )
    for key, step in made.items():
        if not isinstance(key, str) or not isinstance(step, TrainingStep):
            raise _invalid(
                _("{name}: {key} is a {kind}, not a TrainingStep", name=name, key=repr(key), kind=_kind(step))
            )
    return dict(made)


def load_value(name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """The named object; a callable that is not a step is called with the arguments that it has parameters for.

    Raises:
        InvalidInputError: as :func:`load_object`; a parameter without a default is not among the arguments, or the
            callable raises.
    """
    found = load_object(name)
    if isinstance(found, (TrainingStep, Mapping)) or not callable(found):
        return found
    _refuse_plain(name, found)
    if inspect.isclass(found) and not issubclass(found, TrainingStep):
        raise InvalidInputError(
            _("{name} is a class, not a step: write a function that makes a TrainingStep with it", name=name)
        )
    return _called(name, found, _fitting(name, found, arguments or {}))


def _called(name: str, builder: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a builder makes; what it raises is one line."""
    try:
        return builder(**arguments)
    except VramGuardError:
        raise
    except Exception as error:
        why = " ".join(f"{_kind(error)}: {error}".split())
        raise InvalidInputError(_("{name} raised {error}", name=name, error=why)) from error


def parameters_of(name: str) -> frozenset[str] | None:
    """The arguments that a named callable has parameters for; None where it takes any.

    Raises:
        InvalidInputError: as :func:`load_object`.
    """
    found = load_object(name)
    import torch

    # A model that is there already is built from nothing; its own call takes any arguments.
    if isinstance(found, (TrainingStep, Mapping, torch.nn.Module)) or not callable(found):
        return frozenset()
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return frozenset()
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return None
    return frozenset(parameters)


def _parts(name: object) -> tuple[str, str]:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise InvalidInputError(_("a name must be text such as package.module:function, not {kind}", kind=_kind(name)))
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not all(part.isidentifier() for part in attribute.split(".")):
        raise _invalid(_("{name} names no training step", name=repr(name)))
    if not _is_file(module_name) and not all(part.isidentifier() for part in module_name.split(".")):
        raise _invalid(
            _(
                "{name}: {module} is neither a module nor a file that ends in .py",
                name=repr(name),
                module=repr(module_name),
            )
        )
    return module_name, attribute


def _is_file(module_name: str) -> bool:
    return module_name.endswith(".py")


def _module(module_name: str) -> Any:
    try:
        with reading():  # an answer that is remembered rests on what the module reads
            if _is_file(module_name):
                return _module_from(Path(module_name))
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise _invalid(
                _(
                    "there is no module {name} in {folder} or among what is installed",
                    name=repr(missing),
                    folder=Path.cwd(),
                )
            ) from None
        raise InvalidInputError(
            _("importing {module} needs {name}, which is not installed", module=module_name, name=repr(missing))
        ) from error
    except VramGuardError:
        raise
    except Exception as error:
        raise InvalidInputError(
            _("importing {module} raised {error}", module=module_name, error=f"{_kind(error)}: {error}")
        ) from error


def _module_from(path: Path) -> Any:
    """A module from a file that need not be on the path; the same object when it is asked for again."""
    if not path.is_file():
        raise _invalid(_("there is no file {path}, seen from {folder}", path=path, folder=Path.cwd()))
    own_name = f"vram_guard_named_{path.stem}_{abs(hash(path.resolve()))}"
    if own_name in sys.modules:
        return sys.modules[own_name]
    spec = importlib.util.spec_from_file_location(own_name, path)
    if spec is None or spec.loader is None:
        raise _invalid(_("{path} is not a Python file", path=path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[own_name] = module  # dataclasses and pickle look modules up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    return module


def _look_in(folder: Path) -> None:
    """Modules are looked for in ``folder`` first, now and when what was imported imports more."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _fitting(name: str, builder: Callable[..., Any], arguments: Mapping[Any, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):
        return {}
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in arguments
    ]
    if needed:
        raise InvalidInputError(
            _(
                "{name} needs {names}: write it into the config, or give it a default",
                name=name,
                names=", ".join(needed),
            )
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return {key: value for key, value in arguments.items() if isinstance(key, str)}
    return {one.name: arguments[one.name] for one in parameters if one.name in arguments}


def _kind(made: object) -> str:
    return type(made).__name__


def _nearest(part: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(part, [one for one in known if not one.startswith("_")], n=3)
    return _("; did you mean {names}?", names=", ".join(near)) if near else ""


def _invalid(problem: str) -> InvalidInputError:
    """The error for a name that means no training step, with the form that is expected."""
    return InvalidInputError(f"{problem}: {_(_ADVICE)}")
