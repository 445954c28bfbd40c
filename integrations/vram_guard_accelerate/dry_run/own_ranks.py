"""Scripts that make a process group by themselves: their dry run stands for the first of the launch's processes."""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vram_guard.language import _
from vram_guard.patching import replace_attributes
from vram_guard.simulate.parallel.groups import pretended_group
from vram_guard.simulate.parallel.own_replicas import replacements
from vram_guard.user_code import is_users_file
from vram_guard_accelerate._alive import alive
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate.dry_run.first_batch import LaunchShape
from vram_guard_accelerate.dry_run.results import stopped

_ACCELERATED = re.compile(r"^\s*(?:from|import)\s+(?:accelerate|transformers|diffusers|peft|trl)\b", re.MULTILINE)

_entered = ExitStack()
"""The pretended group, until the process ends."""


def announce(shape: LaunchShape, script: str) -> None:
    """The variables by which torchrun names the first of several processes, for a script that reads them itself.

    Accelerate, and what is built on it, would join the other processes by them.

    Args:
        shape: of the launch.
        script: its file, or the name of its module.
    """
    if shape.ranks > 1 and not _imports_accelerate(Path(script)):
        os.environ.update(_variables(shape.ranks, shape.local_ranks))


def _imports_accelerate(script: Path) -> bool:
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the name of a module
        return True
    return _ACCELERATED.search(text) is not None


@cache
def take_back() -> None:
    """Without them: Accelerate, which the script turns out to use, would join the other processes.

    Once: those that are there later are of DeepSpeed's engine, which is made as one of several processes.
    """
    for name in _variables(1, 1):
        os.environ.pop(name, None)


def watch(ranks: int) -> None:
    """Groups that the script makes are pretended ones, and DistributedDataParallel passes calls on, from now on."""
    wrap(dist, "init_process_group", partial(_group_made, ranks), optional=True)
    replace_attributes(DistributedDataParallel, replacements(stopped))


def refuse_divided_models() -> None:
    """End the dry run of a script without Accelerate if it has divided a model (``fully_shard``)."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None and alive(kind):
        _refuse_division()


def _refuse_division(*_args: Any, **_kwargs: Any) -> NoReturn:
    stopped(
        _(
            "it divides its model over the processes without Accelerate, which is not followed; Accelerate does it "
            "with --use_fsdp"
        )
    )


def _variables(ranks: int, local_ranks: int) -> dict[str, str]:
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return {**own, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local_ranks), **where}


def _group_made(ranks: int, original: Any, *args: Any, **kwargs: Any) -> None:
    if not is_users_file(sys._getframe(2).f_code.co_filename):  # noqa: SLF001 - who asks is the question
        original(*args, **kwargs)
        return
    asked = int(kwargs.get("world_size", -1))
    if asked not in (-1, ranks):
        stopped(
            _("it makes a process group of {count} processes, and is launched in {ranks}", count=asked, ranks=ranks)
        )
    _entered.enter_context(pretended_group(ranks))
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrap(FullyShardedDataParallel, "__init__", _refuse_division)
