"""Connections that a script makes before ``prepare``: what it sends there cannot be taken back, and is said."""

from __future__ import annotations

import sys
from typing import Any, Final

from vram_guard.language import _
from vram_guard_accelerate._script_files import asked_by_script

#: Clients through which a script sends what it has to say. Libraries that fetch models and data by them are not in it.
_CLIENTS: Final = frozenset(
    {
        *("requests", "urllib3", "httpx", "httpcore", "aiohttp", "anyio", "websocket", "websockets", "paramiko"),
        *("redis", "pymysql", "psycopg", "psycopg2", "pymongo", "boto3", "botocore", "slack_sdk"),
    }
)


class EarlyConnections:
    """The connections of one script."""

    def __init__(self) -> None:
        self._resolved: tuple[str, object] = ("", None)
        self._places: dict[str, None] = {}

    def watch(self) -> None:
        """From now on. Permanently: the process has no other purpose."""
        sys.addaudithook(self._audit)

    def _audit(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo":
            self._resolved = (str(values[0]), values[1])
        if event != "socket.connect" or not asked_by_script(_CLIENTS):
            return
        address = values[1]
        if isinstance(address, tuple):
            host, port = address[:2]
            name, wanted = self._resolved
            self._places[f"{name if wanted == port else host}:{port}"] = None
        else:
            self._places[str(address)] = None

    @property
    def note(self) -> str:
        """Where the script itself has connected to; "" where it has not."""
        if not self._places:
            return ""
        return _(
            "what the script has sent to {places} before it trains was really sent, and will be again when it is "
            "started",
            places=", ".join(self._places),
        )
