"""The target of a launch, as accelerate makes it of its options: launcher, processes, environment."""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vram_guard.budget import Budget
from vram_guard.errors import DeviceQueryError, InvalidInputError, NoDeviceError, UnsupportedStepError
from vram_guard.language import _, marked
from vram_guard.parallel.deepspeed import deepspeed_library
from vram_guard_accelerate._settings import LaunchSettings
from vram_guard_accelerate.cli.arguments import LaunchArguments, launch_parser

#: Launchers that hand the model to another library, by accelerate's own option, and what to do about it.
NOT_FOLLOWED = {
    "use_megatron_lm": marked("Megatron-LM builds the model itself"),
    "tpu": marked("TPU memory is not modelled"),
    "use_parallelism_config": marked("parallel dimensions beyond data parallelism shard the model"),
}


@dataclass(frozen=True)
class Target:
    """The processes, devices and environment that a script will run with."""

    ranks: int
    """Processes that train together."""
    machines: int
    """On which they are spread evenly."""
    environment: Mapping[str, str]
    """Variables that accelerate adds to the environment of a script."""
    gpu_ids: str
    """accelerate's ``--gpu_ids``: "all", or numbers."""
    simple: bool
    """True if accelerate starts one process by itself, without torchrun."""


def target_of(launch: LaunchArguments) -> Target:
    """Read accelerate's options, its config file and the environment as accelerate does.

    Raises:
        InvalidInputError: accelerate refuses its options or its config file.
        UnsupportedStepError: a way of training that cannot be followed.
    """
    words = [*launch.accelerate, launch.script, *launch.arguments]
    with _quiet():
        arguments, _command, environment = simple_launch(words)
    for name, why in NOT_FOLLOWED.items():
        if getattr(arguments, name, False) and not arguments.cpu:
            raise UnsupportedStepError(
                _(
                    "--{option}: {reason}, which the guard cannot follow; start it with accelerate launch",
                    option=name,
                    reason=_(why),
                )
            )
    if str(arguments.mixed_precision).lower() == "fp8":
        raise UnsupportedStepError(_("--mixed_precision fp8 cannot be predicted; start it with accelerate launch"))
    sharded = arguments.use_fsdp and not arguments.cpu
    if sharded:
        environment |= _fsdp_variables(arguments)
    by_engine = arguments.use_deepspeed and not arguments.cpu
    if by_engine:
        environment |= _deepspeed_variables(words)
    several = (arguments.multi_gpu and not arguments.cpu) or sharded or by_engine
    distributed = several or arguments.mpirun_hostfile is not None
    return Target(
        ranks=max(1, arguments.num_processes or 1) if distributed else 1,
        machines=max(1, arguments.num_machines or 1) if distributed else 1,
        environment={name: value for name, value in environment.items() if os.environ.get(name) != value},
        gpu_ids=str(arguments.gpu_ids or "all"),
        simple=not several,
    )


def _fsdp_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """The settings of FSDP as accelerate hands them to a script."""
    from accelerate.utils.launch import prepare_multi_gpu_env

    named = copy.copy(arguments)  # it writes ports and addresses into them
    named.main_process_port = 0
    with _refusals():
        environment = prepare_multi_gpu_env(named)
    return {name: value for name, value in environment.items() if "FSDP" in name}


def _deepspeed_variables(words: Sequence[str]) -> dict[str, str]:
    """The settings of DeepSpeed as accelerate hands them to a script.

    Raises:
        MissingLibraryError: DeepSpeed is not installed.
        UnsupportedTechniqueError: its release was not tested.
    """
    deepspeed_library()
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    arguments, defaults, precision_from_file = _validated(words)
    fields = list(defaults.deepspeed_config) if defaults else []
    # As launch_command of accelerate 1.x does before it starts anything.
    arguments.deepspeed_fields_from_accelerate_config = ",".join(
        [*fields, *(["mixed_precision"] if precision_from_file else [])]
    )
    arguments.main_process_port = 0
    with _refusals():
        _command, environment = prepare_deepspeed_cmd_env(arguments)
    theirs = ("DEEPSPEED", "GRADIENT", "CONFIG_DS_FIELDS", "MIXED_PRECISION")
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("ACCELERATE_") and any(part in name for part in theirs)
    }


def simple_launch(words: Sequence[str]) -> tuple[argparse.Namespace, list[str], dict[str, str]]:
    """The words after ``accelerate launch`` as it reads them; command and environment of a launch of one process.

    Raises:
        InvalidInputError: accelerate refuses its options or its config file.
    """
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    arguments, *_defaults = _validated(words)
    with _refusals(arguments.config_file):
        return arguments, *prepare_simple_launcher_cmd_env(arguments)


def _validated(words: Sequence[str]) -> tuple[Any, Any, Any]:
    """The words, accelerate's defaults, and whether a config file gives the precision, as accelerate reads them."""
    from accelerate.commands.launch import _validate_launch_command

    arguments = launch_parser().parse_args(words)
    with _refusals(arguments.config_file):
        validated: tuple[Any, Any, Any] = _validate_launch_command(arguments)
        return validated


@contextlib.contextmanager
def _refusals(file: str | None = None) -> Iterator[None]:
    """What accelerate refuses inside the block is an InvalidInputError, which names its config file."""
    try:
        yield
    except Exception as error:  # accelerate raises ValueError, YAML's errors, OSError, AssertionError, ...
        message = _("accelerate refuses its options: {error}", error=error)
        if file:
            message = _("accelerate refuses its options (config file {file}): {error}", file=file, error=error)
        raise InvalidInputError(message) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """It prints the defaults that it takes; it prints them again when it launches."""
    logger = logging.getLogger("accelerate.commands.launch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def budget_for(settings: LaunchSettings, ranks: int, gpu_ids: str) -> Budget:
    """The budget of every process: that of the GPU with the least memory.

    Raises:
        NoDeviceError: there is no GPU here and neither a budget nor a GPU's name was given.
        DeviceQueryError: the GPU here cannot be read.
    """
    if gpu_ids != "all":
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_ids  # as accelerate does for the script
    if settings.names_no_memory:
        found = [Budget.resolve(margin=settings.margin, device=device) for device in range(ranks)] if ranks > 1 else []
        return min(found, key=lambda one: one.usable, default=None) or Budget.resolve(margin=settings.margin)
    budget = settings.resolved_budget()
    if budget.compute_capability is None:
        with contextlib.suppress(NoDeviceError, DeviceQueryError):
            here = Budget.resolve()
            # A script that asks for its GPU's memory finds the card, of which the budget is a part.
            memory = budget.device_memory or here.device_memory
            return replace(budget, compute_capability=here.compute_capability, device_memory=memory)
    return budget
