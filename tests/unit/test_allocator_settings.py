from __future__ import annotations

import json
import subprocess
import sys

import pytest
from each import each

from vram_guard.allocator import AllocatorSettings
from vram_guard.errors import InvalidInputError

MIB = 2**20

ACCEPTED = [
    ("", AllocatorSettings()),
    ("backend:native", AllocatorSettings()),
    ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
    ("expandable_segments:False", AllocatorSettings()),
    (" expandable_segments : True ,", AllocatorSettings(expandable_segments=True)),
    ("max_split_size_mb:20", AllocatorSettings(max_split_size=20 * MIB)),
    ("max_split_size_mb:20,max_split_size_mb:64", AllocatorSettings(max_split_size=64 * MIB)),
    ("max_non_split_rounding_mb:30", AllocatorSettings(max_non_split_rounding_size=30 * MIB)),
    ("garbage_collection_threshold:0.8", AllocatorSettings(garbage_collection_threshold=0.8)),
    ("garbage_collection_threshold:8e-1", AllocatorSettings(garbage_collection_threshold=0.8)),
    ("large_segment_size_mb:11", AllocatorSettings(large_segment_size=11 * MIB)),
    # The large segment's size is the lower bound of the other, wherever the two stand.
    (
        "max_split_size_mb:15,large_segment_size_mb:12",
        AllocatorSettings(max_split_size=15 * MIB, large_segment_size=12 * MIB),
    ),
    ("per_process_memory_fraction:0.5", AllocatorSettings(per_process_memory_fraction=0.5)),
    ("roundup_power2_divisions:4", AllocatorSettings(roundup_power2_divisions=(4,) * 16)),
    ("roundup_power2_divisions:1", AllocatorSettings(roundup_power2_divisions=(1,) * 16)),
    ("roundup_power2_divisions:[]", AllocatorSettings(roundup_power2_divisions=(0,) * 16)),
    # 256 MiB is interval 8 (2**8): its number also holds below. ">" begins behind the last bound, 1024 MiB.
    (
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        AllocatorSettings(roundup_power2_divisions=(1,) * 9 + (2, 4) + (8,) * 5),
    ),
    ("roundup_power2_divisions:[>:4]", AllocatorSettings(roundup_power2_divisions=(0,) + (4,) * 15)),
    # An interval that nothing names keeps 0.
    (
        "roundup_power2_divisions:[1:2,4:8,]",
        AllocatorSettings(roundup_power2_divisions=(2, 0, 8) + (0,) * 13),
    ),
    ("roundup_power2_divisions:[65536:2]", AllocatorSettings(roundup_power2_divisions=(2,) * 16)),
    ("pinned_use_background_threads:True", AllocatorSettings()),
]

REFUSED = [
    ("max_split_size_mb:19", "at least large_segment_size"),
    ("max_split_size_mb:12,large_segment_size_mb:15", "at least large_segment_size"),
    ("max_non_split_rounding_mb:1", "at least large_segment_size"),
    ("large_segment_size_mb:10", "more than 10 MiB"),
    ("garbage_collection_threshold:0", "between 0 and 1"),
    ("garbage_collection_threshold:1.0", "between 0 and 1"),
    ("garbage_collection_threshold:nan", "takes a number"),
    ("expandable_segments:true", "True or False"),
    ("expandable_segments", "needs a value"),
    ("expandable_segments:", "needs a value"),
    ("expandable_segments:[True]", "not a list"),
    ("roundup_power2_divisions:3", "power of two"),
    ("roundup_power2_divisions:0", "power of two"),
    ("roundup_power2_divisions:[3:4]", "power of two"),
    ("roundup_power2_divisions:[0:4]", "power of two"),
    ("roundup_power2_divisions:[256:3]", "power of two"),
    ("roundup_power2_divisions:[256:1", "closing"),
    ("roundup_power2_divisions:[256]", "takes a list like"),
    ("max_split_size_mb:abc", "whole number"),
]

#: What torch lets pass although it can only be a slip, and what only a CUDA build of torch knows.
STRICTER = [
    (",max_split_size_mb:40", "option's name"),
    ("max_split_size_mb:40,,", "option's name"),
    ("max_split_size_mb:40abc", "whole number"),
    ("max_split_size_mb:-1", "whole number"),
    ("max_split_size_mb,40", "needs a value"),
    ("max_split_size_mb:40;expandable_segments:True", 'expected ","'),
    ("expandable_segments:True expandable_segments:True", 'expected ","'),
    ("max_split_size:40", "did you mean 'max_split_size_mb'"),
    ("expandable_segment:True", "did you mean 'expandable_segments'"),
    ("no_such_option:1", "no option"),
    ("per_process_memory_fraction:1.5", "between 0 and 1"),
    ("backend:cudaMallocAsync", "not modelled"),
    ("backend:other", "native or cudaMallocAsync"),
]


@each(("text", "settings"), ACCEPTED)
def test_reads_what_torch_reads(text, settings):
    assert AllocatorSettings.from_conf(text) == settings


@each(("text", "reason"), REFUSED + STRICTER)
def test_refuses_with_the_reason(text, reason):
    with pytest.raises(InvalidInputError, match=reason):
        AllocatorSettings.from_conf(text)


#: Asks torch's own parser, in a process of its own because it changes that process's settings. The C++ function
#: tells how many divisions a size got.
ASK_TORCH = """
import ctypes, json, pathlib, sys, torch
divisions = getattr(
    ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libc10.so")),
    "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm",
)
divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
answers = []
for text, sizes in json.load(sys.stdin):
    try:
        # One set of large segments stays until it is set again.
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        torch._C._accelerator_setAllocatorSettings(text)
        answers.append([divisions(size) for size in sizes])
    except (ValueError, RuntimeError):
        answers.append(None)
json.dump(answers, sys.stdout)
"""


def test_torch_accepts_refuses_and_divides_alike():
    texts = [text for text, _ in ACCEPTED + REFUSED]
    sizes = [2**power + more for power in range(9, 40) for more in (0, 1)]
    asked = subprocess.run(
        [sys.executable, "-c", ASK_TORCH],
        input=json.dumps([[text, sizes] for text in texts]),
        capture_output=True,
        text=True,
        check=False,
    )
    if "AttributeError" in asked.stderr or "undefined symbol" in asked.stderr:
        pytest.skip("this torch has no accelerator-wide allocator settings (2.9 and later have)")
    assert asked.returncode == 0, asked.stderr
    for text, answer in zip(texts, json.loads(asked.stdout), strict=True):
        if answer is None:
            with pytest.raises(InvalidInputError):
                AllocatorSettings.from_conf(text)
        else:
            settings = AllocatorSettings.from_conf(text)
            assert [settings.divisions_at(size) for size in sizes] == answer, text


def test_the_first_variable_that_is_set_counts():
    both = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert AllocatorSettings.from_environment(both) == AllocatorSettings(expandable_segments=True)
    del both["PYTORCH_CUDA_ALLOC_CONF"]
    assert AllocatorSettings.from_environment(both) == AllocatorSettings(max_split_size=64 * MIB)
    assert AllocatorSettings.from_environment({}) == AllocatorSettings()


def test_no_caching_at_all_is_not_modelled():
    with pytest.raises(InvalidInputError):
        AllocatorSettings.from_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert AllocatorSettings.from_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}) == AllocatorSettings()


@each(
    "wrong",
    [
        {"max_split_size": MIB},
        {"large_segment_size": 10 * MIB},
        {"garbage_collection_threshold": 1.0},
        {"garbage_collection_threshold": float("nan")},
        {"per_process_memory_fraction": -0.1},
        {"roundup_power2_divisions": (4,)},
        {"roundup_power2_divisions": (3,) * 16},
        {"roundup_power2_divisions": (-4,) * 16},
    ],
)
def test_settings_made_by_hand_are_checked_too(wrong):
    with pytest.raises(InvalidInputError):
        AllocatorSettings(**wrong)
