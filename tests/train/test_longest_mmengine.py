"""The longest batch of a real Runner: planned for where the first batches are small."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import torch
from guard_arguments import in_advanced
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, FUNCTIONS, METRICS, MODELS
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import nn
from torch.nn import functional as F


@DATASETS.register_module(force=True)
class Mixed(cases.Blobs):
    """Small pictures and one large one (None: all are large), which the annotations tell."""

    def __init__(self, large, **kwargs):
        self.large = large
        super().__init__(**kwargs)

    def load_data_list(self):
        sizes = [64 if self.large in (None, number) else 16 for number in range(self.samples)]
        return [
            {"number": number, "label": number % 2, "height": size, "width": size} for number, size in enumerate(sizes)
        ]

    def prepare_data(self, index):
        self.size = self.get_data_info(index)["height"]
        return super().prepare_data(index)


@MODELS.register_module(force=True)
class Brightness(cases.SmallClassifier):
    """Its loss is a plain mean over the samples."""

    def forward(self, inputs, data_samples, mode="tensor"):
        if mode != "loss":
            return super().forward(inputs, data_samples, mode)
        return {"loss": self.scores(inputs).square().mean()}


@FUNCTIONS.register_module(force=True)
def padded_collate(samples):
    """Pictures padded to the largest of the batch, by the loader."""
    size = max(one["inputs"].shape[-1] for one in samples)
    pictures = [F.pad(one["inputs"], (0, size - one["inputs"].shape[-1]) * 2) for one in samples]
    return {"inputs": torch.stack(pictures), "data_samples": [one["data_samples"] for one in samples]}


def test_a_runner_is_planned_for_its_longest_batch(tmp_path):
    root = cases.write_configs(tmp_path / "configs", cases.MMPRETRAIN)

    def peak(name, samples, large, **settings):
        cfg = cases.load(
            root,
            "small.py",
            tmp_path / name,
            runner_type="vram_guard_mmengine.GuardRunner",
            vram_guard=in_advanced({"budget": "1GiB", "mode": "report", **settings}),
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


@pytest.mark.parametrize(
    ("large", "collate", "model"),
    [
        (13, "pseudo_collate", "SmallClassifier"),
        (13, "pseudo_collate", "Brightness"),
        (None, "pseudo_collate", "SmallClassifier"),
        (None, "pseudo_collate", "Brightness"),
        (13, "padded_collate", "SmallClassifier"),
    ],
)
def test_micro_batches_that_are_padded_otherwise_than_the_whole_batch_are_refused(
    large, collate, model, tmp_path, capsys
):
    """One picture is larger: `train_step` pads its batch to it, and the classifier looks at the padding, too."""
    root = cases.write_configs(tmp_path / "configs", cases.MMPRETRAIN)

    def trained(name, **settings):
        guard = (
            {"runner_type": "vram_guard_mmengine.GuardRunner", "vram_guard": in_advanced(settings)} if settings else {}
        )
        data = {"dataset": {"type": "Mixed", "samples": 20, "large": large}, "collate_fn": {"type": collate}}
        changes = {"model": {"type": model}, "train_cfg": {"max_epochs": 1}, "train_dataloader": data, **guard}
        return cases.train(cases.load(root, "small.py", tmp_path / name, **changes))

    plain, whole = trained("plain"), trained("whole", budget="1GiB", mode="report", allow=["accumulate"])
    budget = cases.guard(whole).plan.before.peak_reserved - 1
    capsys.readouterr()
    split = trained("split", budget=budget, margin=0, allow=["accumulate"])
    said = " ".join("".join(capsys.readouterr()).split())
    if large is None or collate == "padded_collate":
        assert cases.guard(split).plan.splits > 1
        assert "proven by the loss graph" in said
    else:
        assert cases.guard(split).plan.splits == 1
        assert "the step treats samples of the batch in different ways" in said
    assert cases.diary(split).losses == pytest.approx(cases.diary(plain).losses, abs=1e-5)
    assert torch.allclose(cases.weights(split), cases.weights(plain), rtol=0, atol=1e-6)


# --- boxes and masks ----------------------------------------------------------------------------------------------


@DATASETS.register_module(force=True)
class Instances(BaseDataset):
    """As mmdet's: pictures of any size; each instance has a box and a mask of the picture's size."""

    def __init__(self, sizes, **kwargs):
        self.sizes = sizes
        super().__init__(**kwargs)

    def load_data_list(self):
        return [
            {"height": height, "width": width, "instances": [{"bbox": [0, 0, 4, 4], "bbox_label": 0}] * boxes}
            for height, width, boxes in self.sizes
        ]

    def prepare_data(self, index):
        info = self.get_data_info(index)
        extent, count = (info["height"], info["width"]), len(info["instances"])
        sample = BaseDataElement(metainfo={"img_shape": extent})
        boxes = torch.tensor([one["bbox"] for one in info["instances"]], dtype=torch.float32).view(-1, 4)
        masks = torch.ones(count, *extent, dtype=torch.uint8)
        sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.zeros(count, dtype=torch.long), masks=masks)
        sample.gt_sem_seg = PixelData(data=torch.zeros(1, *extent, dtype=torch.long))
        return {"inputs": torch.zeros(3, *extent, dtype=torch.uint8), "data_samples": sample}


class _OnPictures(BaseModel):
    def __init__(self, data_preprocessor=None):
        super().__init__({"type": "ImgDataPreprocessor", "pad_size_divisor": 32})
        self.backbone = nn.Conv2d(3, 8, 3, 4, 1)


@MODELS.register_module(force=True)
class Detector(_OnPictures):
    """Every anchor against every box, and masks as large as the padded picture, as mmdet's preprocessor pads them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.regression, self.mask = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 1, 1)

    def forward(self, inputs, data_samples, mode="tensor"):
        features = self.backbone(inputs)
        anchors = self.regression(features).flatten(2).transpose(1, 2)
        masks = F.interpolate(self.mask(features), inputs.shape[-2:])
        losses = []
        for one, mask, sample in zip(anchors, masks, data_samples, strict=True):
            found = sample.gt_instances
            corners = torch.minimum(one[:, None], found.bboxes[None]).square().sum(-1).mean()
            wide, high = inputs.shape[-1] - found.masks.shape[-1], inputs.shape[-2] - found.masks.shape[-2]
            targets = F.pad(found.masks, (0, wide, 0, high)).float()
            losses.append(corners + F.binary_cross_entropy_with_logits(mask.expand_as(targets), targets))
        return {"loss": torch.stack(losses).mean()}


def phases_of(tmp_path, model, train, *, validation=None, **settings):
    """Allocated peaks of the phases of a Runner in mode "report"."""
    loader = {"batch_size": 2, "num_workers": 0, "sampler": {"type": "DefaultSampler", "shuffle": True}}
    loader["collate_fn"] = {"type": "pseudo_collate"}
    whole = {**loader, "batch_size": 1, "sampler": {"type": "DefaultSampler", "shuffle": False}}
    evaluated = {"val_dataloader": None, "val_cfg": None, "val_evaluator": None}
    if validation is not None:
        evaluated = {"val_cfg": {}, "val_evaluator": {"type": "Scores"}}
        evaluated["val_dataloader"] = {**whole, "dataset": {"type": "Instances", "sizes": validation}}
    runner = cases.Runner(
        model={"type": model},
        work_dir=str(tmp_path),
        train_dataloader={**loader, "dataset": {"type": "Instances", "sizes": train}},
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
        default_hooks={"checkpoint": None, "logger": None, "timer": None},
        custom_hooks=[VramGuardHook(**in_advanced({"budget": "4GiB", "mode": "report", **settings}))],
        default_scope="mmengine",
        experiment_name=f"run{random.random()}",
        **evaluated,
    )
    runner.train()
    plan = next(hook for hook in runner.hooks if isinstance(hook, VramGuardHook)).plan
    highest = {}
    for phase in plan.before.phases:
        highest[phase.name] = max(highest.get(phase.name, 0), phase.peak_allocated)
    return highest


LARGE, CROWDED = (224, 256, 2), (64, 96, 120)


def test_a_detector_is_planned_for_boxes_and_masks_as_well_as_pixels(tmp_path):
    """A picture of many instances beside a large one: their masks are padded to its size."""
    drawn = random.Random(0)
    some = [(32 * drawn.randint(1, 4), 32 * drawn.randint(1, 4), drawn.randint(1, 5)) for _ in range(40)]
    mixed = [*some[:20], LARGE, *some[20:], CROWDED]
    worst = phases_of(tmp_path, "Detector", [LARGE, CROWDED])["training"]
    assert phases_of(tmp_path, "Detector", mixed)["training"] == worst
    for other in ([LARGE, LARGE], [CROWDED, CROWDED], mixed[:2]):
        assert phases_of(tmp_path, "Detector", other)["training"] < 0.8 * worst


@MODELS.register_module(force=True)
class Segmentor(_OnPictures):
    """As mmseg's: trained on crops of one size, and validated on whole pictures, whose scores have their size."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.decode_head = nn.Conv2d(8, 19, 1)

    def forward(self, inputs, data_samples, mode="tensor"):
        scores = self.decode_head(self.backbone(inputs))
        if mode == "predict":
            whole = F.interpolate(scores, inputs.shape[-2:], mode="bilinear")
            return [{"right": one.argmax(0)} for one in whole.softmax(1)]
        labels = torch.stack([sample.gt_sem_seg.data[0] for sample in data_samples])
        return {"loss": F.cross_entropy(F.interpolate(scores, labels.shape[-2:], mode="bilinear"), labels)}


@METRICS.register_module(force=True)
class Scores(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [float(one["right"].sum()) for one in data_samples]

    def compute_metrics(self, results):
        return {"right": sum(results)}


def test_a_segmentor_that_is_validated_on_whole_pictures_is_planned_for_the_largest(tmp_path):
    crops = [(64, 64, 1)] * 8
    small, large = [(64, 96, 1)] * 5, (512, 1024, 1)
    found = phases_of(tmp_path, "Segmentor", crops, validation=[*small, large, (64, 96, 1)])
    assert found["validation"] > 2 * found["training"]
    assert found["validation"] == phases_of(tmp_path, "Segmentor", crops, validation=[large])["validation"]
    first = phases_of(tmp_path, "Segmentor", crops, validation=[*small, large], longest="first")
    assert first["validation"] < 0.1 * found["validation"]
