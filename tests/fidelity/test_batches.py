"""Batches of all layouts, and loaders of all kinds, in Lightning: none differs in silence."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from fidelity import lightning_batches, lightning_loaders
from fidelity.harness import check, every
from fidelity.lightning import SUITE, of


@every(SUITE, [*of(lightning_batches), *of(lightning_loaders)])
def test_no_silent_difference(suite, case, mode):
    check(suite, case, mode)
