"""The longest batch of a real Runner: planned for where the first batches are small."""

from __future__ import annotations

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
from mmengine.registry import DATASETS


@DATASETS.register_module(force=True)
class Mixed(cases.Blobs):
    """Small pictures and one large one, which the annotations tell."""

    def __init__(self, large, **kwargs):
        self.large = large
        super().__init__(**kwargs)

    def load_data_list(self):
        sizes = [64 if number == self.large else 16 for number in range(self.samples)]
        return [
            {"number": number, "label": number % 2, "height": size, "width": size} for number, size in enumerate(sizes)
        ]

    def prepare_data(self, index):
        self.size = self.get_data_info(index)["height"]
        return super().prepare_data(index)


def test_a_runner_is_planned_for_its_longest_batch(tmp_path):
    root = cases.write_configs(tmp_path / "configs", cases.MMPRETRAIN)

    def peak(name, samples, large, **settings):
        cfg = cases.load(
            root,
            "small.py",
            tmp_path / name,
            runner_type="vram_guard_mmengine.GuardRunner",
            vram_guard={"budget": "1GiB", "mode": "report", **settings},
            train_cfg={"max_epochs": 1},
            train_dataloader={
                "dataset": {"type": "Mixed", "samples": samples, "large": large},
                "collate_fn": {"type": "pseudo_collate"},
            },
        )
        runner = cases.train(cfg)
        return next(hook for hook in runner.hooks if isinstance(hook, VramGuardHook)).plan.before.peak_reserved

    one_batch = peak("one", 8, 3)
    assert peak("some", 20, 15) == one_batch
    assert peak("first", 20, 15, longest="first") < one_batch
