"""The ``vram-guard`` command.

What a subcommand needs is imported when it runs, so that ``--help`` and ``--version`` never wait for torch.

Exit codes: 0 done (and, where something is checked, it fits), 1 it does not fit, 2 bad usage, 3 the environment
cannot be read. Answers go to standard output, messages to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard import __version__
from vram_guard.errors import DeviceQueryError, DoesNotFitError, InvalidInputError, NoDeviceError, VramGuardError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from vram_guard.budget import GPU

EXIT_DONE = 0
EXIT_DOES_NOT_FIT = 1
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3

#: The format of every ``--json`` answer; raised when a key changes its meaning or goes away.
JSON_SCHEMA = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. argparse itself exits with 0 for help and 2 for bad usage."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        sys.stdout.flush()
    except VramGuardError as error:
        print(f"vram-guard: {error}", file=sys.stderr)
        return _exit_code(error)
    except BrokenPipeError:
        # The reader has seen enough (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    return code


def _exit_code(error: VramGuardError) -> int:
    if isinstance(error, DoesNotFitError):
        return EXIT_DOES_NOT_FIT
    if isinstance(error, InvalidInputError):
        return EXIT_USAGE
    return EXIT_ENVIRONMENT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vram-guard",
        description="Know how much GPU memory a PyTorch training step takes before it runs, and make it fit.",
        epilog="Exit codes: 0 done, 1 it does not fit, 2 bad usage, 3 the environment cannot be read.",
    )
    parser.add_argument("--version", action="version", version=f"vram-guard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    gpus = commands.add_parser("gpus", help="the GPUs that are known by name", description=_gpus.__doc__)
    gpus.add_argument("name", nargs="?", help='one card, by any of its names ("4090", "A100 40GB")')
    doctor = commands.add_parser("doctor", help="what was found on this machine", description=_doctor.__doc__)
    for command, run in ((gpus, _gpus), (doctor, _doctor)):
        command.add_argument("--json", action="store_true", help="answer as JSON")
        command.set_defaults(run=run)
    return parser


# --- gpus -------------------------------------------------------------------------------------------------------


def _gpus(options: argparse.Namespace) -> int:
    """List the GPUs that can be given by name, with memory, what a training may use of it, and throughput."""
    from vram_guard.budget import catalogue, find_gpu

    cards = catalogue() if options.name is None else (find_gpu(options.name),)
    if options.json:
        _print_json({"gpus": [_gpu_facts(card) for card in cards]})
    else:
        _print_gpus(cards)
    return EXIT_DONE


def _gpu_facts(card: GPU) -> dict[str, Any]:
    """A card for programs: bytes, bytes a second, FLOP a second; null where unknown."""
    from vram_guard.budget import Budget

    return {
        "name": card.name,
        "aliases": list(card.aliases),
        "architecture": card.architecture,
        "compute_capability": list(card.compute_capability),
        "memory_bytes": card.memory_bytes,
        "usable_bytes": Budget.of(card).usable,
        "memory_bandwidth": card.memory_bandwidth,
        "fp32_flops": card.fp32_flops,
        "tf32_flops": card.tf32_flops,
        "fp16_flops": card.fp16_flops,
        "bf16_flops": card.bf16_flops,
        "sources": {figure: card.source_of(figure) for figure, _ in card.sources},
    }


def _print_gpus(cards: Sequence[GPU]) -> None:
    from vram_guard.budget import DEFAULT_MARGIN, Budget
    from vram_guard.budget.margins import measured_margin

    rows: list[tuple[str, ...]] = [("GPU", "architecture", "cc", "GiB", "usable", "GB/s", "fp32", "fp16", "bf16")]
    for card in cards:
        major, minor = card.compute_capability
        memory, usable = card.memory_bytes / 2**30, Budget.of(card).usable / 2**30
        figures = [_tera(flops) for flops in (card.fp32_flops, card.fp16_flops, card.bf16_flops)]
        sizes = (f"{memory:.2f}", f"{usable:.2f}", f"{card.memory_bandwidth / 1e9:.0f}")
        rows.append((card.name, card.architecture, f"{major}.{minor}", *sizes, *figures))
    _print_columns(rows, left=2)
    print(
        f"\nusable: GiB less what the driver and the CUDA context take (partly estimates), less the default "
        f"margin of {100 * DEFAULT_MARGIN:g}% ({measured_margin().source}).\n"
        "fp32, fp16, bf16: dense TFLOP/s, the latter two on tensor cores. "
        "--json names each figure's source."
    )


def _tera(flops: int | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:.1f}"


# --- doctor -----------------------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    """Say what was found here: torch, the GPU and what is free on it, host memory, settings, frameworks."""
    facts = _diagnosis()
    if options.json:
        _print_json(facts)
    else:
        _print_columns([(name.replace("_", " "), _in_words(value)) for name, value in facts.items()], left=2)
    return EXIT_ENVIRONMENT if facts["gpu_unreadable"] else EXIT_DONE


def _diagnosis() -> dict[str, Any]:
    import platform

    import torch

    gpu, unreadable = _gpu_at_hand()
    return {
        "vram_guard": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": gpu,
        "gpu_unreadable": unreadable,
        "host_memory": _host_memory(),
        "allocator_settings": _allocator_settings(),
        **{f"integration {name}": state for name, state in sorted(_integrations().items())},
    }


def _gpu_at_hand() -> tuple[str, bool]:
    """What there is to plan with here, and whether a GPU is there that cannot be read. No GPU is a normal case."""
    from vram_guard.budget import Budget

    try:
        return Budget.resolve().explain(), False
    except NoDeviceError as error:
        return str(error), False
    except DeviceQueryError as error:
        return str(error), True


def _host_memory() -> str:
    from vram_guard.budget import host_memory
    from vram_guard.units import format_bytes

    try:
        host = host_memory()
    except DeviceQueryError as error:
        return str(error)
    return f"{format_bytes(host.available)} free of {format_bytes(host.total)} ({host.limited_by})"


def _allocator_settings() -> str:
    """What the environment makes of the caching allocator's settings."""
    from vram_guard.allocator import AllocatorSettings

    try:
        settings = AllocatorSettings.from_environment()
    except VramGuardError as error:
        return str(error)
    return "PyTorch's defaults" if settings == AllocatorSettings() else str(settings)


def _integrations() -> dict[str, str]:
    """Framework -> whether its adapter can be used, from the entry points of installed distributions."""
    from importlib.metadata import entry_points

    return {entry.name: _adapter_state(entry) for entry in entry_points(group="vram_guard.integrations")}


def _adapter_state(entry: EntryPoint) -> str:
    try:
        adapter = entry.load()
        for name in adapter.__all__:
            getattr(adapter, name)
    except ImportError as error:
        return str(error)
    return "ready"


# --- printing ---------------------------------------------------------------------------------------------------


def _in_words(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _print_json(answer: dict[str, Any]) -> None:
    print(json.dumps({"schema": JSON_SCHEMA, **answer}, indent=2))


def _print_columns(rows: Sequence[Sequence[str]], *, left: int) -> None:
    """Rows as aligned columns: the first ``left`` flush left, the others flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    sys.exit(main())
