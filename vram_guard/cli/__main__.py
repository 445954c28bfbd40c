"""``python -m vram_guard.cli``: the command where the console script is not on the path."""

from __future__ import annotations

import sys

from vram_guard.cli import main

sys.exit(main())
