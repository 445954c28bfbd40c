"""Libraries that we import, without what they log and warn of meanwhile: nothing of it is the user's to mend."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Inside the block, warnings and log lines below an error are dropped; for what libraries do by themselves."""
    threshold = logging.root.manager.disable
    logging.disable(max(threshold, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(threshold)
