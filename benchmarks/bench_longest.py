"""Seconds that looking for the longest batch takes, and whether it is the true one.

Ten thousand synthetic samples with a heavy tail: texts by length, pictures by the heads of their files, detection by
pictures and boxes; in random order, in buckets, by a budget of tokens. The predicted batch is compared with all batches
of some epochs. Exits with 1 where one of them is larger, or a look takes longer than --limit.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from vram_guard.longest import longest_batch

COUNT, SIZE, BUDGET, EPOCHS = 10_000, 16, 16_384, 3


class Samples(Dataset[Any]):
    """Samples of these extents; ``told`` says how the data set tells them."""

    def __init__(self, extents: Sequence[tuple[int, ...]], told: str, folder: Path) -> None:
        self._of = tuple(extents)
        if told == "lengths":
            self.lengths = [length for (length,) in extents]
        if told == "heads of files":
            self.samples = [(str(_picture(folder, k, *extent)), 0) for k, extent in enumerate(extents)]
        if told == "annotations":
            self.get_data_info = self._info

    def _info(self, index: int) -> dict[str, Any]:
        height, width, boxes = self._of[index]
        return {"height": height, "width": width, "instances": [0] * boxes}

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.empty(self._of[index], dtype=torch.uint8)


def _picture(folder: Path, number: int, height: int, width: int) -> Path:
    path = folder / f"{number}.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height))
    return path


class Batches:
    """Batches of samples in buckets, or by a budget of tokens, in an order that is drawn anew in every epoch."""

    def __init__(self, amounts: Sequence[int], kind: str) -> None:
        self.amounts, self.kind, self.drawn = amounts, kind, random.Random(0)  # noqa: S311 - no secret
        if kind == "budget":
            self.max_tokens = BUDGET

    def __iter__(self) -> Iterator[list[int]]:
        if self.kind == "buckets":
            order = sorted(range(len(self.amounts)), key=self.amounts.__getitem__)
            for start in range(0, len(order), 50 * SIZE):
                bucket = self.drawn.sample(order[start : start + 50 * SIZE], len(order[start : start + 50 * SIZE]))
                yield from (bucket[first : first + SIZE] for first in range(0, len(bucket), SIZE))
            return
        batch: list[int] = []
        for index in self.drawn.sample(range(len(self.amounts)), len(self.amounts)):
            if batch and max(self.amounts[one] for one in [*batch, index]) * (len(batch) + 1) > self.max_tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def padded(batch: list[torch.Tensor]) -> torch.Tensor:
    """As large as the largest sample in each dimension."""
    if batch[0].dim() == 1:
        return pad_sequence(batch, batch_first=True)
    return torch.empty(len(batch), *map(max, zip(*(one.shape for one in batch), strict=True)), dtype=torch.uint8)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=float, default=2.0, help="seconds for one look (default: %(default)s)")
    options = parser.parse_args()
    drawn = random.Random(1)  # noqa: S311 - no secret
    tail = [min(4000, int(10 * drawn.paretovariate(1.2))) for _ in range(COUNT)]
    sides = [(drawn.randint(20, 133), drawn.randint(20, 133)) for _ in range(COUNT)]
    kinds: dict[str, list[tuple[int, ...]]] = {
        "lengths": [(length,) for length in tail],
        "nothing (read)": [(length,) for length in tail],
        "heads of files": [(height, width) for height, width in sides],
        "annotations": [(height, width, 1 + boxes // 40) for (height, width), boxes in zip(sides, tail, strict=True)],
    }
    wrong = 0
    print(f"{COUNT} samples")
    print(f"{'sizes are told by':18}{'batches':12}{'seconds':>8}{'planned for':>24}{'largest of epochs':>20}")
    with tempfile.TemporaryDirectory() as name:
        os.environ["VRAM_GUARD_CACHE"] = str(Path(name) / "cache")
        folder = Path(name) / "pictures"
        folder.mkdir()
        for told, extents in kinds.items():
            data = Samples(extents, told, folder)
            for order in ("random", "buckets", "budget")[: 3 if len(extents[0]) == 1 else 2]:
                wrong += not _row(data, told, order, extents, options.limit)
    return int(wrong > 0)


def _row(data: Samples, told: str, order: str, extents: list[tuple[int, ...]], limit: float) -> bool:
    amounts = [int(torch.Size(extent).numel()) for extent in extents]
    if order == "random":
        loader: DataLoader[Any] = DataLoader(data, SIZE, shuffle=True, collate_fn=padded)
    else:
        loader = DataLoader(data, batch_sampler=Batches(amounts, order), collate_fn=padded)  # type: ignore[arg-type]
    began = time.perf_counter()
    found = longest_batch(loader)
    seconds = time.perf_counter() - began
    planned = found(found.size)
    largest = 0
    for _epoch in range(EPOCHS):
        for batch in loader.batch_sampler or ():
            tops = map(max, zip(*(extents[one] for one in batch), strict=True))
            largest = max(largest, len(batch) * int(torch.Size(tuple(tops)).numel()))
    shape = " x ".join(map(str, planned.shape))
    print(f"{told:18}{order:12}{seconds:8.2f}{shape:>24}{largest:>20,}")
    return planned.numel() >= largest and seconds <= limit


if __name__ == "__main__":
    raise SystemExit(main())
