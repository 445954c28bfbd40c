"""A config at several batch sizes and precisions, side by side: predicted memory, modelled speed, learning rate."""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError, VramGuardError
from vram_guard.language import _
from vram_guard.plan.comparison import Comparison, Configuration
from vram_guard.plan.comparison import compare as compare_configurations
from vram_guard.plan.learning_rate import learning_rate_factor
from vram_guard.step import Precision, checked_count
from vram_guard_mmengine._capture import CapturedRun, capture
from vram_guard_mmengine._configs import refuse_before_mmengine, unregistered_types_said
from vram_guard_mmengine._training import auto_scaled


def compare(
    config: Any,
    budget: Budget | str | int | None = None,
    batch_sizes: Iterable[int] = (),
    precisions: Iterable[Precision] = (),
    *,
    gpu: str | None = None,
    margin: float | None = None,
    allow: Iterable[str] = (),
    lr_rule: str = "linear",
) -> Comparison:
    """Predict a config's training step at several batch sizes and precisions; nothing is trained.

    Args:
        config: a path, or a ``Config``; not changed.
        budget: what the allocator may reserve: "24GiB", bytes, or a GPU's name.
        batch_sizes: ``train_dataloader.batch_size``, several of them; none: the one in the config and twice that.
        precisions: Lightning's words for them; none: the one in the config.
        gpu: the card that is meant, by name.
        margin: the share of the card to leave free; None: the default.
        allow: what a plan may change where a configuration does not fit as written; nothing by default.
        lr_rule: how the learning rate follows the batch, where ``auto_scale_lr`` does not: "linear", "sqrt", "none" or
            "auto".

    Returns:
        One row for each batch size and precision.

    Raises:
        InvalidInputError: an argument makes no sense.
        UnsupportedStepError: this training cannot be predicted.
    """
    sizes = [checked_count("batch_size", size) for size in batch_sizes]
    learning_rate_factor(lr_rule, 1, 1)
    with _captured(config) as (runner, found):
        written = found.sample.batch_size
        rows = [
            Configuration(
                _(", ").join([_("batch {count}", count=size), precision]),
                found.step.with_(precision=precision),
                size,
                _learning_rate(runner, lr_rule, written, size),
            )
            for size in dict.fromkeys(sizes or [written, 2 * written])
            for precision in dict.fromkeys(precisions) or [found.step.precision]
        ]
        with found.symbolic_run():
            compared = compare_configurations(rows, budget, gpu=gpu, margin=margin, allow=allow, lr_rule=lr_rule)
            return replace(compared, rates_by_rule=True)


def _learning_rate(runner: Any, rule: str, written: int, size: int) -> float | None:
    """The optimizer's learning rate at another batch size than the written one."""
    wrapper = runner.optim_wrapper
    optimizer: Any = (wrapper.get("optimizer") or {}) if isinstance(wrapper, dict) else wrapper.optimizer
    described = isinstance(optimizer, dict)
    rate = optimizer.get("lr") if described else optimizer.param_groups[0]["lr"]
    if rate is None:
        return None
    if auto_scaled(runner):
        settings = runner.auto_scale_lr or runner.cfg.get("auto_scale_lr")
        return float(rate * size * runner.world_size / settings["base_batch_size"])
    kind = optimizer.get("type") if described else type(optimizer).__name__
    return float(rate * learning_rate_factor(rule, written, size, getattr(kind, "__name__", str(kind))))


@contextlib.contextmanager
def _unbuildable_said() -> Iterator[None]:
    """An error of MMEngine or of the config's own classes, as one line."""
    try:
        yield
    except VramGuardError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidInputError(_("the config's training cannot be built: {reason}", reason=why)) from error


@contextlib.contextmanager
def _captured(config: Any) -> Iterator[tuple[Any, CapturedRun]]:
    """A runner whose training is not built, in a folder of its own that goes away again; and its step."""
    cfg = copy.deepcopy(config) if isinstance(config, Config) else Config.fromfile(str(config))
    refuse_before_mmengine(cfg)
    threshold = logging.root.manager.disable
    runner: Any = None
    with tempfile.TemporaryDirectory(prefix="vram_guard") as folder:
        # Runners of one name that are made within a second are taken for one experiment.
        name = f"vram_guard_{uuid.uuid4().hex}"
        aside = {"work_dir": folder, "launcher": "none", "load_from": None, "resume": False, "experiment_name": name}
        cfg.merge_from_dict(aside)
        logging.disable(logging.WARNING)  # a runner says pages about itself
        try:
            with _unbuildable_said(), unregistered_types_said():
                runner = RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)
                found = capture(runner)
            yield runner, found
        finally:
            logging.disable(threshold)
            for handler in [] if runner is None else runner.logger.handlers:
                handler.close()
