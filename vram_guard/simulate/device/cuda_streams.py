"""Streams and events of ``torch.cuda`` while a trace runs: the trace notes what runs on which, and who waits for whom.

A stream may outlive the trace that made it (a model keeps it, and is traced again) and may be a real one: each trace
numbers the streams that it meets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.simulate.memory.streams import Reached, StreamLog

if TYPE_CHECKING:
    from typing_extensions import Self

#: Streams of one priority that a process has; the next one is the first again (c10/cuda/CUDAStream.cpp,
#: ``kStreamsPerPool``), and the number of priorities (``max_compile_time_stream_priorities``).
_POOL, _PRIORITIES = 32, 4

#: The log of the trace that runs; of several, the innermost is last.
_logs: list[Callable[[], StreamLog]] = []


@contextlib.contextmanager
def streams_noted(log: Callable[[], StreamLog]) -> Iterator[None]:
    """Streams and events tell this log what they do while the block runs."""
    _logs.append(log)
    try:
        yield
    finally:
        _logs.pop()


def current_log() -> StreamLog:
    """The log of the trace that runs; one that nobody reads where none does."""
    return _logs[-1]() if _logs else StreamLog(lambda: 0)


class Stream:
    """Stands for ``torch.cuda.Stream``; equal to those that the pool gives for the same place."""

    device = torch.device("cuda", 0)
    device_index = 0
    device_type = 1

    def __init__(self, _device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: Any) -> None:
        self.priority = priority
        if stream_id is None:
            pool = min(max(-priority, 0), _PRIORITIES - 1)
            log = current_log()
            self.stream_id = 1 + pool * _POOL + log.take(pool, _POOL)
            self._made_by: object = log.identity
        else:
            self.stream_id, self._made_by = stream_id, None
        self._before: list[Any] = []

    @property
    def cuda_stream(self) -> int:
        """The handle; 0 for the default stream."""
        return self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (other.stream_id, other._made_by) == (self.stream_id, self._made_by)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def __enter__(self) -> Self:
        self._before.append(_select(self))
        return self

    def __exit__(self, *args: object) -> None:
        current_log().select(self._before.pop())

    def wait_event(self, event: Any) -> None:
        """What follows on this stream waits for the event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """What follows on this stream waits for all that the other one has been given."""
        log = current_log()
        log.wait(number_of(self), log.reached(number_of(stream)))

    def record_event(self, event: Any = None) -> Any:
        """An event behind all that the stream has been given."""
        made = Event() if event is None else event
        made.record(self)
        return made

    def synchronize(self) -> None:
        """The CPU waits for all that the stream has been given."""
        log = current_log()
        log.cpu_waits(log.reached(number_of(self)))

    def query(self) -> bool:
        """All is over."""
        return True

    def is_capturing(self) -> bool:
        """No graph is captured."""
        return False


_DEFAULT = Stream(stream_id=0)


class Event:
    """Stands for ``torch.cuda.Event``: remembers what is over once it has happened."""

    device = torch.device("cuda", 0)
    cuda_event = event_id = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._over: Reached = {}

    def record(self, stream: Any = None) -> Event:
        """The event happens once the stream has done all that it has been given."""
        log = current_log()
        self._over = log.reached(log.current if stream is None else number_of(stream))
        return self

    def wait(self, stream: Any = None) -> None:
        """What follows on the stream waits for the event."""
        log = current_log()
        log.wait(log.current if stream is None else number_of(stream), self._over)

    def synchronize(self) -> None:
        """The CPU waits for the event."""
        current_log().cpu_waits(self._over)

    def query(self) -> bool:
        """The event has happened."""
        return True

    def elapsed_time(self, _other: Any) -> float:
        """A trace takes no time."""
        return 0.0


class _StreamContext:
    """Stands for ``torch.cuda.stream(stream)``; a stream of None changes nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        log = current_log()
        self._before = log.selected if self.stream is None else _select(self.stream)

    def __exit__(self, *args: object) -> None:
        current_log().select(self._before)


def _key(stream: Any) -> Any:
    """What a log is given: None for the default stream, one of ours for a real one."""
    if not stream.cuda_stream:
        return None
    return stream if isinstance(stream, Stream) else Stream(stream_id=stream.stream_id)


def number_of(stream: Any) -> int:
    """The number that the running trace has given to a stream."""
    return current_log().number(_key(stream))


def _select(stream: Any) -> Any:
    return current_log().select(_key(stream))


def current_stream(*_args: Any, **_kwargs: Any) -> Any:
    """Stands for ``torch.cuda.current_stream`` and ``torch.accelerator.current_stream``."""
    selected = current_log().selected
    return _DEFAULT if selected is None else selected


def _set_stream(stream: Any) -> None:
    if stream is not None:
        _select(stream)


def stream_answers() -> dict[str, Any]:
    """What ``torch.cuda`` has of streams, by name."""
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": _StreamContext,
        "StreamContext": _StreamContext,
        "current_stream": current_stream,
        "default_stream": lambda *_args, **_kwargs: _DEFAULT,
        "set_stream": _set_stream,
        "synchronize": lambda *_args, **_kwargs: current_log().cpu_waits(None),
    }
