"""Temporaries of sorts by CUB, and of what PyTorch builds on them: gradients of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vram_guard.scratch._card import Card

#: CUB's ``tuning_radix_sort.cuh``, single-tile and onesweep policies of pairs with 64-bit offsets: (first compute
#: capability, threads, elements a thread for a key and a value of 4 bytes and of 8 bytes).
_TILES = (
    ((9, 0), 384, 17, 24),
    ((8, 0), 384, 17, 21),
    ((7, 0), 256, 46, 23),
    ((6, 1), 256, 30, 30),
    ((0, 0), 256, 29, 29),
)
_SINGLE_TILE = 256, 19
_SHARED_MEMORY = 48 * 1024
_DIGITS, _DIGIT_BITS = 256, 8
_OFFSET, _COUNTER = 8, 4
_PORTION = 2**28 - 1
_ALIGNED = 256


@dataclass(frozen=True)
class RadixSort:
    """CUB's storage for sorting pairs of a key and its index; asked with the numbers of pairs and of possible keys.

    ``DeviceRadixSort::SortPairs`` (``dispatch_radix_sort.cuh``, ``invoke_onesweep``): one tile is sorted in place; more
    need bins and counters of each pass, look-back of each block, and, from two passes on, buffers for keys and values.

    Attributes:
        width: bytes of a key and of a value.
        whole: every bit of the keys is sorted, not only those that the largest possible key has.
        above: number of pairs up to which there is no sort.
    """

    width: int = 8
    whole: bool = False
    above: int = 0

    def bytes(self, numbers: tuple[int, ...], card: Card) -> int:
        """Bytes of temporary storage; 0 where nothing is sorted."""
        count, keys = numbers
        if count <= self.above:
            return 0
        if count <= _tile(*_SINGLE_TILE, self.width):
            return 1
        _since, threads, of_four, of_eight = next(each for each in _TILES if card.capability >= each[0])
        tile = _tile(threads, of_four if self.width == 4 else of_eight, self.width)
        bits = 8 * self.width if self.whole else max(keys - 1, 1).bit_length()
        passes = -(-bits // _DIGIT_BITS)
        portions = -(-count // (_PORTION // tile * tile))
        blocks = -(-min(count, _PORTION // tile * tile) // tile)
        spare = 0 if passes <= 1 else count * self.width
        sizes = (
            portions * passes * _DIGITS * _OFFSET,
            blocks * _DIGITS * _COUNTER,
            spare,
            spare,
            portions * passes * _COUNTER,
        )
        return sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes) + _ALIGNED - 1


def _tile(threads: int, items: int, width: int) -> int:
    """Elements of a tile: policies are for 4 bytes, and scaled to registers and shared memory (``scale_reg_bound``)."""
    scaled = max(1, items * 4 // max(4, width))
    most = -(-(_SHARED_MEMORY // (width * scaled)) // 32) * 32
    return min(threads, most) * scaled


#: ``Embedding.cu``, ``embedding_dense_backward_cuda``: up to this many indices no sort is needed.
EMBEDDING_SORT_ABOVE = 3072

#: ``EmbeddingBackwardKernel.cu``, ``NROWS_PER_THREAD``.
_ROWS_PER_THREAD = 10

#: The same file, ``MAX_ATOMIC_ACCUM_BLOCKS_PER_SM``; ``MAX_BLOCK_SIZE`` of SortingCommon.cuh; threads of a warp.
_ATOMIC_BLOCKS, _MAX_BLOCK, _WARP = 4, 1024, 32


@dataclass(frozen=True)
class EmbeddingGradient:
    """A temporary of an embedding's gradient; asked with the number of indices.

    ``embedding_backward_cuda_kernel`` sums the rows of each index in pieces of at most ten rows.

    Since torch 2.11 few rows are summed in place, by atomic additions, where their pieces are many and their number
    does not fill the card (``use_fused_kernel``).

    Attributes:
        part: "indices": one number an index; "segments": one for each index that may occur; "pieces": one for each
            piece that there may be; "sums": the same, where they are summed by themselves; "places": the same, and
            "table": one for each row, where they are summed in place.
        rows: of the embedding.
        width: bytes of one number; of a whole row in float32 for the sums of the pieces, and of the table.
        above: number of indices up to which they are not sorted.
        stride: elements of a row, where it may be summed in place; 0: it is not.
    """

    part: Literal["indices", "segments", "pieces", "sums", "places", "table"]
    rows: int
    width: int
    above: int = EMBEDDING_SORT_ABOVE
    stride: int = 0

    def bytes(self, numbers: tuple[int, ...], card: Card) -> int:
        """Bytes of this part; 0 where the indices need not be sorted."""
        (count,) = numbers
        if count <= self.above:
            return 0
        segments = min(count, self.rows)
        pieces = count // _ROWS_PER_THREAD + segments
        if self.part in ("sums", "places", "table"):
            in_place = self.stride > 0 and _summed_in_place(segments, pieces, self.stride, card)
            if in_place == (self.part == "sums"):
                return 0
        number = {"indices": count, "segments": segments, "table": self.rows}.get(self.part, pieces)
        return number * self.width


def _summed_in_place(segments: int, pieces: int, stride: int, card: Card) -> bool:
    warped = -(-stride // _WARP) * _WARP
    blocks = -(-segments * warped // min(warped, _MAX_BLOCK))
    return blocks < card.multiprocessors * _ATOMIC_BLOCKS and pieces > blocks * 4
