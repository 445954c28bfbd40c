"""The releases that a prediction holds for: those that were imported when the step was traced."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

#: Module -> name of its distribution, of the packages whose release changes what a training step takes: they define
#: operators, models, losses, optimizers, or the loop around them. Of packages that others import only to see what is
#: there, the module that every model comes from.
PACKAGES: Final[Mapping[str, str]] = {
    "torch": "torch",
    "torchvision": "torchvision",
    "torchao": "torchao",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "mmengine": "mmengine",
    "mmcv": "mmcv",
    "mmdet": "mmdet",
    "mmdet3d": "mmdet3d",
    "mmseg": "mmsegmentation",
    "mmpretrain": "mmpretrain",
    "accelerate": "accelerate",
    "transformers.modeling_utils": "transformers",
    "diffusers.models.modeling_utils": "diffusers",
    "peft": "peft",
    "trl": "trl",
    "timm": "timm",
    "open_clip": "open-clip-torch",
    "sentence_transformers": "sentence-transformers",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
    "monai": "monai",
    "ultralytics": "ultralytics",
    "torch_geometric": "torch-geometric",
    "bitsandbytes": "bitsandbytes",
    "flash_attn": "flash-attn",
    "xformers": "xformers",
    "liger_kernel": "liger-kernel",
}


@dataclass(frozen=True)
class Releases:
    """The releases of Python and of the packages that a step was traced with.

    Example:
        >>> str(Releases("3.11.7", (("torch", "2.4.1"), ("transformers", "4.57.6")), cuda="12.1"))
        'Python 3.11.7, torch 2.4.1 (CUDA 12.1), transformers 4.57.6'
    """

    python: str
    packages: tuple[tuple[str, str], ...] = ()
    """(distribution, release), torch first."""
    cuda: str | None = None
    """The release of CUDA that torch was built for; None: for none."""

    @classmethod
    def here(cls) -> Releases:
        """Those of this process: of the packages in :data:`PACKAGES` that are imported."""
        imported = [(name, module) for module, name in PACKAGES.items() if sys.modules.get(module) is not None]
        found = [(name, _release(name, module.partition(".")[0])) for name, module in imported]
        cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
        return cls(".".join(map(str, sys.version_info[:3])), tuple(one for one in found if one[1]), cuda)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {"python": self.python, "cuda": self.cuda, **dict(self.packages)}

    def __str__(self) -> str:
        cuda = f" (CUDA {self.cuda})" if self.cuda else ""
        names = [f"{name} {release}{cuda if name == 'torch' else ''}" for name, release in self.packages]
        return ", ".join([f"Python {self.python}", *names])


@cache
def _release(name: str, module: str) -> str:
    """The installed release as its metadata has it, which is what lock files speak of; "" where it is not known."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(sys.modules[module], "__version__", ""))
