"""One of two processes (gloo, CPU) that count graphs of MMEngine's compiled ``train_step``, as traced and for real.

Run by test_mmengine_compiled.py, once per rank.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
import vram_guard_mmengine  # noqa: E402

vram_guard_mmengine.GuardRunner  # noqa: B018 - imports MMEngine
import mmengine_cases as cases  # noqa: E402
import mmengine_compiled_cases as compiled  # noqa: E402
import torch  # noqa: E402

from vram_guard.watch.process_groups import end_process_groups  # noqa: E402

RANK = int(os.environ["RANK"])


def main() -> None:
    """Graphs of one step."""
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")  # MMEngine's launcher asks for a GPU before it does so
    root = folder / f"configs{RANK}"
    cases.write_configs(root, cases.MMPRETRAIN)

    def cfg(name: str) -> Any:
        made = compiled.cfg_of(root, folder / f"{name}{RANK}", compiled.ADAMW, width=320)
        made.launcher = "pytorch"
        made.model_wrapper_cfg = {"type": "MMDistributedDataParallel", "device_ids": None, "bucket_cap_mb": 2}
        return made  # without device_ids=None it would ask for a GPU

    eager, traced = compiled.traced(cfg("traced"))
    answer = {
        "real": compiled.graphs_of_a_step(cfg("real")),
        "traced": traced.compiled.graphs,
        "smaller": traced.at(compiled.SAMPLES).peak_allocated < eager.at(compiled.SAMPLES).peak_allocated,
    }
    (folder / f"{RANK}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
    end_process_groups()  # no SIGABRT after the work (PyTorch's issue 190489)
