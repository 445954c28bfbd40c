"""Links between GPUs, the time of collectives, and what NCCL takes outside the allocator."""

from __future__ import annotations

import pytest
from each import each

from vram_guard import Parallel
from vram_guard.budget import find_gpu
from vram_guard.errors import InvalidInputError
from vram_guard.parallel.collectives import Group, bus_bandwidth, collective_seconds, group_of
from vram_guard.parallel.links import topology
from vram_guard.parallel.outside import outside_allocator

WIRES = topology("nvlink4,ib400", gpus=64, node=8)
GROUPS = (Group(2), Group(8), Group(16, 2), Group(64, 8), Group(8, 8))


# --- links ----------------------------------------------------------------------------------------------------------


def test_nvlink_and_pcie_follow_the_card() -> None:
    def inside(card: str, text: str | None) -> str:
        return topology(text, gpus=8, node=8, gpu=find_gpu(card)).inside.name

    assert inside("A100 SXM4 80GB", "nvlink") == "nvlink3"
    assert inside("H100 SXM", None) == "nvlink4"
    assert inside("B200", None) == "nvlink5"
    assert inside("H100 PCIe", None) == "pcie5"
    assert inside("RTX 4090", None) == "pcie4"


def test_ethernet_is_one_port_of_a_node_and_infiniband_one_of_each_gpu() -> None:
    def per_gpu(text: str) -> float:
        return topology(text, gpus=64, node=8).per_gpu_between

    assert per_gpu("ib100") == pytest.approx(12e9)  # NET_BW of NCCL's topo.h
    assert per_gpu("ethernet100") == pytest.approx(12e9 / 8)
    assert per_gpu("4xib100") == pytest.approx(12e9 / 2)


def test_what_nobody_says_is_assumed_and_said() -> None:
    several = topology(None, gpus=16, node=8, gpu=find_gpu("H100 SXM"))

    assert (several.inside.name, several.between.name) == ("nvlink4", "ib400")
    assert len(several.assumptions) == 2
    assert not topology("nvlink,ib400", gpus=16, node=8, gpu=find_gpu("H100 SXM")).assumptions
    assert len(topology(None, gpus=8, node=8).assumptions) == 1  # there is one node


@each(
    ("text", "said"),
    [
        ("token-ring", "unknown link 'token-ring'; known are nvlink"),
        ("ib400,ib200", "two networks"),
        ("nvlink,pcie", "within a node"),
        ("nvlink9", "unknown link"),
        ("0xib100", "unknown link"),
        ("ib123", "unknown link"),
        (",", "names nothing"),
        ("", "names nothing"),
    ],
)
def test_a_link_that_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        topology(text, gpus=8, node=8)


def test_nvlink_of_a_card_without_one_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="RTX 4090"):
        topology("nvlink", gpus=8, node=8, gpu=find_gpu("RTX 4090"))


# --- time of collectives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("size", [10**6, 10**8, 10**10])
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(group: Group, size: int) -> None:
    parts = [collective_seconds(name, size, group, WIRES) for name in ("reduce_scatter", "all_gather")]
    whole = collective_seconds("all_reduce", size, group, WIRES)

    # The tree may be faster than the ring, and never slower; what it takes to begin counts once, not twice.
    assert whole <= sum(parts)
    if size == 10**10 and group.ranks > 2:
        assert whole == pytest.approx(sum(parts), rel=1e-3)


@pytest.mark.parametrize("group", GROUPS)
def test_large_messages_reach_the_bus_bandwidth_as_nccl_tests_count_it(group: Group) -> None:
    size, share = 10**11, (group.ranks - 1) / group.ranks

    gathered = size * share / collective_seconds("all_gather", size, group, WIRES)
    reduced = 2 * size * share / collective_seconds("all_reduce", size, group, WIRES)

    assert gathered == pytest.approx(bus_bandwidth(group, WIRES), rel=1e-2)
    assert reduced == pytest.approx(bus_bandwidth(group, WIRES), rel=0.1)


def test_groups_lie_where_the_mesh_puts_them() -> None:
    both = Parallel(gpus=64, kind="fsdp2", tensor=8)
    hybrid = Parallel(gpus=64, kind="hsdp")

    assert group_of(both, "tensor") == Group(8, 1)
    assert group_of(both, "shard") == Group(8, 8)
    assert group_of(Parallel(gpus=64, kind="fsdp2", tensor=2), "shard") == Group(32, 8)
    assert group_of(hybrid, "shard") == Group(8, 1)
    assert group_of(hybrid, "replicate") == Group(8, 8)
    assert group_of(Parallel(gpus=64, kind="fsdp2"), "shard") == Group(64, 8)
    assert group_of(both, "") == Group(64, 8)
    assert group_of(Parallel(gpus=64, kind="fsdp2"), "shard", 4) == Group(4, 1)


# --- outside the allocator ------------------------------------------------------------------------------------------


def test_nccl_is_a_range_by_what_was_measured() -> None:
    two, four = (outside_allocator(Parallel(gpus=count, kind="ddp"), WIRES) for count in (2, 4))

    assert (two.high, four.high) == (544 * 10**6, 688 * 10**6)  # github.com/NVIDIA/nccl/issues/964
    over_pcie = outside_allocator(Parallel(gpus=4, kind="ddp"), topology("pcie4", gpus=4, node=4))
    assert over_pcie.low < four.low <= four.high <= four.most
    assert outside_allocator(Parallel(gpus=64, kind="fsdp2", tensor=8), WIRES).high == 3 * 688 * 10**6
