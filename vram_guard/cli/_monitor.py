"""``vram-guard monitor``: what the GPUs of this machine do, live, and what it came to."""

from __future__ import annotations

import argparse
import csv
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vram_guard.cli._arguments import number
from vram_guard.cli.exits import EXIT_DONE
from vram_guard.cli.options import add_options
from vram_guard.cli.printing import print_json, say, tell
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.printable import printable

if TYPE_CHECKING:
    from vram_guard.budget.sampling import GpuSample
    from vram_guard.watch.monitor import GpuSummary

#: One row for each GPU at each moment (``pid`` empty), and one for each process on it.
COLUMNS = (
    "time",
    "seconds",
    "gpu",
    "name",
    "pid",
    "process",
    "utilization",
    "memory_used_bytes",
    "memory_total_bytes",
)

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
    add_options(
        parser,
        "device",
        dest="watched",
        action="append",
        help=_("only this GPU of this machine, as nvidia-smi counts; repeatable"),
    )
    # Its name until 0.2; everywhere else --gpu is a card's name. Not "gpu": that is a setting.
    parser.add_argument("--gpu", dest="watched_before", action="append", metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--csv", metavar="FILE", help=_('write every sample as CSV ("-": to standard output)'))
    add_options(parser, "json")
    parser.add_argument("--quiet", action="store_true", help=_("show only the summary"))
    parser.set_defaults(run=_monitor)


def _monitor(options: argparse.Namespace) -> int:
    from math import isfinite

    from vram_guard.watch.monitor import Monitor, any_sampler, checked_interval, watch

    interval = checked_interval(number("interval", options.interval, 1.0))
    seconds = number("seconds", options.seconds, 0.0, option=False)
    if not isfinite(seconds) or seconds < 0:
        raise InvalidInputError(_("seconds must be 0 or more, not {value}", value=seconds))
    watched = _devices(options)
    if options.csv == "-" and options.json:
        raise InvalidInputError(_("--csv - and --json both answer on standard output: give --csv a file"))
    if options.csv is not None and Path(options.csv).is_dir():
        raise InvalidInputError(_("{path} is a folder: give the name of a file", path=options.csv))
    monitor = Monitor()
    with any_sampler() as (sampler, missing), _csv_file(options.csv) as rows:
        if missing:
            tell(missing)
        chosen = _only(sampler, watched)
        show = _shown_at(options, rows)
        stop = threading.Event()
        with _ending_cleanly(stop):
            try:
                watch(chosen, monitor, seconds=seconds or None, interval=interval, tell=show, stop=stop)
            finally:  # what was seen until an error is worth its summary too
                _finish(options, monitor.summary(), monitor.count)
    return EXIT_DONE


def _devices(options: argparse.Namespace) -> list[str]:
    """The GPUs that are named, by the numbers that nvidia-smi shows, or parts of one ("0 MIG 1").

    Raises:
        InvalidInputError: one does not begin with a number.
    """
    if options.watched_before:
        tell(_("monitor --gpu N is --device N now: --gpu names a card in every command"))
    watched = [*(options.watched or ()), *(options.watched_before or ())]
    for one in watched:
        if not one[:1].isdecimal() or not one.isascii():
            raise InvalidInputError(
                _("--device is the number of a GPU of this machine, not {text}", text=repr(one)[:40])
            )
    return watched


def _only(sampler: Callable[[], tuple[GpuSample, ...]], gpus: Sequence[str] | None) -> Callable[[], Any]:
    """The sampler for the chosen GPUs.

    Raises:
        InvalidInputError: there is no such GPU; before anything is shown.
    """
    if not gpus:
        return sampler
    known = [sample.gpu for sample in sampler()]
    for gpu in gpus:
        if gpu not in known:
            raise InvalidInputError(_("there is no GPU {gpu}; available: {known}", gpu=gpu, known=", ".join(known)))
    return lambda: tuple(sample for sample in sampler() if sample.gpu in gpus)


@contextmanager
def _ending_cleanly(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM (``kill``, a batch system's time limit) end the watching, not the program."""
    before = {}

    def end(_number: int, _frame: object) -> None:
        stop.set()

    for sent in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):  # not the main thread: its starter ends it
            before[sent] = signal.signal(sent, end)
    try:
        yield
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler)


# --- what is shown --------------------------------------------------------------------------------------------------


def _shown_at(options: argparse.Namespace, rows: Any | None) -> Callable[[float, tuple[GpuSample, ...]], None]:
    """Callback for each sample: lines for people, rows for programs."""
    # The answer has standard output to itself.
    stream = sys.stderr if options.json or options.csv == "-" else sys.stdout
    show = None if options.quiet else _shower(stream)

    def tell(seconds: float, moment: tuple[GpuSample, ...]) -> None:
        if rows is not None:
            _write_rows(rows, seconds, moment)
        if show is not None:
            show(seconds, moment)

    return tell


def _shower(stream: TextIO) -> Callable[[float, tuple[GpuSample, ...]], None]:
    """On a terminal the moment replaces the one before; elsewhere every moment has its lines."""
    in_place = stream.isatty()
    height = 0

    def show(seconds: float, moment: tuple[GpuSample, ...]) -> None:
        nonlocal height
        lines = [line for sample in moment for line in _lines(sample, processes=in_place)]
        if in_place:
            import shutil

            width, most = shutil.get_terminal_size()
            lines = [line[: width - 1] for line in lines[: most - 2]]
            # Cursor up by what stands there, and erase to the end of the screen (ECMA-48: CUU, ED).
            stream.write(f"\x1b[{height}A\x1b[J" if height else "")
            height = len(lines)
        else:
            lines = [f"{seconds:7.1f} s  {line}" for line in lines]
        stream.write(printable("\n".join(lines)) + "\n")
        stream.flush()

    return show


def _lines(sample: GpuSample, *, processes: bool) -> Iterator[str]:
    from vram_guard.units import format_bytes

    share = "  -" if sample.utilization is None else f"{sample.utilization:4.0%}"
    used = f"{sample.used / max(1, sample.total):4.0%} ({format_bytes(sample.used)} / {format_bytes(sample.total)})"
    yield _(
        "GPU {gpu} {name}: utilisation {share} | memory {used}",
        gpu=sample.gpu,
        name=sample.name,
        share=share,
        used=used,
    )
    for process in sample.processes if processes else ():
        held = "?" if process.bytes is None else format_bytes(process.bytes)
        part = "" if process.utilization is None else f", {process.utilization:.0%}"
        yield f"    {process.pid:>8} {process.name}: {held}{part}"


def _finish(options: argparse.Namespace, summary: Sequence[GpuSummary], count: int) -> None:
    if options.json:
        print_json({"kind": "monitor", "samples": count, "gpus": [_as_dict(one) for one in summary]})
        return
    from vram_guard.units import format_bytes

    stream = sys.stderr if options.csv == "-" else sys.stdout
    say(_("\nSummary of {count} samples", count=count), stream)
    for one in summary:
        say(f"GPU {one.gpu} {one.name}: {one.words()}", stream)
        for process in one.processes:
            peak = "?" if process.peak is None else format_bytes(process.peak)
            share = "" if process.utilization_mean is None else f", {process.utilization_mean:.0%}"
            say(f"    {process.pid:>8} {process.name}: {_('peak')} {peak}{share}", stream)
        advice = _advice(one)
        if advice:
            say(f"    {advice}", stream)


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


def _as_dict(one: GpuSummary) -> dict[str, Any]:
    from dataclasses import asdict

    def renamed(facts: dict[str, Any]) -> dict[str, Any]:
        return {_IN_JSON.get(name, name): value for name, value in facts.items()}

    facts = asdict(one)
    return renamed({**facts, "processes": [renamed(process) for process in facts["processes"]]})


# --- CSV ------------------------------------------------------------------------------------------------------------


@contextmanager
def _csv_file(path: str | None) -> Iterator[Any | None]:
    """A writer of rows, each of them on the disk before the next moment; None where none was asked for."""
    if path is None:
        yield None
        return
    if path == "-":
        yield _with_head(sys.stdout)
        return
    try:
        file = Path(path).open("w", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115 - closed below
    except OSError as error:
        raise InvalidInputError(_("{path} cannot be written: {reason}", path=path, reason=error.strerror)) from None
    with file:
        yield _with_head(file)


def _with_head(file: TextIO) -> Any:
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    return writer


def _write_rows(rows: Any, seconds: float, moment: tuple[GpuSample, ...]) -> None:
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    for sample in moment:
        head = (now, f"{seconds:.3f}", sample.gpu, sample.name)
        rows.writerow((*head, "", "", _cell(sample.utilization), sample.used, sample.total))
        for process in sample.processes:
            share = _cell(process.utilization)
            rows.writerow((*head, process.pid, process.name, share, _cell(process.bytes), sample.total))


def _cell(value: float | None) -> str | float:
    return "" if value is None else value
