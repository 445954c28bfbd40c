"""The end of process groups: the interpreter goes only when gloo's threads have let go of its tensors."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from vram_guard.watch.process_groups import THREAD_NAME, wait_for_gloo

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the states of threads are read on Linux")

PR_SET_NAME = 15  # linux/prctl.h


@pytest.fixture
def busy() -> Iterator[threading.Event]:
    """A thread that computes under the name of gloo's threads, until the event is set."""
    named, end = threading.Event(), threading.Event()

    def compute() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, THREAD_NAME.encode(), 0, 0, 0)
        named.set()
        while not end.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    named.wait()
    yield end
    end.set()
    thread.join()


def test_a_thread_that_works_is_waited_for(busy: threading.Event) -> None:
    assert not wait_for_gloo(patience=0.3)
    threading.Timer(0.2, busy.set).start()
    assert wait_for_gloo(patience=100)


GROUP = """
import os, torch, torch.distributed as dist
from vram_guard.watch.process_groups import end_process_groups, wait_for_gloo

end_process_groups()  # there is none
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept = dist.group.WORLD  # as device meshes do: its threads stay
dist.all_reduce(torch.ones(3))
assert wait_for_gloo(100)
end_process_groups()
assert not dist.is_initialized()
"""


def test_the_threads_of_a_group_are_found_and_the_group_ends() -> None:
    done = subprocess.run([sys.executable, "-c", GROUP], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
