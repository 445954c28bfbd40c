"""Parts of the gradients of a layer norm's weight and bias: ``layer_norm_kernel.cu``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vram_guard.scratch._card import Card
from vram_guard.scratch._reduction import Reduction

#: ``LaunchGammaBetaBackwardCUDAKernel``: above this many rows, and with few columns for the card, blocks of 32 rows are
#: summed, of which there are at most so many.
_ROWS_ABOVE = 64 * 1024
_WARP, _ROWS_PER_BLOCK, _MOST_BLOCKS = 32, 32, 64 * 1024 // 2


@dataclass(frozen=True)
class PartialGradient:
    """A temporary of the gradient of a weight or a bias; asked with the number of rows.

    Attributes:
        part: "rows": the sums of all blocks, in the weight's type; "result", "buffer" and "semaphores": of their sum.
        columns: elements of the weight.
        element, accumulated: bytes of one element, and of one as it is summed.
    """

    part: Literal["rows", "result", "buffer", "semaphores"]
    columns: int
    element: int
    accumulated: int

    def bytes(self, numbers: tuple[int, ...], card: Card) -> int:
        """Bytes of this part; 0 where the gradient is computed in one pass."""
        (rows,) = numbers
        if rows <= _ROWS_ABOVE or self.columns // _WARP >= card.multiprocessors // 2:
            return 0
        blocks = min(_MOST_BLOCKS // -(-self.columns // _WARP), -(-rows // _ROWS_PER_BLOCK))
        if self.part == "rows":
            return blocks * self.columns * self.element
        if self.part == "result":
            return self.columns * self.element
        sums = Reduction(self.part, 1, self.element, self.accumulated)
        return sums.bytes((0, blocks, self.columns, self.columns, 1), card)
