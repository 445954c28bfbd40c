"""DeepSpeed's ZeRO: its own engine, and the config that it is made with."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vram_guard.checks import one_of
from vram_guard.errors import InvalidInputError, MissingLibraryError, UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.parallel.spec import Parallel

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch import nn

    from vram_guard.techniques import Sharding

#: Releases whose engine was traced and looked at. The trace leans on many of its inner names.
TESTED = ("0.19.8",)

#: Stages of ZeRO by the kinds of :data:`vram_guard.parallel.spec.KINDS`.
STAGES = {"deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3}

#: Sections that change what the engine does with memory, and which its trace follows.
_FOLLOWED = (
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "bf16", "fp16", "optimizer"),
)

#: Sections that take no memory of a training step (logging, schedules, files), or that the step itself says.
_OF_NO_CONSEQUENCE = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("scheduler", "steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "seed"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "aio", "checkpoint", "dataloader_drop_last"),
    *("log_level", "monitor_config"),
)

#: Keys of the section on ZeRO under which the engine runs other code than that which is followed.
_OTHER_ENGINES = (
    *("zenflow", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
    *("zeropp_loco_param", "mics_hierarchical_params_gather"),
)

#: Sizes of groups within the ranks: more than this, and parameters are divided twice.
_WITHIN_RANKS = {"zero_hpz_partition_size": 1, "mics_shard_size": -1}

#: Where DeepSpeed's states and parameters may be kept: its ``OffloadDeviceEnum``.
_DEVICES = ("none", "cpu", "nvme")


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


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what a framework has still to fill in ("auto")."""
    return {
        name: filled(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if value != "auto"
    }


def layout_of(config: Mapping[str, Any], *, gpus: int, node: int | None = None) -> Parallel:
    """The layout of a training under DeepSpeed's engine.

    Args:
        config: DeepSpeed's.
        gpus: processes of the training.
        node: of one node.

    Raises:
        InvalidInputError: the config cannot be used.
        UnsupportedTechniqueError: it asks for something that is not followed.
    """
    stage = _section(config).get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in range(4):
        raise InvalidInputError(
            _("zero_optimization.stage of a DeepSpeed config must be 1, 2 or 3, not {value}", value=repr(stage))
        )
    if not stage:
        raise UnsupportedTechniqueError(
            _("DeepSpeed's stage 0 (no ZeRO) cannot be predicted: it divides nothing, as DistributedDataParallel does")
        )
    check_config(config, stage)
    kind: Any = next(kind for kind, number in STAGES.items() if number == stage)
    return Parallel(gpus=gpus, node=node, kind=kind)


def offloaded(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the settings of a config that keep something in host memory."""
    section = _section(config)
    return tuple(
        name for name in ("offload_optimizer", "offload_param") if (section.get(name) or {}).get("device") == "cpu"
    )


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("zero_optimization", {})
    if not isinstance(section, Mapping):
        raise InvalidInputError(
            _("zero_optimization of a DeepSpeed config must be a section, not {value}", value=repr(section))
        )
    return section


def check_config(config: Mapping[str, Any], stage: int) -> None:
    """Refuse a config that the engine cannot use, or whose training is not followed.

    Args:
        config: DeepSpeed's.
        stage: of ZeRO that is to be used.

    Raises:
        InvalidInputError: it cannot be used, something in it was left open ("auto"), or it names another stage.
        UnsupportedTechniqueError: names the setting that is not followed.
    """
    section = _section(config)
    if section.get("stage", stage) != stage:
        raise InvalidInputError(
            _(
                "the DeepSpeed config asks for stage {stage}, and kind for stage {other}: they must be the same",
                stage=section["stage"],
                other=stage,
            )
        )
    left = list(_left_open(config))
    if left:
        raise InvalidInputError(
            _(
                '"auto" in a DeepSpeed config is filled in by Transformers and Accelerate alone: set {settings}',
                settings=", ".join(left),
            )
        )
    for name in ("offload_optimizer", "offload_param"):
        _check_offload(name, section.get(name), stage)
    other = [name for name in config if name not in (*_FOLLOWED, *_OF_NO_CONSEQUENCE) and _switched_on(config[name])]
    other += [f"zero_optimization.{name}" for name in _OTHER_ENGINES if _switched_on(section.get(name))]
    other += [f"zero_optimization.{name}" for name, most in _WITHIN_RANKS.items() if section.get(name, most) > most]
    other += [f"bf16.{name}" for name in ("bf16_master_weights_and_grads",) if config.get("bf16", {}).get(name)]
    other += [f"fp16.{name}" for name in ("fp16_master_weights_and_grads",) if config.get("fp16", {}).get(name)]
    if config.get("managed_gradient_accumulation") is False:
        other.append("managed_gradient_accumulation")
    if other:
        raise UnsupportedTechniqueError(_("DeepSpeed's {settings} cannot be predicted", settings=", ".join(other)))


def _check_offload(name: str, section: Any, stage: int) -> None:
    device = (section or {}).get("device", "none")
    one_of(f"zero_optimization.{name}.device", device, _DEVICES)
    if device == "nvme":
        raise UnsupportedTechniqueError(
            _("DeepSpeed's {setting} to nvme cannot be predicted; to the cpu it can", setting=name)
        )
    if device == "cpu" and name == "offload_param" and stage != STAGES["deepspeed3"]:
        raise InvalidInputError(_("DeepSpeed's offload_param needs stage 3, not {stage}", stage=stage))
    if device == "cpu" and (section.get("super_offload") or section.get("ratio", 1.0) != 1.0):
        raise UnsupportedTechniqueError(
            _("DeepSpeed's {settings} cannot be predicted", settings=f"{name}.super_offload, {name}.ratio")
        )


def _switched_on(value: Any) -> bool:
    """True for a setting or section that does something."""
    return (
        bool(value.get("enabled", any(map(_switched_on, value.values())))) if isinstance(value, dict) else bool(value)
    )


def _left_open(section: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in section.items():
        if value == "auto" and name not in _OF_NO_CONSEQUENCE and not path.startswith("scheduler."):
            yield f"{path}{name}"
        elif isinstance(value, dict):
            yield from _left_open(value, f"{path}{name}.")


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
        own: the user's config, without what the other arguments say.

    Raises:
        InvalidInputError: the user's config cannot be used.
        UnsupportedTechniqueError: it asks for something that is not followed.
    """
    return {
        **_handed_over(parallel, own),
        **_batches(parallel, micro_batch, accumulate),
        "bf16": {**own.get("bf16", {}), "enabled": precision.startswith("bf16")},
        "fp16": {**own.get("fp16", {}), "enabled": precision.startswith("16")},
        "gradient_clipping": clip_grad_norm or 0.0,
    }


def as_traced(parallel: Parallel, own: Mapping[str, Any]) -> dict[str, Any]:
    """A config that a framework has completed, for one of the ranks of a layout.

    Args:
        parallel: the layout.
        own: the framework's config, which may take this process for the only one.

    Raises:
        InvalidInputError: the config cannot be used.
        UnsupportedTechniqueError: it asks for something that is not followed.
    """
    micro_batch, accumulate = (
        int(own.get(name) or 1) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    return {
        **_handed_over(parallel, own),
        **_batches(parallel, micro_batch, accumulate),
        "gradient_clipping": own.get("gradient_clipping", 0.0),
    }


def with_states_on_host(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config under which optimizer states and weights in float32 lie in host memory, with the optimizer as it is.

    DeepSpeed asks for its own optimizer there unless it is told that another one is meant
    (``zero_force_ds_cpu_optimizer``).
    """
    section = {**_section(config), "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    return {"zero_force_ds_cpu_optimizer": False, **config, "zero_optimization": section}


def changed(config: Mapping[str, Any], sharding: Sharding) -> dict[str, Any]:
    """A config under a change of how it divides a training.

    Args:
        config: the user's.
        sharding: the change. Under stage 3, what is saved as the model's weights is put together first.
    """
    made = with_states_on_host(config) if sharding.states_on_host else dict(config)
    if sharding.stage is not None:
        whole = {"stage3_gather_16bit_weights_on_model_save": True} if sharding.stage == STAGES["deepspeed3"] else {}
        made["zero_optimization"] = {**_section(made), **whole, "stage": sharding.stage}
    return made


def settings_of(sharding: Sharding) -> list[str]:
    """A change of how a training is divided, as settings of DeepSpeed's config."""
    stage = [] if sharding.stage is None else [f"zero_optimization.stage={sharding.stage}"]
    return [*stage, "zero_optimization.offload_optimizer.device=cpu"] if sharding.states_on_host else stage


def how_to_resume(sharding: Sharding) -> str:
    """What is to be known of checkpoints of a training that is divided otherwise than it was written."""
    own = ["zero_force_ds_cpu_optimizer=false"] if sharding.states_on_host else []
    return _(
        "DeepSpeed's checkpoints hold other files under this plan. A training that goes on from one is not changed: "
        "to resume it, set {settings} in the DeepSpeed config yourself",
        settings=_(", ").join([*settings_of(sharding), *own]),
    )


def _handed_over(parallel: Parallel, own: Mapping[str, Any]) -> dict[str, Any]:
    stage = STAGES[str(parallel.kind)]
    check_config(own, stage)
    if parallel.offload:
        own = with_states_on_host(own)
    return {
        "zero_allow_untested_optimizer": True,
        **{name: own[name] for name in _FOLLOWED if name in own},
        "zero_optimization": {**_section(own), "stage": stage},
    }


def _batches(parallel: Parallel, micro_batch: int, accumulate: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulate,
        "train_batch_size": micro_batch * accumulate * parallel.data_ranks,
    }


def placeholder(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a step whose config has DeepSpeed make another one in its place."""
    import torch

    return torch.optim.SGD(parameters, lr=0.0)


def make_engine(model: nn.Module, optimizer: Any, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine around a model, within the process group that is there.

    Raises:
        InvalidInputError: DeepSpeed refuses the config, or the optimizer with it.
    """
    library = deepspeed_library()
    given: dict[str, Any] = {"optimizer": optimizer}
    if "optimizer" in config:
        given = {"model_parameters": [parameter for parameter in model.parameters() if parameter.requires_grad]}
    try:
        return library.initialize(model=model, config=config, dist_init_required=False, **given)[0]
    except (ValueError, AssertionError, library.runtime.zero.utils.ZeRORuntimeException) as error:
        raise InvalidInputError(_("DeepSpeed refuses its config: {error}", error=error)) from error
