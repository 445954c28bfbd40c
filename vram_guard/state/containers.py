"""Nested containers, walked and rebuilt in one way; and what mutable ones hold, remembered and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import Any

import torch

#: Containers whose content can change while they stay the same objects.
MUTABLE = (list, dict, set, deque)
_WALKED = (*MUTABLE, tuple)

# --- the walk ------------------------------------------------------------------------------------------------


def children(part: Any) -> dict[Any, Any] | None:
    """The parts of a container by key, index or field; None for what is not a container that can be rebuilt."""
    if isinstance(part, Mapping):
        return dict(part.items())
    if isinstance(part, (list, tuple)):
        return dict(enumerate(part))
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return None


def rebuilt(part: Any, parts: dict[Any, Any]) -> Any:
    """The same container with other parts; its own type and further attributes are kept."""
    if isinstance(part, (list, tuple)):
        return type(part)(*parts.values()) if hasattr(part, "_fields") else type(part)(parts.values())
    if isinstance(part, (dict, UserDict)):  # also Transformers' ModelOutput and BatchEncoding
        clone: Any = copy.copy(part)
        for key, value in parts.items():
            clone[key] = value
        return clone
    if isinstance(part, Mapping):  # a shallow copy may share the original's content
        return type(part)(parts)  # type: ignore[call-arg]
    if all(field.init for field in dataclasses.fields(part)):
        return dataclasses.replace(part, **parts)
    clone = copy.copy(part)
    for name, value in parts.items():
        object.__setattr__(clone, name, value)
    return clone


def leaves(part: Any) -> Iterator[Any]:
    """Everything in nested containers that is not a container, in order."""
    parts = children(part)
    if parts is None:
        yield part
    else:
        for child in parts.values():
            yield from leaves(child)


def is_cache(part: Any) -> bool:
    """True if this is a cache of keys and values that attention appends to (transformers' ``Cache`` and its kin)."""
    return callable(getattr(part, "get_seq_length", None)) and callable(getattr(part, "update", None))


def mapped(part: Any, function: Callable[[Any], Any]) -> Any:
    """The same nested containers with ``function`` applied to what is not a container."""
    parts = children(part)
    if parts is None:
        return function(part)
    return rebuilt(part, {key: mapped(child, function) for key, child in parts.items()})


def attributes(part: Any) -> dict[Any, Any] | None:
    """The parts of a container, or the attributes of an object; None for what has neither, and for tensors and arrays.

    Example:
        >>> from types import SimpleNamespace
        >>> attributes(SimpleNamespace(label=3)), attributes([5]), attributes(7)
        ({'label': 3}, {0: 5}, None)
    """
    parts = children(part)
    if parts is not None or isinstance(part, type) or _is_array(part):
        return parts
    return dict(vars(part)) if hasattr(part, "__dict__") else None


def own_copy(part: Any, *, arrays: bool = False) -> Any:
    """A copy, down to the objects in nested containers, whose tensors and arrays are those of the original.

    What is written to its containers and attributes does not reach the original. What cannot be copied is returned as
    it is.

    Args:
        part: to copy.
        arrays: whether tensors and arrays are copied as well.
    """
    if not arrays:
        if _fixed(part):
            return part
        if type(part) in (dict, list) and all(map(_fixed, part.values() if type(part) is dict else part)):
            return part.copy()  # as most samples are: grown batches have thousands of them
    found: dict[int, Any] = {}
    _note_arrays(part, found, set())
    try:
        return copy.deepcopy(part, _rows_copied(found.values()) if arrays else found)
    except Exception:  # noqa: BLE001 - other people's objects
        return part


def _fixed(part: Any) -> bool:
    """True for an array, a number or text, and for tuples of nothing else: there is no container to write to."""
    if type(part) is tuple:
        return all(map(_fixed, part))
    return type(part) in (int, float, bool, str, bytes, type(None)) or _is_array(part)


def _is_array(part: Any) -> bool:
    return hasattr(part, "dtype") and hasattr(part, "shape")


def _rows_copied(arrays: Iterable[Any]) -> dict[int, Any]:
    """Copies of tensors that are parts of larger ones, as rows of a data set, by the identity of the tensor.

    A deep copy of such a tensor would copy all that the larger one holds.
    """
    plain = [one for one in arrays if type(one) is torch.Tensor and one.layout is torch.strided]
    return {
        id(one): one.clone() for one in plain if not one.requires_grad and one.untyped_storage().nbytes() > one.nbytes
    }


def _note_arrays(part: Any, found: dict[int, Any], seen: set[int]) -> None:
    if id(part) in seen or isinstance(part, (str, bytes, int, float, type)):
        return
    seen.add(id(part))
    if _is_array(part):
        found[id(part)] = part
        return
    parts = children(part)
    for child in list((getattr(part, "__dict__", {}) if parts is None else parts).values()):
        _note_arrays(child, found, seen)


# --- content of mutable containers ----------------------------------------------------------------------------


def look(container: Any, most: int | None = None) -> Any:
    """A copy of a mutable container's content; of a list of more than ``most`` items, its length."""
    too_long = most is not None and isinstance(container, list) and len(container) > most
    return len(container) if too_long else container.copy()


def refill(container: Any, content: Any) -> None:
    """Put back the content that :func:`look` found; a container that has it already is not touched."""
    if isinstance(content, int):
        del container[content:]
    elif not alike(container, content):
        container.clear()
        container.update(content) if isinstance(container, (dict, set)) else container.extend(content)


def alike(one: Any, other: Any) -> bool:
    """Check whether two looks found the same objects in the same order; nothing is compared by value but lengths."""
    if isinstance(one, int) or isinstance(other, int):
        return bool(type(one) is type(other) and one == other)
    if len(one) != len(other) or not all(map(is_, one, other)):
        return False
    return not isinstance(one, dict) or all(map(is_, one.values(), other.values()))


def contents_of(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The mutable containers among values, nested ones too, each with a copy of what it holds."""
    found: list[tuple[Any, Any]] = []
    pending = list(values)
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if not isinstance(value, _WALKED) or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, tuple):
            found.append((value, value.copy()))
        pending += value.values() if isinstance(value, dict) else value
    return found


def parts_of(batch: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every part of a batch that is no container, with its path."""
    parts = children(batch)
    if parts is None:
        yield path, batch
    else:
        for key, part in parts.items():
            yield from parts_of(part, (*path, key))
