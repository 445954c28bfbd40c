"""The GPUs people train on, by name: memory, capability, bandwidth, dense throughput, and their sources.

The figures live in ``catalogue.json``. There every figure names a document, and every document says how far
it was checked. Dense figures only (NVIDIA's data sheets often print the sparse ones, twice as high), tensor
figures with FP32 accumulation, which is what PyTorch's matrix multiplications use. Unknown is None.

Where NVIDIA prints no tensor figure for a card, it is the FP32 figure times the ratio that the tensor cores
of that architecture and product line have (fp16 and bf16 / TF32): GeForce RTX 20: 4 / none; TITAN RTX: 8 /
none; GeForce RTX 30, 40 and 50: 2 / 1; RTX A, RTX Ada and RTX PRO: 4 / 2. The ratios hold for the cards of
each line whose figures are printed (whitepapers named in the file).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from vram_guard.allocator import Placement
from vram_guard.budget._names import Form, differences, form_of, nearest_names
from vram_guard.errors import InvalidInputError
from vram_guard.language import _

#: Useful gigatransfers a second and lane by PCI Express generation, times 128b/130b coding, over 8 bits
#: (PCI Express base specifications 3.0, 4.0, 5.0), in bytes a second and lane in one direction.
_PCIE_BYTES_PER_LANE = {3: 8e9 * 128 / 130 / 8, 4: 16e9 * 128 / 130 / 8, 5: 32e9 * 128 / 130 / 8}

#: How the names of cards begin for which the placement of segments is known, see :attr:`GPU.placement`.
_PLACED_BELOW = ("H100 ", "H200", "Tesla T4")

# A card whose measured memory is further off than this is another variant, or a slice of it.
_SAME_CARD = 0.1


@dataclass(frozen=True)
class GPU:
    """One graphics card.

    Attributes:
        name: the name used here ("RTX 4090"); names are unique.
        aliases: other names that mean this card; NVML's own name is understood without its brand words.
        architecture: NVIDIA's name of it ("Ampere").
        nominal_gb: the advertised size, in GB as the trade counts (GiB).
        memory_bytes: total as NVML and nvidia-smi report it, in bytes.
        cuda_memory_bytes: total as CUDA and torch report it, in bytes, where it was published; the
            driver keeps the difference for itself.
        compute_capability: (major, minor).
        multiprocessors: number of streaming multiprocessors (SM).
        memory_bandwidth: bytes a second.
        fp32_flops: FLOP a second without tensor cores.
        tf32_flops, fp16_flops, bf16_flops: dense FLOP a second on tensor cores, FP32 accumulation; None
            where the card has no such tensor cores.
        pcie_generation, pcie_lanes: link to the host; None where it is another link, or unknown.
        sources: pairs (figure, key of a document), see :func:`source_of`.
        host_link_bandwidth: bytes a second to the host, one way, over a link that is not PCIe; else None.
    """

    name: str
    aliases: tuple[str, ...]
    architecture: str
    nominal_gb: int
    memory_bytes: int
    cuda_memory_bytes: int | None
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bandwidth: int
    fp32_flops: int
    tf32_flops: int | None
    fp16_flops: int | None
    bf16_flops: int | None
    pcie_generation: int | None
    pcie_lanes: int | None
    sources: tuple[tuple[str, str], ...]
    host_link_bandwidth: int | None = None

    @property
    def placement(self) -> Placement | None:
        """Where CUDA puts new segments on it, under native Linux; None where no measurement tells.

        An H100 (torch 2.6 and 2.11) and an H200 (torch 2.11): read out of addresses in recorded histories, see
        benchmarks/gpu/results/NOTES.md. A T4: no addresses are known. Of the two ways this one was chosen by 20 LoRA
        trainings that were measured on it (benchmarks/published/results/lora_t4.json): it comes to their reserved
        peaks within 0.8%, the other one is up to 8.9% off.
        """
        return "below" if self.name.startswith(_PLACED_BELOW) else None

    @property
    def pcie_bandwidth(self) -> int | None:
        """Bytes a second between host and card, one way, at most; None where it is not PCIe, or unknown."""
        if self.pcie_generation is None or self.pcie_lanes is None:
            return None
        return int(_PCIE_BYTES_PER_LANE[self.pcie_generation] * self.pcie_lanes)

    @property
    def host_bandwidth(self) -> int | None:
        """Bytes a second between host and card, one way, at most, over whatever link; None where unknown."""
        return self.host_link_bandwidth if self.host_link_bandwidth is not None else self.pcie_bandwidth

    @property
    def driver_reserved(self) -> int:
        """Bytes of :attr:`memory_bytes` that the driver keeps and CUDA does not offer.

        The published difference for this card; else the largest published for a card with at most as
        much memory (an upper estimate, marked by ``cuda_memory_bytes`` being None).
        """
        if self.cuda_memory_bytes is not None:
            return self.memory_bytes - self.cuda_memory_bytes
        return _reserved_like(self.nominal_gb)

    @property
    def context_bytes(self) -> int:
        """Bytes a training process holds outside PyTorch's allocator, see :func:`context_bytes`."""
        return context_bytes(self.multiprocessors)

    def source_of(self, figure: str) -> str:
        """The source of a figure ("memory_bytes", "pcie", ...), in words.

        Raises:
            KeyError: for a figure that has no source because it is unknown.
        """
        document = _data()["documents"][dict(self.sources)[figure]]
        return f"{document['title']} [{document['checked']}]"


def catalogue() -> tuple[GPU, ...]:
    """All known GPUs, oldest architecture first."""
    return _catalogue()


def find_gpu(name: str) -> GPU:
    """The GPU that ``name`` means: "RTX 4090", "4090", "nvidia geforce rtx 4090", "A100 40GB", ...

    Brand words, case, spaces and hyphens do not matter. Where several cards match and differ only in
    speed (PCIe and SXM boards of one memory size), the slowest is meant, so that nothing is promised.

    Raises:
        InvalidInputError: for an unknown name (the nearest ones are listed), and for a name that leaves
            the amount of memory open ("A100": 40 or 80 GB).
    """
    if not isinstance(name, str):
        raise InvalidInputError(_('a GPU is given by its name ("RTX 4090"), not {name}', name=repr(name)))
    wanted = form_of(name)
    exact = [gpu for gpu in _catalogue() if any(form == wanted for form in _forms(gpu))]
    found = exact or _closest(wanted)
    if not found:
        raise InvalidInputError(_unknown(name))
    if len({(gpu.memory_bytes, gpu.compute_capability) for gpu in found}) > 1:
        names = ", ".join(f'"{gpu.name}"' for gpu in found[:8]) + (", ..." if len(found) > 8 else "")
        raise InvalidInputError(
            _("GPU {name} could be several cards: {names}. Name one of them.", name=repr(name), names=names)
        )
    return min(found, key=lambda gpu: gpu.memory_bandwidth)


def match_gpu(nvml_name: str, memory_bytes: int) -> GPU | None:
    """The catalogue's entry for a card of this machine, or None.

    Args:
        nvml_name: the product name as NVML or torch gives it.
        memory_bytes: the total measured, in bytes, which tells variants of one name apart.
    """
    wanted = form_of(nvml_name)
    same = [gpu for gpu in _catalogue() if _extra_words(gpu, wanted) == 0]
    near = [gpu for gpu in same if abs(gpu.memory_bytes - memory_bytes) <= _SAME_CARD * gpu.memory_bytes]
    return min(near, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)


@cache
def most_multiprocessors(capability: tuple[int, int]) -> int:
    """The most multiprocessors that a card of this compute capability has, or of the nearest older one there is.

    It is assumed of a card that is not named: what kernels take to fill a card grows with it.
    """
    known = sorted({gpu.compute_capability for gpu in _catalogue()})
    nearest = max((one for one in known if one <= capability), default=known[0])
    return max(gpu.multiprocessors for gpu in _catalogue() if gpu.compute_capability == nearest)


def context_bytes(multiprocessors: int | None) -> int:
    """Bytes that a training process holds on the GPU outside PyTorch's allocator: an estimate from reports.

    The CUDA context, loaded kernels and the libraries' handles. No table is published, but torch's
    out-of-memory message (2.1 and later) prints what a process holds in all and what PyTorch reserved of
    it; the difference is this number. ``catalogue.json`` lists such messages (the card is named by the
    reporter, numbers are rounded to 0.01 GiB). They grow with the number of multiprocessors, by about
    3.5 MiB each. The estimate is the least-squares line, raised until no report lies above it: 0.26 GiB on
    a T4, 0.56 GiB on an RTX 4090. It is not a measurement of ours.

    Args:
        multiprocessors: of the card; None where unknown: the largest of the reports.
    """
    if multiprocessors is None:
        return max(held for _, held in context_reports())
    slope, offset = _context_line()
    return round(slope * multiprocessors + offset)


def context_reports() -> tuple[tuple[int, int], ...]:
    """(multiprocessors, bytes outside PyTorch's allocator) of the published reports."""
    return tuple((report["multiprocessors"], report["bytes"]) for report in _data()["context_reports"])


@cache
def _context_line() -> tuple[float, float]:
    from statistics import linear_regression  # brings in half of the standard library's numbers

    reports = context_reports()
    slope, offset = linear_regression(*zip(*reports, strict=True))
    return slope, offset + max(held - slope * count - offset for count, held in reports)


@cache
def _reserved_like(nominal_gb: int) -> int:
    published = [
        (gpu.nominal_gb, gpu.memory_bytes - gpu.cuda_memory_bytes)
        for gpu in _catalogue()
        if gpu.cuda_memory_bytes is not None
    ]
    smallest = min(size for size, _ in published)
    return max(kept for size, kept in published if size <= max(nominal_gb, smallest))


@cache
def _data() -> dict[str, Any]:
    text = files("vram_guard.budget").joinpath("catalogue.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@cache
def _catalogue() -> tuple[GPU, ...]:
    return tuple(_gpu(entry) for entry in _data()["gpus"])


def _gpu(entry: dict[str, Any]) -> GPU:
    major, minor = entry["compute_capability"]
    converted = {
        "aliases": tuple(entry["aliases"]),
        "compute_capability": (major, minor),
        "sources": tuple(entry["sources"].items()),
    }
    return GPU(**{**entry, **converted})


def _forms(gpu: GPU) -> tuple[Form, ...]:
    return tuple(form_of(name) for name in (gpu.name, *gpu.aliases))


def _extra_words(gpu: GPU, wanted: Form) -> int | None:
    """The number of words of the card's name that ``wanted`` leaves out; None where it has a word the card has not.

    The memory size is a word of every name, and one that may be left out.
    """
    size = f"{gpu.nominal_gb}gb"
    counts = [differences(wanted, form, size) for form in _forms(gpu)]
    return min((count for count in counts if count is not None), default=None)


def _closest(wanted: Form) -> list[GPU]:
    counted = [(gpu, _extra_words(gpu, wanted)) for gpu in _catalogue()]
    matches = [(gpu, extra) for gpu, extra in counted if extra is not None]
    fewest = min((extra for _, extra in matches), default=0)
    return [gpu for gpu, extra in matches if extra == fewest]


def _unknown(name: str) -> str:
    nearest = nearest_names(name, [gpu.name for gpu in _catalogue()])
    hint = ""
    if nearest:
        either = _(" or ").join(repr(near) for near in nearest)
        hint = _(" Did you mean {names}?", names=either)
    return _(
        "GPU {name} is not in the catalogue.{hint} A GPU that is not listed can be given by its memory: "
        'budget="24GiB".',
        name=repr(name[:60]),
        hint=hint,
    )
