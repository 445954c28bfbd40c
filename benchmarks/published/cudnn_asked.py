"""Published peaks of convolutions, without and with an installed cuDNN asked for its workspaces.

    python benchmarks/published/cudnn_asked.py [LIBCUDNN]

LIBCUDNN: path of a ``libcudnn.so.9`` of 9.8 or later in the folders of NVIDIA's wheels; without it, that of this
environment. The runs had older releases, which cannot be asked without a GPU: what is printed says how far another
release's answers carry, and is no part of the table.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from benchmarks.harness.records import Row
from benchmarks.harness.statistics import quantile
from benchmarks.published import liger, xmem
from vram_guard.budget.catalogue import find_gpu
from vram_guard.simulate.operators import cudnn, cudnn_library


def cnn_rows() -> list[tuple[tuple[int, int], Callable[[], Row]]]:
    """Compute capability and prediction of each of xMem's CNN runs."""
    return [
        (
            next(find_gpu(card).compute_capability for card in xmem.CARDS if card in row["gpu_name"]),
            lambda row=row: xmem.predict(row),
        )
        for row in xmem.all_rows()
        if row["kind"] == "cnn" and row["real_oom"] != "True"
    ]


def show(name: str, one: float, other: float) -> None:
    """One line: signed errors without and with cuDNN's answers."""
    print(f"{name:44} {one:+8.2%} {other:+8.2%}", flush=True)


def main() -> None:
    """Print every row and the summary."""
    path = sys.argv[1] if len(sys.argv) > 1 else cudnn_library.installed()
    if path is None:
        raise SystemExit("no cuDNN here: pip install nvidia-cudnn-cu12 nvidia-cublas-cu12, or name libcudnn.so.9")
    library = cudnn_library.Library(path)
    print(f"cuDNN {library.version}; error without and with its workspaces")
    for row in liger.rows():
        if "multi_token" in row.operator:
            without = liger.predict(row).error
            with cudnn.asking(library, cudnn.DeviceProperties.of((8, 6))):  # all measured on an RTX 3090
                show(f"{row.operator} {row.size}", without, liger.predict(row).error)
    errors: tuple[list[float], list[float]] = ([], [])
    for capability, predict in cnn_rows():
        found = []
        for asked, kept in zip(
            (contextlib.nullcontext(), cudnn.asking(library, cudnn.DeviceProperties.of(capability))),
            errors,
            strict=True,
        ):
            with asked:
                found.append(predict())
            kept.append(abs(found[-1].error))
        show(found[0].name, *(row.error for row in found))
    for name, values in zip(("without", "with"), errors, strict=True):
        print(f"{name:8} median {quantile(values, 0.5):.2%}, 90th percentile {quantile(values, 0.9):.2%}")


if __name__ == "__main__":
    main()
