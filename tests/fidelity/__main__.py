"""The table of verdicts: ``python -m tests.fidelity [words] [--all]``; words choose cases by name or mode."""

from __future__ import annotations

import collections
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "cases")]  # as pytest does


def main(arguments: list[str]) -> int:
    from fidelity import suites
    from fidelity.harness import Verdict, fault

    everything = "--all" in arguments
    words = [word for word in arguments if not word.startswith("--")]
    counts: dict[tuple[str, str], collections.Counter[Any]] = collections.defaultdict(collections.Counter)
    faults = trainings = 0
    begun = time.process_time()
    for suite, cases in suites():
        for case in cases:
            for _, mode in case.pairs:
                if not all(word in f"{suite.framework} {case.name} {mode}".lower() for word in words):
                    continue
                judged = suite.judge(case, mode)
                trainings += 1
                counts[suite.framework, mode][judged.verdict] += 1
                wrong = fault(case, mode, judged)
                faults += bool(wrong)
                if wrong or everything:
                    how = "applied" if judged.applied else ""
                    line = f"{suite.framework:10} {mode:10} {case.name:50} {how:8} {wrong or judged.verdict.value}"
                    print(line, flush=True)
                    if everything:
                        for word in judged.words:
                            print(f"             | {word}")
    print(f"\n{'':21}{'trainings':>10}" + "".join(f"{verdict.value:>20}" for verdict in Verdict))
    for (framework, mode), found in counts.items():
        numbers = "".join(f"{found[verdict]:>20}" for verdict in Verdict)
        print(f"{framework:10} {mode:10}{found.total():>10}{numbers}")
    print(
        f"{trainings} trainings under the guard, {faults} faults, {time.process_time() - begun:.0f} s of processor time"
    )
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
