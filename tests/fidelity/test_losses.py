"""Losses of all kinds in Lightning, with and without the guard: none differs in silence."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from fidelity import lightning_losses
from fidelity.harness import check, every
from fidelity.lightning import SUITE, of


@every(SUITE, of(lightning_losses))
def test_no_silent_difference(suite, case, mode):
    check(suite, case, mode)
