"""What a script's own command line offers: the values of options that mean batch size, accumulation or precision."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram_guard_accelerate.dry_run.run import DryRun

#: Options by which scripts let their users choose the samples of one process's batch.
BATCH_SIZE_OPTIONS = ("per_device_train_batch_size", "train_batch_size", "batch_size")

#: Options by which they let them choose the batches of an optimizer step.
ACCUMULATION_OPTIONS = (
    *("gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches", "grad_accumulation_steps"),
    *("gradient_accumulation", "grad_accum_steps", "grad_accum", "accum_steps", "accum_iter"),
)

#: Switches by which scripts multiply their learning rate with their batch size (diffusers' training scripts).
SCALING_OPTIONS = ("scale_lr", "auto_scale_lr")


def watch(values: dict[str, Any]) -> None:
    """Remember what every parser of the script parsed, and which option strings stand for it.

    HfArgumentParser is an ``ArgumentParser``: it is seen too. What comes from a file of settings has no option.
    """
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        parsed = original(self, *args, **kwargs)
        strings = {action.dest: action.option_strings for action in self._actions}
        for name, value in vars(parsed[0]).items():
            if strings.get(name):
                values[name] = {"value": value, "option": max(strings[name], key=len)}
        return parsed

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def precision_option(run: DryRun) -> str | None:
    """The script's own option for mixed precision, where it takes Accelerate's words; None where there is none."""
    known = run.options.get("mixed_precision")
    if known is None or str(known["value"] or "") != run.precision_given or not run.precision_given:
        return None
    return str(known["option"])


def batch_size_option(run: DryRun) -> str:
    """The script's own option for the batch size, where its value is what the loader delivers; "" where none is."""
    assert run.sample is not None
    return _valued(run, BATCH_SIZE_OPTIONS, run.sample.batch_size)


def scales_rates(run: DryRun) -> bool:
    """Whether the script itself multiplies its learning rate with the batch size that its options name."""
    return any(bool(run.options.get(name, {}).get("value")) for name in SCALING_OPTIONS)


def accumulation_option(run: DryRun, batches_per_step: int) -> str:
    """The script's own option for accumulation, where its value is what the loop was seen to do; "" where none is."""
    return _valued(run, ACCUMULATION_OPTIONS, batches_per_step)


def _valued(run: DryRun, names: tuple[str, ...], value: int) -> str:
    for name in names:
        known = run.options.get(name)
        if known is not None and type(known["value"]) is int and known["value"] == value:
            return str(known["option"])
    return ""
