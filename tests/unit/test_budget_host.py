from __future__ import annotations

import pytest

from vram_guard.budget import HostMemory, host_memory
from vram_guard.budget.host import PHYSICAL
from vram_guard.errors import DeviceQueryError

MIB = 2**20


@pytest.fixture
def root(tmp_path):
    """A machine of 16 GiB, 12 GiB of them available, in no control group."""
    write(
        tmp_path,
        "proc/meminfo",
        f"MemTotal: {16 * 2**20} kB\nMemFree: 100 kB\nMemAvailable: {12 * 2**20} kB\n",
    )
    return tmp_path


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_limits_it_is_the_machines_memory(root):
    assert host_memory(root) == HostMemory(16 * 2**30, 12 * 2**30, PHYSICAL)


def test_a_version_2_limit_binds_and_page_cache_can_be_taken_back(root):
    write(root, "proc/self/cgroup", "0::/job/step\n")
    write(root, "sys/fs/cgroup/job/step/memory.max", f"{1000 * MIB}\n")
    write(root, "sys/fs/cgroup/job/step/memory.current", f"{600 * MIB}\n")
    write(root, "sys/fs/cgroup/job/step/memory.stat", f"anon {400 * MIB}\ninactive_file {150 * MIB}\n")
    memory = host_memory(root)
    assert (memory.total, memory.available) == (1000 * MIB, 550 * MIB)
    assert memory.limited_by.endswith("job/step/memory.max")


def test_a_parents_limit_binds_too(root):
    write(root, "proc/self/cgroup", "0::/job/step\n")
    write(root, "sys/fs/cgroup/job/step/memory.max", "max\n")
    write(root, "sys/fs/cgroup/job/memory.max", f"{800 * MIB}\n")
    write(root, "sys/fs/cgroup/job/memory.current", f"{100 * MIB}\n")
    memory = host_memory(root)
    assert (memory.total, memory.available) == (800 * MIB, 700 * MIB)


def test_a_version_1_limit_binds(root):
    write(root, "proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    write(root, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", f"{500 * MIB}\n")
    write(root, "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", f"{200 * MIB}\n")
    write(root, "sys/fs/cgroup/memory/docker/abc/memory.stat", f"total_inactive_file {50 * MIB}\n")
    memory = host_memory(root)
    assert (memory.total, memory.available) == (500 * MIB, 350 * MIB)


def test_in_a_container_the_hosts_path_is_missing_and_the_mounts_root_counts(root):
    write(root, "proc/self/cgroup", "4:memory:/kubepods/pod1/abc\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{500 * MIB}\n")
    assert host_memory(root).total == 500 * MIB


def test_no_limit_at_all_is_a_huge_number_in_version_1(root):
    write(root, "proc/self/cgroup", "4:memory:/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{200 * MIB}\n")
    assert host_memory(root) == HostMemory(16 * 2**30, 12 * 2**30, PHYSICAL)


def test_more_used_than_allowed_leaves_nothing(root):
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{100 * MIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{120 * MIB}\n")
    assert host_memory(root).available == 0


@pytest.mark.parametrize("line", ["0::/../../etc", "garbage", "", "0:", "4:memory:"])
def test_odd_group_lines_do_no_harm(root, line):
    write(root, "proc/self/cgroup", line + "\n")
    assert host_memory(root).total == 16 * 2**30


def test_without_proc_the_c_library_is_asked(tmp_path, monkeypatch):
    answers = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr("os.sysconf", answers.__getitem__, raising=False)
    assert host_memory(tmp_path) == HostMemory(4096_000, 4096_000, PHYSICAL)


def test_a_system_that_tells_nothing_gives_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.delattr("os.sysconf", raising=False)
    with pytest.raises(DeviceQueryError):
        host_memory(tmp_path)


def test_this_machine_answers():
    memory = host_memory()
    assert 0 <= memory.available <= memory.total
    assert memory.total > 64 * MIB
