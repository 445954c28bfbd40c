"""``vram-guard monitor``: what the GPUs of this machine do, live, and what it came to."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard.cli._arguments import number
from vram_guard.cli.exits import EXIT_DONE
from vram_guard.cli.options import add_options
from vram_guard.cli.printing import print_json, say
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.signals import handled

if TYPE_CHECKING:
    from vram_guard.budget.sampling import GpuSample
    from vram_guard.watch.monitor import GpuSummary
    from vram_guard.watch.running import Running

#: Below this mean a GPU counts as having room: guide values for a busy GPU begin at 80%.
BUSY = 0.8


def add(commands: Any) -> None:
    """The parser of ``monitor``."""
    parser = commands.add_parser(
        "monitor",
        help=_("watch utilisation and memory of the GPUs"),
        description=_("Show utilisation and memory per GPU and process, and sum up at the end. Ctrl-C ends it."),
    )
    parser.add_argument("seconds", nargs="?", metavar="SECONDS", help=_("duration in seconds (0: until Ctrl-C)"))
    parser.add_argument("--interval", metavar="S", help=_("sampling interval in seconds (1)"))
    add_options(parser, "json")
    parser.set_defaults(run=_monitor)


def _monitor(options: argparse.Namespace) -> int:
    from math import isfinite

    from vram_guard.watch.monitor import Monitor, any_sampler, checked_interval, watch
    from vram_guard.watch.running import running

    interval = checked_interval(number("interval", options.interval, 1.0))
    seconds = number("seconds", options.seconds, 0.0, option=False)
    if not isfinite(seconds) or seconds < 0:
        raise InvalidInputError(_("seconds must be 0 or more, not {value}", value=seconds))
    monitor = Monitor()
    trainings: dict[int, Running] = {}
    stream = sys.stderr if options.json else sys.stdout  # the answer has standard output to itself

    def show(seconds: float, moment: tuple[GpuSample, ...]) -> None:
        trainings.update(running())  # they are forgotten where the training ends
        for sample in moment:
            say(f"{seconds:7.1f} s  {_line(sample)}", stream)
        stream.flush()

    with any_sampler() as sampler:
        stop = threading.Event()
        # Ctrl-C and SIGTERM (``kill``, a batch system's time limit) end the watching, not the program.
        with handled(lambda *_signal: stop.set(), (signal.SIGINT, signal.SIGTERM), even_ignored=True):
            try:
                watch(sampler, monitor, seconds=seconds or None, interval=interval, tell=show, stop=stop)
            finally:  # what was seen until an error is worth its summary too
                _finish(options, monitor.summary(), monitor.count, trainings)
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


def _finish(
    options: argparse.Namespace, summary: Sequence[GpuSummary], count: int, trainings: Mapping[int, Running]
) -> None:
    if options.json:
        print_json({"kind": "monitor", "samples": count, "gpus": [_as_dict(one, trainings) for one in summary]})
        return
    from vram_guard.units import format_bytes

    say(_("\nSummary of {count} samples", count=count))
    for one in summary:
        say(f"GPU {one.gpu} {one.name}: {one.words()}")
        for process in one.processes:
            own = trainings.get(process.pid)
            told = [f"{_('peak')} {'?' if process.peak is None else format_bytes(process.peak)}"]
            if own is not None:
                told.append(_("{size} predicted", size=format_bytes(own.expected)))
            if process.utilization_mean is not None:
                told.append(f"{_('utilisation')} {process.utilization_mean:.0%}")
            say(f"    {process.pid:>8} {process.name}: {_(', ').join(told)}")
        advice = _advice(one)
        if advice:
            say(f"    {advice}")


def _advice(one: GpuSummary) -> str:
    """Advice that follows from the figures."""
    if one.utilization_mean is None or not one.processes:
        return ""
    if one.utilization_mean >= BUSY:
        return _("The GPU is kept busy.")
    if one.used_peak < BUSY * one.total:
        return _("The GPU is often idle and has memory left: try a larger batch or more workers (vram-guard optimize).")
    return _("The GPU is often idle though its memory is in use: check the data loader (vram-guard optimize).")


#: Names of the JSON for amounts, which say their unit there.
_IN_JSON = {
    "total": "memory_total_bytes",
    "used_mean": "memory_mean_bytes",
    "used_peak": "memory_peak_bytes",
    "peak": "memory_peak_bytes",
}


def _as_dict(one: GpuSummary, trainings: Mapping[int, Running]) -> dict[str, Any]:
    from dataclasses import asdict

    def told(process: dict[str, Any]) -> dict[str, Any]:
        own = trainings.get(process["pid"])
        return {**process, "predicted_bytes": None if own is None else own.expected}

    def renamed(facts: dict[str, Any]) -> dict[str, Any]:
        return {_IN_JSON.get(name, name): value for name, value in facts.items()}

    facts = asdict(one)
    return renamed({**facts, "processes": [told(renamed(process)) for process in facts["processes"]]})
