"""Candidates for relaunches: changed launches of a script that are worth a dry run of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.guard.refusals import Refusal
from vram_guard.parallel.resharding import other_strategy
from vram_guard.plan.techniques import mixed_precision
from vram_guard.techniques import find_blocks
from vram_guard_accelerate._precision import ACCELERATES
from vram_guard_accelerate._sharding_change import ShardingChange, strategy_of
from vram_guard_accelerate.apply.fsdp import on_host, wrapped_classes
from vram_guard_accelerate.dry_run.first_batch import FirstBatch
from vram_guard_accelerate.dry_run.results import TraceResult
from vram_guard_accelerate.relaunch import engine
from vram_guard_accelerate.relaunch.divisible import why_not_divided
from vram_guard_accelerate.relaunch.relaunch import Baseline, LaunchChange, Relaunch

if TYPE_CHECKING:
    from vram_guard.plan import Plan
    from vram_guard_accelerate._settings import LaunchSettings


class RelaunchCandidates:
    """Finds changes of a launch.

    Args:
        first: the script, at its first training batch.
        trace: of its loop as written.
        settings: what may be changed.
    """

    def __init__(self, first: FirstBatch, trace: TraceResult, settings: LaunchSettings) -> None:
        self._first = first
        self._trace = trace
        self._settings = settings
        self.notes: list[str] = []
        """The reasons why the model is not divided, where that was asked for."""

    @property
    def reserved(self) -> set[str]:
        """Techniques that the script itself acts on before it trains: only a relaunch can have them."""
        script = self._first.script
        acts = script.reads_precision or script.by_trainer or script.precision_option
        return {"precision"} if acts and self._mixed else set()

    @property
    def _mixed(self) -> str:
        """The mixed precision that may replace the script's own, in Accelerate's words; "" where none may."""
        script = self._first.script
        fixed = script.precision_given and not script.precision_option and not script.by_trainer
        if fixed or self._first.sharded or "precision" not in self._settings.techniques:
            return ""
        name, _why = mixed_precision(self._first.precision, self._first.shape.capability)
        return ACCELERATES[name] if name is not None else ""

    def find(self, made: Plan, current: Relaunch | None) -> tuple[Relaunch, ...]:
        """Relaunches that may be better than the plan of the launch as it is, the likeliest first.

        Args:
            made: that plan.
            current: the relaunch that this launch is itself.
        """
        if current is None:
            baseline, change = Baseline.of(made, self._trace.profile, self._first), LaunchChange()
        else:
            baseline, change = replace(current.baseline, profile=self._trace.profile), current.change
        found = []
        if self.reserved:
            option = self._first.script.precision_option
            found.append(Relaunch(replace(change, precision=self._mixed, precision_option=option), baseline))
        found += [Relaunch(replace(change, sharding=one), baseline) for one in self._divided(change.sharding)]
        return tuple(found)

    def _divided(self, present: ShardingChange) -> list[ShardingChange]:
        """Other ways in which Accelerate divides the model; the host, which takes most time, comes last."""
        allowed, plugin = self._settings.techniques, self._first.fsdp_plugin
        if self._first.engine is not None:
            return self._by_engine(present)
        if plugin is None:
            if "shard" not in allowed or self._first.shape.ranks == 1:
                return []
            why = why_not_divided(self._first, self._trace.facts)
            self.notes += [Refusal("shard", why).words()] if why else []
            classes = wrapped_classes(self._first.root, [block.name for block in find_blocks(self._first.root)])
            return [] if why else [ShardingChange(introduced=True, wrapped=classes)]
        if present.introduced:
            return []
        if plugin.fsdp_version == 1:
            freed = other_strategy(strategy_of(plugin).name, reshard=True) if "reshard" in allowed else None
            return [] if freed is None else [replace(present, reshard=True, strategy=freed)]
        found = []
        if "reshard" in allowed and plugin.reshard_after_forward is False and not present.offload:  # first of the two
            found.append(replace(present, reshard=True))
        if self._settings.may_offload_shards and not on_host(plugin):
            found.append(replace(present, offload=True))
        return found

    def _by_engine(self, present: ShardingChange) -> list[ShardingChange]:
        """Other settings of DeepSpeed. They change what its checkpoints hold: only those that are named."""
        found, asks = [], self._settings.asks
        if asks("shard") and not engine.why_not_next_stage(self._first):
            found.append(replace(present, stage=engine.stage_of(self._first) + 1))
        if asks("offload_optimizer") and not engine.why_not_states_on_host(self._first):
            found.append(replace(present, states_on_host=True))
        return found
