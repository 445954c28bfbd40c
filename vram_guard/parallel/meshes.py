"""The device mesh of a layout."""

from __future__ import annotations

from typing import Any

from vram_guard.parallel.spec import Parallel


def make_mesh(parallel: Parallel, device: str = "cuda") -> Any:
    """A mesh with the dimensions of ``parallel``, outermost first, over all ranks of the default process group.

    Args:
        parallel: the layout; the process group has ``parallel.gpus`` ranks.
        device: the type of device that each rank has one of.
    """
    from torch.distributed.device_mesh import init_device_mesh

    dimensions = parallel.dimensions
    return init_device_mesh(device, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def mesh_of(mesh: Any, *names: str) -> Any:
    """The part of a mesh with these dimensions; the mesh itself where it has no others."""
    return mesh if tuple(mesh.mesh_dim_names) == names else mesh[names if len(names) > 1 else names[0]]
