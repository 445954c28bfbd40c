"""Isolated workers: each question is answered in a process of its own, with a time limit.

A worker is a fork of a server that has imported torch and transformers, so that none waits for the imports. A worker
that uses a GPU starts from nothing: libraries ask CUDA for devices when they are imported, and a fork of such a process
cannot use them. Some of these are started ahead, and wait for their job with everything imported.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.harness.environment import QUIET

#: Imported once, by the server that all workers are forked from.
PRELOADED = [
    "torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
    "benchmarks.harness.networks",
    "vram_guard.plan._of_source",
    "vram_guard.simulate.tracing.run",
]
CONF = "PYTORCH_CUDA_ALLOC_CONF"

#: Workers for a GPU that wait, imports done, for a job.
AHEAD = 4

#: Characters of a traceback that are kept, from its end.
LONGEST_MESSAGE = 6000


class Answer(NamedTuple):
    """The result of a worker, or the way in which it failed."""

    result: Any
    error: str
    """Its traceback, or its exit status where it left none."""
    seconds: float
    """Of the whole process."""
    timed_out: bool = False

    def checked(self) -> Any:
        """The result.

        Raises:
            RuntimeError: there is none.
        """
        if self.error:
            raise RuntimeError(self.error)
        return self.result


def ask(job: Callable[..., Any], *arguments: Any, limit: float | None, conf: str = "", fresh: bool = False) -> Answer:
    """Run a job in a fresh process.

    Args:
        job: a function of a module; its result is something that JSON can hold.
        arguments: the job's.
        limit: seconds; a worker that takes longer is ended. None: it may take as long as it wants.
        conf: PYTORCH_CUDA_ALLOC_CONF; such a worker starts a new interpreter. Main thread only.
        fresh: the worker is no fork: it can use a GPU.
    """
    began = clock()
    os.environ.update(QUIET)
    with _STARTING:
        worker, connection = (
            _waiting_worker() if fresh and not conf else _started("spawn" if conf else "forkserver", conf)
        )
    connection.send((job, arguments))
    answer = _heard(connection, limit)
    if answer is None:
        worker.terminate()
        worker.join(10)
        worker.kill()
    worker.join(60)
    seconds = clock() - began
    if answer is None:
        return Answer(None, f"gave no answer within {limit:g} s and was ended", seconds, timed_out=True)
    if not answer:
        return Answer(None, f"the process died without a word, exit code {worker.exitcode}", seconds)
    result, error = json.loads(answer)
    return Answer(result, error or "", seconds)


#: Threads that ask at the same time start their workers one after another.
_STARTING = threading.Lock()
_WAITING: deque[tuple[Any, Any]] = deque()


def _waiting_worker() -> tuple[Any, Any]:
    """One that has been started ahead; others are started in its place."""
    while len(_WAITING) <= AHEAD:
        _WAITING.append(_started("spawn", ""))
    return _WAITING.popleft()


def _started(method: str, conf: str) -> tuple[Any, Any]:
    """A worker and the connection to it."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context: Any = multiprocessing.get_context(method)
    ours, its = context.Pipe()
    worker = context.Process(target=_serve, args=(its, method == "spawn"), daemon=True)
    with _allocator_conf(conf):
        worker.start()
    its.close()
    return worker, ours


def _serve(connection: Any, imports: bool) -> None:
    """The worker's main function: answers (result, None) or (None, traceback) as JSON text."""
    try:
        for name in PRELOADED if imports else ():
            importlib.import_module(name)
        try:
            job, arguments = connection.recv()
        except EOFError:
            return  # nobody has a job any more
        answer: tuple[Any, str | None] = (job(*arguments), None)
    except BaseException:  # noqa: BLE001 - also SystemExit of user code: the parent must be told
        answer = (None, traceback.format_exc()[-LONGEST_MESSAGE:])
    connection.send_bytes(json.dumps(answer).encode())
    connection.close()


def _heard(receiver: Connection, limit: float | None) -> bytes | None:
    """The bytes that the worker sent; b"" where it died first, None where it took too long."""
    try:
        return receiver.recv_bytes() if receiver.poll(limit) else None
    except EOFError:
        return b""
    finally:
        receiver.close()


@contextmanager
def _allocator_conf(conf: str) -> Iterator[None]:
    """A worker's environment is its parent's at the moment of its start."""
    if not conf:
        yield
        return
    before = os.environ.get(CONF)
    os.environ[CONF] = conf
    try:
        yield
    finally:
        if before is None:
            del os.environ[CONF]
        else:
            os.environ[CONF] = before


def clock() -> float:
    """Seconds; tests replace it."""
    return time.monotonic()
