"""Effects of ``module.to("cuda")`` beyond parameters and buffers, on the simulated CUDA device of a trace."""

from __future__ import annotations

import torch
from torch import nn


def move_to_simulated_device(module: nn.Module) -> None:
    """The module's ``device`` (Lightning, MMEngine's data preprocessors), and metrics' states. For use in a trace."""
    for part in module.modules():
        if _is_metric(part):
            part.to("cuda")
        elif "_device" in vars(part):
            vars(part)["_device"] = torch.device("cuda", 0)


def _is_metric(part: nn.Module) -> bool:
    return any(base.__module__.startswith("torchmetrics") and base.__name__ == "Metric" for base in type(part).__mro__)
