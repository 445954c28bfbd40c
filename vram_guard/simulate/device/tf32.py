"""Whether float32 products may run on tensor cores, under torch's old switches and its new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch

#: Backends and their operators that have a switch of their own since torch 2.9 (torch/backends/__init__.py). What is
#: "none" follows ``all`` of its backend, which follows the generic one.
SWITCHES = (
    ("generic", "all"),
    *((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("all", "matmul", "conv", "rnn")),
)


def allows_tf32(operator: Literal["matmul", "conv", "rnn"]) -> bool:
    """Whether cuBLAS's products, or cuDNN's convolutions or recurrent layers, take TF32 for float32.

    Torch sets its new switches along with the old ones, and refuses to read an old one where both were used.
    """
    current = getattr(torch._C, "_get_fp32_precision_getter", None)
    if current is not None:
        return bool(current("cuda", operator) == "tf32")
    if operator == "matmul":
        return torch.get_float32_matmul_precision() != "highest"
    return bool(torch.backends.cudnn.allow_tf32)


def precision_switches() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Getter and setter of each switch, the old ones first: they set new ones. A getter may raise RuntimeError."""
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield partial(getattr, torch.backends.cudnn, "allow_tf32"), partial(setattr, torch.backends.cudnn, "allow_tf32")
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        for names in SWITCHES:
            get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
            yield partial(get, *names), partial(put, *names)
