"""DeepSpeed's ZeRO: its own engine, and the config that it is made with."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

from vram_guard.errors import MissingLibraryError, UnsupportedTechniqueError
from vram_guard.language import _

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from torch import nn

    from vram_guard.parallel.spec import Parallel

#: Releases whose engine was traced and looked at. The trace leans on many of its inner names.
TESTED = ("0.19.8",)

#: Stages of ZeRO by the kinds of :data:`vram_guard.parallel.spec.KINDS`.
STAGES = {"deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3}


def deepspeed_library() -> ModuleType:
    """DeepSpeed, imported.

    Raises:
        MissingLibraryError: it is not installed.
        UnsupportedTechniqueError: the installed release was not tested.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingLibraryError(
            _("DeepSpeed's stages are traced by its own engine: pip install deepspeed=={release}", release=TESTED[-1])
        )
    release = importlib.metadata.version("deepspeed")
    if release not in TESTED:
        raise UnsupportedTechniqueError(
            _(
                "deepspeed {release} was not tested: its engine is traced in release {tested} alone",
                release=release,
                tested=", ".join(TESTED),
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses TorchScript and other things that torch has deprecated
        return importlib.import_module("deepspeed")


def config_of(
    parallel: Parallel,
    *,
    micro_batch: int,
    accumulate: int,
    precision: str,
    clip_grad_norm: float | None,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """DeepSpeed's config for a layout; what neither names has DeepSpeed's own defaults.

    Args:
        parallel: the layout, of a kind of :data:`STAGES`.
        micro_batch: samples of a micro-batch on one rank.
        accumulate: micro-batches per optimizer step.
        precision: the step's, in Lightning's words: DeepSpeed keeps weights in half precision and their masters in
            float32, with "mixed" as with "true".
        clip_grad_norm: the maximum norm, or None.
        own: the user's config, of which the section on ZeRO counts: buckets, overlap, thresholds.

    Raises:
        UnsupportedTechniqueError: the section keeps something in host memory or on disk.
    """
    section = {key: value for key, value in own.get("zero_optimization", {}).items() if value != "auto"}
    moved = sorted(key for key in section if key.startswith("offload_") and section[key])
    if moved:
        raise UnsupportedTechniqueError(
            _("DeepSpeed's {settings} cannot be predicted yet; fsdp2 with offload can", settings=", ".join(moved))
        )
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulate,
        "train_batch_size": micro_batch * accumulate * parallel.data_ranks,
        "bf16": {"enabled": precision.startswith("bf16")},
        "fp16": {"enabled": precision.startswith("16")},
        "gradient_clipping": clip_grad_norm or 0.0,
        "zero_optimization": {**section, "stage": STAGES[str(parallel.kind)]},
        "zero_allow_untested_optimizer": True,
    }


def make_engine(model: nn.Module, optimizer: Any, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine around a model, within the process group that is there."""
    return deepspeed_library().initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
