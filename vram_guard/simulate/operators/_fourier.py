"""Fourier transforms: PyTorch's copies and second buffers, and cuFFT's workspace as a range."""

from __future__ import annotations

from typing import Any

from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators.meta_results import result_of

#: Dimensions that one plan of cuFFT transforms (CuFFTUtils.h, ``cufft_max_ndim``).
DIMENSIONS_OF_A_PLAN = 3

#: NVIDIA, cuFFT API Reference, on a plan's memory: at worst 8 complex numbers for each element of all transforms.
MOST_OF_A_PLAN = 8


def transform(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result; for the call a second buffer or a copy, and cuFFT's workspace, of which only the most is known.

    SpectralOps.cpp: a transform to real numbers overwrites its input and gets a copy (``_fft_c2r_cufft``); one that
    takes several plans goes back and forth between the result and a second buffer (``_fft_c2c_cufft``,
    ``_fft_r2c_cufft``); ``_exec_fft`` takes the workspace from the caching allocator.
    """
    source, dims = args[:2]
    out = result_of(func, args, kwargs)
    name = str(func)
    recorder.track(out, name)
    one, other = (source, out) if source.is_complex() else (out, source)
    plans = len(dims) > DIMENSIONS_OF_A_PLAN or (not source.is_complex() and list(dims[:2]) == [0, 1])
    second = source if not out.is_complex() else out if plans else None
    sizes = [] if second is None else [second.numel() * second.element_size()]
    most = MOST_OF_A_PLAN * max(one.numel(), other.numel()) * one.element_size()
    recorder.together(sizes, name, unknown=most)
    return out
