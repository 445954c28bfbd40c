"""State and randomness of a module's own, checkpointed blocks, losses that change: none differs in silence."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from fidelity import lightning_blocks, lightning_later, lightning_state, lightning_unseen
from fidelity.harness import check, every
from fidelity.lightning import SUITE, of


@every(SUITE, [*of(lightning_state), *of(lightning_blocks), *of(lightning_unseen), *of(lightning_later)])
def test_no_silent_difference(suite, case, mode):
    check(suite, case, mode)
