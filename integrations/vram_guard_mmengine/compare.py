"""A config at several batch sizes and precisions, side by side: predicted memory, modelled speed, learning rate."""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from vram_guard.errors import InvalidInputError
from vram_guard.plan.cost import step_seconds
from vram_guard.plan.learning_rate import learning_rate_factor
from vram_guard.simulate import trace
from vram_guard.step import Precision, checked_count
from vram_guard_mmengine import rates
from vram_guard_mmengine.capture import Captured, capture

if TYPE_CHECKING:
    from vram_guard.budget import GPU, Budget
    from vram_guard.timeline import Timeline


@dataclass(frozen=True)
class Row:
    """One configuration of a training."""

    batch_size: int
    """Samples that one process loads at once."""
    precision: Precision
    peak_allocated: int
    peak_reserved: int
    """Bytes of one step at its peak."""
    share: float
    """The reserved peak over the card's budget without its margin."""
    fits: bool
    """Within what may be used, the margin left free."""
    seconds: float
    """One step, by the cost model; without the data loader."""
    samples_per_second: float
    learning_rate: float
    """That of the optimizer's first group at its highest, by the rule."""


@dataclass(frozen=True)
class Comparison:
    """The rows, and what holds for all of them."""

    rows: tuple[Row, ...]
    gpu: GPU
    budget: Budget
    written: int
    """The batch size in the config."""
    lr_rule: str
    notes: tuple[str, ...]


def compare(
    config: Any,
    gpu: str,
    batch_sizes: Iterable[int] = (),
    precisions: Iterable[Precision] = (),
    *,
    lr_rule: str = "linear",
    margin: float | None = None,
) -> Comparison:
    """Predict a config's training step at several batch sizes and precisions; nothing is trained.

    Args:
        config: a path, or a ``Config``; not changed.
        gpu: the card that is meant, by name.
        batch_sizes: ``train_dataloader.batch_size``, several of them; none: the one in the config and twice that.
        precisions: Lightning's words for them; none: the one in the config.
        lr_rule: how the learning rate follows the batch, where ``auto_scale_lr`` does not: "linear", "sqrt" or "none".
        margin: the share of the card to leave free; None: the default.

    Returns:
        One row for each precision and batch size, in the order of the batch sizes.

    Raises:
        InvalidInputError: an argument makes no sense.
        UnsupportedStepError: this training cannot be predicted.
    """
    from vram_guard.budget import Budget, find_gpu

    card, budget = find_gpu(gpu), Budget.of(find_gpu(gpu), margin)
    sizes = [checked_count("batch_size", size) for size in batch_sizes]
    learning_rate_factor(lr_rule, 1, 1)
    with _captured(config) as (runner, found):
        written = found.sample.batch_size
        rate = _learning_rate(runner)
        rows = []
        wanted = list(dict.fromkeys(precisions)) or [found.step.precision]
        with found.lent():
            timelines = {
                kind: trace(found.step.with_(precision=kind), compute_capability=card.compute_capability)
                for kind in wanted
            }
            for size in sizes or [written, 2 * written]:
                factor = _factor(runner, lr_rule, written, size)
                rows += [_row(timelines[kind], kind, size, card, budget, rate * factor) for kind in wanted]
    return Comparison(tuple(rows), card, budget, written, lr_rule, found.notes)


def _row(timeline: Timeline, precision: Precision, size: int, gpu: GPU, budget: Budget, learning_rate: float) -> Row:
    exact = timeline.exact(size)
    estimate, seconds = exact.at(size), step_seconds(exact, size, gpu).seconds
    peak = estimate.peak_reserved
    return Row(
        batch_size=size,
        precision=precision,
        peak_allocated=estimate.peak_allocated,
        peak_reserved=peak,
        share=peak / budget.total,
        fits=peak <= budget.usable,
        seconds=seconds,
        samples_per_second=size / seconds,
        learning_rate=learning_rate,
    )


def _learning_rate(runner: Any) -> float:
    """The optimizer's own, as written."""
    wrapper = runner.optim_wrapper
    described = isinstance(wrapper, dict)
    rate = (wrapper.get("optimizer") or {}).get("lr") if described else wrapper.param_groups[0]["lr"]
    if rate is None:
        raise InvalidInputError("optim_wrapper.optimizer has no lr: there is no learning rate to compare")
    return float(rate)


def _factor(runner: Any, rule: str, written: int, size: int) -> float:
    """What the learning rate in the config is multiplied by at another batch size."""
    if rates.auto_scaled(runner):
        settings = runner.auto_scale_lr or runner.cfg.get("auto_scale_lr")
        return float(size * runner.world_size / settings["base_batch_size"])
    return learning_rate_factor(rule, written, size)


@contextlib.contextmanager
def _captured(config: Any) -> Iterator[tuple[Any, Captured]]:
    """A runner whose training is not built, in a folder of its own that goes away again; and its step."""
    cfg = copy.deepcopy(config) if isinstance(config, Config) else Config.fromfile(str(config))
    threshold = logging.root.manager.disable
    with tempfile.TemporaryDirectory(prefix="vram_guard") as folder:
        cfg.merge_from_dict({"work_dir": folder, "launcher": "none", "load_from": None, "resume": False})
        logging.disable(logging.WARNING)  # a runner says pages about itself
        try:
            runner = RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)
            yield runner, capture(runner)
        finally:
            logging.disable(threshold)
            for handler in getattr(locals().get("runner"), "logger", logging.root).handlers:
                handler.close()
