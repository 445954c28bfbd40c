"""Settings of DeepSpeed as ``accelerate launch`` hands them to a script."""

from __future__ import annotations

from collections.abc import Sequence

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.parallel.deepspeed import deepspeed_library
from vram_guard_accelerate.cli.arguments import launch_parser


def variables(words: Sequence[str]) -> dict[str, str]:
    """The variables that a launch with these words sets for DeepSpeed.

    Args:
        words: after ``accelerate launch``.

    Raises:
        InvalidInputError: accelerate refuses them.
        MissingLibraryError: DeepSpeed is not installed.
        UnsupportedTechniqueError: its release was not tested.
    """
    deepspeed_library()
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    try:
        arguments, defaults, precision_from_file = _validate_launch_command(launch_parser().parse_args(words))
        fields = list(defaults.deepspeed_config) if defaults else []
        # As launch_command of accelerate 1.x does before it starts anything.
        arguments.deepspeed_fields_from_accelerate_config = ",".join(
            [*fields, *(["mixed_precision"] if precision_from_file else [])]
        )
        arguments.main_process_port = 0
        _command, environment = prepare_deepspeed_cmd_env(arguments)
    except Exception as error:  # accelerate raises ValueError, YAML's errors, OSError, AssertionError, ...
        raise InvalidInputError(_("accelerate refuses its options: {error}", error=error)) from error
    theirs = ("DEEPSPEED", "GRADIENT", "CONFIG_DS_FIELDS", "MIXED_PRECISION")
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("ACCELERATE_") and any(part in name for part in theirs)
    }
