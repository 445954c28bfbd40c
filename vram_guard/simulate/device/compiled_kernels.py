"""Compiled kernels of other libraries, by what their sources allocate: results, and what they take in between.

Python modules in C++ (pybind11) are given tensors without data in a trace, and refuse them. In their place stand the
functions below, under the same names: they allocate as the C++ does, in its order, and compute nothing. What the
library's own Python around them makes and saves is seen as always.

Sources:

- FlashAttention 2.7.0 to 2.8.3, github.com/Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp: ``mha_fwd``,
  ``mha_varlen_fwd``, ``mha_bwd``, ``mha_varlen_bwd``. Before 2.7 the functions returned other tensors. Not counted: the
  partial results of forwards that are split over the keys (``set_params_splitkv``), which small batches take.
- xformers 0.0.30 to 0.0.33, github.com/facebookresearch/xformers, third_party/flash-attention: 2.7.4 to 2.8.3 of these.
- causal-conv1d 1.4 to 1.6, github.com/Dao-AILab/causal-conv1d, csrc/causal_conv1d.cpp.
- mamba 1.0 to 2.3, github.com/state-spaces/mamba, csrc/selective_scan/selective_scan.cpp.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from vram_guard.language import Message
from vram_guard.patching import replaced
from vram_guard.simulate.device.symbolic import is_symbolic

Tensor = torch.Tensor


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- FlashAttention -------------------------------------------------------------------------------------------


def _attended(
    query: Tensor, out: Tensor | None, log_sums: tuple[int, ...], scores: tuple[int, ...] | None
) -> list[Tensor]:
    """Output, log-sum-exps, dropped-out scores where they are asked for, and the two words of the random state."""
    return [
        torch.empty_like(query) if out is None else out,
        query.new_empty(log_sums, dtype=torch.float32),
        query.new_empty((0,) if scores is None else scores),
        query.new_empty((2,), dtype=torch.int64),
    ]


def flash_forward(query: Tensor, key: Tensor, _value: Tensor, out: Tensor | None, *settings: Any) -> list[Tensor]:
    """``mha_fwd``: query (batch, length, heads, head size)."""
    # Settings: alibi, dropout, scale, causal, two windows, softcap, with scores, generator.
    batch, length, heads, _head = query.shape
    scores = (batch, heads, _up(length, 128), _up(key.shape[1], 128)) if settings[7] else None
    return _attended(query, out, (batch, heads, length), scores)


def flash_varlen_forward(
    query: Tensor, _key: Tensor, _value: Tensor, out: Tensor | None, starts: Tensor, _key_starts: Tensor, *settings: Any
) -> list[Tensor]:
    """``mha_varlen_fwd``: query (total, heads, head size), and where each sequence starts."""
    # Settings: used keys, left padding, pages, alibi, two longest, dropout, scale, zeros, causal, two windows, softcap,
    # with scores, generator.
    total, heads, _head = query.shape
    longest, longest_key = settings[4:6]
    scores = (starts.numel() - 1, heads, _up(longest, 128), _up(longest_key, 128)) if settings[13] else None
    return _attended(query, out, (heads, total), scores)


def _gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    given: tuple[Tensor | None, ...],
    sums: tuple[int, ...],
    rows: int,
    splits: int,
) -> list[Tensor]:
    """Gradients of query, key and value, the row sums; in between the float32 gradient of the query, padded."""
    query, key, _value = inputs
    heads, head = query.shape[-2:]
    made = [torch.empty_like(of) if into is None else into for of, into in zip(inputs, given, strict=True)]
    row_sums = query.new_empty(sums, dtype=torch.float32)
    rounded = _up(head, 32 if head <= 128 else 64)
    held = [query.new_empty((splits * rows, heads, rounded), dtype=torch.float32)]
    if key.shape[-2] != heads:  # grouped queries: per query head, then summed
        held += [key.new_empty((*key.shape[:-2], heads, head)) for _ in range(2)]
    del held
    return [*made, row_sums]


def _splits(query: Tensor, pairs: int, deterministic: bool) -> int:
    """A deterministic backward accumulates the query's gradient apart for each of its splits."""
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return -(-processors // pairs) if deterministic else 1


def flash_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _out: Tensor, _log_sums: Tensor, *settings: Any
) -> list[Tensor]:
    """``mha_bwd``."""
    # Settings: dq, dk, dv, alibi, dropout, scale, causal, two windows, softcap, deterministic, generator, state.
    batch, length, heads, _head = query.shape
    rounded = _up(length, 128)
    splits = _splits(query, batch * heads, settings[10])
    return _gradients((query, key, value), settings[:3], (batch, heads, rounded), batch * rounded, splits)


def flash_varlen_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _out: Tensor, _log_sums: Tensor, *settings: Any
) -> list[Tensor]:
    """``mha_varlen_bwd``."""
    # Settings: dq, dk, dv, two starts, alibi, two longest, dropout, scale, zeros, causal, two windows, softcap,
    # deterministic, generator, state.
    total, heads, _head = query.shape
    batch = settings[3].numel() - 1
    rows = total + 128 * batch
    splits = _splits(query, batch * heads, settings[15])
    return _gradients((query, key, value), settings[:3], (heads, rows), rows, splits)


# --- causal-conv1d --------------------------------------------------------------------------------------------


def convolved(x: Tensor, *rest: Any) -> Tensor | None:
    """``causal_conv1d_fwd``: since 1.6 (8 arguments) into the output that it is given, before into one of its own."""
    return None if len(rest) == 7 else torch.empty_like(x)


def convolved_backward(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """``causal_conv1d_bwd``: since 1.6 (12 arguments) into given tensors, with sums apart where it is deterministic."""
    batch, dim, length = x.shape
    width = weight.shape[-1]
    last = x.stride(1) == 1 and x.stride(2) > 1  # channels
    grad = rest[0]
    _lined = (grad.transpose(-1, -2) if last else grad).contiguous() if grad.stride(1 if last else 2) != 1 else grad
    if len(rest) == 9:
        asked = os.environ.get("CAUSAL_CONV1D_DETERMINISTIC", "")[:1]
        if asked == "1" or (asked != "0" and torch.are_deterministic_algorithms_enabled()):
            parts = -(-length // (64 if length <= 128 else 128)) if last else 1
            held = [x.new_empty((batch, parts, dim, width), dtype=torch.float32)]
            if bias is not None:
                held.append(x.new_empty((batch, parts, dim), dtype=torch.float32))
            del held
        return None
    into, with_states = rest[4:6]
    gradient = torch.empty_like(x) if into is None else into
    by_weight = torch.zeros_like(weight, dtype=torch.float32)
    by_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    states = x.new_empty((batch, width - 1, dim)).transpose(1, 2) if with_states else None
    by_weight = by_weight.to(weight.dtype)
    return [gradient, by_weight, None if by_bias is None or bias is None else by_bias.to(bias.dtype), states]


# --- the selective scan of Mamba ------------------------------------------------------------------------------


def scanned(
    u: Tensor, delta: Tensor, a: Tensor, _b: Tensor, _c: Tensor, _d: Tensor | None, z: Tensor | None, *_: Any
) -> Any:
    """``selective_scan_fwd``: the output, the states between chunks of 2,048, and the gated output if there is a z."""
    batch, dim, length = u.shape
    gated = [] if z is None else [torch.empty_like(z)]
    out = torch.empty_like(delta)
    states = u.new_empty((batch, dim, -(-length // 2048), 2 * a.shape[1]), dtype=a.dtype)
    return [out, states, *gated]


def scanned_backward(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    *rest: Any,
) -> Any:  # gradient, states, output, dz, softplus, recompute the gated output
    """``selective_scan_bwd``: gradients of B and C are summed in float32 where they vary, and cast at the end."""
    out, into, _softplus, again = rest[2:6]
    gated = [] if z is None else [torch.empty_like(z) if into is None else into]
    recomputed = [torch.empty_like(out)] if again and z is not None else []
    made: list[Any] = [torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)]
    sums = [torch.zeros_like(of, dtype=torch.float32 if of.dim() >= 3 else of.dtype) for of in (b, c)]
    weights = [None if of is None else torch.zeros_like(of) for of in (d, bias)]
    cast = [one.to(of.dtype) for one, of in zip(sums, (b, c), strict=True)]
    return [*made, *cast, *weights, *gated, *recomputed]


_FLASH: dict[str, Callable[..., Any]] = {
    "fwd": flash_forward,
    "varlen_fwd": flash_varlen_forward,
    "bwd": flash_backward,
    "varlen_bwd": flash_varlen_backward,
}

Release = tuple[int, ...]

#: Module -> (package, the first and the last release whose sources were read, functions). The last one has as many
#: numbers as are meant: (1, 6) is any 1.6. The package says its release as ``__version__``.
MODULES: dict[str, tuple[str, Release, Release, dict[str, Callable[..., Any]]]] = {
    "flash_attn_2_cuda": ("flash_attn", (2, 7, 0), (2, 8, 3), _FLASH),
    "xformers._C_flashattention": ("xformers", (0, 0, 30), (0, 0, 33), _FLASH),
    "causal_conv1d_cuda": (
        "causal_conv1d",
        (1, 4, 0),
        (1, 6),
        {"causal_conv1d_fwd": convolved, "causal_conv1d_bwd": convolved_backward},
    ),
    "selective_scan_cuda": ("mamba_ssm", (1, 0, 0), (2, 3), {"fwd": scanned, "bwd": scanned_backward}),
}


def is_known(module: str) -> bool:
    """True if this module is imported, in a release whose sources are known."""
    package, first, _last, _functions = MODULES[module]
    return module in sys.modules and _release(package) >= first


def newer_than_read(module: str) -> Message | None:
    """What is said where the module is of a release that is newer than the sources that were read."""
    package, _first, last, _functions = MODULES[module]
    if _release(package)[: len(last)] <= last:
        return None
    version = getattr(sys.modules[package], "__version__", "")
    read = ".".join(map(str, last))
    return Message(
        "{package} {version} is newer than the sources that were read (up to {read}): its compiled kernels are counted "
        "as they were there",
        package=package,
        version=version,
        read=read,
    )


def _release(package: str) -> Release:
    version = str(getattr(sys.modules.get(package), "__version__", "0")).split(".")
    return tuple(int(part) if part.isdigit() else 0 for part in version[:3])


def calls_known(namespace: str) -> bool:
    """True if the Python of the operators in this namespace calls a module that is known.

    These operators of FlashAttention have fake kernels, which tell their results alone.
    """
    if namespace == "xformers_flash":  # its own build, or flash_attn's; none where it takes PyTorch's
        names = vars(sys.modules.get("xformers.ops.fmha.flash", object))
        module = names.get("_C_flashattention") or names.get("_flash_attn_cuda")
        name = getattr(module, "__name__", "")
        return name in MODULES and is_known(name)
    return namespace == "flash_attn" and is_known("flash_attn_2_cuda")


class CompiledKernels:
    """Puts the functions above in the place of the compiled ones, once their module is imported.

    Args:
        state: of the trace; calls are as always while it is not active, and where no tensor is symbolic.
        stack: gives the modules back.
    """

    def __init__(self, state: Any, stack: contextlib.ExitStack) -> None:
        self._state = state
        self._stack = stack
        self._done: set[str] = set()
        self._called: set[str] = set()

    def look(self) -> None:
        """Take over the modules that are there."""
        for name, (*_of, functions) in MODULES.items():
            if name not in self._done and is_known(name):
                self._done.add(name)
                module = sys.modules[name]
                ours = {key: self._or(name, made, getattr(module, key)) for key, made in functions.items()}
                self._stack.enter_context(replaced(module, ours))

    def _or(self, module: str, ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            if not self._state.active or not any(isinstance(one, Tensor) and is_symbolic(one) for one in args):
                return original(*args, **named)
            if module not in self._called:
                self._called.add(module)
                if (said := newer_than_read(module)) is not None:
                    self._state.recorder.note(said, tier="partly symbolic")
            return ours(*args, **named)

        return run
