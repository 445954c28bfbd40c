"""Asks an installed cuDNN, without a GPU, how much workspace a convolution takes on a GPU that is not there.

From 9.8 on, cuDNN plans for a device that it is only told about ("Deviceless Ahead-of-time Compilation" in NVIDIA's
cuDNN documentation; ``CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR`` in cudnn_graph_v9.h). The description is JSON; its fields
are those that OpenXLA fills from its own tables of GPUs (xla/backends/gpu/target_config/cudnn_device_props.cc).

Plans are chosen as PyTorch chooses them with ``torch.backends.cudnn.benchmark = False`` (aten/src/ATen/native/cudnn/
Conv_v8.cpp: ``get_configs_from_heuristics``, ``filterEngineConfigs``, ``try_configs``): those of the instant
heuristics in their order, without those that convert inputs down, the first that can be finalized; then the fallback
list. The numbers are those of the cuDNN that is asked: another release may choose other kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from vram_guard.language import _
from vram_guard.simulate.operators.cudnn import (
    Convolution,
    CudnnRefusedError,
    DeviceProperties,
    Direction,
    Element,
    Tensor,
)

#: The first release whose heuristics and plans take a description of the device (cudnn_graph_v9.h).
FIRST_VERSION = 90800

#: PyTorch's allocator hands out multiples of 512 bytes; ``getAlignment`` in Conv_v8.cpp looks no further than 32.
_ALIGNMENT = 32

# cudnn_graph_v9.h. cudnnBackendDescriptorType_t:
_CONVOLUTION, _ENGINE, _ENGINECFG, _ENGINEHEUR, _PLAN, _GRAPH, _TENSOR, _DEVICE = 1, 2, 3, 4, 5, 15, 17, 38
# cudnnBackendAttributeType_t:
_DATA_TYPE, _INT64, _FLOAT, _CONV_MODE, _HEUR_MODE, _NOTE, _DESCRIPTOR, _CHAR = 1, 3, 4, 7, 8, 11, 15, 24
# cudnnBackendNumericalNote_t, cudnnBackendHeurMode_t, cudnnConvolutionMode_t, cudnnDataType_t:
_TENSOR_CORE, _DOWN_CONVERT, _NONDETERMINISTIC = 0, 1, 4
_INSTANT, _FALLBACK = 0, 2
_CROSS_CORRELATION = 1
_ELEMENTS: dict[Element, int] = {"float32": 0, "float16": 2, "bfloat16": 9}
# cudnnBackendAttributeName_t:
_COMPUTE_TYPE, _MODE, _DILATIONS, _STRIDES, _POST_PADDING, _PRE_PADDING, _DIMENSIONS = range(100, 107)
_HEUR_KIND, _HEUR_GRAPH, _HEUR_RESULTS, _HEUR_DEVICE = 200, 201, 202, 204
_CFG_ENGINE, _PLAN_CFG, _PLAN_WORKSPACE, _PLAN_DEVICE = 300, 401, 402, 407
_GRAPH_OPERATIONS, _ENGINE_NOTES, _DEVICE_JSON = 801, 1303, 2702
_TENSOR_ALIGNMENT, _TENSOR_TYPE, _TENSOR_SIZES, _TENSOR_STRIDES, _TENSOR_ID = 900, 901, 902, 903, 906


class _Operation(NamedTuple):
    """One direction: its descriptor type, and the names of its attributes."""

    kind: int
    alpha: int
    beta: int
    convolution: int
    weight: int
    source: int
    out: int


_OPERATIONS: dict[Direction, _Operation] = {
    "forward": _Operation(10, 700, 701, 702, 703, 704, 705),
    "backward_data": _Operation(12, 706, 707, 708, 709, 710, 711),
    "backward_filter": _Operation(11, 712, 713, 714, 715, 716, 717),
}


def installed() -> Path | None:
    """``libcudnn.so.9`` of NVIDIA's wheel in this environment (torch's CUDA builds bring it); None where it is not."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return None
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder) / "lib" / "libcudnn.so.9"
        if path.exists():
            return path
    return None


def _load_cublas(path: Path) -> None:
    """Load cuBLAS from the wheels next to it: a cuDNN that finds none aborts the process.

    Raises:
        OSError: there is none, or it cannot be loaded.
    """
    wheels = path.resolve().parents[2]
    found = [*wheels.glob("cublas/lib/libcublasLt.so.*"), *wheels.glob("cu*/lib/libcublasLt.so.*")]
    if not found:
        raise OSError(
            _("no libcublasLt beside {path}; install NVIDIA's cublas wheel of the same CUDA release", path=path)
        )
    for library in sorted(set(found)):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class _Refused(Exception):  # noqa: N818 - how cuDNN says that a plan is not possible
    """cuDNN did not do what it was asked; ``status`` is its code (cudnn_graph_v9.h, ``cudnnStatus_t``)."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def release_of(version: int) -> str:
    """``cudnnGetVersion``'s number as it is written: 92600 is "9.26.0"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Library:
    """One cuDNN, loaded into this process.

    Args:
        path: of ``libcudnn.so.9`` in the folders of NVIDIA's wheels: its other libraries lie next to it.

    Raises:
        OSError: it cannot be loaded, cuBLAS is not next to it, or it is too old to plan without a GPU.
    """

    def __init__(self, path: str | Path) -> None:
        _load_cublas(Path(path))
        self._library = ctypes.CDLL(str(path))
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        self.version = int(self._library.cudnnGetVersion())
        self.release = release_of(self.version)
        if self.version < FIRST_VERSION:
            raise OSError(
                _(
                    "{path} is cuDNN {version}; planning without a GPU needs {first} or later",
                    path=path,
                    version=self.release,
                    first=release_of(FIRST_VERSION),
                )
            )
        self._lock = threading.Lock()
        self._devices: dict[DeviceProperties, ctypes.c_void_p] = {}

    def check(self, device: DeviceProperties) -> None:
        """Describe this GPU to cuDNN.

        Raises:
            CudnnRefusedError: it does not take the description; the message names its status.
        """
        major, minor = device.capability
        try:
            with self._lock:
                self._described(device)
        except KeyError:
            said = _("nothing is known here of GPUs of compute capability {capability}", capability=f"{major}.{minor}")
            raise CudnnRefusedError(said) from None
        except _Refused as error:
            said = _(
                "it refuses a GPU of compute capability {capability} that is only described, with status {status}",
                capability=f"{major}.{minor}",
                status=error.status,
            )
            raise CudnnRefusedError(said) from None

    def workspace(self, call: Convolution, device: DeviceProperties) -> int | None:
        """Bytes of workspace that PyTorch would allocate for this call; None where cuDNN has no plan for it."""
        with self._lock, ExitStack() as stack:
            try:
                described = self._described(device)
                graph = self._graph(stack, call)
            except (_Refused, KeyError):
                return None
            for mode in (_INSTANT, _FALLBACK):
                for config in self._configs(stack, graph, described, mode):
                    with contextlib.suppress(_Refused):
                        if self._allowed(stack, config, call):
                            return self._planned(stack, config, described)
            return None

    # --- descriptors -------------------------------------------------------------------------------------------------

    def _make(self, stack: ExitStack, kind: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._check(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(made)))
        stack.callback(self._library.cudnnBackendDestroyDescriptor, made)
        return made

    def _set(self, descriptor: ctypes.c_void_p, name: int, kind: int, values: Sequence[Any], ctype: Any) -> None:
        data = (ctype * len(values))(*values)
        self._check(self._library.cudnnBackendSetAttribute(descriptor, name, kind, ctypes.c_int64(len(values)), data))

    def _finalize(self, descriptor: ctypes.c_void_p) -> None:
        self._check(self._library.cudnnBackendFinalize(descriptor))

    def _get(self, descriptor: ctypes.c_void_p, name: int, kind: int, data: Any, count: int) -> int:
        """Fill ``data`` with at most ``count`` values; how many there are."""
        found = ctypes.c_int64()
        arguments = (descriptor, name, kind, ctypes.c_int64(count), ctypes.byref(found), data)
        self._check(self._library.cudnnBackendGetAttribute(*arguments))
        return found.value

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise _Refused(status)

    def _described(self, device: DeviceProperties) -> ctypes.c_void_p:
        found = self._devices.get(device)
        if found is None:
            text = device.json().encode()
            found = self._make(ExitStack(), _DEVICE)  # kept as long as the process
            self._set(found, _DEVICE_JSON, _CHAR, text, ctypes.c_char)
            self._finalize(found)
            self._devices[device] = found
        return found

    def _tensor(self, stack: ExitStack, tensor: Tensor, element: Element, name: str) -> ctypes.c_void_p:
        made = self._make(stack, _TENSOR)
        self._set(made, _TENSOR_TYPE, _DATA_TYPE, [_ELEMENTS[element]], ctypes.c_int)
        self._set(made, _TENSOR_SIZES, _INT64, tensor.sizes, ctypes.c_int64)
        self._set(made, _TENSOR_STRIDES, _INT64, tensor.strides, ctypes.c_int64)
        self._set(made, _TENSOR_ID, _INT64, [ord(name)], ctypes.c_int64)
        self._set(made, _TENSOR_ALIGNMENT, _INT64, [_ALIGNMENT], ctypes.c_int64)
        self._finalize(made)
        return made

    def _convolution(self, stack: ExitStack, call: Convolution) -> ctypes.c_void_p:
        made = self._make(stack, _CONVOLUTION)
        # Half precision is summed in float32 (Conv_v8.cpp, getConvDescriptor).
        self._set(made, _COMPUTE_TYPE, _DATA_TYPE, [_ELEMENTS["float32"]], ctypes.c_int)
        self._set(made, _MODE, _CONV_MODE, [_CROSS_CORRELATION], ctypes.c_int)
        self._set(made, _DIMENSIONS, _INT64, [len(call.padding)], ctypes.c_int64)
        for name, values in (
            (_DILATIONS, call.dilation),
            (_STRIDES, call.stride),
            (_PRE_PADDING, call.padding),
            (_POST_PADDING, call.padding),
        ):
            self._set(made, name, _INT64, values, ctypes.c_int64)
        self._finalize(made)
        return made

    def _graph(self, stack: ExitStack, call: Convolution) -> ctypes.c_void_p:
        names = _OPERATIONS[call.direction]
        operation = self._make(stack, names.kind)
        for name, part in (
            (names.source, self._tensor(stack, call.source, call.element, "x")),
            (names.weight, self._tensor(stack, call.weight, call.element, "w")),
            (names.out, self._tensor(stack, call.out, call.element, "y")),
            (names.convolution, self._convolution(stack, call)),
        ):
            self._set(operation, name, _DESCRIPTOR, [part.value], ctypes.c_void_p)
        self._set(operation, names.alpha, _FLOAT, [1.0], ctypes.c_float)
        self._set(operation, names.beta, _FLOAT, [0.0], ctypes.c_float)
        self._finalize(operation)
        graph = self._make(stack, _GRAPH)
        self._set(graph, _GRAPH_OPERATIONS, _DESCRIPTOR, [operation.value], ctypes.c_void_p)
        self._finalize(graph)
        return graph

    # --- plans -------------------------------------------------------------------------------------------------------

    def _configs(
        self, stack: ExitStack, graph: ctypes.c_void_p, device: ctypes.c_void_p, mode: int
    ) -> list[ctypes.c_void_p]:
        """Engine configurations that the heuristics propose, best first."""
        try:
            heuristics = self._make(stack, _ENGINEHEUR)
            self._set(heuristics, _HEUR_GRAPH, _DESCRIPTOR, [graph.value], ctypes.c_void_p)
            self._set(heuristics, _HEUR_KIND, _HEUR_MODE, [mode], ctypes.c_int)
            self._set(heuristics, _HEUR_DEVICE, _DESCRIPTOR, [device.value], ctypes.c_void_p)
            self._finalize(heuristics)
            count = self._get(heuristics, _HEUR_RESULTS, _DESCRIPTOR, None, 0)
            configs = [self._make(stack, _ENGINECFG) for _ in range(count)]
            data = (ctypes.c_void_p * count)(*(config.value for config in configs))
            return configs[: self._get(heuristics, _HEUR_RESULTS, _DESCRIPTOR, data, count)]
        except _Refused:
            return []

    def _allowed(self, stack: ExitStack, config: ctypes.c_void_p, call: Convolution) -> bool:
        """True if PyTorch keeps this configuration (Conv_v8.cpp, filterEngineConfigs)."""
        engine = self._make(stack, _ENGINE)
        data = (ctypes.c_void_p * 1)(engine.value)
        self._get(config, _CFG_ENGINE, _DESCRIPTOR, data, 1)
        notes = (ctypes.c_int * 32)()
        held = notes[: self._get(engine, _ENGINE_NOTES, _NOTE, notes, len(notes))]
        if _DOWN_CONVERT in held or (call.deterministic and _NONDETERMINISTIC in held):
            return False
        return call.allow_tf32 or call.element != "float32" or _TENSOR_CORE not in held

    def _planned(self, stack: ExitStack, config: ctypes.c_void_p, device: ctypes.c_void_p) -> int:
        plan = self._make(stack, _PLAN)
        self._set(plan, _PLAN_CFG, _DESCRIPTOR, [config.value], ctypes.c_void_p)
        self._set(plan, _PLAN_DEVICE, _DESCRIPTOR, [device.value], ctypes.c_void_p)
        self._finalize(plan)
        size = (ctypes.c_int64 * 1)()
        self._get(plan, _PLAN_WORKSPACE, _INT64, size, 1)
        return size[0]
