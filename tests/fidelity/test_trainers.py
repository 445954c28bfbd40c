"""Hooks, logged values, schedules, callbacks, optimizers and resuming in Lightning: none differs in silence."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from fidelity import lightning_hooks, lightning_trainers
from fidelity.harness import check, every
from fidelity.lightning import SUITE, of


@every(SUITE, [*of(lightning_hooks), *of(lightning_trainers)], cut=True)
def test_no_silent_difference(suite, case, mode):
    check(suite, case, mode)
