"""The pages docs/en/plans.md and docs/zh_cn/plans.md, made from a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import pages

GIB = 2**30


class Words(NamedTuple):
    """One language's sentences."""

    folder: str
    title: str
    made_by: str
    intro: str
    columns: tuple[str, ...]
    as_written: str
    unchanged: str
    nothing_fits: str
    halving_fails: str
    kept: str
    seconds: str
    failed: str


EN = Words(
    folder="en",
    title="# What is planned for large models on small budgets",
    made_by="This page is made by `python -m benchmarks.plans`; do not edit it. {machine}; planned for an {gpu}.",
    intro=(
        "A budget is what PyTorch's allocator may reserve, less the margin; every budget is a part of the same "
        "card, so that only the amount differs. Plans may use everything that is allowed by default, and {host} of "
        "host memory; the effective batch, the learning rates and the number of optimizer steps stay as they are "
        "under every plan. Halving is what Lightning's `BatchSizeFinder` and Accelerate's "
        "`find_executable_batch_size` do: the batch shrinks until the step no longer runs out of memory. Learning "
        "rates and schedules, chosen for another batch, are then wrong. Step times are for the same number of "
        "samples, relative to the step as written, by the project's cost model (a roofline over the traced "
        "operators): a model, not a measurement. All peaks are "
        "predictions, made without a GPU."
    ),
    columns=(
        "budget",
        "plan",
        "peak",
        "step time",
        "in host memory",
        "halving: batch",
        "halving: step time",
        "planned in",
    ),
    as_written="As written: {peak:.2f} GiB.",
    unchanged="as written",
    nothing_fits="nothing fits",
    halving_fails="fails",
    kept="{size} (unchanged)",
    seconds="{seconds:.1f} s",
    failed="Not planned for: {name} ({why}).",
)

ZH = Words(
    folder="zh_cn",
    title="# 小显存上的大模型：给出的方案",
    made_by="本页由 `python -m benchmarks.plans` 生成，请勿手工修改。{machine}；按 {gpu} 规划。",
    intro=(
        "预算是 PyTorch 分配器可以保留的显存，再减去余量；所有预算都取自同一张卡，因此各行之间只有数额不同。"
        "方案可以使用默认允许的全部技术和 {host} 主机内存；在任何方案下，有效 batch、学习率和优化器步数都保持不变。"
        "“减半”指 Lightning 的 `BatchSizeFinder` 和 Accelerate 的 `find_executable_batch_size` 的做法："
        "不断减小 batch，直到不再显存不足；这时为原来的 batch 选定的学习率和调度就不再合适。"
        "步时按同样多的样本计算，是相对于原训练步的倍数，来自本项目的成本模型（对所记录的算子做 roofline 估算）："
        "是模型，不是测量。所有峰值都是在没有 GPU 的情况下预测的。"
    ),
    columns=("预算", "方案", "峰值", "步时", "主机内存", "减半：batch", "减半：步时", "规划用时"),
    as_written="原样训练：{peak:.2f} GiB。",
    unchanged="原样",
    nothing_fits="没有可行方案",
    halving_fails="失败",
    kept="{size}（不变）",
    seconds="{seconds:.1f} 秒",
    failed="未能规划：{name}（{why}）。",
)


def write_pages(report: dict[str, Any], docs: Path) -> list[Path]:
    """Write both pages under ``docs``; the answer is their paths."""
    return pages.write_pages(report, docs, "plans.md", (EN, ZH), page)


def page(report: dict[str, Any], words: Words) -> str:
    """One page."""
    from benchmarks.plans.compare import HOST_BUDGET

    parts = [
        words.title,
        words.made_by.format(machine=pages.machine(report), gpu=report["gpu"]),
        words.intro.format(host=HOST_BUDGET.replace("GiB", " GiB")),
    ]
    for title in dict.fromkeys(row["title"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["title"] == title]
        parts += [
            f"## {title}",
            words.as_written.format(peak=rows[0]["as_written"] / GIB),
            pages.table(words.columns, (_line(row, words) for row in rows)),
        ]
    parts += [words.failed.format(name=name, why=why) for name, why in report["failed"].items()]
    return "\n\n".join(parts) + "\n"


def _line(row: dict[str, Any], words: Words) -> tuple[str, ...]:
    fits, half = row["fits"], row["halving"]
    plan = (row["plan"] if row["changed"] else words.unchanged) if fits else words.nothing_fits
    batch, time = words.halving_fails, "-"
    if half is not None:
        kept = half["batch_size"] == row["batch_size"]
        batch = words.kept.format(size=half["batch_size"]) if kept else f"{row['batch_size']} → {half['batch_size']}"
        time = f"× {half['slowdown']:.2f}"
    return (
        row["budget"].replace("GiB", " GiB"),
        plan,
        f"{row['peak'] / GIB:.2f} GiB" if fits else "-",
        f"× {row['slowdown']:.2f}" if fits and row["slowdown"] is not None else "-",
        f"{row['host_peak'] / GIB:.2f} GiB" if fits and row["host_peak"] else "-",
        batch,
        time,
        words.seconds.format(seconds=row["seconds"]),
    )
