"""A rule of thumb for the activations of a network of equal layers, and what to change until they fit.

The rule: every layer keeps one tensor of batch x sequence x height x width x hidden numbers for the backward pass, and
the activations of all layers may take a share of the GPU (70% unless said otherwise), so that weights, gradients and
optimizer states find room in the rest. Real networks keep several tensors a layer (a convolution block with
normalisation and activation two or three, a transformer layer about 17 in 16 bit: Korthikanti et al. 2022,
arXiv:2205.05198, equation 1): the rule says at a glance what is out of the question, never what is certain to fit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.step import LARGEST_BATCH

#: Bytes of a float32 number; half of it under automatic mixed precision.
FLOAT32 = 4
HALF = 2
#: The share of the GPU that activations may take.
USUAL_SHARE = 0.7


@dataclass(frozen=True)
class Network:
    """A network of equal layers and its input, as the rule sees it. Whole numbers, at least 1.

    Attributes:
        batch: samples of one forward pass.
        height, width: of the input, in pixels or grid points.
        hidden_dim: numbers at every point, between the layers.
        num_layers: layers.
        seq_length: time steps or tokens at every point.
        bytes_per_element: of one number: 4 in float32, 2 in float16 and bfloat16.

    Example:
        >>> Network(batch=8, height=256, width=256, hidden_dim=64, num_layers=12).total_bytes / 2**30
        1.5
    """

    batch: int
    height: int
    width: int
    hidden_dim: int
    num_layers: int
    seq_length: int = 1
    bytes_per_element: int = FLOAT32

    @property
    def layer_bytes(self) -> int:
        """One layer's activations in bytes."""
        points = self.batch * self.seq_length * self.height * self.width
        return points * self.hidden_dim * self.bytes_per_element

    @property
    def total_bytes(self) -> int:
        """All layers' activations in bytes."""
        return self.layer_bytes * self.num_layers


@dataclass(frozen=True)
class Calculation:
    """The rule's answer for one network on one amount of memory; amounts in bytes.

    Attributes:
        network: what was asked about.
        memory: of the whole GPU.
        share: of it that activations may take, in (0, 1].

    Example:
        >>> network = Network(batch=16, height=256, width=256, hidden_dim=64, num_layers=12)
        >>> asked = Calculation(network, memory=2 * 2**30)
        >>> asked.fits, asked.largest_batch, asked.accumulation, asked.with_amp.largest_batch
        (False, 7, (4, 4), 14)
    """

    network: Network
    memory: int
    share: float = USUAL_SHARE

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:  # of NaN that is false too
            raise InvalidInputError(
                _("threshold must be above 0 and at most 1 (0.7 for 70%), not {value}", value=self.share)
            )

    @cached_property
    def allowed(self) -> int:
        """Bytes that activations may take, rounded down."""
        # By way of its decimal digits: 0.7 means seven tenths, not the nearest binary fraction below.
        return math.floor(self.memory * Fraction(str(self.share)))

    @property
    def fits(self) -> bool:
        """True where the activations stay within what is allowed."""
        return self.network.total_bytes <= self.allowed

    @property
    def remaining(self) -> int:
        """Bytes that are left of what is allowed; negative where it is exceeded."""
        return self.allowed - self.network.total_bytes

    @property
    def remaining_fraction(self) -> float:
        """The same as a fraction of what is allowed."""
        return self.remaining / self.allowed if self.allowed else -math.inf

    def with_network(self, **changes: int) -> Calculation:
        """The same question about a changed network.

        Example:
            >>> Calculation(Network(4, 64, 64, 32, 6), memory=2**30).with_network(batch=8).network.batch
            8
        """
        return replace(self, network=replace(self.network, **changes))

    @property
    def largest_batch(self) -> int:
        """The largest batch that fits and that a step may have; 0 where not even one sample fits."""
        return min(self.allowed // replace(self.network, batch=1).total_bytes, LARGEST_BATCH)

    @property
    def largest_resolution(self) -> tuple[int, int] | None:
        """The largest (height, width) that fits in the same proportions, not beyond what was asked for.

        The longer side is as long as fits, the shorter one what belongs to it, rounded down. None where not even one
        point fits.
        """
        points = self.allowed // replace(self.network, height=1, width=1).total_bytes
        long, short = max(self.network.height, self.network.width), min(self.network.height, self.network.width)

        def sides(side: int) -> tuple[int, int]:
            return side, max(short * side // long, 1)

        side = bisect_right(range(1, long + 1), points, key=lambda one: math.prod(sides(one)))
        if not side:
            return None
        return sides(side) if self.network.height >= self.network.width else sides(side)[::-1]

    @property
    def accumulation(self) -> tuple[int, int] | None:
        """(micro-batch, micro-batches for each optimizer step) with the same effective batch; None where none fits."""
        most = min(self.largest_batch, self.network.batch)
        low = [size for size in range(1, math.isqrt(self.network.batch) + 1) if self.network.batch % size == 0]
        fitting = [size for part in low for size in (part, self.network.batch // part) if size <= most]
        return (max(fitting), self.network.batch // max(fitting)) if fitting else None

    @property
    def with_amp(self) -> Calculation | None:
        """The same network under automatic mixed precision: 2 bytes a number. None where it has that already."""
        if self.network.bytes_per_element <= HALF:
            return None
        return self.with_network(bytes_per_element=HALF)
