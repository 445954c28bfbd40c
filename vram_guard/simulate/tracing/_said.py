"""What a trace cannot see of a model or of an optimizer, and says."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from vram_guard.language import Message

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.simulate.memory.recorder import Recorder

#: Functions of fast kernels, as models import them or replace them by plain torch -> the package that has them.
_FAST = {
    "causal_conv1d_fn": "causal_conv1d",
    **dict.fromkeys(("selective_scan_fn", "mamba_inner_fn", "mamba_chunk_scan_combined"), "mamba_ssm"),
    **dict.fromkeys(("chunk_gated_delta_rule", "chunk_kda"), "fla"),
}

#: Parts of the names under which optimizers keep how many steps lie between two rounds of the same work: GaLore's
#: ``update_proj_gap``, SOAP's ``precondition_frequency``, Shampoo's ``preconditioning_compute_steps``.
_BETWEEN = ("_gap", "freq", "interval", "_every", "_period", "compute_steps")


def note_absent_kernels(model: nn.Module, recorder: Recorder) -> None:
    """Say which fast kernels the model would use, were they installed here: their plain replacement is followed."""
    for home in sorted({type(module).__module__ for module in model.modules()}):
        names = vars(sys.modules.get(home, object)) if home.partition(".")[0] != "torch" else {}
        packages = sorted({_FAST[name] for name in names if name in _FAST})
        absent = [package for package in packages if importlib.util.find_spec(package) is None]
        if absent:
            said = Message(
                "{home} runs in plain PyTorch here, because {packages} cannot be imported on this machine: with these "
                "kernels the training takes other, and usually much less, memory",
                home=home,
                packages=", ".join(absent),
            )
            recorder.note(said, tier="partly symbolic")


def note_work_between(optimizer: torch.optim.Optimizer, recorder: Recorder, traced: int) -> None:
    """Say what an optimizer does only every so many steps: later rounds of it lie behind the steps that are traced."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            number = isinstance(value, int) and not isinstance(value, bool)
            if number and value > traced and any(part in str(name).lower() for part in _BETWEEN):
                said = Message(
                    "{optimizer} does some of its work every {number} steps ({name}): what that takes beyond the first "
                    "{traced} steps is not counted",
                    optimizer=type(optimizer).__name__,
                    number=value,
                    name=name,
                    traced=traced,
                )
                recorder.note(said, tier="partly symbolic")
                return
