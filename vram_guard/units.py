"""Amounts of memory: what people write ("24GB", "24GiB") as exact bytes, and bytes as people read them."""

from __future__ import annotations

import operator
import re
from fractions import Fraction

from vram_guard.errors import InvalidInputError
from vram_guard.language import _, marked
from vram_guard.limits import LARGEST_BYTES, LEAST_WRITTEN

#: Decimal prefixes are powers of 1000 and binary ones powers of 1024 (IEC 80000-13), so "24GB" and
#: "24GiB" differ by 7%: enough to turn "fits" into an out-of-memory error. Keys are lower case.
BYTES_PER_UNIT: dict[str, int] = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    # As people write the memory of a card, and as du, Slurm and Docker count: "80G" is 80 GiB.
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}

# At most 30 digits each side: far beyond LARGEST_BYTES, and no input can make the arithmetic slow.
# [0-9] rather than \d, which takes every Unicode digit.
_AMOUNT = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*([A-Za-z]*)")
_ADVICE = marked('write for instance "24GiB" (or "24G"), "110MiB", "24GB" or a whole number of bytes')


def parse_bytes(value: str | int, name: str = "budget") -> int:
    """``value`` as a whole number of bytes.

    Args:
        value: an int of bytes, or text: a number and a unit ("24GB" = 24 * 10**9, "24GiB" and "24G" = 24 * 2**30,
            "1.5 GiB"; upper or lower case), or digits alone, which are bytes.
        name: what the amount is called in error messages.

    Returns:
        bytes, at least 1; exact (a fraction of a byte is dropped).

    Raises:
        InvalidInputError: for bool, float, NaN, "inf", zero, negative amounts, amounts of 2**63 bytes or
            more, unknown units and any other text.

    Example:
        >>> parse_bytes("24GB"), parse_bytes("1.5 GiB")
        (24000000000, 1610612736)
        >>> parse_bytes("24 parsecs")
        Traceback (most recent call last):
        vram_guard.errors.InvalidInputError: budget='24 parsecs' has a unit other than B, kB, MB, GB, TB, KiB, MiB, ...
    """
    count = _from_text(value, name) if isinstance(value, str) else _from_number(value, name)
    if count < 1:
        raise InvalidInputError(_("{name} must be at least one byte, not {value}: {advice}", **_said(name, value)))
    if count > LARGEST_BYTES:
        raise InvalidInputError(_("{name} must be below 2**63 bytes, not {value}: {advice}", **_said(name, value)))
    return count


def format_bytes(count: int) -> str:
    """``count`` bytes as people read them: "512 B", "110.00 MiB", "12.34 GiB"; differences may be negative.

    The unit is the largest of B, KiB, MiB, GiB and TiB that leaves a number of at least 1; two decimals.

    Example:
        >>> format_bytes(1610612736), format_bytes(-512)
        ('1.50 GiB', '-512 B')
    """
    size = abs(count)
    sign = "-" if count < 0 else ""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size} B"


def written_bytes(value: str | int, name: str = "budget") -> int:
    """As :func:`parse_bytes`; text without a unit that is less than a MiB is refused: "24" was meant in another unit.

    Raises:
        InvalidInputError: as :func:`parse_bytes`, and for such text.

    Example:
        >>> written_bytes("24GiB") == 24 * 2**30
        True
        >>> written_bytes("24")
        Traceback (most recent call last):
        vram_guard.errors.InvalidInputError: budget=24 is 24 bytes: with a unit, such as "24GiB"
    """
    amount = parse_bytes(value, name)
    if amount < LEAST_WRITTEN and isinstance(value, str) and value.strip().isdigit():
        raise without_unit(value.strip(), name)
    return amount


def without_unit(count: object, name: str = "budget") -> InvalidInputError:
    """The error for an amount that is too small to be meant in bytes.

    Example:
        >>> str(without_unit(24, "host_budget"))
        'host_budget=24 is 24 bytes: with a unit, such as "24GiB"'
    """
    return InvalidInputError(
        _('{name}={count} is {count} bytes: with a unit, such as "{count}GiB"', name=name, count=count)
    )


class Amount(int):
    """Bytes that a message shows as people read them.

    Example:
        >>> f"{Amount(3 * 2**30)} too much"
        '3.00 GiB too much'
    """

    def __str__(self) -> str:
        return format_bytes(self)


def _from_text(text: str, name: str) -> int:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise InvalidInputError(_("{name}={value} is not an amount of memory: {advice}", **_said(name, text)))
    number, unit = match.group(1), match.group(2).lower()
    if not unit and "." in number:
        raise InvalidInputError(_("{name}={value} has no unit: {advice}", **_said(name, text)))
    if unit and unit not in BYTES_PER_UNIT:
        raise InvalidInputError(
            _(
                "{name}={value} has a unit other than B, kB, MB, GB, TB, KiB, MiB, GiB, TiB and K, M, G, T: {advice}",
                **_said(name, text),
            )
        )
    # int() and not round(): a budget must never come out larger than what was written.
    return int(Fraction(number) * BYTES_PER_UNIT[unit or "b"])


def _from_number(value: object, name: str) -> int:
    if isinstance(value, bool):
        raise InvalidInputError(_("{name} must be an amount of memory, not {value}: {advice}", **_said(name, value)))
    if isinstance(value, float):
        # 24.0 could mean bytes or GiB, and 1e9 has no unit either: refused rather than guessed.
        raise InvalidInputError(_("{name}={value} has no unit: {advice}", **_said(name, value)))
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidInputError(
            _("{name} must be an amount of memory, not {value}: {advice}", **_said(name, value))
        ) from None


def _said(name: str, value: object) -> dict[str, str]:
    """The values that every message about an amount names."""
    return {"name": name, "value": _shown(value), "advice": _(_ADVICE)}


def _shown(value: object) -> str:
    """``value`` for a message, whatever its length (a pasted file, an int of a million digits)."""
    if isinstance(value, int) and value.bit_length() > 256:
        return _("an int of {count} bits", count=value.bit_length())
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
