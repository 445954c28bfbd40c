"""Memory of one rank under each layout, by category at the allocated peak: figures, and a picture of stacked bars."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sharded.torchtitan import Recipe, flash_attention
from vram_guard import Parallel
from vram_guard.budget.catalogue import find_gpu
from vram_guard.simulate import trace_at

GIB = 2**30
CARD = "H100 SXM"
GPUS, NODE = 16, 8
HALF = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
#: What is shown, from whole copies to divided layers.
LAYOUTS: dict[str, Parallel | None] = {
    "DDP": Parallel(gpus=GPUS, node=NODE, kind="ddp"),
    "ZeRO-1": Parallel(gpus=GPUS, node=NODE, kind="zero1"),
    "FSDP2": Parallel(gpus=GPUS, node=NODE, kind="fsdp2", **HALF),
    "HSDP 2 × 8": Parallel(gpus=GPUS, node=NODE, kind="hsdp", **HALF),
    "FSDP2 2 × TP 8": None,  # by the recipe's own plan of layers
}
COLORS = {
    "parameters": "#4477aa",
    "gradients": "#66ccee",
    "optimizer_states": "#228833",
    "activations": "#ccbb44",
    "temporaries": "#ee6677",
    "others": "#bbbbbb",
    "reserved": "#e8e8e8",
}
FONT = 'font-family="sans-serif" font-size="13"'
WIDTH, LEFT, BAR, GAP, TOP = 820, 130, 30, 16, 58


def figures() -> list[dict[str, Any]]:
    """A row for each layout: category -> bytes of a rank, the reserved peak with both kinds of segments."""
    from vram_guard import AllocatorSettings

    found = []
    for name, parallel in LAYOUTS.items():
        start = time.perf_counter()
        recipe = Recipe("8B", GPUS, 1, tensor=1 if parallel else 8, checkpointing="full")
        step = recipe.step()
        if parallel is not None:
            whole = parallel.kind in ("ddp", "zero1")
            step = step.with_(parallel=parallel, precision="bf16-mixed" if whole else "32-true", model=_built(recipe))
        with flash_attention():
            timeline = trace_at(step, 1, compute_capability=find_gpu(CARD).compute_capability)
        taken = timeline.at(1)
        expandable = timeline.at(1, settings=AllocatorSettings(expandable_segments=True))
        parts = {name: size for name, size in taken.breakdown.items() if name in COLORS}
        parts["others"] = taken.peak_allocated - sum(parts.values())
        found.append(
            {
                "name": name,
                **parts,
                "reserved": taken.peak_reserved,
                "expandable": expandable.peak_reserved,
                "seconds": time.perf_counter() - start,
            }
        )
    return found


def _built(recipe: Recipe) -> Any:
    from benchmarks.sharded.llama import SIZES, Llama
    from benchmarks.sharded.torchtitan import checkpoint_blocks

    def build() -> Llama:
        model = Llama(SIZES["8B"], recipe.length)
        checkpoint_blocks(model, "full")
        return model

    return build


def svg(rows: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> str:
    """The picture: a bar for each layout, allocated by category, and what is reserved beyond; a line for the card."""
    card = find_gpu(CARD).memory_bytes
    scale = (WIDTH - LEFT - 90) / max(*(row["reserved"] for row in rows), card)
    height = TOP + len(rows) * (BAR + GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="15">{words["picture_title"]}</text>',
    ]
    x = 8.0
    for name, color in COLORS.items():
        parts.append(f'<rect x="{x:.0f}" y="32" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="42" font-size="12">{words["category_" + name]}</text>')
        x += 40 + 7.2 * sum(2 if ord(letter) > 0x2E80 else 1 for letter in words["category_" + name])
    for number, row in enumerate(rows):
        y = TOP + number * (BAR + GAP)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 20}" text-anchor="end">{row["name"]}</text>')
        at = float(LEFT)
        parts.append(
            f'<rect x="{at}" y="{y}" width="{row["reserved"] * scale:.1f}" height="{BAR}" fill="{COLORS["reserved"]}"/>'
        )
        for name in (*COLORS,):
            if name != "reserved":
                width = row.get(name, 0) * scale
                parts.append(f'<rect x="{at:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLORS[name]}"/>')
                at += width
        end = LEFT + row["reserved"] * scale
        parts.append(f'<text x="{end + 6:.1f}" y="{y + 20}">{row["reserved"] / GIB:.1f} GiB</text>')
    line = LEFT + card * scale
    bottom = TOP + len(rows) * (BAR + GAP)
    parts.append(f'<line x1="{line:.1f}" y1="{TOP - 6}" x2="{line:.1f}" y2="{bottom}" stroke="black"/>')
    parts.append(f'<text x="{line:.1f}" y="{bottom + 18}" text-anchor="middle">{words["card"]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def write(rows: Sequence[Mapping[str, Any]], words: Mapping[str, str], path: Path) -> None:
    """Write the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(rows, words), encoding="utf-8")
