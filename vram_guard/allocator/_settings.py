"""AllocatorSettings: what PYTORCH_CUDA_ALLOC_CONF can change about the caching allocator."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

MIB = 2**20

#: Bytes of the segments that requests of 1 to 10 MiB are cut from (``large_segment_size_`` in
#: AllocatorConfig.h; ``kLargeBuffer`` in torch 2.6).
LARGE_SEGMENT = 20 * MIB

#: Requests of at least this many bytes get a segment of their own (``kMinLargeAlloc``).
LEAST_OWN_SEGMENT = 10 * MIB

#: ``roundup_power2_divisions`` has one entry for each power of two from 1 MiB to 32 GiB
#: (``kRoundUpPowerOfTwoIntervals`` in AllocatorConfig.cpp).
INTERVALS = 16

#: The variables that torch reads, in its order; the first that is set counts (AllocatorConfig.cpp).
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

#: Options that torch knows and that do not change how much device memory is reserved: they are about pinned
#: host memory, locks, CUDA graphs, and the wording of errors (CUDAAllocatorConfig.h, AllocatorConfig.cpp).
WITHOUT_EFFECT = frozenset(
    {
        *("graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_max_cached_size_mb"),
        *("pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb"),
        *("pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register"),
        *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom"),
    }
)

_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of PyTorch's native caching allocator; the defaults are PyTorch's.

    Attributes:
        expandable_segments: one growing segment per pool and stream instead of many fixed ones.
        max_split_size: bytes; blocks of at least this size are never split, nor used for smaller requests.
            None: no limit. At least ``large_segment_size``.
        roundup_power2_divisions: into how many equal parts each power of two is divided before a size is
            rounded up to the next part: 16 numbers, for sizes below 2 MiB, 2 to 4 MiB, ..., 32 GiB and more;
            0 or 1: no such rounding. Empty: none anywhere.
        garbage_collection_threshold: fraction of the allowed memory above which unused segments are freed
            before new ones are taken; 0.0: off. torch heeds it only while ``per_process_memory_fraction``
            is below 1.
        large_segment_size: bytes of the segments that requests of 1 to 10 MiB share.
        max_non_split_rounding_size: bytes by which a block that may not be split can exceed the request that
            it serves; None: ``large_segment_size``.
        per_process_memory_fraction: the part of the device's memory that the allocator may reserve
            (``torch.cuda.set_per_process_memory_fraction`` sets the same).

    Raises:
        InvalidInputError: for values that torch refuses.

    Example:
        >>> AllocatorSettings(max_split_size=128 * 2**20) == AllocatorSettings.from_conf("max_split_size_mb:128")
        True
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = LARGE_SEGMENT
    max_non_split_rounding_size: int | None = None
    per_process_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.large_segment_size <= LEAST_OWN_SEGMENT:
            raise InvalidInputError(
                _("large_segment_size must be more than 10 MiB (large_segment_size_mb: 11 or more)")
            )
        for name in ("max_split_size", "max_non_split_rounding_size"):
            size = getattr(self, name)
            if size is not None and size < self.large_segment_size:
                least = self.large_segment_size // MIB
                message = _(
                    "{name} must be at least large_segment_size ({least} MiB), not {size} bytes",
                    name=name,
                    least=least,
                    size=size,
                )
                raise InvalidInputError(message)
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise InvalidInputError(_("garbage_collection_threshold must lie between 0 and 1 (0: off)"))
        if not 0.0 <= self.per_process_memory_fraction <= 1.0:
            raise InvalidInputError(_("per_process_memory_fraction must lie between 0 and 1"))
        if len(self.roundup_power2_divisions) not in (0, INTERVALS):
            raise InvalidInputError(
                _("roundup_power2_divisions takes {count} numbers, one for each power of two", count=INTERVALS)
            )
        for divisions in self.roundup_power2_divisions:
            _power_of_two_or_zero(divisions)

    @classmethod
    def from_conf(cls, text: str) -> AllocatorSettings:
        """Read PYTORCH_CUDA_ALLOC_CONF's text, e.g. "max_split_size_mb:128,expandable_segments:True".

        The grammar is that of AllocatorConfig.cpp in torch 2.13. Where torch lets a typo pass in silence
        ("40x" read as 40, "-1" as no limit, a comma for a colon) this raises.

        Raises:
            InvalidInputError: for anything torch does not know or refuses, and for
                ``backend:cudaMallocAsync``, whose memory pool belongs to the CUDA driver and is not modelled
                here.

        Example:
            >>> AllocatorSettings.from_conf("expandable_segments:True,garbage_collection_threshold:0.8")
            AllocatorSettings(expandable_segments=True, ... garbage_collection_threshold=0.8, ...)
        """
        fields: dict[str, Any] = {}
        for key, value in _groups(_tokens(text)):
            fields.update(_read(key, value))
        return cls(**fields)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> AllocatorSettings:
        """The settings that a process with this environment runs under (default: this process's).

        Raises:
            InvalidInputError: as :meth:`from_conf`, or where PYTORCH_NO_CUDA_MEMORY_CACHING switches caching
                off.

        Example:
            >>> AllocatorSettings.from_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}).max_split_size
            67108864
        """
        environ = os.environ if environ is None else environ
        for name in ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"):
            if environ.get(name, "0") != "0":
                raise InvalidInputError(
                    _("{name} switches the caching allocator off, which is not modelled: unset it", name=name)
                )
        for name in VARIABLES:
            if name in environ:
                return cls.from_conf(environ[name])
        return cls()

    def divisions_at(self, size: int) -> int:
        """Parts that the power of two below ``size`` bytes is divided into; 0 or 1: no such rounding.

        Example:
            >>> AllocatorSettings.from_conf("roundup_power2_divisions:[2:4,>:8]").divisions_at(5 * 2**20)
            8
        """
        if not self.roundup_power2_divisions:
            return 0
        interval = max(0, size.bit_length() - MIB.bit_length())
        return self.roundup_power2_divisions[min(interval, INTERVALS - 1)]


def _refused(problem: str) -> InvalidInputError:
    return InvalidInputError(_("allocator settings: {problem}", problem=problem))


def _tokens(text: str) -> list[str]:
    """The separators ``,:[]`` and what stands between them, without white space (``ConfigTokenizer``)."""
    return [token for token in re.split(r"([,:\[\]])", re.sub(r"\s", "", text)) if token]


def _groups(tokens: list[str]) -> list[tuple[str, list[str]]]:
    """``key:value`` pairs; the value is one token, or those between "[" and "]" with both brackets."""
    groups = []
    at = 0
    while at < len(tokens):
        key = tokens[at]
        if key in ",:[]":
            raise _refused(_("expected an option's name, found {text}", text=repr(key)))
        if tokens[at + 1 : at + 2] != [":"] or tokens[at + 2 : at + 3] in ([], [","], [":"], ["]"]):
            raise _refused(_("{option} needs a value, as in {example}", option=repr(key), example=f"{key}:VALUE"))
        end = at + 3
        if tokens[at + 2] == "[":
            if "]" not in tokens[end:]:
                raise _refused(_('the list of {option} lacks its closing "]"', option=repr(key)))
            end = tokens.index("]", end) + 1
        groups.append((key, tokens[at + 2 : end]))
        if end < len(tokens) and tokens[end] != ",":
            raise _refused(_('expected "," after {option}, found {text}', option=repr(key), text=repr(tokens[end])))
        at = end + 1
    return groups


def _read(key: str, value: list[str]) -> dict[str, Any]:
    """The fields of AllocatorSettings that one option sets."""
    if key in WITHOUT_EFFECT:
        return {}
    if key not in _READERS:
        near = difflib.get_close_matches(key, [*_READERS, *WITHOUT_EFFECT], n=1)
        hint = _("; did you mean {name}?", name=repr(near[0])) if near else ""
        raise _refused(_("PyTorch has no option {option}", option=repr(key)) + hint)
    if key == "roundup_power2_divisions":
        return {key: _divisions(value)}
    if len(value) != 1:
        raise _refused(_("{option} takes one value, not a list", option=key))
    field, reader = _READERS[key]
    read = reader(key, value[0])
    return {field: read} if field else {}


def _mebibytes(key: str, value: str) -> int:
    return _count(key, value) * MIB


def _count(key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]+", value):
        raise _refused(_("{option} takes a whole number, not {value}", option=key, value=repr(value)))
    return int(value)


def _threshold(key: str, value: str) -> float:
    number = _number(key, value)
    if not 0.0 < number < 1.0:
        raise _refused(
            _("{option} must lie between 0 and 1, and be neither, not {value}", option=key, value=repr(value))
        )
    return number


def _number(key: str, value: str) -> float:
    if not _FLOAT.fullmatch(value):
        raise _refused(_("{option} takes a number, not {value}", option=key, value=repr(value)))
    return float(value)


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _refused(_("{option} takes True or False, not {value}", option=key, value=repr(value)))
    return value == "True"


def _native(key: str, value: str) -> None:
    if value in ("cudaMallocAsync", "hipMallocAsync"):
        raise InvalidInputError(
            _(
                "backend:{value} is not modelled: its pool belongs to the CUDA driver. Plan with the native allocator "
                "(remove the option), or measure on the device",
                value=value,
            )
        )
    if value != "native":
        raise _refused(_("{option} is native or cudaMallocAsync, not {value}", option=key, value=repr(value)))


def with_expandable_segments(environ: Mapping[str, str] | None = None, *, grow: bool = True) -> tuple[str, str]:
    """The variable, and its value, that let a new process's segments expand; its other settings stay.

    Args:
        environ: the environment as it is; None: this process's.
        grow: False: the value that keeps them from it.

    Example:
        >>> with_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
        ('PYTORCH_CUDA_ALLOC_CONF', 'max_split_size_mb:64,expandable_segments:True')
    """
    environ = os.environ if environ is None else environ
    # The first name is read by every release: later ones (2.9 on: PYTORCH_ALLOC_CONF) still know it.
    name = next((name for name in VARIABLES if name in environ), VARIABLES[0])
    kept = [part for part in _SETTING.findall(environ.get(name, "")) if not part.startswith("expandable_segments")]
    return name, ",".join([*kept, f"expandable_segments:{grow}"])


#: A setting of the variable: a list in brackets holds commas of its own.
_SETTING = re.compile(r"[^,\[\]]+(?:\[[^\]]*\])?")

_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "backend": ("", _native),
    "expandable_segments": ("expandable_segments", _truth),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "large_segment_size_mb": ("large_segment_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", _mebibytes),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "per_process_memory_fraction": ("per_process_memory_fraction", _number),
    "roundup_power2_divisions": ("roundup_power2_divisions", _count),
}


def _divisions(value: list[str]) -> tuple[int, ...]:
    """``parseRoundUpPower2Divisions``: one number for all sizes, or "[256:1,512:2,>:4]" with bounds in MiB.

    The first bound's number also holds for all smaller sizes; ">" holds for the intervals after the last
    bound (in torch 2.6 it overwrote the last bound as well); intervals that nothing names keep 0.
    """
    if value[0] != "[":
        parts = _count("roundup_power2_divisions", value[0])
        if parts == 0:
            raise InvalidInputError(_("roundup_power2_divisions must be a power of two, not 0"))
        return (_power_of_two_or_zero(parts),) * INTERVALS
    divisions = [0] * INTERVALS
    last, first = 0, True
    for bound, parts in _pairs(value[1:-1]):
        if bound == ">":
            divisions[last + 1 :] = [parts] * (INTERVALS - last - 1)
            continue
        last = min(_interval(bound), INTERVALS - 1)
        if first:
            divisions[:last] = [parts] * last
            first = False
        divisions[last] = parts
    return tuple(divisions)


def _pairs(tokens: list[str]) -> list[tuple[str, int]]:
    """``bound:divisions`` pairs of a list; one comma may trail, as torch allows."""
    pairs = []
    for at in range(0, len(tokens), 4):
        pair = tokens[at : at + 4]
        if len(pair) < 3 or pair[1] != ":" or pair[3:] not in ([], [","]):
            raise InvalidInputError(_("roundup_power2_divisions takes a list like [256:1,512:2,>:4]"))
        pairs.append((pair[0], _power_of_two_or_zero(_count("roundup_power2_divisions", pair[2]))))
    return pairs


def _interval(bound: str) -> int:
    mebibytes = _count("roundup_power2_divisions", bound)
    if mebibytes == 0 or mebibytes & (mebibytes - 1):
        raise InvalidInputError(
            _("roundup_power2_divisions: the bound {bound} must be a power of two (MiB)", bound=bound)
        )
    return mebibytes.bit_length() - 1


def _power_of_two_or_zero(divisions: int) -> int:
    if divisions < 0 or divisions & (divisions - 1):
        raise InvalidInputError(
            _("roundup_power2_divisions: {count} must be a power of two, or 0 for no rounding", count=divisions)
        )
    return divisions
