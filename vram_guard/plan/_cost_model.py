"""Costs of options and lower bounds of their memory, computed from the traces of the step's precisions alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from vram_guard.plan._activations import activation_bytes
from vram_guard.plan._option import Option
from vram_guard.plan.communication import communication
from vram_guard.plan.descriptions import Why
from vram_guard.plan.roofline import HOST_MEMORY_BANDWIDTH, HOST_PER_OPERATOR, StepTime, beside, total_time
from vram_guard.plan.search_space import LowerBound, Timelines
from vram_guard.plan.step_time import (
    ancestors,
    calls_with_modules,
    card_of,
    forward_seconds_by_module,
    offload_seconds,
    recompute_seconds,
    recompute_seconds_of,
    relative_cost,
    step_seconds,
    worth_keeping,
)
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe

if TYPE_CHECKING:
    from vram_guard.budget import GPU
    from vram_guard.parallel.links import Topology
    from vram_guard.plan.source import Source
    from vram_guard.timeline import Category, Timeline, Work

#: An 8-bit state is a quarter of a 32-bit one (its scales come on top).
EIGHT_BIT_SHARE = 0.25

#: Matrix products, as a layer makes its result of its input.
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.matmul.", "aten.linear.")


def _whole(option: Option) -> Option:
    """The step in this precision and divided so over its processes, on whole batches and otherwise as written."""
    return Option(option.precision, 1, AS_WRITTEN.with_(sharding=option.recipe.sharding))


class CostModel:
    """Step times and lower bounds of options for one step; see :class:`vram_guard.plan.search_space.Costs`.

    Args:
        source: the step.
        timelines: of it; only those of whole batches as written are asked for, one per precision.
        batch_size: samples that the loader delivers at once.
        gpu: the card; None: one of the compute capability that was traced for.
        topology: what connects the processes, where the source does not say it; None: collectives take no time.
    """

    def __init__(
        self, source: Source, timelines: Timelines, batch_size: int, gpu: GPU | None, topology: Topology | None = None
    ) -> None:
        self._source = source
        self._timelines = timelines
        self._batch_size = batch_size
        self._gpu = gpu
        self._topology = source.topology or topology
        self._times: dict[Option, StepTime] = {}
        self._steps: dict[tuple[Option, int], StepTime] = {}
        self._bases: dict[Option, Timeline] = {}
        self._recompute: dict[tuple[Option, int, tuple[str, ...]], dict[str, StepTime]] = {}
        """Time of each block's forward, by step, micro-batch size and operators that do not run again."""
        self._saved: dict[tuple[Option, int], Mapping[str, int]] = {}
        """Bytes saved for the backward pass, by module, what lies inside it included."""
        self._static: dict[Option, Mapping[Category, int]] = {}
        self._outside: dict[tuple[str, ...], tuple[int, int]] = {}
        self._frozen: dict[tuple[str, ...], int] = {}
        """Bytes of frozen modules, by their names."""
        self._phases: dict[tuple[Option, int], tuple[StepTime, StepTime]] = {}
        """Time of a micro-batch's backward pass and of the optimizer's step, by step and micro-batch size."""

    # --- time -------------------------------------------------------------------------------------------------

    def relative(self, option: Option) -> float:
        """Step time under the option over the step time as written."""
        return relative_cost(self.seconds(option), self.written)

    @property
    def written(self) -> StepTime:
        """The predicted time of one optimizer step as its author wrote it."""
        return self.seconds(Option(self._source.precision, 1))

    def seconds(self, option: Option) -> StepTime:
        """The predicted time of one optimizer step under the option."""
        if option not in self._times:
            self._times[option] = self._seconds(option)
        return self._times[option]

    def _seconds(self, option: Option) -> StepTime:
        recipe, size = option.recipe, self._batch_size // option.splits
        base = _whole(option)
        timeline = self._timeline(base)
        rounds = option.splits * self._source.accumulate
        time = self._step(base, size, rounds)
        if recipe.checkpoint:
            time += self._recomputed(base, size, recipe.checkpoint, recipe.checkpoint_keeps).times(rounds)
        if recipe.slices is not None:
            again = recipe.slices.again / recipe.slices.count
            time += self._recomputed(base, size, (recipe.slices.body.name,), ()).times(rounds * again)
        if recipe.chunked_head:  # the layer's forward once more, chunk by chunk
            forward = forward_seconds_by_module(timeline.exact(size).work, size, self._gpu)
            time += forward.get(recipe.chunked_head, StepTime()).times(rounds)
        if recipe.offload_activations:
            saved = sum(self._saved_by(base, size, recipe.offload_activations).values())
            time += offload_seconds(saved, self._gpu).times(rounds)
        if recipe.frozen_on_host:
            # They never change: nothing is copied back. accelerate's hooks keep them in ordinary memory.
            arriving = offload_seconds(self._frozen_bytes(recipe), self._gpu, pinned=False, both_ways=False)
            time += arriving.times(rounds)
        return time + self._host_optimizer(base, recipe, rounds, size) + self._form(timeline, recipe)

    def _step(self, base: Option, size: int, rounds: int) -> StepTime:
        key = (base, size)
        if key not in self._steps:
            timeline = self._timeline(base)
            self._steps[key] = step_seconds(timeline, size, self._gpu, micro_batches=rounds)
            if self._topology is not None:
                card = card_of(self._gpu, timeline.compute_capability)
                waited = communication(timeline, size, card, self._topology, micro_batches=rounds)
                self._steps[key] += waited.step_time
        return self._steps[key]

    def _timeline(self, base: Option) -> Timeline:
        if base not in self._bases:
            self._bases[base] = self._timelines(base)
        return self._bases[base]

    def _recomputed(self, base: Option, size: int, blocks: tuple[str, ...], keeps: tuple[str, ...]) -> StepTime:
        """The forward of these blocks again: the sum of their own, unless some lie within others."""
        work, inside = self._timeline(base).exact(size).work, set(blocks)
        if any(not inside.isdisjoint(islice(ancestors(name), 1, None)) for name in blocks):
            return recompute_seconds(work, blocks, size, self._gpu, keeps=keeps)
        known = self._recompute.setdefault((base, size, keeps), {})
        new: dict[str, list[list[Work]]] = {name: [] for name in blocks if name not in known}
        for name, call in calls_with_modules(work, new) if new else ():
            new[name].append(call)
        for name, calls in new.items():
            known[name] = recompute_seconds_of(calls, size, self._gpu, keeps=keeps)
        return sum((known[name] for name in blocks), StepTime())

    def _host_optimizer(self, base: Option, recipe: Recipe, rounds: int, samples: int) -> StepTime:
        """Gradients go to the host, the step is made there, weights come back."""
        if not (recipe.optimizer_on_host or recipe.parameters_on_host or _by_engine(recipe)):
            return StepTime()
        held = self._held(Option(self._source.precision, 1))
        static = {name: size // self._sharers(recipe) for name, size in held.items()}
        down = offload_seconds(static["gradients"], self._gpu, both_ways=False)
        backward, stepped = self._backward_and_step(base, samples)
        if not _by_engine(recipe):  # torchao and FSDP2 carry them down on a stream of their own
            down = beside(down, backward)
        down = down.times(rounds)
        if not _by_engine(recipe):
            down += stepped.times(-1)
        if recipe.optimizer_on_host:
            return down + self._torchao(static)
        # The weights for every forward and every backward pass, or after the step.
        trips = 2 * rounds if recipe.parameters_on_host else 1
        stepping = [work for work in self._timeline(base).exact(samples).work if work.phase == "optimizer"]
        up = offload_seconds(static["parameters"], self._gpu, both_ways=False).times(trips)
        moved = sum(work.moved.at(1) for work in stepping) / self._sharers(recipe)
        # Each parameter is carried and stepped with by itself, unless an engine has all of them in one tensor.
        started = 0 if _by_engine(recipe) else (2 + len(stepping)) * self._trained
        return down + up + StepTime(host=moved / HOST_MEMORY_BANDWIDTH, dispatch=started * HOST_PER_OPERATOR)

    def _backward_and_step(self, base: Option, size: int) -> tuple[StepTime, StepTime]:
        if (base, size) not in self._phases:
            timeline = self._timeline(base).exact(size)
            card = card_of(self._gpu, timeline.compute_capability)
            backward = (work for work in timeline.work if work.phase == "backward" and work.micro_batch == 0)
            stepping = (work for work in timeline.work if work.phase == "optimizer")
            self._phases[base, size] = total_time(backward, size, card), total_time(stepping, size, card)
        return self._phases[base, size]

    def _torchao(self, static: Mapping[Category, int]) -> StepTime:
        """The step in place of the GPU's: fused, and beside it what is trained comes down and goes back.

        Fused: weights, gradients and states are read, weights and states written, each once. Every parameter has an
        optimizer of its own: a gradient comes down, is stepped with, and the parameter goes back.
        """
        trained, states = static["gradients"], static["optimizer_states"]
        step = StepTime(host=(3 * trained + 2 * states) / HOST_MEMORY_BANDWIDTH)
        started = StepTime(dispatch=3 * self._trained * HOST_PER_OPERATOR)
        return beside(offload_seconds(trained, self._gpu), step) + step + started

    def _sharers(self, recipe: Recipe) -> int:
        """Processes of which each carries its own part of the parameters between host and GPU."""
        return self._source.ranks if _by_engine(recipe) else 1

    def _form(self, timeline: Timeline, recipe: Recipe) -> StepTime:
        """Without foreach, or in the backward pass, the host starts each operator of the step for each parameter."""
        if recipe.optimizer != "for-loop" and not recipe.optimizer_in_backward:
            return StepTime()
        operators = sum(work.phase == "optimizer" for work in timeline.work)
        return StepTime(dispatch=operators * self._trained * HOST_PER_OPERATOR)

    # --- blocks -----------------------------------------------------------------------------------------------

    def of_blocks(self, names: Iterable[str]) -> tuple[Mapping[str, int], Mapping[str, float], Mapping[str, float]]:
        """For each block: bytes it saves for the backward pass, seconds of its forward, seconds of offloading it."""
        names = tuple(names)
        timeline = self._timeline(Option(self._source.precision, 1)).exact(self._batch_size)
        saved = self._saved_by(Option(self._source.precision, 1), self._batch_size, names)
        # A step that could not be followed says nothing of its work, and is not planned for.
        forward = forward_seconds_by_module(timeline.work, self._batch_size, self._gpu) if timeline.work else {}
        recompute = dict.fromkeys(names, 0.0)
        for path, time in forward.items():
            for name in ancestors(path):
                if name in recompute:
                    recompute[name] += time.device
        offload = {name: offload_seconds(size, self._gpu).seconds for name, size in saved.items()}
        return saved, recompute, offload

    def worth_keeping(self, names: Iterable[str]) -> tuple[str, ...]:
        """Operators whose results are worth keeping where these blocks are checkpointed."""
        timeline = self._timeline(Option(self._source.precision, 1))
        return worth_keeping(timeline, tuple(names), self._batch_size, self._gpu)

    def _saved_by(self, base: Option, size: int, names: Iterable[str]) -> Mapping[str, int]:
        key = (base, size)
        if key not in self._saved:
            whole: dict[str, int] = {}
            for path, held in activation_bytes(self._timeline(base), size).items():
                for module in ancestors(path):
                    whole[module] = whole.get(module, 0) + held
            self._saved[key] = whole
        return {name: self._saved[key].get(name, 0) for name in names}

    def logits_layer(self) -> str:
        """The layer whose result is the last product before the only cross-entropy; "" where there is none, or more."""
        from torch import nn

        forward = [work for work in self._timeline(Option(self._source.precision, 1)).work if work.phase == "forward"]
        losses = [at for at, work in enumerate(forward) if work.operator.startswith("aten.nll_loss_forward")]
        first = forward[0].micro_batch if forward else 0
        if sum(forward[at].micro_batch == first for at in losses) != 1:
            return ""
        products = [work.module for work in forward[: losses[0]] if work.operator.startswith(_PRODUCTS)]
        layers = dict(self._source.model.named_modules())
        layer = layers.get(products[-1]) if products else None
        # Fewer classes than features: the logits are smaller than what they are made of.
        is_wide = type(layer) is nn.Linear and layer.out_features > layer.in_features
        return products[-1] if is_wide else ""

    # --- bytes ------------------------------------------------------------------------------------------------

    def lower_bound(self, option: Option) -> LowerBound:
        """The memory allocated on the GPU when the optimizer steps, or when a forward of the second step ends."""
        stepping, waiting = self._when_stepping(option), self._when_forward_ends(option)
        if waiting > stepping:
            return LowerBound(waiting, Why.NEEDS_SAVED)
        return LowerBound(stepping, Why.NEEDS_STATES)

    def _when_stepping(self, option: Option) -> int:
        return self._state(option, gradients=not option.recipe.optimizer_in_backward)

    def _when_forward_ends(self, option: Option) -> int:
        """Treated blocks count nothing here, though some of what they save stays (their inputs): a lower bound."""
        recipe, size = option.recipe, self._batch_size // option.splits
        if recipe.chunked_head:
            return 0  # what the logits and their loss save is not told apart from what stands beside them
        every = (_whole(option), size)
        treated = self._saved_by(*every, {*recipe.checkpoint, *recipe.offload_activations})
        saved = sum(self._saved_by(*every, ("",)).values()) - sum(treated.values())
        if recipe.slices is not None:
            body, slices = recipe.slices.body.name, recipe.slices
            saved -= self._saved_by(*every, (body,))[body] * slices.again // slices.count
        # From the second micro-batch on, the gradients of those before are there.
        state = self._state(option, gradients=option.splits * self._source.accumulate > 1)
        return state + saved + self._gathered(option)

    def _gathered(self, option: Option) -> int:
        """Weights that FSDP2 leaves on the GPU after the forward pass: those of the root, which backward needs first.

        ``torch/distributed/fsdp/_fully_shard/_fsdp_state.py``, ``_lazy_init``.
        """
        units = option.recipe.parameters_on_host
        if not units or "" in units:
            return 0
        if units not in self._outside:
            inside = set(units)
            named = self._source.model.named_parameters()
            outside = [parameter for path, parameter in named if inside.isdisjoint(ancestors(path))]
            sizes = (sum(p.numel() * 2 for p in outside), sum(p.numel() * p.element_size() for p in outside))
            self._outside[units] = sizes
        halved, whole = self._outside[units]
        return halved if option.precision.startswith("bf16") else whole

    def _state(self, option: Option, *, gradients: bool) -> int:
        recipe = option.recipe
        static = self._held(_whole(option)._replace(precision=self._source.precision))
        if recipe.parameters_on_host:
            return 0
        states = 0 if recipe.optimizer_on_host else static["optimizer_states"]
        if recipe.optimizer == "8bit":
            states = int(states * EIGHT_BIT_SHARE)
        total = static["parameters"] - self._frozen_bytes(recipe) + states
        if gradients:
            total += static["gradients"]
        halved = self._source.precision == "32-true" and option.precision in ("16-true", "bf16-true")
        return total // 2 if halved else total

    def _held(self, base: Option) -> Mapping[Category, int]:
        """Bytes by category when the second optimizer step begins, or at the end where there is none."""
        if base not in self._static:
            self._static[base] = self._held_in(self._timeline(base).exact(self._batch_size))
        return self._static[base]

    def _held_in(self, timeline: Timeline) -> Mapping[Category, int]:
        ends = [phase.start for phase in timeline.phases if phase.name == "optimizer" and phase.step == 2]
        held: dict[Category, int] = {"parameters": 0, "gradients": 0, "optimizer_states": 0}
        for block in timeline.alive_at(ends[-1] if ends else len(timeline.events)):
            if block.category in held:
                held[block.category] += block.bytes_at(self._batch_size)
        return held

    @cached_property
    def _trained(self) -> int:
        return sum(parameter.requires_grad for parameter in self._source.model.parameters())

    def _frozen_bytes(self, recipe: Recipe) -> int:
        names = recipe.frozen_on_host
        if names not in self._frozen:
            modules = (self._source.model.get_submodule(name) for name in names)
            self._frozen[names] = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
        return self._frozen[names]


def _by_engine(recipe: Recipe) -> bool:
    """True if DeepSpeed's engine keeps the optimizer's states in host memory."""
    return recipe.sharding is not None and recipe.sharding.states_on_host
