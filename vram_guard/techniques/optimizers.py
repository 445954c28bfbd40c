"""Other forms of the same optimizer: fewer temporaries while it steps, or smaller states."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError, MissingLibraryError, UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.techniques.compatibility import EIGHT_BIT, FUSED, no_eight_bit_form, no_fused_form
from vram_guard.techniques.recipe import OPTIMIZER_FORMS, OptimizerForm, unknown_form

if TYPE_CHECKING:
    import torch

#: Where it is looked for, the first that is installed. bitsandbytes updates in one kernel per parameter; torchao
#: compiles its step, and what that takes while it runs is known to a bound only.
LIBRARIES = ("bitsandbytes", "torchao")


def with_form(optimizer: torch.optim.Optimizer, form: OptimizerForm, *, library: str = "") -> torch.optim.Optimizer:
    """The optimizer in another form, over the same parameters, groups and hyperparameters.

    "fused" and "for-loop" change the optimizer in place, as its constructor would have done, and keep its state.
    "8bit" makes a new one, before the first step only: see :func:`repoint` for schedulers that hold the old one.

    Args:
        optimizer: one of torch's own.
        form: see :class:`vram_guard.techniques.Recipe`.
        library: for "8bit": "torchao" or "bitsandbytes"; "": the first of :data:`LIBRARIES` that is installed.

    Raises:
        InvalidInputError: unknown form or library.
        UnsupportedTechniqueError: the optimizer has no such form; nothing was changed.
        MissingLibraryError: "8bit" without a library that has it.
    """
    if form not in OPTIMIZER_FORMS:
        raise unknown_form(form)
    if form == "as-written":
        return optimizer
    reason = no_such_form(optimizer, form)
    if reason:
        raise UnsupportedTechniqueError(reason)
    if form == "8bit":
        return _eight_bit(optimizer, library)
    set_form = partial(_set_implementation, fused=form == "fused")
    set_form(optimizer)
    optimizer.register_load_state_dict_post_hook(set_form)  # a checkpoint brings its own flags
    return optimizer


def no_such_form(optimizer: torch.optim.Optimizer, form: OptimizerForm) -> str:
    """The reason why the optimizer has no such form; "" if it has."""
    name = _torch_class(optimizer)
    if form == "fused":
        if name not in FUSED:
            return no_fused_form(type(optimizer).__name__)
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return _("{name}: torch's fused kernels do not support differentiable=True", name=name)
        odd = {str(p.dtype) for group in optimizer.param_groups for p in group["params"] if not p.is_floating_point()}
        if not odd:
            return ""
        kinds = ", ".join(odd)
        return _("{name}: torch's fused kernels take floating-point parameters, not {kinds}", name=name, kinds=kinds)
    if form == "for-loop":
        if name and "foreach" in optimizer.defaults:
            return ""
        return _("{name} has no foreach option", name=type(optimizer).__name__)
    if form == "8bit":
        return _no_eight_bit(optimizer, name)
    return ""


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True for optimizers that evaluate the loss themselves, several times a step (LBFGS)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _torch_class(optimizer: torch.optim.Optimizer) -> str:
    """The name of torch's own class; "" for a subclass, whose step may be another."""
    import torch

    kind = type(optimizer)
    return kind.__name__ if getattr(torch.optim, kind.__name__, None) is kind else ""


# --- fused, for-loop -------------------------------------------------------------------------------------------------

#: Attributes that the constructors set besides the groups (torch/optim/{adam,sgd,adagrad}.py, ``if fused:``).
_FLAGS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")


def _set_implementation(optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
    chosen = {"foreach": False}
    if "fused" in optimizer.defaults:
        chosen["fused"] = fused
    # The constructor itself, over the same parameters, decides what else goes with it, or refuses.
    options = {name: value for name, value in optimizer.defaults.items() if name in _constructor(optimizer)}
    built = type(optimizer)([{"params": group["params"]} for group in optimizer.param_groups], **{**options, **chosen})
    for flag in _FLAGS:
        optimizer.__dict__.pop(flag, None)
        if flag in built.__dict__:
            optimizer.__dict__[flag] = built.__dict__[flag]
    optimizer.defaults.update(chosen)
    for group in optimizer.param_groups:
        group.update(chosen)
    _move_step_counts(optimizer, fused=fused)


def _constructor(optimizer: torch.optim.Optimizer) -> set[str]:
    import inspect

    return set(inspect.signature(type(optimizer).__init__).parameters)


def _move_step_counts(optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
    """Fused kernels count steps where the parameters are, the others on the host (torch/optim/adam.py)."""
    import torch

    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor) and not any(group.get("capturable") for group in optimizer.param_groups):
            state["step"] = step.to(parameter.device if fused else "cpu")


# --- 8 bits ----------------------------------------------------------------------------------------------------------


def _no_eight_bit(optimizer: torch.optim.Optimizer, name: str) -> str:
    if name not in EIGHT_BIT:
        return no_eight_bit_form(type(optimizer).__name__)
    if optimizer.state:
        return _(
            "{name} has stepped already: its states cannot become 8-bit ones; set the form before the first step",
            name=name,
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group.get(option):
                return _("{name}: the 8-bit form does not support {option}=True", name=name, option=option)
        if name == "Adam" and group.get("decoupled_weight_decay"):
            return _("Adam: the 8-bit form does not support decoupled_weight_decay=True; use AdamW")
    return ""


def eight_bit_library(wanted: str = "") -> str:
    """The library whose 8-bit optimizers are used.

    Raises:
        InvalidInputError: a library that is not known here.
        MissingLibraryError: it, or every one of them, is missing.
    """
    if wanted and wanted not in LIBRARIES:
        raise InvalidInputError(
            _(
                "8-bit optimizers come from {libraries}, not from {wanted}",
                libraries=_(" or ").join(LIBRARIES),
                wanted=repr(wanted),
            )
        )
    for name in (wanted,) if wanted else LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            return name
    raise MissingLibraryError(
        _(
            "the 8-bit form needs {libraries}: pip install {library}",
            libraries=wanted or _(" or ").join(LIBRARIES),
            library=wanted or LIBRARIES[0],
        )
    )


def eight_bit_classes(wanted: str = "") -> Any:
    """The module of :func:`eight_bit_library` that has the classes.

    Raises:
        MissingLibraryError: the library is missing, or cannot be imported here.
    """
    library = eight_bit_library(wanted)
    try:
        return importlib.import_module(f"{library}.optim")
    except Exception as error:
        raise unusable(library, error) from error


def unusable(library: str, error: Exception) -> MissingLibraryError:
    """The error for an optional library whose import fails: a release for another torch may raise anything."""
    return MissingLibraryError(
        _(
            "{library} is installed but cannot be imported ({error}): install a release that fits torch {version}",
            library=library,
            error=f"{type(error).__name__}: {error}",
            version=version("torch"),
        )
    )


def _eight_bit(optimizer: torch.optim.Optimizer, library: str) -> torch.optim.Optimizer:
    kind = getattr(eight_bit_classes(library), type(optimizer).__name__ + "8bit")
    kept = ("params", "lr", "betas", "eps", "weight_decay")
    groups = [{name: group[name] for name in (*kept, *_extras(optimizer, group))} for group in optimizer.param_groups]
    options = {name: optimizer.defaults[name] for name in kept if name in optimizer.defaults}
    import torch

    made: torch.optim.Optimizer = kind(groups, **{**options, "lr": float(options["lr"])})
    if isinstance(made.defaults["lr"], torch.Tensor):
        for group in made.param_groups:  # torchao 0.11 makes a tensor of its own rate only, and refuses other numbers
            group["lr"] = torch.as_tensor(group["lr"])
    return made


def _extras(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[str]:
    """The entries that the user, or a scheduler (``initial_lr``), added to a group."""
    return [name for name in group if name != "params" and name not in optimizer.defaults]


# --- schedulers ------------------------------------------------------------------------------------------------------


def repoint(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler that was built over another optimizer drive this one, over the same groups.

    Schedulers inside it (SequentialLR, ChainedScheduler: ``_schedulers``) follow. Call it before the scheduler's
    next step; best is to build schedulers after :func:`with_form`.

    Raises:
        UnsupportedTechniqueError: the two optimizers have different numbers of parameter groups.
    """
    for inner in getattr(scheduler, "_schedulers", ()):
        repoint(inner, optimizer)
    old = getattr(scheduler, "optimizer", None)
    if old is None or old is optimizer:
        return
    if len(old.param_groups) != len(optimizer.param_groups):
        raise UnsupportedTechniqueError(
            _(
                "{scheduler} drives {count} parameter groups, the new optimizer has {new}",
                scheduler=type(scheduler).__name__,
                count=len(old.param_groups),
                new=len(optimizer.param_groups),
            )
        )
    _watch_steps(old, optimizer)
    for mine, theirs in zip(optimizer.param_groups, old.param_groups, strict=True):
        mine.update({name: theirs[name] for name in _KEPT_BY_SCHEDULERS if name in theirs})
        _set_rate(mine, float(theirs["lr"]))
    scheduler.optimizer = optimizer


#: Keys that torch's schedulers write into parameter groups besides the rate itself.
_KEPT_BY_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "initial_momentum", "max_momentum", "base_momentum")


def _watch_steps(old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Schedulers see by a wrapper around ``step`` whether their optimizer stepped; their constructor puts it there."""
    import torch

    if not hasattr(new.step, "_wrapped_by_lr_sched"):
        torch.optim.lr_scheduler.LambdaLR(new, lambda _: 1.0)
    if getattr(old, "_opt_called", False):
        new.__dict__["_opt_called"] = True


def _set_rate(group: dict[str, Any], rate: float) -> None:
    import torch

    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)  # torchao keeps it as a tensor and refuses a number
    else:
        group["lr"] = rate
