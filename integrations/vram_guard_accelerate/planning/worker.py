"""``python -m vram_guard_accelerate.planning.worker FOLDER``: the process of a dry run."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from vram_guard.forks.side_effects import discard_writes, way
from vram_guard_accelerate.planning.caches import caches


def main() -> NoReturn:
    """Follow the script that the request in the folder names, and write the answer next to the request."""
    folder = Path(sys.argv[1])
    # Before the libraries are imported: what they are is then read through the overlay, and there is one thread.
    command = json.loads((folder / "request.json").read_text(encoding="utf-8"))["command"]
    discard_writes((folder, *caches()), command)
    if way() != "overlay":
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    from vram_guard_accelerate.planning.followed_script import follow

    follow(folder)


if __name__ == "__main__":
    main()
