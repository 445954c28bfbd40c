"""Sentences of plans: why they are what they are, and recipes in words. Values first, text where it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from vram_guard.language import Message, _, marked
from vram_guard.module_names import in_a_sentence, joined, kind_of, with_class
from vram_guard.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vram_guard.techniques.recipe import Recipe, Sharding


class Why(Enum):
    """Kinds of reasons; the value is the sentence, in English."""

    # what the step as written takes
    PINNED = marked("The step fits as written; the pinned settings are applied nevertheless.")
    PINS_DO_NOT_FIT = marked("The step fits as written; with the pinned settings it does not.")
    PINS_REFUSED = marked("The pinned settings are not possible in this step: {why}.")
    ONLY_BOUNDED = marked("The step as written could only be bounded from below, so it is not known to fit.")
    SHORTAGE = marked("As written the step needs {peak}, {missing} more than the {usable} that may be used.")
    MARGINS = marked("The safety margin is measured on runs of the same kind: {before} as written, {after} as planned.")
    SHORTAGE_SPREAD = marked(
        "Spread so, and otherwise as written, each GPU needs {peak}, {missing} more than the {usable} that may be used."
    )
    SAME_FOR_EVERY_BATCH = marked(
        "The step takes the same memory with {samples} samples as with any other number: check that its batch has as "
        "many samples as are asked for."
    )

    # why the precision is what it is
    NOT_ALLOWED = marked("Mixed precision was not tried: it is not among the techniques that this plan may use.")
    PRECISION_PINNED = marked("The precision is pinned.")
    PRECISION_CHOSEN = marked("The precision {precision} was chosen by the user and stays.")
    BFLOAT16_ASSUMED = marked(
        "No GPU is named: bf16-mixed assumes compute capability 8.0 or later. Name the GPU to be sure."
    )
    BFLOAT16 = marked("The GPU computes in bfloat16, which needs no gradient scaling.")
    FLOAT16 = marked("Compute capability {version} has no bfloat16: float16 with a GradScaler.")
    NO_HALF_PRECISION = marked(
        "Mixed precision was not tried: compute capability {version} has no fast half precision."
    )

    # what was chosen
    MICRO_BATCHES = marked(
        "{count} equal micro-batches; the effective batch size stays, and with it learning rates, schedules and the "
        "number of optimizer steps."
    )
    BATCH_NORM = marked(
        "Batch normalisation takes its statistics over a micro-batch ({samples} samples instead of {batch}), and its "
        "running statistics move on with each: the result is close to the unsplit one, not equal."
    )
    EXPANDABLE = marked(
        "Expandable segments are the allocator's setting {setting}: what trains under this plan makes it before memory "
        "is reserved."
    )
    EXPANDABLE_WOULD_FIT = marked(
        "Expandable segments ({setting}), which change no result, would make the step fit as written ({peak}); they "
        "are not among the techniques that this plan may use."
    )
    CHEAPEST = marked("The cheapest way that fits: {time}, by a model of the GPU.")

    CHANGES_LEAST = marked(
        "Of the ways that fit and that a model of the GPU cannot tell apart, the one that changes least: {time}."
    )
    MODELLED_ON = marked("Step times are modelled on the slowest GPU of compute capability {version} ({name}).")

    # the whole job
    PHASE_TOO_LARGE = marked(
        "A plan for the training step alone would not be enough for the whole run: {phase} would need {peak}, "
        "{missing} more than the {usable} that may be used."
    )
    PHASE_NOT_KNOWN = marked(
        "{phase} needs at least {peak}, and could not be followed to its end: the run is not known to fit."
    )
    STEP_DOES_NOT_HELP = marked("No change of the training step makes the whole run fit.")
    COMPILED_TOO_LARGE = marked("Compiled, the step needs {missing} more than may be used.")
    SMALLER_EVALUATION = marked(
        "With batches of {size} in place of {batch}, {phase} fits beside the step. It is not applied: {why}."
    )
    FIRST_STEPS_ALONE = marked(
        "This counts the first training steps alone: as they do not fit, the rest of the job (evaluation, saving, "
        "later epochs) was not followed, and is not counted."
    )
    JOB_LEFT_OUT = marked(
        "This counts the first training steps alone: the rest of the job (evaluation, saving, later epochs) is not "
        "counted, as whole_job is off."
    )
    EVALUATION_CUT = marked(
        "With batches of {size} in place of {batch}, {phase} fits beside the step: the same samples, in more batches."
    )
    NO_EVALUATION = marked("Not even batches of one sample make {phase} fit beside the step.")

    # what was refused
    REFUSED = marked("{technique} is not possible here: {why}")
    REFUSED_SEVERAL = marked("{techniques} are not possible here: {why}")

    NOT_CHECKPOINTED = marked(
        "{blocks} cannot be checkpointed: the forward {does}, and would do so again in the backward pass."
    )
    NOT_CHECKPOINTED_INSIDE = marked(
        "{blocks} cannot be checkpointed: the forward runs inside {name}, and in the backward pass it may not."
    )
    NO_BLOCKS = marked(
        "Checkpointing was not tried: the model has no block that keeps something for the backward pass."
    )

    # nothing fits
    NEAREST = marked("Nothing that is allowed makes it fit. Closest: {option}, {missing} over budget ({count} bytes).")
    NEAREST_AT_LEAST = marked(
        "Nothing that is allowed makes it fit. Closest: {option}, at least {missing} over budget ({count} bytes)."
    )
    PROPOSED = marked("It would fit with {change}, but {why}")
    NO_ACCUMULATION = marked(
        "Smaller micro-batches were not tried: they are not among the techniques that this plan may use."
    )
    NO_GRADIENTS = marked("A step without an optimizer has no gradients to accumulate over smaller micro-batches.")
    SIZE_PINNED = marked("The micro-batch size is pinned.")
    ONE_SAMPLE = marked("A batch of one sample cannot be split.")
    UNCHANGED = marked("Nothing was changed.")

    # growth
    ABOVE_TARGET = marked("It already uses more than the target of {share} of {total}: the batch is not grown.")
    CANNOT_GROW = marked("The batch cannot grow.")
    CANNOT_GROW_TO = marked("The batch cannot grow ({option}: {why}).")
    GROWN = marked(
        "Memory used: {before} with batch {batch}, {after} with batch {grown}; the target is {share} of {total}."
    )
    LEARNING_RATE = marked(
        "The effective batch size grows from {before} to {after}: learning rates are multiplied by {rate} (rule: "
        "{rule})."
    )
    WARM_UP = marked("Warm the learning rate up over the first 5 epochs or so (Goyal et al. 2017, section 2.2).")
    FOUND_FOR_SGD = marked(
        "Published for SGD: the linear rule with warm-up lost no accuracy on ImageNet up to 8,192 images a step, "
        "weight decay and all else unchanged (Goyal et al. 2017, arXiv:1706.02677, section 2.1); such rules do not "
        "hold for every problem or every batch size (Shallue et al. 2019, JMLR 20(112), arXiv:1811.03600)."
    )
    FOUND_FOR_ADAM = marked(
        "Published for Adam-like optimizers: rates grow with the square root of the batch, and 1 - beta1 and 1 - beta2 "
        "with the batch itself, while epsilon falls with its square root (Malladi et al. 2022, arXiv:2205.10287); in "
        "very large batches the best rate falls again (Li et al. 2024, arXiv:2405.14578). Betas, epsilon and weight "
        "decay are left as they are."
    )
    LARGE_BATCH = marked("Beyond {count} samples per step or so, scaled rates have lost accuracy.")

    # why an alternative was not taken
    OVER_BUDGET = marked("needs {peak} ({missing} over budget)")
    OVER_TARGET = marked("needs {peak} ({missing} over the target)")
    LOWER_BOUND = marked("needs at least {peak} (a lower bound: not known to fit)")
    NEEDS_STATES = marked("needs at least {amount} for weights, gradients and optimizer states alone")
    NEEDS_SAVED = marked("needs at least {amount} for weights, optimizer states and saved activations alone")
    NEEDS_FEW_BLOCKS = marked("needs at least {amount} with three of its equal blocks alone")
    NEEDS_OUTSIDE_OPTIMIZER = marked("needs at least {amount} outside the optimizer")
    CHEAPER_AND_MORE_CHANGES = marked("should fit too ({peak}, not traced) and take {time}, but changes more")
    HARDLY_DEARER = marked("should fit too ({peak}, not traced), and takes {time}")
    HOST_MEMORY = marked("takes {amount} of host memory, of which {usable} are available")
    FAILS = marked("the step fails there: {error}")
    COSTS = marked("not traced: would take {time}")
    AS_LONG = marked("takes about as long")
    COSTS_MORE_THAN = marked("takes {factor} times as long")
    NO_FIT_AND_AS_LONG = marked("does not fit as it is, and takes about as long")
    NO_FIT_AND_SLOWER = marked("does not fit as it is, and takes {factor} times as long")
    NOT_FASTER = marked("does not fit as it is; with what might make it fit, it takes longer")
    NOTHING_FITS = marked("nothing that is allowed makes it fit: {missing} over budget")
    COSTS_WITH_EVERY_BLOCK = marked("not traced: would take {time}, and more with every block")
    DATA_SET_TOO_SMALL = marked("the data set has {count} samples, and an epoch needs at least one optimizer step")


#: Reasons that only explain the figures and the change that a short report shows beside them.
EXPLANATIONS = frozenset(
    {
        *(Why.SHORTAGE, Why.MARGINS, Why.SHORTAGE_SPREAD, Why.MICRO_BATCHES),
        *(Why.CHEAPEST, Why.CHANGES_LEAST, Why.NOT_CHECKPOINTED, Why.NOT_CHECKPOINTED_INSIDE),
        *(Why.FOUND_FOR_SGD, Why.FOUND_FOR_ADAM),
        *(Why.NOT_ALLOWED, Why.PRECISION_PINNED, Why.PRECISION_CHOSEN, Why.BFLOAT16, Why.FLOAT16),
    }
)


#: Reasons that stand right behind the verdict: a plan that is only proposed, and what the figures count.
COUNTED = frozenset({Why.PROPOSED, Why.FIRST_STEPS_ALONE, Why.JOB_LEFT_OUT})


@dataclass(frozen=True, init=False)
class Reason(Message):
    """A reason with its figures; ``str()`` is the sentence in the reader's language."""

    kind: Why

    def __init__(self, kind: Why, /, **values: object) -> None:
        super().__init__(kind.value, **values)
        object.__setattr__(self, "kind", kind)

    @classmethod
    def of(cls, text: str, values: Mapping[str, object]) -> Reason:
        """The reason of this kind, by its sentence in English."""
        return cls(Why(text), **values)


class RelativeTime(float):
    """A modelled step time over that of the step as written, for messages.

    Example:
        >>> f"would take {RelativeTime(1.25)}", f"would take {RelativeTime(0.999)}"
        ('would take 1.25 times the step time as written', 'would take about the same step time as written')
    """

    def __str__(self) -> str:
        factor = f"{float(self):.2f}"
        if factor == "1.00":
            return _("about the same step time as written")
        return _("{factor} times the step time as written", factor=factor)


def longer(factor: float, *, fits: bool) -> Reason:
    """How much longer a way of using several GPUs takes than the fastest one."""
    shown = f"{factor:.2f}"
    if shown == "1.00":
        return Reason(Why.AS_LONG if fits else Why.NO_FIT_AND_AS_LONG)
    return Reason(Why.COSTS_MORE_THAN if fits else Why.NO_FIT_AND_SLOWER, factor=shown)


_FORMS = {
    "fused": marked("fused optimizer"),
    "for-loop": marked("optimizer without foreach"),
    "8bit": marked("8-bit optimizer states"),
}

#: Techniques as they are called where a training does not admit them.
_ONE = {
    "precision": marked("mixed precision"),
    "grow": marked("a larger batch"),
    "checkpoint": marked("activation checkpointing of blocks"),
    "selective_checkpoint": marked("selective activation checkpointing"),
    "fused": marked("a fused optimizer"),
    "offload_optimizer": marked("an optimizer on the host"),
    "reshard": marked("another time at which gathered weights are freed"),
    "shard": marked("FSDP2 in place of DDP"),
    "optimizer_in_backward": marked("an optimizer in the backward pass"),
    "chunked_loss": marked("a loss in chunks"),
}
_SEVERAL = {
    "slices": marked("slices of the batch"),
    "accumulate": marked("smaller micro-batches"),
    "expandable_segments": marked("expandable segments"),
    "offload_parameters": marked("parameters on the host"),
}


def refused(technique: str, why: object) -> Reason:
    """The reason for leaving out a technique that a training does not admit."""
    if technique in _SEVERAL:
        return Reason(Why.REFUSED_SEVERAL, techniques=Message(_SEVERAL[technique]), why=why)
    return Reason(Why.REFUSED, technique=Message(_ONE.get(technique, technique)), why=why)


def recipe_words(recipe: Recipe) -> list[str]:
    """The techniques that are on, each in a few words."""
    words = []
    if recipe.checkpoint_keeps:
        kept = _(", ").join(recipe.checkpoint_keeps)
        words.append(
            _("{blocks} checkpointed, results of {operators} kept", blocks=counted(recipe.checkpoint), operators=kept)
        )
    elif recipe.checkpoint:
        words.append(_("{blocks} checkpointed", blocks=counted(recipe.checkpoint)))
    words += [slices_words(recipe)] if recipe.slices is not None else []
    words += [sharding_words(recipe.sharding)] if recipe.sharding is not None else []
    words += offload_words(recipe)
    if recipe.optimizer != "as-written":
        words.append(_(_FORMS[recipe.optimizer]))
    words += [_("optimizer in the backward pass")] if recipe.optimizer_in_backward else []
    words += [_("logits of '{name}' and their loss in chunks", name=recipe.chunked_head)] if recipe.chunked_head else []
    words += [_("expandable segments")] if recipe.expandable_segments else []
    return words


def sharding_words(sharding: Sharding) -> str:
    """A change of how the training is divided over its processes, in a few words."""
    words = [_("FSDP2 in place of DDP")] if sharding.fsdp2 else []
    if sharding.reshard is True:
        words.append(_("gathered weights freed after the forward"))
    elif sharding.reshard is False:
        words.append(_("gathered weights kept for the backward pass"))
    if sharding.offload:
        words.append(_("weights and optimizer in host memory"))
    if sharding.stage is not None:
        words.append(_("stage {stage} of DeepSpeed's ZeRO", stage=sharding.stage))
    if sharding.states_on_host:
        words.append(_("DeepSpeed's optimizer in host memory"))
    return _(", ").join(words)


def slices_words(recipe: Recipe) -> str:
    """The slices that the body's batch is cut into, in a few words."""
    if recipe.slices is None:
        return _("as written")
    slices, name = recipe.slices, recipe.slices.body.name
    return _(
        "{body} in {count} slices of the batch, {again} of them computed again",
        body=repr(name) if name else _("the model"),
        count=slices.count,
        again=slices.again,
    )


def offload_words(recipe: Recipe) -> list[str]:
    """A description of everything that is kept in host memory."""
    words = []
    if recipe.offload_activations:
        words.append(_("activations of {blocks} on the host", blocks=counted(recipe.offload_activations)))
    if recipe.frozen_on_host:
        words.append(_("{modules} (frozen) on the host", modules=joined(recipe.frozen_on_host)))
    if recipe.optimizer_on_host:
        words.append(_("optimizer on the host"))
    if recipe.parameters_on_host:
        words.append(_("parameters on the host (FSDP2)"))
    return words


def optimizer_words(recipe: Recipe) -> str:
    """The optimizer's form and place, in a few words."""
    form = [_(_FORMS[recipe.optimizer])] if recipe.optimizer in _FORMS else []
    where = [_("in the backward pass")] if recipe.optimizer_in_backward else []
    return _(", ").join([*form, *where]) or _("as written")


def loss_words(recipe: Recipe) -> str:
    """How logits and loss are computed, in a few words."""
    return _("in chunks, with '{name}'", name=recipe.chunked_head) if recipe.chunked_head else _("as written")


def segments_words(recipe: Recipe) -> str:
    """The allocator's segments, in a word."""
    return _("expandable") if recipe.expandable_segments else _("as set")


def counted(modules: tuple[str, ...]) -> str:
    """The names where there are few, else how many, and which."""
    if modules == ("",):
        return _("the whole model")
    kinds = {kind_of(name) for name in modules}
    if len(modules) == 1:
        return in_a_sentence(modules[0])
    if len(modules) <= 3:
        return _("modules {names}", names=", ".join(with_class(name, repr(str(name))) for name in modules))
    blocks = _("{count} blocks", count=len(modules))
    return with_class(modules[0], blocks) if len(kinds) == 1 else blocks


def ranges(modules: tuple[str, ...]) -> str:
    """The names, runs of numbers joined: "h.0-7, head"."""
    return printable(joined(modules), lines=False)
