"""The calculator's answer in words and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.closed_form.calculator import Calculation

LINE = "=" * 60


def calculator_lines(answer: Calculation, *, memory_source: str, read_from: str = "", model: str = "") -> Iterator[str]:
    """The answer of the rule of thumb, line by line.

    Args:
        answer: the calculation.
        memory_source: where the amount of memory comes from ("RTX 4090", "given").
        read_from: the config's path.
        model: the model's name, for the reader.
    """
    network = answer.network
    if read_from:
        yield _("📂 config: {path}", path=read_from)
    if model:
        yield _("✓ model: {model}", model=model)
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
    if answer.fits:
        share = f"{answer.remaining_fraction:.1%}"
        yield _("✅ fits, by the rule of thumb")
        yield _("   to spare: {amount} ({share})", amount=amount(answer.remaining), share=share)
    else:
        share = f"{-answer.remaining_fraction:.1%}"
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


def amount(count: int) -> str:
    """Bytes as the calculator's readers write them, decimal and binary: "1.342 GB (1.250 GiB)"."""
    if abs(count) >= 10**7:
        return f"{count / 10**9:.3f} GB ({count / 2**30:.3f} GiB)"
    return f"{count / 10**6:.3f} MB ({count / 2**20:.3f} MiB)"
