"""Trainings with Accelerate, each in a copy of one process that has imported everything.

``python fidelity_accelerate_script.py FOLDER [WORDS...]`` trains every case whose name has these words as written and
under ``guard`` in every mode, and keeps what they came to.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it: once, for all copies
from fidelity import accelerate_cases  # noqa: F401 - they register themselves
from fidelity.accelerate import CASES, train


def main(folder: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # no copy looks through it again
    for number, one in enumerate(CASES):
        if not all(word in one.name for word in words):
            continue
        for mode in (None, *one.modes):
            process = os.fork()
            if process == 0:
                try:
                    kept = folder / f"{number}-{mode}"
                    words = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(words, 2)
                    kept.write_bytes(pickle.dumps(train(one, mode)))
                except BaseException:  # noqa: BLE001 - the copy ends here, whatever it was
                    traceback.print_exc()
                os._exit(0)
            os.waitpid(process, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
