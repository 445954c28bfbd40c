"""``python -m vram_guard``: the ``vram-guard`` command, where its folder is not on the path."""

import sys

from vram_guard.cli import main

if __name__ == "__main__":
    sys.exit(main())
