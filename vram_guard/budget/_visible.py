"""CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, read as CUDA reads them."""

from __future__ import annotations

import os
import re

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

# CUDA reads numbers like C's strtoul: "1gpu" counts as 1 and "gpu1" as nothing.
_LEADING_NUMBER = re.compile(r"[+-]?[0-9]+")


def visible_devices() -> list[int] | list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES leaves visible, in CUDA's order.

    Returns:
        None where the variable is not set (all devices); else physical numbers, or UUIDs that start with
        "GPU-" or "MIG-" (possibly shortened). As in CUDA, the first entry that is not valid ends the list,
        and an entry given twice empties it. An empty list means that no device is visible.
    """
    text = os.environ.get(VISIBLE)
    if text is None:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    for prefix in ("GPU-", "MIG-"):
        if entries[0].startswith(prefix):
            return _unique(_leading(entries, prefix))
    return _unique(_leading_numbers(entries))


def ordered_by_bus() -> bool:
    """True if CUDA numbers the devices by PCI bus; its default is "fastest first"."""
    return os.environ.get(ORDER) == "PCI_BUS_ID"


def _leading(entries: list[str], prefix: str) -> list[str]:
    kept: list[str] = []
    for entry in entries:
        if not entry.startswith(prefix):
            break
        kept.append(entry)
    return kept


def _leading_numbers(entries: list[str]) -> list[int]:
    kept: list[int] = []
    for entry in entries:
        number = _LEADING_NUMBER.match(entry)
        if number is None or int(number.group()) < 0:
            break
        kept.append(int(number.group()))
    return kept


def _unique(entries: list[int] | list[str]) -> list[int] | list[str]:
    return entries if len(set(entries)) == len(entries) else []
