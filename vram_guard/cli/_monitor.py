"""``vram-guard monitor``: what the GPUs of this machine do, live, and what it came to."""

from __future__ import annotations

import argparse
import csv
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    from rich.console import Group

    from vram_guard.budget.sampling import GpuSample
    from vram_guard.watch.monitor import GpuSummary
    from vram_guard.watch.running import Running

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

#: Called with the seconds since the start and a moment.
Tell = Callable[[float, "tuple[GpuSample, ...]"], None]

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
    from vram_guard.watch.running import running

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
    trainings: dict[int, Running] = {}
    with any_sampler() as (sampler, missing), _csv_file(options.csv) as rows:
        if missing:
            tell(missing)
        chosen = _only(sampler, watched)
        stop = threading.Event()
        with _ending_cleanly(stop):
            try:
                with _shown_at(options, rows) as show:

                    def tell_and_note(seconds: float, moment: tuple[GpuSample, ...]) -> None:
                        trainings.update(running())  # they are forgotten where the training ends
                        show(seconds, moment)

                    watch(chosen, monitor, seconds=seconds or None, interval=interval, tell=tell_and_note, stop=stop)
            finally:  # what was seen until an error is worth its summary too
                _finish(options, monitor.summary(), monitor.count, trainings)
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


@contextmanager
def _shown_at(options: argparse.Namespace, rows: Any | None) -> Iterator[Tell]:
    """Callback for each sample: lines for people, rows for programs."""
    # The answer has standard output to itself.
    stream = sys.stderr if options.json or options.csv == "-" else sys.stdout
    with _shower(stream, quiet=options.quiet) as show:

        def tell(seconds: float, moment: tuple[GpuSample, ...]) -> None:
            if rows is not None:
                _write_rows(rows, seconds, moment)
            show(seconds, moment)

        yield tell


@contextmanager
def _shower(stream: TextIO, *, quiet: bool = False) -> Iterator[Tell]:
    """On a terminal the moment replaces the one before; elsewhere every moment has its lines."""
    if quiet:
        yield lambda _seconds, _moment: None
    elif stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):  # where nothing can be replaced
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=stream), auto_refresh=False) as live:
            yield lambda _seconds, moment: live.update(_table(moment), refresh=True)
    else:

        def show(seconds: float, moment: tuple[GpuSample, ...]) -> None:
            stream.write(printable("\n".join(f"{seconds:7.1f} s  {_line(sample)}" for sample in moment)) + "\n")
            stream.flush()

        yield show


def _table(moment: tuple[GpuSample, ...]) -> Group:
    """GPUs and their processes, predicted beside measured; below it what grows from epoch to epoch."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from vram_guard.units import format_bytes
    from vram_guard.watch.running import running

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GPU")
    for title in (_("utilisation"), _("memory"), _("share"), _("predicted")):
        table.add_column(title, justify="right")
    trainings, warnings = running(), list[Text]()
    for sample in moment:
        used = (_percent(sample.utilization), format_bytes(sample.used), f"{sample.used / max(1, sample.total):.0%}")
        table.add_row(Text(printable(f"{sample.gpu} {sample.name}", lines=False), "bold"), *used, "")
        for process in sample.processes:
            own = trainings.get(process.pid)
            held = "?" if process.bytes is None else format_bytes(process.bytes)
            share = "" if own is None or not process.bytes else f"{process.bytes / max(1, own.expected):.0%}"
            over = bool(own and process.bytes and process.bytes > own.expected)
            name = Text(printable(f"  {process.pid} {process.name}", lines=False))
            predicted = "" if own is None else f"{share} / {format_bytes(own.expected)}"
            table.add_row(name, _percent(process.utilization), held, "", Text(predicted, "yellow" if over else "green"))
            if own is not None and own.growth:
                warnings.append(Text(printable(f"{process.pid}: {own.growth}", lines=False), "yellow"))
    return Group(table, *warnings)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


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

    stream = sys.stderr if options.csv == "-" else sys.stdout
    say(_("\nSummary of {count} samples", count=count), stream)
    for one in summary:
        say(f"GPU {one.gpu} {one.name}: {one.words()}", stream)
        for process in one.processes:
            peak = "?" if process.peak is None else format_bytes(process.peak)
            own = trainings.get(process.pid)
            told = [f"{_('peak')} {peak}"]
            if own is not None:
                told.append(_("{size} predicted", size=format_bytes(own.expected)))
            if process.utilization_mean is not None:
                told.append(f"{_('utilisation')} {process.utilization_mean:.0%}")
            say(f"    {process.pid:>8} {process.name}: {_(', ').join(told)}", stream)
            if own is not None and own.growth:
                say(f"             {own.growth}", stream)
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


def _as_dict(one: GpuSummary, trainings: Mapping[int, Running]) -> dict[str, Any]:
    from dataclasses import asdict

    def told(process: dict[str, Any]) -> dict[str, Any]:
        own = trainings.get(process["pid"])
        return {
            **process,
            "predicted_bytes": None if own is None else own.expected,
            "epoch_bytes": [] if own is None else own.epochs,
            "growth": None if own is None or not own.growth else own.growth,
        }

    def renamed(facts: dict[str, Any]) -> dict[str, Any]:
        return {_IN_JSON.get(name, name): value for name, value in facts.items()}

    facts = asdict(one)
    return renamed({**facts, "processes": [told(renamed(process)) for process in facts["processes"]]})


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
