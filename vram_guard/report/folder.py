"""A model folder and the memory of training it, in words and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard.language import _, marked
from vram_guard.report.calculator import amount
from vram_guard.report.columns import columns
from vram_guard.terminal import display_width

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.closed_form.folder import Component, ModelFolder
    from vram_guard.closed_form.tuning import Tuning

_PARTS = {
    "trained parameters": marked("parameters, trained"),
    "frozen parameters": marked("parameters, frozen"),
    "gradients": marked("gradients"),
    "optimizer states": marked("optimizer states (AdamW)"),
    "batch": marked("batch"),
    "text encoding": marked("text encoding"),
    "activations": marked("activations (rule of thumb)"),
}


def folder_lines(folder: ModelFolder, width: int | None = None) -> Iterator[str]:
    """The components with parameters and dtypes; ``width``: of the terminal, in columns."""
    yield _("📂 model folder: {path}", path=folder.path)
    if folder.class_name:
        yield _("✓ pipeline: {name}", name=folder.class_name)
    yield ""
    yield _("📊 parameters, from the files' headers (no weights are loaded):")
    rows = [_component_row(one) for one in folder.components.values()]
    yield from _aligned(rows, width)
    pickles = [f"{one.name}/{name}" for one in folder.components.values() for name in one.weights.pickles]
    if pickles:
        yield _("   ⚠ pickles, not opened (loading one runs what is in it): {names}", names=", ".join(pickles))


def _component_row(component: Component) -> tuple[str, ...]:
    weights = component.weights
    if not weights.numbers:
        count = _("no readable weights")
        return (component.name, count, "", "", component.class_name)
    stored = " + ".join(sorted(weights.numbers, key=lambda dtype: -weights.numbers[dtype]))
    return (
        component.name,
        f"{weights.parameters:,}",
        stored,
        amount(weights.stored_bytes),
        component.class_name,
    )


def tuning_lines(tuning: Tuning, width: int | None = None) -> Iterator[str]:
    """The memory of the training, part by part; ``width``: of the terminal, in columns."""
    trained = ", ".join(one.name for one in tuning.trained) or _("none")
    frozen = ", ".join(one.name for one in tuning.frozen) or _("none")
    yield _("🔢 training {trained}; frozen: {frozen}", trained=trained, frozen=frozen)
    yield _("   batch {batch}, {dtype}", batch=tuning.batch, dtype=tuning.dtype)
    if sample := _sample(tuning):
        yield "   " + sample
    rows = [(_(_PARTS[name]), _amount(held)) for name, held in tuning.parts().items() if held != 0]
    total = amount(tuning.total) if tuning.complete else _("at least {amount}", amount=amount(tuning.total))
    lines = list(_aligned([*rows, (_("in all"), total)], width))
    yield from lines[:-1]
    yield "   " + "-" * (max(map(display_width, lines)) - 3)
    yield lines[-1]


def _sample(tuning: Tuning) -> str:
    """The sizes of one sample that were taken."""
    shape = "×".join(map(str, tuning.sample))
    if len(tuning.sample) == 1:
        return _("one sample: {count} tokens", count=shape)
    if len(tuning.sample) == 4:
        return _("one sample: {shape} latents (channels, frames, height, width)", shape=shape)
    return _("one sample: {shape} (channels, height, width)", shape=shape) if tuning.sample else ""


def verdict_lines(tuning: Tuning, budget: Budget) -> Iterator[str]:
    """The closed form against the budget."""
    total, usable = tuning.total, budget.usable
    yield _("✓ GPU: {budget}", budget=budget.explain())
    share = f"{abs(usable - total) / usable:.1%}" if usable else "-"
    if total > usable:
        yield _(
            "❌ does not fit, by the closed form; too much: {amount} ({share})",
            amount=amount(total - usable),
            share=share,
        )
    elif tuning.complete:
        yield _("✅ fits, by the closed form; to spare: {amount} ({share})", amount=amount(usable - total), share=share)
        yield _("   - largest batch: {count}", count=tuning.largest_batch(usable))
    else:
        yield _("❓ not known to fit: no rule is known for this network's activations")


def folder_dict(folder: ModelFolder) -> dict[str, Any]:
    """The folder for programs."""
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
    }


def tuning_dict(tuning: Tuning) -> dict[str, Any]:
    """The closed form for programs; amounts are ints of bytes, null where no rule is known."""
    return {
        "method": "closed form",
        "trained": [one.name for one in tuning.trained],
        "frozen": [one.name for one in tuning.frozen],
        "batch": tuning.batch,
        "dtype": tuning.dtype,
        "sample": list(tuning.sample),
        "parts": tuning.parts(),
        "total_bytes": tuning.total,
        "lower_bound": not tuning.complete,
    }


def _aligned(rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Rows in columns: amounts flush right, names flush left."""
    return columns(rows, to_the_right=lambda index, cell: index > 0 and cell[:1].isdigit(), indent=3, width=width)


def _amount(held: int | None) -> str:
    return _("no rule known") if held is None else amount(held)
