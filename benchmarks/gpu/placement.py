"""Where CUDA put the allocator's segments: read out of the addresses in recorded histories.

    python -m benchmarks.gpu.placement [SNAPSHOT ...]

Without a SNAPSHOT (of ``torch.cuda.memory._snapshot()``, gzipped or not): every history of ``benchmarks/gpu/results``
and ``benchmarks/recorded/data``. For each: the lowest address; how many new segments there were of 2 MiB, of 20 MiB and
larger; the shares of these that lay below the last one of their kind, that begin at a multiple of 32 MiB, and that lie
directly behind another segment; and the peaks that the requests alone come to with each placement.

What the histories show (2026-11-28):

* H100 (torch 2.6; torch 2.11 with CUDA 13.0) and H200 (torch 2.11 with CUDA 13.0), native Linux. Address space is taken
  in multiples of 32 MiB, each below the last. A segment that does not fill its stretch leaves a rest, and a later
  segment that fits is put there: behind what is there already, and into the rest that was made last. So segments of
  20 MiB lie one below the other, 32 MiB apart, and behind them, upwards, those of 2 MiB and of 10 to 12 MiB. Right
  above the first weights 12 stretches (384 MiB) stay empty until the first kernels run; segments taken after that fill
  them before they lie below the weights: from the top down, or, where cuDNN convolves, as one stretch. Weights may lie
  in two rows, one of them where the host's copies of earlier weights were. Those copies, the driver's own use of a
  rest, and gaps between its mappings move single segments. With this placement the requests of 60 histories, from the
  process's beginning on, come to 59 of the recorded peaks; the other one (DDP with a checkpoint) is 6.0% off with
  every placement. With all segments above each other 5 more differ, by up to 3.5%.
* ``lm-medium-*`` (torch 2.11): addresses from 0x703a00000 on, upwards without gaps, those of 2 MiB too. Under Windows'
  Linux CUDA's address space lies between 0x207800000 and 0x1600000000 (microsoft/WSL, issue 40401).
* ``nca-*`` (Linux, a card that nobody names): the first 256 MiB or so upwards, after that as on the H100, with 32 MiB
  more between stretches. No peak differs between the placements.

No recorded history tells of segments taken after others were given back in a way that decides a peak: here they
are placed as if nothing had been given back.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.compare import OWN_RESULTS
from benchmarks.gpu.history import expanded
from benchmarks.gpu.records import HISTORIES, read_histories
from benchmarks.harness.command import arguments_of
from benchmarks.recorded.recordings import DATA, SUFFIX, recordings
from vram_guard.allocator import PLACEMENTS, Recording, compare, read_recording, replay

MIB = 2**20
STRETCH = 32 * MIB

KINDS = ("2 MiB", "20 MiB", "larger")


def _kind(size: int) -> str:
    return {2 * MIB: "2 MiB", 20 * MIB: "20 MiB"}.get(size, "larger")


def told(name: str, recording: Recording) -> str:
    """One line for a recording."""
    taken = [entry for entry in recording.trace if entry.action == "segment_alloc"]
    ends = {segment.end for segment in recording.initial} | {entry.address + entry.size for entry in taken}
    parts = []
    for kind in KINDS:
        own = [entry.address for entry in taken if _kind(entry.size) == kind]
        pairs = list(itertools.pairwise(own))
        if pairs:
            below = sum(new < last for last, new in pairs) / len(pairs)
            begins = sum(address % STRETCH == 0 for address in own) / len(own)
            behind = sum(address in ends for address in own) / len(own)
            parts.append(
                f"{len(own)} of {kind}: {below:.0%} below, {begins:.0%} begin 32 MiB, {behind:.0%} behind another"
            )
    peak = compare(recording).recorded_peak_reserved
    found = {
        placement: replay(
            recording.events,
            recording.sizes,
            settings=recording.settings,
            streams=recording.streams,
            placement=placement,
        ).peak_reserved
        for placement in PLACEMENTS
    }
    peaks = ", ".join(f"{one} {reserved / peak - 1:+.3%}" for one, reserved in found.items())
    first = min([segment.address for segment in recording.initial] + [entry.address for entry in taken], default=0)
    return f"{name:55} {first:#x}; {'; '.join(parts) or 'no new segments'}; peak {peak}: {peaks}"


def _histories(files: list[Path]) -> Iterator[tuple[str, Recording]]:
    for folder in () if files else sorted(path.parent for path in OWN_RESULTS.glob(f"*/{HISTORIES}")):
        for name, history in read_histories(folder / HISTORIES).items():
            yield f"{folder.name.split('-')[0]} {name}", read_recording(expanded(history, name))
    for path in files or sorted(DATA.glob(f"*{SUFFIX}")):
        for recording in recordings(path):
            yield f"{path.name.removesuffix(SUFFIX)} {recording.device}", recording


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each history."""
    parser = arguments_of("benchmarks.gpu.placement", __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="SNAPSHOT")
    for name, recording in _histories(parser.parse_args(arguments).files):
        if not recording.settings.expandable_segments:
            print(told(name, recording), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
