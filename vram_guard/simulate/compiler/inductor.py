"""Inductor for a CUDA device that is not there: it writes its code as always, and its kernels do nothing.

The code that it writes lies in memory, and no file is made. No kernel is compiled, no process is started and nothing is
measured: what torch would find out by measuring (the padding of matrix products) follows from rules.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface
import torch._dynamo.repro.after_aot
import torch._functorch.config
import torch._inductor.async_compile
import torch._inductor.codecache
import torch._inductor.compile_fx
import torch._inductor.config
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
import torch._inductor.runtime.hints
import torch._inductor.scheduler
import torch._prims.rng_prims
import torch.utils._triton

from vram_guard.forks.fork import write_all
from vram_guard.patching import replaced
from vram_guard.simulate.compiler.fake_tensors import graph_on_cuda, moved_to_cuda, on_cuda
from vram_guard.simulate.compiler.padding import padding_decided
from vram_guard.simulate.device.cuda_module import CUDA
from vram_guard.simulate.device.fake_cuda import FakeCudaState
from vram_guard.simulate.operators.higher_order import kernel_under

_CPU = torch.device("cpu")

#: In torch's own folder: lines there are torch's, and what runs is named by the user's line that called it.
_GENERATED = str(Path(torch.__file__).parent / "_inductor" / "generated")

#: Of an A100 (CUDA C++ Programming Guide, table of compute capabilities, 8.0), where torch.cuda does not say.
_PROPERTIES = {
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_block_optin": 163 * 1024,
    "gcnArchName": "",
}

#: What changes nothing of the code but needs a GPU, other processes or files; and checks of layouts, which a trace's
#: own rules of operators do not keep everywhere.
_CONFIG = {
    "force_disable_caches": True,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "compile_threads": 1,
    "size_asserts": False,
    "alignment_asserts": False,
}


class _Kernel:
    """Stands for a compiled kernel: it writes into what it is given, and allocates nothing."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__call__


class _Anything(ModuleType):
    """Stands for Triton where it is not installed, while the generated code is loaded that imports it."""

    __path__: list[str] = []  # noqa: RUF012 - a package, as the import system looks at it

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


class _DeviceGuard:
    def __init__(self, *_args: Any) -> None:
        pass

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_error: object) -> None:
        return None


class _Generator(torch.Generator):
    """CUDA's generator, of which a graph keeps copies for what it draws again; on the GPU they take nothing."""

    device = CUDA

    def clone_state(self) -> _Generator:
        return self

    def graphsafe_get_state(self) -> _Generator:
        return self

    def manual_seed(self, _seed: int) -> _Generator:
        return self


def _drawn(operator: Callable[..., Any], *args: Any, rng_state: object = None, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


class _Codes:
    """Generated modules, in files without a place in any folder: Inductor reads its code again."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def write(self, source_code: str, **_extra: str) -> tuple[str, str]:
        key = f"graph{len(self._files)}"
        # A copy of a script's process makes no files: what it opens for writing is thrown away.
        self._files.append(os.memfd_create(key))
        write_all(self._files[-1], memoryview(source_code.encode()))
        return key, f"/proc/self/fd/{self._files[-1]}"

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def load(self, key: str, path: str, *args: Any, **kwargs: Any) -> ModuleType:
        made = ModuleType(f"torch._inductor.generated.{key}")
        made.__file__ = path
        attributes = kwargs.get("attrs", args[1] if len(args) > 1 else None)
        code = compile(Path(path).read_text(encoding="utf-8"), f"{_GENERATED}/{key}.py", "exec")
        with _triton_importable():
            exec(code, vars(made))  # noqa: S102 - Inductor's own code
        vars(made).update(attributes or {})
        return made

    def template(self, source_code: str) -> ModuleType:
        """The module of a kernel that is made of a template (flex_attention's): its caller asks for its file."""
        key, path = self.write(source_code)
        made = _Anything(key)
        made.__file__ = path
        vars(made)["key"] = key
        return made


@contextlib.contextmanager
def _triton_importable() -> Iterator[None]:
    names = ("triton", "triton.language")
    before = {name: sys.modules.get(name) for name in names}
    if before["triton"] is None:
        for name in names:
            sys.modules[name] = _Anything(name)
        sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)


def _constant(value: Any) -> Any:
    return staticmethod(lambda *_args, **_kwargs: value)


def _device_answers(capability: tuple[int, int]) -> dict[str, Any]:
    properties = SimpleNamespace(**{**_PROPERTIES, **vars(torch.cuda.get_device_properties(0))})
    return {
        "is_available": _constant(True),
        "get_compute_capability": _constant(10 * capability[0] + capability[1]),
        "get_device_properties": _constant(properties),
        "device_count": _constant(1),
        **{name: _constant(0) for name in ("current_device", "get_raw_stream", "exchange_device")},
        "maybe_exchange_device": _constant(0),
        **{name: _constant(None) for name in ("raise_if_triton_unavailable", "synchronize", "set_device")},
    }


@contextlib.contextmanager
def inductor_without_gpu(state: FakeCudaState, mode: type, capability: tuple[int, int]) -> Iterator[None]:
    """Inside the block Inductor writes code for CUDA, and the code runs in a trace.

    Args:
        state: of the simulated device.
        mode: class of the trace's mode.
        capability: of the GPU that is meant.
    """
    interface = torch._dynamo.device_interface.CudaInterface
    answers = _device_answers(capability)
    worker = {name: answers[name] for name in ("get_device_properties", "current_device")}
    codecache, asynchronous = torch._inductor.codecache, torch._inductor.async_compile.AsyncCompile
    guards = torch._C._dynamo.guards

    def kernel(*_args: Any, **_kwargs: Any) -> _Kernel:
        return _Kernel()

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=CUDA)

    generator = _Generator()
    system = {"device": {"name": torch.cuda.get_device_name()}, "hash": "0"}
    with contextlib.ExitStack() as stack:
        codes = stack.enter_context(contextlib.closing(_Codes()))
        for target, values in (
            (interface, answers),
            (interface.Worker, worker),
            (torch._inductor.scheduler, {"has_triton": lambda *_args, **_kwargs: True}),
            (torch.utils._triton, {"triton_hash_with_backend": lambda: "0" * 52}),
            (codecache.CacheBase, {"get_system": _constant(system)}),
            # Text for logs, for which nvcc would be run.
            (torch._dynamo.repro.after_aot, {"save_graph_repro": lambda *_args, **_kwargs: None}),
            (
                codecache.PyCodeCache,
                {
                    "write": staticmethod(codes.write),
                    "load": classmethod(lambda _cls, text, *_args, **_kwargs: codes.template(text)),
                    "load_by_key_path": classmethod(lambda _cls, *args, **kwargs: codes.load(*args, **kwargs)),
                },
            ),
            (
                asynchronous,
                {"triton": kernel, "multi_kernel": kernel, "wait": lambda *_args: None, "use_process_pool": _false},
            ),
            (guards, {"_empty_strided_cuda": empty_strided}),
            (
                torch._C,
                {
                    "_cuda_getCurrentRawStream": lambda _device=0: 0,
                    # Asked from torch 2.14 on, where torch.cuda.default_generators was before.
                    "_accelerator_getDefaultGenerator": lambda _device: generator,
                },
            ),
            (torch.cuda, {"_DeviceGuard": _DeviceGuard, "default_generators": (generator,)}),
            padding_decided(capability),
            *_passes(state),
        ):
            stack.enter_context(replaced(target, values))
        stack.enter_context(_constants_on_host())
        drawn_again = getattr(torch._prims.rng_prims, "graphsafe_run_with_rng_state", None)
        if drawn_again is not None:
            stack.enter_context(kernel_under(drawn_again, mode, _drawn))
        stack.enter_context(torch._inductor.config.patch({n: v for n, v in _CONFIG.items() if _has(n)}))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        torch._inductor.runtime.hints.DeviceProperties.create.cache_clear()
        stack.callback(torch._inductor.runtime.hints.DeviceProperties.create.cache_clear)
        yield


@contextlib.contextmanager
def _constants_on_host() -> Iterator[None]:
    """Inside the block a real tensor that is made on CUDA lies on the host: the compiler computes some constants."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a machine with a GPU there is a kernel already
            for name in ("empty.memory_format", "empty_strided"):
                packet, _dot, overload = name.partition(".")
                library.impl(name, _on_host(getattr(getattr(torch.ops.aten, packet), overload or "default")), "CUDA")
        yield
    finally:
        library._destroy()


def _on_host(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return operator(*args, **{**kwargs, "device": _CPU, "pin_memory": False})

    return made


def _has(name: str) -> bool:
    return hasattr(torch._inductor.config, name)


def _false(*_args: Any) -> bool:
    return False


def _passes(state: FakeCudaState) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Passes over graphs, as they are for CUDA."""
    joint, post = torch._inductor.fx_passes.joint_graph, torch._inductor.fx_passes.post_grad
    compile_fx = torch._inductor.compile_fx
    joint_passes = compile_fx._recursive_joint_graph_passes

    def passes(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graph_on_cuda(graph)
        named = {name: on_cuda(value) for name, value in kwargs.items()}
        return joint_passes(graph, *map(on_cuda, args), **named)

    def patterns(original: Callable[..., Any]) -> Callable[..., Any]:
        """The passes' patterns are traced of functions on the CPU, once for the process."""

        def made(*args: Any, **kwargs: Any) -> Any:
            state.active, before = False, state.active
            try:
                with replaced(torch.cuda, {"is_available": _false}):
                    return original(*(_CPU for _one in args), **dict.fromkeys(kwargs, _CPU))
            finally:
                state.active = before

        return made

    yield joint, {"lazy_init": patterns(joint.lazy_init)}
    yield post, {"lazy_init": patterns(post.lazy_init)}
    yield compile_fx, {"_recursive_joint_graph_passes": passes}


def inputs_on_cuda(graph: torch.fx.GraphModule, inputs: Any) -> None:
    """A graph and its example inputs as Inductor compiles them."""
    graph_on_cuda(graph)
    for one in inputs:
        moved_to_cuda(one)
