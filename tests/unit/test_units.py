from __future__ import annotations

import math
from fractions import Fraction

import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st

from vram_guard.errors import InvalidInputError
from vram_guard.limits import LARGEST_BYTES
from vram_guard.units import BYTES_PER_UNIT, format_bytes, parse_bytes


@each(
    ("written", "count"),
    [
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        *(("80G", 80 * 2**30), ("24g", 24 * 2**30), ("24 G", 24 * 2**30), ("110M", 110 * 2**20), ("1.5T", 3 * 2**39)),
        ("24GiB", 24 * 2**30),
        ("110MiB", 110 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        (" 1.5\tgib ", 3 * 2**29),
        (".5KiB", 512),
        ("1kB", 1000),
        ("1KB", 1000),
        ("2TB", 2 * 10**12),
        ("2TiB", 2**41),
        ("7B", 7),
        ("12884901888", 12 * 2**30),
        (12 * 2**30, 12 * 2**30),
        (1, 1),
        (LARGEST_BYTES, LARGEST_BYTES),
        ("0.1GB", 10**8),
        ("1.0000000001GB", 10**9),
    ],
)
def test_an_amount_is_exact(written, count):
    assert parse_bytes(written) == count


@each(
    "nonsense",
    [
        "",
        " ",
        "inf",
        "nan",
        "-1GiB",
        "+1GiB",
        "0",
        "0GiB",
        "0.2B",
        "GiB",
        "24 X",
        "24Gi",
        "24Gb it",
        "24,5GiB",
        "1e9",
        "1.5",
        "1_000MB",
        "0x10",
        "٣GiB",
        "1GiB\n2GiB",
        "9223372036854775808",
        "99999999999TiB",
        0,
        -1,
        2**63,
        True,
        False,
        24.0,
        math.nan,
        math.inf,
        None,
        b"24GiB",
        [24],
    ],
)
def test_nonsense_is_refused(nonsense):
    with pytest.raises(InvalidInputError, match="budget") as refused:
        parse_bytes(nonsense)
    assert "24GiB" in str(refused.value), "says what to write instead"


@pytest.mark.parametrize("huge", [10**5000, "1" * 10_000, "x" * 10_000], ids=["int", "digits", "text"])
def test_huge_input_is_refused_in_a_short_message(huge):
    with pytest.raises(InvalidInputError, match="budget") as refused:
        parse_bytes(huge)
    assert len(str(refused.value)) < 400


def test_the_message_names_the_setting():
    with pytest.raises(InvalidInputError, match=r"host_limit='lots'"):
        parse_bytes("lots", "host_limit")


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.sampled_from(sorted(BYTES_PER_UNIT)))
def test_text_and_fractions_agree(whole, decimals, unit):
    written = f"{whole}.{decimals:06d} {unit}"
    exact = Fraction(f"{whole}.{decimals:06d}") * BYTES_PER_UNIT[unit]
    if 1 <= exact <= LARGEST_BYTES:
        assert parse_bytes(written) == math.floor(exact)
    else:
        with pytest.raises(InvalidInputError):
            parse_bytes(written)


@given(st.integers(1, LARGEST_BYTES))
def test_an_int_and_its_digits_are_the_same_bytes(count):
    assert parse_bytes(count) == parse_bytes(str(count)) == parse_bytes(f"{count} B") == count


@each(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (110 * 2**20, "110.00 MiB"),
        (2**30, "1.00 GiB"),
        (int(12.34 * 2**30), "12.34 GiB"),
        (-(3 * 2**29), "-1.50 GiB"),
        (-1, "-1 B"),
        (3 * 2**40, "3.00 TiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(count, shown):
    assert format_bytes(count) == shown


@given(st.integers(1, 2**50))
def test_what_is_shown_can_be_read_back_to_half_a_hundredth_of_its_unit(count):
    unit = max(factor for factor in (1, 2**10, 2**20, 2**30, 2**40) if factor <= count)
    # Two decimals are off by half a hundredth at most; reading drops what is left of a byte.
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.005 * unit + 1
