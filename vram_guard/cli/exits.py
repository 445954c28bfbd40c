"""The exit codes of ``vram-guard``."""

from __future__ import annotations

from typing import Final

EXIT_DONE: Final = 0
EXIT_DOES_NOT_FIT: Final = 1
EXIT_USAGE: Final = 2
EXIT_ENVIRONMENT: Final = 3
