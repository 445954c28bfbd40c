"""Pretended ranks: a process group whose collectives do nothing, in a world of its own.

``torch.distributed`` keeps its groups in one object of the process, which it calls an extension point. A trace puts
another in its place, so that a training that runs in this process finds its own groups untouched afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from vram_guard.parallel.meshes import make_mesh
from vram_guard.parallel.spec import Parallel
from vram_guard.patching import replaced

#: Names of groups are counted from here: those of a training in this process have small numbers.
_FIRST_NAME = 10**6


@contextlib.contextmanager
def pretended_ranks(parallel: Parallel, rank: int = 0) -> Iterator[Any]:
    """Inside the block this process is one rank of ``parallel.gpus``.

    Args:
        parallel: the layout.
        rank: of this process.

    Yields:
        The mesh of the layout.
    """
    import torch.distributed as dist

    with pretended_group(parallel.gpus, rank):
        for name, size in parallel.dimensions.items():
            if size == parallel.gpus:  # its group is then the default one, which nobody has named
                world: Any = dist.group.WORLD
                world._set_group_desc(f"{_MESH}{name}")
        yield make_mesh(parallel)


@contextlib.contextmanager
def pretended_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Inside the block this process is one of so many, whatever group it was in before; collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with _own_world():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside the block this process is the only rank of a real process group, whatever group it was in before."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    with _own_world():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        yield


#: Groups of a mesh are described as this and the dimension's name (``DeviceMesh._init_process_groups``).
_MESH = "mesh_"


def dimension_of(group: Any) -> str:
    """The mesh dimension that a group belongs to; "" where that has no name."""
    described = str(group.group_desc)
    named = described.startswith(_MESH) and not described.startswith(
        f"{_MESH}dim_"
    )  # "mesh_dim_1": the second of a mesh
    return described.removeprefix(_MESH) if named else ""


def is_pretended(group: Any) -> bool:
    """True if a group is a trace's own, whose collectives do nothing; also after the trace has left its ranks."""
    name = str(group.group_name)
    return name.isdigit() and int(name) >= _FIRST_NAME


@contextlib.contextmanager
def _own_world() -> Iterator[None]:
    import torch.distributed.distributed_c10d as c10d
    from torch._C._distributed_c10d import _unregister_process_group

    distributed_tensor, generators = _distributed_tensors()
    world = _world_class()()
    _forget_meshes()
    with (
        default_group_kept(),
        replaced(c10d, {"_world": world}),
        # DTensor's generators are those of the first mesh that it has seen; draws of a trace have no values.
        replaced(generators, {"_rng_tracker": None}),
        replaced(distributed_tensor._op_dispatcher, {"_random_ops": frozenset()}),
    ):
        try:
            yield
        finally:
            for group in world.pg_map:
                _unregister_process_group(group.group_name)


#: Globals of ``torch.distributed.distributed_c10d`` beside its groups, which a group that is made sets.
_OF_DEFAULT_GROUP = ("_backend", "_default_pg_init_method")


@contextlib.contextmanager
def default_group_kept() -> Iterator[None]:
    """After the block, what a default group that is made in it changes beside the groups is as before."""
    import torch.distributed.distributed_c10d as c10d

    default = {name: getattr(c10d, name) for name in _OF_DEFAULT_GROUP if hasattr(c10d, name)}
    rules = sys.modules.get("torch._dynamo.trace_rules")
    # It would empty Dynamo's tables, and polyfills would be missing in those that come after.
    kept = {} if rules is None else {"clear_lru_cache": lambda: None}
    hook = {"excepthook": sys.excepthook}  # of a group that is made: it puts its rank before every line
    with replaced(c10d, default), replaced(rules, kept), replaced(sys, hook):
        try:
            yield
        finally:
            _forget_meshes()


def _world_class() -> Any:
    import torch.distributed.distributed_c10d as c10d

    class World(c10d._World):
        """Groups of its own; torch's class keeps them in globals of its module."""

        def __init__(self) -> None:
            super().__init__()
            self._own: dict[str, dict[Any, Any]] = {name: {} for name in _TABLES}
            self.group_count = max(_FIRST_NAME, c10d._world.group_count)  # inside another one of its kind too

        group_count = 0

    for name in _TABLES:
        setattr(World, name, property(partial(_table, name)))
    return World


def _table(name: str, world: Any) -> dict[Any, Any]:
    table: dict[Any, Any] = world._own[name]
    return table


_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


def _forget_meshes() -> None:
    """Empty DTensor's caches: they hold meshes, to which those of other ranks or of a real training may be equal."""
    import torch

    distributed_tensor, _generators = _distributed_tensors()
    propagate = distributed_tensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    getattr(propagate, "cache", propagate).cache_clear()  # torch 2.4 has one cache for all threads
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()  # since torch 2.10
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    getattr(redistribute, "clear_redistribute_planner_cache", lambda: None)()  # since torch 2.10
    infos = getattr(redistribute, "_gen_transform_infos", None)
    getattr(infos, "cache_clear", lambda: None)()


def _distributed_tensors() -> tuple[Any, Any]:
    """The class DTensor, and the module of its generators."""
    try:
        from torch.distributed.tensor import DTensor, _random
    except ImportError:  # torch 2.4
        before: Any = importlib.import_module("torch.distributed._tensor")
        return before.DTensor, before.random
    return DTensor, _random
