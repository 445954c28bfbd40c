"""The answers of the closed forms, in words and for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.report.as_json import as_dict
from vram_guard.report.columns import columns
from vram_guard.report.text import render
from vram_guard.terminal import terminal_width

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.closed_form.calculator import Calculation
    from vram_guard.closed_form.folder import Component, FineTuning, ModelFolder
    from vram_guard.plan import Plan
    from vram_guard.timeline import Estimate

LINE = "=" * 60


def amount(count: int) -> str:
    """Bytes as the calculator's readers write them, decimal and binary: "1.342 GB (1.250 GiB)"."""
    if abs(count) >= 10**7:
        return f"{count / 10**9:.3f} GB ({count / 2**30:.3f} GiB)"
    return f"{count / 10**6:.3f} MB ({count / 2**20:.3f} MiB)"


# --- the calculator -----------------------------------------------------------------------------------------------


def calculator_lines(answer: Calculation, *, memory_source: str) -> Iterator[str]:
    """The answer of the rule of thumb, line by line.

    Args:
        answer: the calculation.
        memory_source: where the amount of memory comes from ("RTX 4090", "given").
    """
    network = answer.network
    yield _("✓ GPU memory: {amount} ({source})", amount=amount(answer.memory), source=memory_source)
    rest = f"{1 - answer.share:.0%}"
    yield _("💡 for activations ({share}): {amount}", share=f"{answer.share:.0%}", amount=amount(answer.allowed))
    yield _("   (the other {share} are left for weights, gradients and optimizer states)", share=rest)
    yield ""
    yield _("📊 parameters:")
    yield _("   - batch size: {count}", count=network.batch)
    yield _("   - resolution: {height} × {width}", height=network.height, width=network.width)
    yield _("   - hidden dim: {count}", count=network.hidden_dim)
    yield _("   - layers: {count}", count=network.num_layers)
    yield _("   - sequence length: {count}", count=network.seq_length)
    yield _("   - bytes per element: {count}", count=network.bytes_per_element)
    yield ""
    yield _("🔢 activations by the rule of thumb (one tensor per layer):")
    yield _("   - each layer: {amount}", amount=amount(network.layer_bytes))
    yield _("   - all layers: {amount}", amount=amount(network.total_bytes))
    yield ""
    share = f"{abs(answer.remaining_fraction):.1%}"
    if answer.fits:
        yield _("✅ fits, by the rule of thumb")
        yield _("   to spare: {amount} ({share})", amount=amount(answer.remaining), share=share)
    else:
        yield _("❌ does not fit, by the rule of thumb")
        yield _("   too much: {amount} ({share})", amount=amount(-answer.remaining), share=share)
        yield ""
        yield _("🔧 what would help, each by itself:")
        yield from (f"   {number}. {line}" for number, line in enumerate(_fixes(answer), 1))


def _fixes(answer: Calculation) -> Iterator[str]:
    network = answer.network
    if answer.largest_batch:
        yield _("a smaller batch: {before} → {after}", before=network.batch, after=answer.largest_batch)
    else:
        yield _("no batch size: not even one sample fits")
    size = answer.largest_resolution
    if size is not None:
        before, after = [network.height, network.width], list(size)
        yield _("a lower resolution: {before} → {after}", before=before, after=after)
    split = answer.accumulation
    if split is not None:
        yield _(
            "gradient accumulation: micro-batches of {micro}, {count} for each optimizer step (batch {batch} stays)",
            micro=split[0],
            count=split[1],
            batch=network.batch,
        )
    mixed = answer.with_amp
    if mixed is not None:
        total, most = amount(mixed.network.total_bytes), mixed.largest_batch
        if mixed.fits:
            yield _("mixed precision (AMP): {total}, fits (largest batch {most})", total=total, most=most)
        else:
            yield _("mixed precision (AMP): {total}, not enough alone (largest batch {most})", total=total, most=most)


def calculator_dict(answer: Calculation) -> dict[str, Any]:
    """The answer of the rule of thumb for programs; amounts are ints of bytes."""
    network, mixed, split, amp = answer.network, answer.with_amp, answer.accumulation, None
    if mixed is not None:
        total, most = mixed.network.total_bytes, mixed.largest_batch
        amp = {"total_bytes": total, "fits": mixed.fits, "largest_batch": most}
    return {
        "method": "rule of thumb",
        "network": asdict(network),
        "gpu_memory": answer.memory,
        "threshold": answer.share,
        "allowed": answer.allowed,
        "layer_bytes": network.layer_bytes,
        "total_bytes": network.total_bytes,
        "fits": answer.fits,
        "remaining": answer.remaining,
        "remaining_percent": round(100 * answer.remaining_fraction, 2),
        "fixes": {
            "largest_batch": answer.largest_batch,
            "largest_resolution": None if answer.largest_resolution is None else list(answer.largest_resolution),
            "accumulation": None if split is None else {"micro_batch": split[0], "accumulate": split[1]},
            "amp": amp,
        },
    }


# --- a folder with a model ----------------------------------------------------------------------------------------


def folder_lines(folder: ModelFolder, tuning: FineTuning) -> Iterator[str]:
    """The components with parameters and dtypes, and which of them is trained how."""
    yield _("📂 model folder: {path}", path=folder.path)
    if folder.class_name:
        yield _("✓ pipeline: {name}", name=folder.class_name)
    yield ""
    yield _("📊 parameters, from the files' headers (no weights are loaded):")
    yield from _aligned([_component_row(one) for one in folder.components.values()])
    pickles = [f"{one.name}/{name}" for one in folder.components.values() for name in one.weights.pickles]
    if pickles:
        yield _("   ⚠ pickles, not opened (loading one runs what is in it): {names}", names=", ".join(pickles))
    yield ""
    frozen = ", ".join(one.name for one in tuning.frozen) or _("none")
    yield _("🔢 training {trained}; frozen: {frozen}", trained=tuning.trained.name, frozen=frozen)
    yield _("   batch {batch}, {dtype}", batch=tuning.batch, dtype=tuning.dtype)
    yield _("   one sample: {shape}", shape="×".join(map(str, tuning.sample)))


def _component_row(component: Component) -> tuple[str, ...]:
    weights = component.weights
    if not weights.numbers:
        return component.name, _("no readable weights"), "", "", component.class_name
    stored = " + ".join(sorted(weights.numbers, key=lambda dtype: -weights.numbers[dtype]))
    held = amount(weights.stored_bytes)
    return component.name, f"{weights.parameters:,}", stored, held, component.class_name


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns: amounts flush right, names flush left."""
    width = terminal_width(sys.stdout)
    return columns(rows, to_the_right=lambda index, cell: index > 0 and cell[:1].isdigit(), indent=3, width=width)


def folder_dict(folder: ModelFolder, tuning: FineTuning) -> dict[str, Any]:
    """The folder and what is trained of it, for programs; amounts are ints of bytes."""
    return {
        "path": str(folder.path),
        "class_name": folder.class_name or None,
        "components": {
            one.name: {
                "class_name": one.class_name or None,
                "parameters": one.weights.parameters,
                "numbers_by_dtype": dict(one.weights.numbers),
                "stored_bytes": one.weights.stored_bytes,
                "files": list(one.weights.files),
                "pickles_not_opened": list(one.weights.pickles),
            }
            for one in folder.components.values()
        },
        "trained": tuning.trained.name,
        "frozen": [one.name for one in tuning.frozen],
        "batch": tuning.batch,
        "dtype": tuning.dtype,
        "sample": list(tuning.sample),
    }


# --- the symbolic answer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SymbolicAnswer:
    """The memory that the step of this very model takes."""

    estimate: Estimate
    budget: Budget | None
    """None: the amount is unknown."""
    largest_batch: int | None
    """None without a budget."""
    plan: Plan | None = None
    """The plan, where one was asked for."""

    @property
    def fits(self) -> bool:
        """True where the step is known to stay within the budget."""
        return self.budget is not None and self.estimate.fits(self.budget)

    def lines(self, *, verbose: bool = True) -> Iterator[str]:
        """The answer, line by line; verbose: the whole report."""
        width = terminal_width(sys.stdout)
        answer = self.estimate if self.plan is None else self.plan
        yield from render(answer, budget=self.budget, width=width, verbose=verbose).splitlines()
        if self.largest_batch is not None:
            yield _("   - largest batch: {count}", count=self.largest_batch)

    def as_dict(self) -> dict[str, Any]:
        """The answer for programs, without its plan; amounts are ints of bytes."""
        return {**as_dict(self.estimate, budget=self.budget), "largest_batch": self.largest_batch}
