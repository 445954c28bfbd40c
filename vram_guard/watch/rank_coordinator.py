"""Processes of a data-parallel training agree on how many micro-batches each of them makes of its batch."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from vram_guard.watch.process_groups import wait_for_gloo


def hosts() -> RankCoordinator | None:
    """The processes of torch.distributed's default group; on every rank at one point. None where there is but one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()) or dist.get_world_size() == 1:
        return None
    return RankCoordinator()


class RankCoordinator:
    """Processes in torch.distributed's default group, whose hosts talk over a gloo group of their own.

    Made on every rank at the same point; every rank calls :meth:`parts` alike. The GPU is not waited for.

    The group ends with :meth:`close`, or else with this object, or before the interpreter goes: worker threads of a
    living group that free Python's objects while it goes may end a finished rank with SIGABRT (pytorch/pytorch issue
    190489).
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._groups = [dist.new_group(backend="gloo")]
        """The one over which the hosts talk, until it is closed."""
        self._end = weakref.finalize(self, _destroy, self._groups)  # at exit at the latest

    def parts(self, needed: int, samples: int) -> tuple[int, int]:
        """The most parts that any rank needs for its batch, and the fewest samples that any rank's batch has."""
        import torch.distributed as dist

        message = torch.tensor([needed, -samples], dtype=torch.int64)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._groups[0])
        most, fewest = message.tolist()
        return most, -fewest

    def close(self) -> None:
        """Let go of what the ranks talk over. A second call does nothing."""
        self._end()


def _destroy(groups: list[Any]) -> None:
    """End process groups, unless the script has ended all of them before; their threads end with the last reference."""
    import torch.distributed as dist

    while groups:
        with contextlib.suppress(ValueError):  # no longer known
            dist.destroy_process_group(groups.pop())
    wait_for_gloo()
