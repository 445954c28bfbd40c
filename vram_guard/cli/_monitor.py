"""``vram-guard monitor``: what the GPUs of this machine do, live, and what it came to."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard.cli.exits import EXIT_DONE
from vram_guard.cli.options import add_options
from vram_guard.cli.printing import print_json, say
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.signals import handled

if TYPE_CHECKING:
    from vram_guard.budget.sampling import GpuProcess, GpuSample
    from vram_guard.watch.monitor import GpuSummary
    from vram_guard.watch.running import Running

#: From this mean on a GPU counts as busy: the guide's values for one begin at 80%.
BUSY = 0.8


def add(commands: Any) -> None:
    """The parser of ``monitor``."""
    parser = commands.add_parser(
        "monitor",
        help=_("watch utilisation and memory of the GPUs"),
        description=_("Show utilisation and memory per GPU and process, and sum up at the end. Ctrl-C ends it."),
    )
    parser.add_argument(
        "seconds", nargs="?", default="0", metavar="SECONDS", help=_("duration in seconds (0: until Ctrl-C)")
    )
    add_options(parser, "json")
    parser.set_defaults(run=_monitor)


def _monitor(options: argparse.Namespace) -> int:
    from math import isfinite

    from vram_guard.watch.monitor import GpuSummary, watch
    from vram_guard.watch.running import running

    try:
        seconds = float(options.seconds)
    except ValueError:
        seconds = -1.0
    if not isfinite(seconds) or seconds < 0:
        raise InvalidInputError(_("seconds must be 0 or more, not {value}", value=repr(options.seconds)[:40]))
    gpus: dict[str, GpuSummary] = {}
    trainings: dict[int, Running] = {}
    stream = sys.stderr if options.json else sys.stdout  # the answer has standard output to itself

    def show(seconds: float, moment: tuple[GpuSample, ...]) -> None:
        trainings.update(running())  # they are forgotten where the training ends
        for sample in moment:
            gpus.setdefault(sample.gpu, GpuSummary(sample.gpu, sample.name, sample.total)).add(sample)
            say(f"{seconds:7.1f} s  {_line(sample)}", stream)
        stream.flush()

    stop = threading.Event()
    # Ctrl-C and SIGTERM (``kill``, a batch system's time limit) end the watching, not the program.
    with handled(lambda *_signal: stop.set(), (signal.SIGINT, signal.SIGTERM), even_ignored=True):
        try:
            watch(seconds=seconds or None, tell=show, stop=stop)
        finally:  # what was seen until an error is worth its summary too
            summary = tuple(gpus.values())
            count = max((one.samples for one in summary), default=0)
            if options.json and count:
                print_json({"kind": "monitor", "samples": count, "gpus": [_as_dict(one, trainings) for one in summary]})
            elif count:
                say(_("\nSummary of {count} samples", count=count))
                _print_summary(summary, trainings)
    return EXIT_DONE


def _line(sample: GpuSample) -> str:
    from vram_guard.units import format_bytes

    share = "  -" if sample.utilization is None else f"{sample.utilization:4.0%}"
    used = f"{sample.used / max(1, sample.total):4.0%} ({format_bytes(sample.used)} / {format_bytes(sample.total)})"
    return _(
        "GPU {gpu} {name}: utilisation {share} | memory {used}",
        gpu=sample.gpu,
        name=sample.name,
        share=share,
        used=used,
    )


def _print_summary(summary: Sequence[GpuSummary], trainings: Mapping[int, Running]) -> None:
    from vram_guard.units import format_bytes

    for one in summary:
        say(f"GPU {one.gpu} {one.name}: {_in_words(one)}")
        for process in _by_size(one):
            own = trainings.get(process.pid)
            told = [f"{_('peak')} {'?' if process.bytes is None else format_bytes(process.bytes)}"]
            if own is not None:
                told.append(_("{size} predicted", size=format_bytes(own.expected)))
            say(f"    {process.pid:>8} {process.name}: {_(', ').join(told)}")
        if one.utilization_mean is not None and one.processes:
            if one.utilization_mean >= BUSY:
                say(f"    {_('The GPU is kept busy.')}")
            else:
                say(f"    {_('The GPU is often idle: try a larger batch or more workers (vram-guard optimize).')}")


def _in_words(one: GpuSummary) -> str:
    """Mean and peak in one line."""
    from vram_guard.units import format_bytes

    total, mean, peak = one.total, one.used_mean, one.used_peak
    memory = _(
        "memory mean {mean} ({share}), peak {peak} ({most}) of {total}",
        mean=format_bytes(mean),
        share=f"{mean / max(1, total):.0%}",
        peak=format_bytes(peak),
        most=f"{peak / max(1, total):.0%}",
        total=format_bytes(total),
    )
    if one.utilization_mean is None or one.utilization_peak is None:
        return _("utilisation unavailable; {memory}", memory=memory)
    share, most = f"{one.utilization_mean:.0%}", f"{one.utilization_peak:.0%}"
    return _("utilisation mean {mean}, peak {peak}; {memory}", mean=share, peak=most, memory=memory)


def _by_size(one: GpuSummary) -> list[GpuProcess]:
    return sorted(one.processes.values(), key=lambda process: (-(process.bytes or 0), process.pid))


def _as_dict(one: GpuSummary, trainings: Mapping[int, Running]) -> dict[str, Any]:
    predicted = {pid: own.expected for pid, own in trainings.items()}
    return {
        "gpu": one.gpu,
        "name": one.name,
        "samples": one.samples,
        "utilization_mean": one.utilization_mean,
        "utilization_peak": one.utilization_peak,
        "memory_total_bytes": one.total,
        "memory_mean_bytes": one.used_mean,
        "memory_peak_bytes": one.used_peak,
        "processes": [
            {
                "pid": process.pid,
                "name": process.name,
                "memory_peak_bytes": process.bytes,
                "predicted_bytes": predicted.get(process.pid),
            }
            for process in _by_size(one)
        ],
    }
