"""The installed release of torch: whose kernels are followed, and whose techniques are there."""

from __future__ import annotations

import functools

#: ``torch.distributed.fsdp.fully_shard`` is public since this release.
FULLY_SHARD_SINCE = (2, 6)


@functools.cache
def torch_release() -> tuple[int, int]:
    """(major, minor)."""
    import torch  # here: what asks for the release is imported by commands that need no torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
