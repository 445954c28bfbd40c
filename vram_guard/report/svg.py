"""Charts as SVG text, for a page that brings its own colours: every element has a class, none a colour.

Nothing but the standard library is needed. Coordinates are written with one decimal, a tenth of a pixel.
"""

from __future__ import annotations

import math
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from vram_guard.language import _
from vram_guard.report.batch_curve import close_together
from vram_guard.report.categories import PHASES, category_name
from vram_guard.report.plot import LAYERS, stack
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.report.batch_curve import BatchCurve, Limit
    from vram_guard.report.plot import Stack
    from vram_guard.timeline import Estimate, Phase, Timeline

WIDTH, HEIGHT = 960.0, 330.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 14.0, 46.0, 32.0

#: As many as pixels across the page: finer ones cannot be told apart.
COLUMNS = 900

#: Phases narrower than this share of the width have no room for their name.
LEAST_LABELLED = 0.05

HEADROOM = 1.12


class Scale(NamedTuple):
    """From events (or batch sizes) and bytes to pixels."""

    last: int
    top: int

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return LEFT + (WIDTH - LEFT - RIGHT) * value / max(1, self.last)

    def y(self, size: float) -> float:
        """Pixels from above."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * size / max(1, self.top)


class Chart(NamedTuple):
    """A chart and what a script needs to read values off it."""

    svg: str
    data: dict[str, Any]


def timeline_chart(
    timeline: Timeline,
    batch_size: int,
    *,
    usable: int | None = None,
    top: int | None = None,
    settings: AllocatorSettings | None = None,
) -> Chart:
    """The memory of a step over its events, stacked by category, with the peak and the budget marked.

    Args:
        timeline: what to draw.
        batch_size: samples per micro-batch.
        usable: the budget's usable bytes.
        top: bytes at the upper end of the scale; None: a little above what is drawn. Charts that are compared share it.
        settings: the allocator's settings; None: PyTorch's defaults.
    """
    exact = timeline.exact(batch_size)
    drawn = stack(exact, batch_size, settings, most=COLUMNS)
    estimate = exact.at(batch_size, settings=settings)
    peak_event = exact.replay(batch_size, settings=settings).peak_event
    count = len(exact.events)
    scale = Scale(max(1, count - 1), top or scale_top([estimate.peak_reserved], usable))
    parts = [
        *_phases(exact.phases, count, scale),
        *_byte_grid(scale),
        *_areas(drawn, scale),
        f'<path class="reserved" d="{_steps(drawn.events, drawn.reserved, scale)}"/>',
        *_budget_line(usable, scale),
        _peak(estimate, peak_event, _reserved_around(drawn, peak_event), scale),
        f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
        _middle_text(_("allocations and frees, in order"), HEIGHT - 6),
    ]
    said = _(
        "Memory over the step at batch size {batch_size}: peak {peak} allocated, {reserved} reserved.",
        batch_size=batch_size,
        peak=format_bytes(estimate.peak_allocated),
        reserved=format_bytes(estimate.peak_reserved),
    )
    return Chart(_svg(parts, said, focusable=True), _data(drawn, scale.last, peak_event))


def batch_chart(curve: BatchCurve, *, at: int | None = None) -> str:
    """The reserved peak over the batch size, a line for each budget, its largest batch marked."""
    last, top = curve.sizes[-1], int(max(*curve.peaks, *(limit.usable for limit in curve.limits)) * HEADROOM)
    scale = Scale(last, top)
    points = " ".join(f"{scale.x(n):.1f},{scale.y(peak):.1f}" for n, peak in zip(curve.sizes, curve.peaks, strict=True))
    parts = [*_byte_grid(scale), *_size_ticks(scale), f'<polyline class="curve" points="{points}"/>']
    for limit in curve.limits:
        parts += _budget_line(limit.usable, scale)
        if limit.peak is not None:
            parts.append(
                f'<circle class="limit" cx="{scale.x(limit.largest):.1f}" cy="{scale.y(limit.peak):.1f}" r="4"/>'
            )
    parts += [_limit_label(group, curve, scale) for group in close_together(curve.limits, 0.055)]
    if at is not None and at in curve.sizes:
        x, y = scale.x(at), scale.y(curve.peaks[curve.sizes.index(at)])
        parts.append(f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        parts.append(
            f'<text class="ink" x="{x + 9:.1f}" y="{y + 12:.1f}">{escape(_("batch {count}", count=at))}</text>'
        )
    parts.append(_middle_text(_("batch size"), HEIGHT - 4))
    return _svg(parts, _("The reserved peak over the batch size, and the largest batch of each GPU."))


def scale_top(peaks: Iterable[int], usable: int | None) -> int:
    """The upper end of a scale for these peaks; a budget far above them is left outside."""
    highest = max(1, *peaks)
    if usable is not None and usable < 3 * highest:
        highest = max(highest, usable)
    return int(highest * HEADROOM)


def _data(drawn: Stack, last: int, peak_event: int) -> dict[str, Any]:
    layers = [{"name": category_name(name), "bytes": sizes} for name, sizes in drawn.layers.items() if any(sizes)]
    peak = next((column for column, event in enumerate(drawn.events) if event >= peak_event), 0)
    return {
        "events": drawn.events,
        "last": last,
        "layers": layers,
        "reserved": drawn.reserved,
        "peak": peak,
        "area": {"left": LEFT, "width": WIDTH - LEFT - RIGHT},
        "words": {"allocated": _("allocated"), "reserved": _("reserved")},
    }


def _areas(drawn: Stack, scale: Scale) -> list[str]:
    """One path for each category, on the sum of those below it."""
    floor = [0] * len(drawn.events)
    areas = []
    for category in LAYERS:
        if not any(drawn.layers[category]):
            continue
        roof = [low + size for low, size in zip(floor, drawn.layers[category], strict=True)]
        way = f"{_steps(drawn.events, roof, scale)} {_steps_back(drawn.events, floor, scale)}Z"
        areas.append(
            f'<path d="{way}" fill="var(--{category})"><title>{escape(category_name(category))}</title></path>'
        )
        floor = roof
    return areas


def _steps(events: Sequence[int], sizes: Sequence[int], scale: Scale) -> str:
    """A line that holds each value until the next event; runs of one value are one stroke."""
    if not events:
        return ""
    jumps = (
        f"H{scale.x(events[index]):.1f}V{scale.y(sizes[index]):.1f}"
        for index in range(1, len(events))
        if sizes[index] != sizes[index - 1]
    )
    return f"M{scale.x(events[0]):.1f} {scale.y(sizes[0]):.1f}{''.join(jumps)}H{WIDTH - RIGHT:.1f}"


def _steps_back(events: Sequence[int], sizes: Sequence[int], scale: Scale) -> str:
    """The same line from its end to its beginning, to close an area."""
    jumps = (
        f"H{scale.x(events[index]):.1f}V{scale.y(sizes[index - 1]):.1f}"
        for index in range(len(events) - 1, 0, -1)
        if sizes[index] != sizes[index - 1]
    )
    return f"V{scale.y(sizes[-1]):.1f}{''.join(jumps)}H{scale.x(events[0]):.1f}"


def _phases(phases: Sequence[Phase], count: int, scale: Scale) -> list[str]:
    """Bands for every other phase, their names above, and a line where an optimizer step begins."""
    parts = []
    ends = [*(phase.start for phase in phases[1:]), count]
    seen = 0
    for index, (phase, end) in enumerate(zip(phases, ends, strict=True)):
        left, right = scale.x(phase.start), scale.x(min(end, scale.last))
        if index % 2 and right > left:
            parts.append(_rectangle("band", left, TOP, right - left, HEIGHT - TOP - BOTTOM))
        if end - phase.start >= LEAST_LABELLED * count:
            name = escape(_(PHASES[phase.name if phase.step else "setup"]))
            parts.append(f'<text x="{(left + right) / 2:.1f}" y="{TOP - 6:.0f}" text-anchor="middle">{name}</text>')
        if phase.step > seen:
            seen = phase.step
            parts.append(f'<line class="frame" x1="{left:.1f}" x2="{left:.1f}" y1="14" y2="{HEIGHT - BOTTOM:.0f}"/>')
            parts.append(f'<text class="ink" x="{left + 5:.1f}" y="22">{escape(_("step {count}", count=seen))}</text>')
    return parts


def _byte_grid(scale: Scale) -> list[str]:
    """Horizontal lines at round amounts, the unit above them."""
    unit, name = next((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if scale.top >= u)
    parts = [f'<text x="{LEFT - 6:.0f}" y="{TOP - 6:.0f}" text-anchor="end">{name}</text>']
    for value in _round_values(scale.top / unit):
        y = scale.y(value * unit)
        parts.append(f'<line class="grid" x1="{LEFT:.0f}" x2="{WIDTH - RIGHT:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    return parts


def _size_ticks(scale: Scale) -> list[str]:
    return [
        f'<text x="{scale.x(value):.1f}" y="{HEIGHT - BOTTOM + 12:.0f}" text-anchor="middle">{value:g}</text>'
        for value in _round_values(scale.last)
        if value == int(value)
    ]


def _round_values(end: float, most: int = 7) -> list[float]:
    """At most ``most`` values from 0 to ``end``, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10(max(end, 1e-9) / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if end / (power * factor) <= most)
    return [*accumulate([step] * int(end / step), initial=0.0)]


def _budget_line(usable: int | None, scale: Scale) -> list[str]:
    if usable is None or usable > scale.top:
        return []
    y = scale.y(usable)
    return [f'<line class="limit" x1="{LEFT:.0f}" x2="{WIDTH - RIGHT:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>']


def _limit_label(group: Sequence[Limit], curve: BatchCurve, scale: Scale) -> str:
    """Where the curve is not: small budgets meet it at the left, large ones at the right."""
    to_the_right = group[-1].largest < 0.6 * curve.sizes[-1]
    x, anchor = (WIDTH - RIGHT - 3, "end") if to_the_right else (LEFT + 4, "start")
    names = " | ".join(f"{limit.name}: {limit.largest}{'+' if limit.open_ended else ''}" for limit in group)
    y = scale.y(group[-1].usable) - 4
    return f'<text class="ink" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(names)}</text>'


def _reserved_around(drawn: Stack, event: int) -> int:
    """What is reserved at an event: a label stands above that line."""
    return max((size for at, size in zip(drawn.events, drawn.reserved, strict=True) if at <= event), default=0)


def _peak(estimate: Estimate, event: int, above: int, scale: Scale) -> str:
    """A dot at the allocated peak, and over ``above`` bytes what was asked for there."""
    x, y = scale.x(event), scale.y(estimate.peak_allocated)
    left_of_it = event > scale.last / 2
    where = ", ".join(part for part in (estimate.peak_module, estimate.peak_operator) if part)
    said = escape(f"{_('peak')} {format_bytes(estimate.peak_allocated)}{', ' if where else ''}{where}")
    offset, anchor = (-9, "end") if left_of_it else (9, "start")
    at = min(y, scale.y(above)) - 6
    text = f'<text class="ink" x="{x + offset:.1f}" y="{at:.1f}" text-anchor="{anchor}">{said}</text>'
    return f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>{text}'


def _rectangle(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _middle_text(text: str, y: float) -> str:
    return f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{y:.0f}" text-anchor="middle">{escape(text)}</text>'


def _svg(parts: Sequence[str], said: str, *, focusable: bool = False) -> str:
    focus = ' tabindex="0"' if focusable else ""
    head = f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(said)}"{focus}>'
    return head + "".join(parts) + "</svg>"
