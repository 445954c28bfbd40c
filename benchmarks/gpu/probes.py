"""Workspaces and choices of single operators: facts behind the rules of the simulation, each measured by itself.

"extra" is what an operator held at its peak beyond the results that it returned, in bytes: its workspace.
"kept" is what stayed allocated afterwards beyond those results: a library's own workspace, taken at its first use.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

DEVICE = "cuda"

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

#: (inputs, outputs, kernel, stride, side of the image): the convolutions of ResNet-50, VGG and the U-Net that differ.
_CONVOLUTIONS = (
    (3, 64, 7, 2, 224),
    (64, 64, 1, 1, 56),
    (64, 64, 3, 1, 56),
    (128, 128, 3, 2, 56),
    (256, 1024, 1, 1, 14),
    (512, 512, 3, 1, 7),
    (64, 64, 3, 1, 96),
    (32, 32, 3, 1, 128),
    (32, 3, 1, 1, 128),
)


def all_probes() -> list[dict[str, Any]]:
    """Every probe's answer; one that fails answers with its traceback."""
    found = []
    for name, facts, probe in (*_libraries(), *_convolutions(), *_recurrent(), *_attention()):
        found.append({"probe": name, **facts, **_answered(probe)})
    return found


def _answered(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return probe()
    except RuntimeError:
        return {"error": traceback.format_exc()[-2000:]}


Probe = tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]


def _held(operator: Callable[[], Any]) -> dict[str, Any]:
    """Bytes that one call held beyond its results."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = operator()
    torch.cuda.synchronize()
    with_results = torch.cuda.memory_allocated()
    peak = torch.cuda.max_memory_allocated()
    del results
    return {"extra": peak - with_results, "kept": torch.cuda.memory_allocated() - before}


def _libraries() -> Iterator[Probe]:
    """Matrix products: first in this thread, then in a backward, whose thread is another."""
    for dtype in _DTYPES:
        for name, probe in (("matmul", _product), ("linear with bias", _linear), ("matmul, backward", _backward)):
            yield name, {"dtype": dtype}, partial(probe, dtype)


def _square(dtype: str) -> Tensor:
    return torch.randn(512, 512, device=DEVICE, dtype=_DTYPES[dtype])


def _product(dtype: str) -> dict[str, Any]:
    left, right = _square(dtype), _square(dtype)
    return _held(lambda: left @ right)


def _linear(dtype: str) -> dict[str, Any]:
    x, weight = _square(dtype), _square(dtype)
    return _held(lambda: F.linear(x, weight, weight[0]))


def _backward(dtype: str) -> dict[str, Any]:
    """The gradient of one product; the product and the gradient that it starts from exist before."""
    x, weight = _square(dtype), _square(dtype).requires_grad_()
    product = x @ weight
    gradient = torch.ones_like(product)
    return _held(lambda: torch.autograd.grad(product, weight, gradient))


def _convolutions() -> Iterator[Probe]:
    for shape in _CONVOLUTIONS:
        for size in (8, 64):
            for dtype in _DTYPES:
                for memory_format in ("contiguous", "channels_last"):
                    facts = {"shape": list(shape), "batch_size": size, "dtype": dtype, "memory_format": memory_format}
                    for part in ("forward", "input gradient", "weight gradient"):
                        yield f"convolution, {part}", facts, partial(_convolution, part, facts)


def _convolution(part: str, facts: dict[str, Any]) -> dict[str, Any]:
    inputs, outputs, kernel, stride, side = facts["shape"]
    layout = torch.channels_last if facts["memory_format"] == "channels_last" else torch.contiguous_format
    dtype = _DTYPES[facts["dtype"]]
    x = torch.randn(facts["batch_size"], inputs, side, side, device=DEVICE, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(outputs, inputs, kernel, kernel, device=DEVICE, dtype=dtype).to(memory_format=layout)
    geometry = ([stride] * 2, [kernel // 2] * 2, [1] * 2)
    if part == "forward":
        return _held(lambda: torch.ops.aten.convolution(x, weight, None, *geometry, False, [0, 0], 1))
    gradient = torch.ones_like(torch.ops.aten.convolution(x, weight, None, *geometry, False, [0, 0], 1))
    mask = [part == "input gradient", part == "weight gradient", False]
    backward = torch.ops.aten.convolution_backward
    return _held(lambda: backward(gradient, x, weight, None, *geometry, False, [0, 0], 1, mask))


def _recurrent() -> Iterator[Probe]:
    for kind in ("LSTM", "GRU"):
        for size in (1, 64):
            for dtype in ("float32", "float16"):
                facts = {"kind": kind, "batch_size": size, "dtype": dtype, "length": 128, "width": 512, "layers": 2}
                yield "recurrent forward", facts, partial(_run_recurrent, facts)


def _run_recurrent(facts: dict[str, Any]) -> dict[str, Any]:
    """The reserve space lives in the graph: it counts among the results here, as in training."""
    kind = getattr(torch.nn, facts["kind"])
    module = kind(facts["width"], facts["width"], facts["layers"], batch_first=True, dropout=0.2)
    module = module.to(DEVICE, _DTYPES[facts["dtype"]])
    x = torch.randn(facts["batch_size"], facts["length"], facts["width"], device=DEVICE, dtype=_DTYPES[facts["dtype"]])
    return _held(lambda: module(x))


def _attention() -> Iterator[Probe]:
    for dtype in _DTYPES:
        for width in (32, 64, 80, 128, 256):
            for mask in ("none", "causal", "bool", "float"):
                for dropout in (0.0, 0.1):
                    facts = {"dtype": dtype, "head_size": width, "mask": mask, "dropout": dropout}
                    yield "attention backend", facts, partial(_chosen_backend, facts)


def _chosen_backend(facts: dict[str, Any]) -> dict[str, Any]:
    """The choice of torch itself: 0 math, 1 flash, 2 memory-efficient, 3 cuDNN (SDPBackend)."""
    q = torch.randn(2, 4, 256, facts["head_size"], device=DEVICE, dtype=_DTYPES[facts["dtype"]], requires_grad=True)
    masks = {
        "bool": torch.ones(2, 1, 256, 256, device=DEVICE, dtype=torch.bool),
        "float": torch.zeros(2, 1, 256, 256, device=DEVICE, dtype=q.dtype),
    }
    settings = {"attn_mask": masks.get(facts["mask"]), "dropout_p": facts["dropout"]}
    chosen = torch._fused_sdp_choice(q, q, q, is_causal=facts["mask"] == "causal", **settings)  # noqa: SLF001
    return {"backend": int(chosen)}
