"""``python -m vram_guard_accelerate.dry_run.worker REQUEST``: the process of a dry run."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from vram_guard.report.as_json import as_dict
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.results import Failure, imported_files
from vram_guard_accelerate.dry_run.run import DryRun
from vram_guard_accelerate.relaunch.relaunch import Varied
from vram_guard_accelerate.settings import Settings


def main() -> NoReturn:
    """Follow the script that the request names, and write what came out beside the request."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    answer: dict[str, Any]
    try:
        _follow(request, folder)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher has to hear of it
        failure = Failure.of(error, request["command"][0])
        answer = {"error": failure.kind, "message": failure.message, "traceback": failure.traceback}
    _answer(folder, answer)


def _follow(request: dict[str, Any], folder: Path) -> NoReturn:
    import pickle

    budget = pickle.loads((folder / "budget.pickle").read_bytes())  # noqa: S301 - written by the launcher just now
    settings = Settings.of(request["settings"])
    varied = Varied.read(request.get("varied"))

    def decided(run: DryRun) -> NoReturn:
        from vram_guard_accelerate.planning.decide import decide

        began, memory = time.monotonic(), _memory()
        decision = decide(run, settings, budget, varied=varied, may_vary=True)
        _answer(
            folder,
            {
                "plan": as_dict(decision.plan),
                "text": _rendered(decision.plan),
                "orders": json.loads(decision.orders.text()),
                "notes": list(decision.notes),
                "wanted": [wanted.asked() for wanted in decision.wanted],
                "files": {**imported_files(), **run.resumed.files},
                "fits": decision.plan.fits,
                "changed": decision.plan.changed or decision.orders.resumes_grown,
                "seconds": {"script": began - start, "plan": time.monotonic() - began},
                "host_memory": {"script": memory, "plan": _memory()},
            },
        )

    # As in vram_guard.plan: of a GPU that nobody named, the oldest generation with bfloat16 is assumed.
    capability = tuple(budget.compute_capability or (8, 0))
    start = time.monotonic()
    run = DryRun(capability, request["ranks"], decided, may_shard="offload_parameters" in settings.techniques)
    run.local_ranks = request["local_ranks"]
    run.run(request["command"], module=request["module"])


def _rendered(plan: Any) -> str:
    from vram_guard.report.text import render

    return render(plan, unicode=True)


def _memory() -> int:
    """Bytes of host memory that this process, or the largest of its copies, took at most."""
    kibibytes = 1 if sys.platform == "darwin" else 1024
    own = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(own) * kibibytes


def _answer(folder: Path, answer: dict[str, Any]) -> NoReturn:
    """Write the answer and end at once: the script's own goodbyes (trackers, threads) have nothing to say."""
    forks.end_all()
    try:
        # The script's `open` is silenced by now: the descriptor is not.
        handle = os.open(folder / "answer.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        data = memoryview(json.dumps(answer).encode())
        while data:
            data = data[os.write(handle, data) :]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
