"""Operators whose results a checkpointed block may keep, in place of computing them again (names alone)."""

from __future__ import annotations

from vram_guard.checks import known_names

#: What may be kept. These operators do most of a block's arithmetic; the results of all others cost about as much to
#: write and to read as to compute.
KEEPABLE = ("addmm", "attention", "baddbmm", "bmm", "convolution", "mm")

_ATTENTION = "_scaled_dot_product_"


def kept_as(operator: str) -> str:
    """The name in :data:`KEEPABLE` of an operator; "" for one that is always computed again.

    The kernels of attention, which differ between GPUs and precisions, have one name.

    Args:
        operator: as a trace names it.

    Example:
        >>> kept_as("aten._scaled_dot_product_flash_attention.default"), kept_as("aten.addmm.default")
        ('attention', 'addmm')
        >>> kept_as("aten.add.Tensor")
        ''
    """
    namespace, _dot, rest = operator.partition(".")
    name = rest.partition(".")[0]
    if namespace != "aten" or "backward" in name:
        return ""
    if name.startswith(_ATTENTION):
        return "attention"
    return name if name in KEEPABLE else ""


def checked_operators(name: str, operators: object) -> tuple[str, ...]:
    """The operators, each once and in the order of :data:`KEEPABLE`.

    Args:
        name: of the setting, for the message.
        operators: a list, a tuple or a set of names, or one name.

    Raises:
        InvalidInputError: they are not such names.

    Example:
        >>> checked_operators("checkpoint_keeps", ["mm", "attention"])
        ('attention', 'mm')
    """
    given = list(operators) if isinstance(operators, (list, tuple, set, frozenset)) else [operators]
    known_names(name, given, KEEPABLE)
    return tuple(one for one in KEEPABLE if one in given)
