"""Budget: how many bytes PyTorch's allocator may reserve, and why."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Real

from vram_guard.allocator import Placement
from vram_guard.budget import nvml, torch_cuda
from vram_guard.budget._device import DeviceMemory, GpuProcess, cuda_ordinal, placement_here
from vram_guard.budget._names import form_of
from vram_guard.budget.catalogue import GPU, context_bytes, find_gpu, match_gpu
from vram_guard.budget.margins import measured_margin
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import LEAST_WRITTEN
from vram_guard.units import format_bytes, parse_bytes, written_bytes

#: The part of the available memory that is left free unless the user says otherwise, where every operator's memory
#: is known: a quantile of measured errors (:mod:`vram_guard.budget.margins`).
DEFAULT_MARGIN = measured_margin().fraction


#: The size of a card in place of its name; "4090 Ti" is a name.
_WITH_UNIT = re.compile(r"[0-9.]+ ?[GM]i?B", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """The memory there is to plan with. Made by :meth:`of` and :meth:`resolve`.

    Attributes:
        total: bytes of the whole amount: the explicit amount, or the device's memory.
        available: bytes PyTorch's allocator may reserve before the margin is taken off.
        margin: the fraction of ``available`` that is left free, in [0, 1).
        source: where the amount comes from: "explicit", "catalogue: RTX 4090", "device 0: NVIDIA ...".
        context: bytes taken off for the CUDA context and libraries: an estimate (see
            :func:`~vram_guard.budget.catalogue.context_bytes`); 0 where nothing had to be taken off.
        driver_reserved: bytes taken off that the driver keeps for itself; 0 as above.
        gpu: the card, where it is in the catalogue.
        free: bytes free on the device when it was read, None where no device was read.
        processes: other processes that held memory on the device.
        compute_capability: (major, minor) of the card, None where no card is known. Planning then assumes
            nothing about bfloat16.
        notes: sentences a person should read with the numbers.
        margin_source: where the margin comes from; "" for one that the user gave.
        multiprocessors: of the card, None where no card is known: then the most that a card of this compute capability
            has is assumed of kernels that fill it.
        device_memory: bytes of the whole card as CUDA reports them, None where no card is known.
        placement: where CUDA puts new segments on the card, "below" or "above" the earlier ones; None where that is not
            known, see :attr:`vram_guard.GPU.placement`.

    Example:
        >>> Budget.resolve("10GiB", gpu="RTX 4090", margin=0.1).explain()
        '9.00 GiB usable; 10.00 GiB (explicit); less a margin of 10%'
    """

    total: int
    available: int
    margin: float
    source: str
    context: int = 0
    driver_reserved: int = 0
    gpu: GPU | None = None
    free: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    compute_capability: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    margin_source: str = ""
    multiprocessors: int | None = None
    device_memory: int | None = None
    placement: Placement | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", checked_margin(self.margin))
        if not 0 <= self.available <= self.total:
            raise InvalidInputError(
                _(
                    "available ({available}) must be between 0 and the total of {total} bytes",
                    available=self.available,
                    total=self.total,
                )
            )

    def __repr__(self) -> str:
        return f"<Budget: {format_bytes(self.usable)} usable of {format_bytes(self.total)}, {self.source}>"

    @property
    def usable(self) -> int:
        """Bytes PyTorch's allocator may reserve: ``available`` less the margin, rounded down."""
        # Fraction(float) is exact, so a margin of 0 takes off nothing at any size.
        return math.floor(self.available * (1 - Fraction(self.margin)))

    @classmethod
    def of(cls, value: Budget | GPU | str | int, margin: float | None = None) -> Budget:
        """A budget from an amount ("24GiB", bytes), a card ("RTX 4090") or a budget.

        Args:
            value: an amount is what PyTorch's allocator may reserve, and nothing but the margin is taken
                off; a card is its memory less what the driver and the CUDA context take, less the margin.
            margin: the fraction left free, in [0, 1). None: :data:`DEFAULT_MARGIN`, or the budget's own.

        Raises:
            InvalidInputError: for anything else, and for text such as "24", which is no number of bytes; for an unknown
                card the nearest names are listed.

        Example:
            >>> Budget.of("24GiB", margin=0).usable == 24 * 2**30
            True
            >>> Budget.of("RTX 4090").source
            'catalogue: RTX 4090'
        """
        if isinstance(value, Budget):
            return value if margin is None else replace(value, margin=margin, margin_source="")
        kept, source = _margin(margin)
        if isinstance(value, GPU):
            return replace(_of_card(value, kept), margin_source=source)
        if isinstance(value, str) and _names_a_card(value):
            return replace(_of_card(find_gpu(value), kept), margin_source=source)
        amount = written_bytes(value)
        return cls(amount, amount, kept, "explicit", margin_source=source)

    @classmethod
    def resolve(
        cls,
        budget: Budget | str | int | None = None,
        gpu: GPU | str | None = None,
        margin: float | None = None,
        device: object = None,
        gpu_memory: str | float | None = None,
    ) -> Budget:
        """The budget that a user's settings mean.

        Args:
            budget: what PyTorch's allocator may reserve; nothing is taken off but the margin. A card's
                name is accepted here too.
            gpu: a whole card by name, or by its size: "24GB". A name together with an amount says which card the
                amount is part of.
            margin: the fraction left free, in [0, 1). None: :data:`DEFAULT_MARGIN`, or the budget's own.
            device: a CUDA device of this machine (1, "cuda:1"); what is free on it now. None with neither
                of the others: the current device.
            gpu_memory: of a whole GPU: an amount, of which the CUDA context takes its part; a number without a unit is
                GB, as the makers of cards write. Together with a card's name, that card with so much memory.

        Raises:
            InvalidInputError: for settings that mean nothing or contradict each other.
            NoDeviceError: neither is given and there is no GPU here.
            DeviceQueryError: neither is given and the GPU here cannot be read.
        """
        if device is not None and not (budget is None and gpu is None and gpu_memory is None):
            raise InvalidInputError(_("give either device= (what is free there) or budget= and gpu=, not both"))
        if gpu_memory is None and isinstance(gpu, str) and _WITH_UNIT.fullmatch(gpu.strip()):
            gpu, gpu_memory = None, gpu
        card = gpu if gpu is None or isinstance(gpu, GPU) else find_gpu(gpu)
        if gpu_memory is not None:
            if budget is not None:
                raise InvalidInputError(
                    _("give gpu_memory= (of the whole GPU) or budget= (of PyTorch's allocator), not both")
                )
            return _of_memory(gpu_memory, card, margin)
        if budget is not None:
            amount = cls.of(budget, margin)
            return amount if card is None else amount.on_card(card)
        kept, source = _margin(margin)
        found = _at_hand(device, kept) if card is None else _of_card(card, kept)
        return replace(found, margin_source=source)

    def for_tier(self, tier: str, network: str | None = None) -> Budget:
        """The budget as answers of this tier for this kind of network are compared with it: with their measured margin.

        A margin that the user gave stays, and so does everything else.
        """
        if not self.margin_source:
            return self
        found = measured_margin(tier, network)
        return replace(self, margin=found.fraction, margin_source=found.source)

    def holds(self, peak_reserved: int, tier: str, network: str | None = None) -> bool:
        """True if a predicted peak is known to stay within the budget, its margin kept; a lower bound never is.

        Args:
            peak_reserved: bytes.
            tier: of the prediction.
            network: the kind of network; None: not known.
        """
        return tier != "formula" and peak_reserved <= self.for_tier(tier, network).usable

    @property
    def source_text(self) -> str:
        """``source`` in the reader's language."""
        if self.source == "explicit":
            return _("explicit")
        if self.source == "given":
            return _("given")
        if self.free is None and self.gpu is not None:
            return _("catalogue: {name}", name=self.gpu.name)
        return self.source

    def explain(self, *, brief: bool = False) -> str:
        """One line: the usable amount, where it comes from and what was taken off (but not in brief)."""
        total = format_bytes(self.total)
        parts = [_("{amount} usable", amount=format_bytes(self.usable))]
        if self.free is None:
            parts.append(_("{total} ({source})", total=total, source=self.source_text))
        else:
            free = format_bytes(self.free)
            parts.append(_("{free} free of {total} ({source})", free=free, total=total, source=self.source))
        if brief:
            return _("; ").join(parts)
        if self.driver_reserved:
            parts.append(_("less {amount} kept by the driver", amount=format_bytes(self.driver_reserved)))
        if self.context:
            parts.append(_("less {amount} for the CUDA context (estimate)", amount=format_bytes(self.context)))
        share = f"{100 * self.margin:.4g}%"
        if self.margin_source:
            share = _("{share} ({source})", share=share, source=self.margin_source)
        parts.append(_("less a margin of {share}", share=share))
        if self.processes:
            described = ", ".join(map(_described, self.processes))
            parts.append(_("other processes: {processes}", processes=described))
        return _("; ").join([*parts, *self.notes])

    def on_card(self, gpu: GPU) -> Budget:
        """The same amount, as a part of this card.

        Raises:
            InvalidInputError: the budget is for another card, or larger than this one.
        """
        if self.gpu is not None and self.gpu != gpu:
            raise InvalidInputError(
                _("budget is for {name} and gpu says {other}: give one of them", name=self.gpu.name, other=gpu.name)
            )
        if self.total > gpu.nominal_gb * 2**30:
            raise InvalidInputError(
                _(
                    "budget is {amount}, more than {name} has ({size} GiB): lower it, or leave gpu out",
                    amount=format_bytes(self.total),
                    name=gpu.name,
                    size=gpu.nominal_gb,
                )
            )
        memory = self.device_memory or gpu.memory_bytes - gpu.driver_reserved
        known = replace(
            self,
            gpu=gpu,
            compute_capability=gpu.compute_capability,
            device_memory=memory,
            placement=self.placement or gpu.placement,
        )
        most = _of_card(gpu, self.margin).available
        if self.available <= most:
            return known
        # "24GiB" of a 24 GiB card: the driver and the context have their part of it all the same.
        note = _("{name} leaves PyTorch at most {amount}", name=gpu.name, amount=format_bytes(most))
        return replace(known, available=most, notes=(*self.notes, note))


def _of_memory(memory: str | float, card: GPU | None, margin: float | None) -> Budget:
    """A GPU with so much memory, less what its CUDA context takes."""
    text = str(memory).strip()
    plain = text.replace(".", "", 1).isdigit() and text.isascii()
    if plain and float(text) >= LEAST_WRITTEN:
        raise InvalidInputError(
            _('gpu_memory={value} is in GB: write "24", "24GiB", or bytes with their unit: "{value}B"', value=text[:40])
        )
    size = parse_bytes(f"{text}GB" if plain else text, "gpu_memory")
    context = context_bytes(None) if card is None else card.context_bytes
    if size <= context:
        raise InvalidInputError(
            _(
                "gpu_memory is less than the {taken} of a CUDA context: for what PyTorch may use give budget",
                taken=format_bytes(context),
            )
        )
    kept, source = _margin(margin)
    whole = Budget(size, size - context, kept, "given", context=context, margin_source=source, device_memory=size)
    return whole if card is None else whole.on_card(card)


def checked_margin(margin: object) -> float:
    """``margin`` as a float in [0, 1).

    Raises:
        InvalidInputError: for bool, text, NaN, negative numbers and 1 or more (5 for 5% is a mistake).

    Example:
        >>> checked_margin(0.05)
        0.05
    """
    if isinstance(margin, bool) or not isinstance(margin, Real):
        raise InvalidInputError(_("margin must be a fraction such as 0.05, not {value}", value=repr(margin)))
    fraction = float(margin)
    if not 0 <= fraction < 1:  # true for NaN as well
        raise InvalidInputError(
            _("margin must be a fraction of at least 0 and below 1 (0.05 for 5%), not {value}", value=repr(margin))
        )
    return fraction


def _margin(margin: float | None) -> tuple[float, str]:
    """(The fraction, where it comes from); "" where it was given."""
    if margin is not None:
        return checked_margin(margin), ""
    usual = measured_margin()
    return usual.fraction, usual.source


def _names_a_card(text: str) -> bool:
    """True if ``text`` is meant as a card's name rather than an amount.

    Raises:
        InvalidInputError: for "4090", which is both a card and an implausible number of bytes.
    """
    if text.strip().isdigit() and _is_known(text):
        name = find_gpu(text).name
        raise InvalidInputError(
            _(
                'budget={text} is {count} bytes; for the card write "{name}"',
                text=repr(text),
                count=text.strip(),
                name=name,
            )
        )
    try:
        parse_bytes(text)
    except InvalidInputError:
        # An amount with a typo in it ("24GIGS") begins with a number or a sign; cards' names do too
        # ("4090 Ti"), so those are names only where the catalogue knows them.
        amount_like = text.strip()[:1] in {*"0123456789+-.", ""} or form_of(text) <= {
            "inf",
            "infinity",
            "nan",
        }
        return not amount_like or _is_known(text)
    return False


def _is_known(text: str) -> bool:
    try:
        find_gpu(text)
    except InvalidInputError:
        return False
    return True


def _of_card(gpu: GPU, margin: float) -> Budget:
    available = gpu.memory_bytes - gpu.driver_reserved - gpu.context_bytes
    return Budget(
        total=gpu.memory_bytes,
        available=available,
        margin=margin,
        source=f"catalogue: {gpu.name}",
        context=gpu.context_bytes,
        driver_reserved=gpu.driver_reserved,
        gpu=gpu,
        compute_capability=gpu.compute_capability,
        multiprocessors=gpu.multiprocessors,
        device_memory=gpu.memory_bytes - gpu.driver_reserved,
        placement=gpu.placement,
    )


def _at_hand(device: object, margin: float) -> Budget:
    """The memory that is free now on a GPU of this machine."""
    ordinal = cuda_ordinal(device)
    if ordinal is None:
        ordinal = torch_cuda.current_device()
    use = torch_cuda.use_of(ordinal)
    try:
        memory = nvml.read_device(ordinal, torch_cuda.device_uuid(ordinal))
    except nvml.NvmlUnavailableError as reason:
        memory, use = torch_cuda.read_device(ordinal, str(reason))
    gpu = None if memory.mig or memory.unified else match_gpu(memory.name, memory.total)
    context, available, notes = _left(memory, use, gpu)
    return Budget(
        total=memory.total,
        available=available,
        margin=margin,
        source=f"device {ordinal}: {memory.name}",
        context=context,
        gpu=gpu,
        free=memory.free,
        processes=memory.processes,
        compute_capability=memory.compute_capability,
        multiprocessors=memory.multiprocessors or (None if gpu is None else gpu.multiprocessors),
        notes=(*memory.notes, *notes, *torch_cuda.notes()),
        device_memory=memory.total if gpu is None else min(memory.total, gpu.memory_bytes - gpu.driver_reserved),
        placement=placement_here(None if gpu is None else gpu.placement),
    )


def _left(memory: DeviceMemory, use: torch_cuda.TorchUse | None, gpu: GPU | None) -> tuple[int, int, tuple[str, ...]]:
    """(context to take off, bytes the allocator may reserve, notes) on a device that was read."""
    if use is None:
        context = context_bytes(memory.multiprocessors if gpu is None else gpu.multiprocessors)
        return context, max(0, memory.free - context), ()
    # This process has its context already, and what its allocator holds it can use again.
    available = min(use.free + use.reserved, memory.total)
    if use.cap is None or use.cap >= available:
        return 0, available, ()
    return 0, use.cap, (_("torch's memory fraction allows {amount}", amount=format_bytes(use.cap)),)


def _described(process: GpuProcess) -> str:
    held = _("an unknown amount") if process.bytes is None else format_bytes(process.bytes)
    return _("{name} (pid {pid}) holds {amount}", name=process.name, pid=process.pid, amount=held)
