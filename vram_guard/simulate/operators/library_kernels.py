"""CUDA kernels of libraries that are Python around launches: that Python runs, and its launches do nothing.

What such a kernel allocates (a dequantised weight, a scale for each row) is then what the installed release allocates.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from vram_guard.patching import replaced
from vram_guard.simulate.device.compiled_kernels import calls_known

_BITSANDBYTES = "bitsandbytes"


class _Launches:
    """A library of CUDA kernels whose functions do nothing, and say that all went well."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _launch


def _launch(*_args: Any, **_kwargs: Any) -> int:
    return 0


class _Contexts:
    """The handles of cuBLAS that the launches are given."""

    @classmethod
    def get_instance(cls) -> _Contexts:
        return cls()

    def get_context(self, _device: object) -> None:
        return None


def kernel_of(func: Any) -> Callable[..., Any] | None:
    """The Python function that an operator runs on CUDA; None where there is none, or it is compiled."""
    name: str = func._schema.name
    if name.partition("::")[0] == _BITSANDBYTES:
        overload = func._overloadname
        return _of_bitsandbytes().get(name if overload == "default" else f"{name}.{overload}")
    return _of_custom_op(func)


def _of_custom_op(func: Any) -> Callable[..., Any] | None:
    """The function of a ``torch.library.custom_op`` for CUDA that has no fake kernel.

    FlashAttention's are run although they have one, which says nothing of what they take beside their results.
    """
    definition = torch._library.custom_ops.OPDEFS.get(func._schema.name)
    if definition is None:
        return None
    if definition._abstract_fn is not None and not calls_known(func.namespace):
        return None
    functions: dict[str | None, Callable[..., Any]] = definition._backend_fns
    return functions.get("cuda", functions.get(None))


@functools.cache
def _of_bitsandbytes() -> dict[str, Callable[..., Any]]:
    """Operator -> function: those for CUDA, and those for all devices where CUDA has none of its own.

    The files that register them (bitsandbytes/backends) run once more, under no name, and register nothing.
    """
    found: dict[str, Callable[..., Any]] = {}
    for backend in ("cuda", "default"):
        found = {**_registered_by(f"{_BITSANDBYTES}.backends.{backend}.ops"), **found}
    return found


def _registered_by(name: str) -> dict[str, Callable[..., Any]]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.loader is None:
        return {}  # before 0.46 the library launched its kernels without operators
    found: dict[str, Callable[..., Any]] = {}

    def collected(operator: str, *_devices: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def keep(function: Callable[..., Any]) -> Callable[..., Any]:
            found[operator] = function
            return function

        return keep

    operators = importlib.import_module(f"{_BITSANDBYTES}._ops")
    extension = importlib.import_module(f"{_BITSANDBYTES}.cextension")
    module = importlib.util.module_from_spec(spec)
    with (
        replaced(operators, {"register_kernel": collected}),
        replaced(extension, {"lib": _Launches()}),
        replaced(torch._C, {"_cuda_getCurrentRawStream": _launch}),
    ):
        spec.loader.exec_module(module)
    names = vars(module)
    names.update(CUBLAS_Context=_Contexts, _cuda_device_of=lambda _tensor: contextlib.nullcontext())
    # A few tokens are multiplied without a dequantised weight, by a rule that knows the card and the number of tokens.
    # Left out: one timeline holds for every batch size, and no card takes more than it says.
    names["_gemm_4bit_custom_max_m"] = 0
    return found
