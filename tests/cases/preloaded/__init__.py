"""Python processes that begin with libraries imported: what tests of real launches would else mostly wait for."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from preloaded.server import READ_AT_START

HERE = Path(__file__).parent


@functools.cache
def _address(modules: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> str:
    """Where a server with these modules answers; started once in each process of tests, and ended with it."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    address = str(Path(folder.name) / "server")
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(HERE)!r}); import server; server.main()",
            address,
            *modules,
        ],
        env={**{name: value for name, value in os.environ.items() if name not in READ_AT_START}, **dict(variables)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )

    @atexit.register
    def _end() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", f"no server with {modules}"
    return address


def environment(
    variables: Mapping[str, str], *modules: str, others: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> dict[str, str]:
    """The variables, and two more with which every Python process below begins with the modules imported.

    Only on Linux: elsewhere they are returned as they are.

    Args:
        variables: of the process.
        modules: none: the processes start as everywhere.
        others: for processes that are started with ``-m NAME``, other modules.
    """
    if not modules or not Path("/proc/self/status").exists():
        return dict(variables)
    read_at_start = tuple((name, variables[name]) for name in READ_AT_START if name in variables)
    servers = {name: _address(tuple(of), read_at_start) for name, of in {"": modules, **others}.items()}
    path = os.pathsep.join([str(HERE), *filter(None, [variables.get("PYTHONPATH")])])
    return {**variables, "PYTHONPATH": path, "PRELOADED_AT": json.dumps(servers)}
