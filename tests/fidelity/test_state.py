"""State and randomness of a module's own, checkpointed blocks, losses that change: none differs in silence."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from fidelity import lightning_blocks, lightning_hidden, lightning_later, lightning_state, lightning_unseen
from fidelity.harness import check, every
from fidelity.lightning import SUITE, of

MODULES = (lightning_state, lightning_blocks, lightning_unseen, lightning_later, lightning_hidden)


@every(SUITE, [one for module in MODULES for one in of(module)])
def test_no_silent_difference(suite, case, mode):
    check(suite, case, mode)
