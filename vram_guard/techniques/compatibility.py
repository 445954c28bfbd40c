"""Techniques that exclude each other, or other settings of a step: answered without tracing anything."""

from __future__ import annotations

from vram_guard.language import _
from vram_guard.techniques.recipe import Recipe

#: torch's optimizers whose update of a parameter depends on nothing but that parameter, with a fused step for the CPU
#: (``torch/optim``, "fused"): the ones that step on the host, each parameter by itself.
STEP_ON_HOST = ("Adam", "AdamW", "SGD", "Adagrad")

#: torch's optimizers with a fused kernel for CUDA ("fused" in their constructors).
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")

#: Those whose 8-bit kin has this name in torchao and in bitsandbytes: ``Adam`` -> ``Adam8bit``.
EIGHT_BIT = ("Adam", "AdamW")

#: torch's optimizers whose update of a parameter depends on nothing but that parameter and its own state
#: (``torch/optim``: each ``step`` walks the parameters of a group one by one, or as lists of equal operations).
EACH_BY_ITSELF = (
    *("Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"),
    *("Adafactor", "Muon"),
)


def incompatible(
    recipe: Recipe,
    *,
    clip: bool = False,
    precision: str = "32-true",
    optimizer_name: str = "",
    ranks: int = 1,
    torch_version: tuple[int, int] | None = None,
    accumulate: int = 1,
    compiled: bool = False,
) -> str:
    """The reason why a recipe cannot run in this step; "" if nothing is known against it.

    What needs the model or the optimizer itself (tied parameters, a subclass) is refused by the functions that install
    the techniques.

    Args:
        recipe: the techniques.
        clip: whether gradients are clipped, by norm or by value.
        precision: the step's, in Lightning's words.
        optimizer_name: the name of the optimizer's class; "": not known, or none (inference).
        ranks: processes that share the work.
        torch_version: (major, minor); None: the installed one is not asked.
        accumulate: backward passes of an optimizer step.
        compiled: whether ``torch.compile`` compiles the model, or blocks of it.
    """
    if compiled and recipe.checkpoint_keeps:
        return _("compiled blocks cannot keep results of single operators")
    if recipe.optimizer_in_backward and accumulate > 1:
        return _("a step has {count} backward passes, and the optimizer would step after each", count=accumulate)
    checks = (
        *(_sharding, _optimizer_form, _optimizer_on_host, _parameters_on_host, _in_backward, _chunked, _selective),
        _sliced,
    )
    for check in checks:
        reason = check(recipe, clip, precision, optimizer_name, ranks, torch_version)
        if reason:
            return reason
    return ""


def _sharding(
    recipe: Recipe, _clip: bool, precision: str, _name: str, _ranks: int, _version: tuple[int, int] | None
) -> str:
    divided = recipe.sharding
    if divided is None:
        return ""
    if precision == "16-mixed" and (divided.fsdp2 or divided.offload):
        return _("the GradScaler is not known to find what overflows in weights that are divided or on the host")
    if recipe.frozen_on_host or recipe.parameters_on_host or recipe.optimizer_on_host or recipe.optimizer == "8bit":
        return _("weights that are divided over the processes have their own places on host and GPU")
    return ""


def _optimizer_form(
    recipe: Recipe, clip: bool, precision: str, name: str, _ranks: int, _version: tuple[int, int] | None
) -> str:
    if recipe.optimizer == "fused":
        if name and name not in FUSED:
            return no_fused_form(name)
        if clip and precision == "16-mixed":
            return _(
                "a fused optimizer unscales float16 gradients itself, within its step: clipping before it would work "
                "on scaled gradients, and Lightning refuses it"
            )
    if recipe.optimizer == "8bit" and name and name not in EIGHT_BIT:
        return no_eight_bit_form(name)
    return ""


def no_fused_form(name: str) -> str:
    """The reason against "fused" for an optimizer of this name."""
    return _("{name} has no fused form; torch has one of {known}", name=name, known=", ".join(FUSED))


def no_eight_bit_form(name: str) -> str:
    """The reason against "8bit" for an optimizer of this name."""
    return _("{name} has no 8-bit form; {known} have one", name=name, known=_(" and ").join(EIGHT_BIT))


def _optimizer_on_host(
    recipe: Recipe, clip: bool, precision: str, name: str, ranks: int, _version: tuple[int, int] | None
) -> str:
    if not recipe.optimizer_on_host:
        return ""
    if clip:
        return _(
            "gradients are copied to the host while the backward pass runs: clipping after it would change only those "
            "on the GPU, without effect"
        )
    if precision == "16-mixed":
        return _(
            "gradients are copied to the host while the backward pass runs: the GradScaler would unscale only those on "
            "the GPU, without effect"
        )
    if ranks > 1:
        return _(
            "gradients are copied to the host before DistributedDataParallel has reduced them: each "
            "process would step with its own"
        )
    if recipe.optimizer == "8bit":
        return _("8-bit states on the host save next to nothing on the GPU, and no library steps them there")
    if name and name not in STEP_ON_HOST:
        return _("{name} cannot step on the host; {known} can", name=name, known=", ".join(STEP_ON_HOST))
    return ""


def _parameters_on_host(
    recipe: Recipe, _clip: bool, precision: str, _name: str, ranks: int, version: tuple[int, int] | None
) -> str:
    if not recipe.parameters_on_host:
        return ""
    if recipe.optimizer_on_host:
        return _(
            "parameters on the host have their optimizer states there already: optimizer_on_host has nothing to do"
        )
    if recipe.frozen_on_host:
        return _(
            "list the frozen modules in parameters_on_host instead: only one library can move a module's parameters"
        )
    if recipe.optimizer == "8bit":
        return _("no library steps 8-bit states on the host, where the parameters' gradients are")
    if precision == "16-mixed":
        return _("the GradScaler unscales gradients on the GPU, and these are on the host")
    if ranks > 1:
        return _("parameters_on_host supports one process, not several")
    if version is not None and version < (2, 6):
        return _("parameters on the host need torch 2.6 or later (torch.distributed.fsdp.fully_shard)")
    return ""


def _in_backward(
    recipe: Recipe, clip: bool, precision: str, name: str, ranks: int, _version: tuple[int, int] | None
) -> str:
    if not recipe.optimizer_in_backward:
        return ""
    if clip:
        return _("gradients are clipped once all of them are there, and each would have stepped by then")
    if precision == "16-mixed":
        return _("the GradScaler looks at all gradients before it lets any weight step")
    if ranks > 1 or recipe.sharding is not None:
        return _("the processes add up their gradients after the hooks in which each process would have stepped")
    if recipe.optimizer_on_host or recipe.parameters_on_host:
        return _("an optimizer on the host takes the gradients there by itself, and steps when it is told to")
    if name and name.removesuffix("8bit") not in EACH_BY_ITSELF:
        return _("{name} is not known to step each parameter by itself", name=name)
    return ""


def _chunked(
    recipe: Recipe, _clip: bool, _precision: str, _name: str, ranks: int, version: tuple[int, int] | None
) -> str:
    if not recipe.chunked_head:
        return ""
    if version is not None and version < (2, 6):  # 2.4 lets no dispatch mode make scores that are chunks
        return _("a loss in chunks needs torch 2.6 or later")
    if ranks > 1 or recipe.sharding is not None:
        return _("the weights of the last layer, which chunks use several times, are gathered or reduced by others")
    if recipe.parameters_on_host:
        return _(
            "parameters on the host come to the GPU for one forward of their layer, and chunks run it several times"
        )
    return ""


def _selective(
    recipe: Recipe, _clip: bool, _precision: str, _name: str, _ranks: int, version: tuple[int, int] | None
) -> str:
    if recipe.checkpoint_keeps and version is not None and version < (2, 6):  # 2.4 lets a kept result be changed
        return _("blocks that keep results of operators need torch 2.6 or later")
    if recipe.checkpoint_keeps and (recipe.sharding is not None or recipe.parameters_on_host):
        return _("FSDP gathers weights within blocks by operators of its own, which differ when a block runs again")
    return ""


def _sliced(
    recipe: Recipe, _clip: bool, _precision: str, _name: str, _ranks: int, _version: tuple[int, int] | None
) -> str:
    if recipe.slices is None:
        return ""
    if recipe.sharding is not None or recipe.parameters_on_host or recipe.frozen_on_host:
        return _("weights come to the GPU, or are gathered, for one forward of their module, and slices run it often")
    body = recipe.slices.body.name
    if recipe.chunked_head and (not body or f"{recipe.chunked_head}.".startswith(f"{body}.")):
        return _("a loss in chunks needs the results of the last layer as it makes them, and slices put them together")
    return ""
