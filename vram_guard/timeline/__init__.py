"""timeline: every allocation and free of a training step, and its peak at any batch size."""

from __future__ import annotations

from vram_guard.timeline._estimate import Estimate, OutOfMemoryPoint
from vram_guard.timeline._law import merge_affine
from vram_guard.timeline._timeline import Timeline, largest_that_fits
from vram_guard.timeline._values import (
    ASSUMED_CARD,
    CATEGORIES,
    SYNCHRONISED_NORM,
    Affine,
    Block,
    Category,
    Change,
    ChangeKind,
    Collective,
    CudnnAnswers,
    Deferred,
    Frees,
    HostBlock,
    Note,
    Phase,
    PhaseName,
    Scratch,
    Tier,
    Unit,
    UpperReason,
    Work,
    Workspaces,
)

__all__ = [
    "ASSUMED_CARD",
    "CATEGORIES",
    "SYNCHRONISED_NORM",
    "Affine",
    "Block",
    "Category",
    "Change",
    "ChangeKind",
    "Collective",
    "CudnnAnswers",
    "Deferred",
    "Estimate",
    "Frees",
    "HostBlock",
    "Note",
    "OutOfMemoryPoint",
    "Phase",
    "PhaseName",
    "Scratch",
    "Tier",
    "Timeline",
    "Unit",
    "UpperReason",
    "Work",
    "Workspaces",
    "largest_that_fits",
    "merge_affine",
]
