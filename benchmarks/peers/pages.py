"""The pages docs/en/peers.md and docs/zh_cn/peers.md, made from a report."""

from __future__ import annotations

import statistics
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
    answers: str
    columns: tuple[str, str]
    error: str
    no_answer: str
    seconds: str
    seconds_columns: tuple[str, ...]
    cannot: str
    cannot_columns: tuple[str, str]
    limits: dict[str, str]
    reasons: str
    chart: str


EN = Words(
    folder="en",
    title="# Beside what you would pick instead",
    made_by="This page is made by `make bench-peers`; do not edit it. {machine}.",
    intro=(
        "Every estimator was asked about the same training steps (float32, AdamW or Adam), in one run, each question "
        "in a fresh process. `vram_guard` answers the reserved peak (`torch.cuda.max_memory_reserved`). Rows with a "
        "measured peak were run on real GPUs by the authors of xMem; what they measured is NVML's use of the whole "
        "device less its first sample, so it also holds what CUDA's libraries take beside the allocator. They are a "
        "few of many: `benchmarks/published` has them all. Rows without one show what each tool says, not who is right."
    ),
    answers="## What each predicts, in GiB",
    columns=("training step", "measured"),
    error="median error on the measured rows",
    no_answer="no answer",
    seconds="## How long an answer takes, in seconds",
    seconds_columns=("tool", "median", "longest", "answers"),
    cannot="## What each cannot answer",
    cannot_columns=("tool", "limits"),
    limits={
        "vram_guard": (
            "what libraries take outside the allocator (the CUDA context, kernels), and what `torch.compile` fuses"
        ),
        "MemTracker": (
            "reserved memory and fragmentation (it knows no segments), CUDA's choice of kernels and their workspaces, "
            "frozen parameters, other batch sizes without another run"
        ),
        "DeepSpeed ZeRO-2": "activations and the batch size, other optimizers than Adam, plain float32 training",
        "DeepSpeed ZeRO-3": "the same; it counts the largest layer as well",
        "Accelerate": "activations and the batch size, other optimizers than Adam; counts four times the weights",
        "guide: grid": "networks whose layers differ; weights, gradients and optimizer state (a flat 30% of the GPU)",
        "guide: twin": "activations (a multiple of the batch for every network), half precision beside float32",
        "torch-kitsune": (
            "what the optimizer holds during its step, reserved memory, several inputs, losses; adds 15% for overhead"
        ),
    },
    reasons="Where there was no answer, and why:",
    chart="![predicted over measured peak, and seconds for an answer](../images/peers.png)",
)

ZH = Words(
    folder="zh_cn",
    title="# 与其他估算方法对比",
    made_by="本页由 `make bench-peers` 生成，请勿手工修改。{machine}。",
    intro=(
        "所有估算方法在同一次运行中回答同样的训练步（float32，AdamW 或 Adam），"
        "每个问题都在新的进程里计算。"
        "`vram_guard` 给出保留显存的峰值（`torch.cuda.max_memory_reserved`）。"
        "带实测峰值的行由 xMem 的作者在真实 GPU 上运行；他们测的是 NVML 报告的整卡用量减去第一个采样值，"
        "因此也包含 CUDA 库在分配器之外占用的显存。"
        "这里只选了几行，全部数据见 `benchmarks/published`。"
        "没有实测值的行只说明各工具的回答，不说明谁对。"
    ),
    answers="## 各工具的预测（GiB）",
    columns=("训练步", "实测"),
    error="有实测值的行上的误差中位数",
    no_answer="无法回答",
    seconds="## 得到回答所需的时间（秒）",
    seconds_columns=("工具", "中位数", "最长", "回答数"),
    cannot="## 各工具不能回答什么",
    cannot_columns=("工具", "局限"),
    limits={
        "vram_guard": "各种库在分配器之外占用的显存（CUDA 上下文、内核），以及 `torch.compile` 融合之后的用量",
        "MemTracker": (
            "保留显存与碎片（不了解显存段）、CUDA 对内核的选择及其工作区、冻结的参数；换一个 batch size 就要重新运行"
        ),
        "DeepSpeed ZeRO-2": "激活值与 batch size、Adam 以外的优化器、普通的 float32 训练",
        "DeepSpeed ZeRO-3": "同上；另外计入最大的一层",
        "Accelerate": "激活值与 batch size、Adam 以外的优化器；只是把权重乘以四",
        "guide: grid": "各层大小不同的网络；权重、梯度和优化器状态（一律留 30% 的显存）",
        "guide: twin": "激活值（无论什么网络都取 batch 的若干倍）、半精度与 float32 并存的情形",
        "torch-kitsune": "优化器更新时的临时显存、保留显存、多个输入、损失函数；另加 15% 的开销",
    },
    reasons="没有回答的情形与原因：",
    chart="![预测峰值与实测峰值之比，以及得到回答所需的时间](../images/peers.png)",
)


def write_pages(report: dict[str, Any], docs: Path) -> list[Path]:
    """Write both pages under ``docs``; the answer is their paths."""
    return pages.write_pages(report, docs, "peers.md", (EN, ZH), page)


def page(report: dict[str, Any], words: Words) -> str:
    """One page."""
    parts = [
        words.title,
        words.made_by.format(machine=pages.machine(report)),
        words.intro,
        words.chart,
        words.answers,
        _answers(report, words),
        words.seconds,
        _seconds(report, words),
        words.cannot,
        pages.table(words.cannot_columns, [(tool, words.limits[tool]) for tool in report["tools"]]),
    ]
    reasons = _reasons(report)
    if reasons:
        parts += [words.reasons, "\n".join(f"- {line}" for line in reasons)]
    return "\n\n".join(parts) + "\n"


def _answers(report: dict[str, Any], words: Words) -> str:
    rows = []
    for row in report["rows"]:
        measured = f"{row['measured'] / GIB:.2f} ({row['gpu']})" if row["measured"] else "-"
        rows.append((row["title"], measured, *(_answer(row, tool, words) for tool in report["tools"])))
    rows.append((words.error, "", *(_median_error(report, tool) for tool in report["tools"])))
    return pages.table((*words.columns, *report["tools"]), rows)


def _answer(row: dict[str, Any], tool: str, words: Words) -> str:
    predicted = row["answers"][tool]["predicted"]
    if predicted is None:
        return words.no_answer
    error = f" ({predicted / row['measured'] - 1:+.1%})" if row["measured"] else ""
    return f"{predicted / GIB:.2f}{error}"


def _median_error(report: dict[str, Any], tool: str) -> str:
    """Of the absolute errors, and over how many of the measured rows."""
    measured = [row for row in report["rows"] if row["measured"]]
    pairs = [(row["answers"][tool]["predicted"], row["measured"]) for row in measured]
    errors = [abs(predicted / truth - 1) for predicted, truth in pairs if predicted is not None]
    return f"{statistics.median(errors):.1%} ({len(errors)}/{len(measured)})" if errors else "-"


def _seconds(report: dict[str, Any], words: Words) -> str:
    rows: list[tuple[str, ...]] = []
    for tool in report["tools"]:
        answers = [row["answers"][tool] for row in report["rows"]]
        seconds = [answer["seconds"] for answer in answers if answer["predicted"] is not None]
        times = (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("-", "-")
        rows.append((tool, *times, f"{len(seconds)}/{len(answers)}"))
    return pages.table(words.seconds_columns, rows)


def _reasons(report: dict[str, Any]) -> list[str]:
    """Tool and reason, with the steps that it held for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in report["rows"]:
        for tool, answer in row["answers"].items():
            if answer["predicted"] is None:
                found.setdefault((tool, answer["why"]), []).append(row["title"].split(",")[0])
    return [f"{tool}: {why} ({', '.join(titles)})" for (tool, why), titles in found.items()]
