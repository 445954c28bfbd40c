"""Facts that a config states about the optimizer, without building it; and its wrapper in another precision."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict, build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _, marked
from vram_guard.step import Precision

SEVERAL = marked("several optimizers (OptimWrapperDict): the model's own train_step drives them in an order of its own")

#: What AmpOptimWrapper takes beyond OptimWrapper.
AMP_ONLY = ("loss_scale", "dtype", "use_fsdp")


@dataclass(frozen=True)
class OptimFacts:
    """One optimizer and the way it is driven."""

    kind: type[Any]
    """The wrapper's class."""
    precision: Precision
    accumulate: int
    clip_grad_norm: float | None
    clip_grad_value: float | None
    make: Callable[[nn.Module], torch.optim.Optimizer]
    """The user's optimizer over a model's parameters, by the user's constructor; one that is built as it is."""
    built: bool
    """True if the user built the wrapper, instead of describing it."""


def read(wrapper: Any) -> OptimFacts:
    """Read ``optim_wrapper``, a config or an object.

    Raises:
        UnsupportedStepError: several optimizers, or a wrapper that is not known here.
    """
    return _read_built(wrapper) if isinstance(wrapper, OptimWrapper) else _read_config(wrapper)


def _read_config(config: Any) -> OptimFacts:
    if "optimizer" not in config and "constructor" not in config:
        raise UnsupportedStepError(_(SEVERAL))
    kind = _class_of(config.get("type", "OptimWrapper"))
    _check_known(kind)
    clip = dict(config.get("clip_grad") or {})
    precision = _precision(kind, config.get("dtype"))
    norm, value = _clipping(str(clip.get("type", "norm")), clip)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        if isinstance(config.get("optimizer"), torch.optim.Optimizer):  # MMEngine puts it into the wrapper as it is
            return config["optimizer"]  # type: ignore[no-any-return]
        plain = copy.deepcopy(config)
        for name in AMP_ONLY:
            plain.pop(name, None)
        plain["type"] = OptimWrapper
        made = build_optim_wrapper(model, plain)
        if isinstance(made, OptimWrapperDict):
            raise UnsupportedStepError(_("the optimizer constructor makes several optimizers"))
        return made.optimizer  # type: ignore[no-any-return]

    return OptimFacts(kind, precision, int(config.get("accumulative_counts", 1)), norm, value, make, built=False)


def _read_built(wrapper: OptimWrapper) -> OptimFacts:
    if isinstance(wrapper, OptimWrapperDict):
        raise UnsupportedStepError(_(SEVERAL))
    _check_known(type(wrapper))
    kind = "norm" if getattr(wrapper, "grad_name", "grad_norm") == "grad_norm" else "value"
    norm, value = _clipping(kind, dict(wrapper.clip_grad_kwargs or {}))
    precision = _precision(type(wrapper), getattr(wrapper, "cast_dtype", None))
    accumulate = wrapper._accumulative_counts  # noqa: SLF001 - it has no public name
    return OptimFacts(type(wrapper), precision, accumulate, norm, value, lambda _model: wrapper.optimizer, built=True)


def _class_of(kind: Any) -> type[Any]:
    found = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    if not isinstance(found, type):
        raise UnsupportedStepError(_("optim_wrapper: there is no optimizer wrapper {kind}", kind=repr(kind)))
    return found


def _check_known(kind: type[Any]) -> None:
    if not issubclass(kind, OptimWrapper) or kind.update_params is not OptimWrapper.update_params:
        raise UnsupportedStepError(
            _(
                "the optimizer wrapper {kind} has an update_params of its own; supported are OptimWrapper, "
                "AmpOptimWrapper and subclasses that keep theirs",
                kind=kind.__name__,
            )
        )
    if any(base.__name__ == "ApexOptimWrapper" and base.__module__.startswith("mmengine.") for base in kind.__mro__):
        raise UnsupportedStepError(_("ApexOptimWrapper's precision is Apex's own; use AmpOptimWrapper"))


def _precision(kind: type[Any], dtype: Any) -> Precision:
    if issubclass(kind, CpuMixedOptimWrapper):
        return "bf16-mixed"
    if not issubclass(kind, AmpOptimWrapper) or str(dtype).endswith("float32"):
        return "32-true"
    if str(dtype).endswith("float64"):
        raise UnsupportedStepError(_("AmpOptimWrapper with dtype float64 cannot be predicted"))
    return "bf16-mixed" if str(dtype).endswith("bfloat16") else "16-mixed"


def _clipping(kind: str, arguments: dict[str, Any]) -> tuple[float | None, float | None]:
    """(maximum norm, bound) as ``clip_grad_norm_`` and ``clip_grad_value_`` take them."""
    if kind == "value":
        bound = arguments.get("clip_value")
        return None, None if bound is None else float(bound)
    most = arguments.get("max_norm")
    return None if most is None else float(most), None


# --- another precision ------------------------------------------------------------------------------------------


class CpuMixedOptimWrapper(OptimWrapper):  # type: ignore[misc]
    """Mixed precision without a GPU: bfloat16 without loss scaling. AmpOptimWrapper insists on a GPU."""

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Autocast to bfloat16 on the CPU."""
        with super().optim_context(model), torch.autocast("cpu", dtype=torch.bfloat16):
            yield


def in_precision(config: Any, precision: str, device: str) -> Any:
    """A copy of the ``optim_wrapper`` config that trains in this mixed precision.

    float16 with AmpOptimWrapper's dynamic loss scale, bfloat16 without any scaling.
    """
    changed = copy.copy(config)  # an optimizer in it is over the parameters of the model
    if device == "cpu":
        changed["type"] = CpuMixedOptimWrapper
        return changed
    changed["type"] = "AmpOptimWrapper"
    half = precision == "16-mixed"
    changed["dtype"] = "float16" if half else "bfloat16"
    changed["loss_scale"] = "dynamic" if half else {"enabled": False}
    return changed


# --- in a trace -------------------------------------------------------------------------------------------------


def wrapper_of_trace(
    given: Any, facts: OptimFacts, optimizer: torch.optim.Optimizer, region: contextlib.AbstractContextManager[Any]
) -> OptimWrapper:
    """The user's wrapper around the optimizer of a trace, on the simulated GPU.

    Args:
        given: config or object, which is changed.
        facts: about it.
        optimizer: to wrap.
        region: in which the trace runs its forward, whose precision may be another one than the written.
    """
    if facts.built:
        given.optimizer = optimizer
        return given
    with region:
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    precision = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}.get(half, "32-true")  # type: ignore[arg-type]
    if precision != facts.precision or issubclass(facts.kind, CpuMixedOptimWrapper):
        given = in_precision(given, precision, "cuda")
    described = ("type", "optimizer", "constructor", "paramwise_cfg")
    settings = {name: value for name, value in given.items() if name not in described}
    return _class_of(given.get("type", "OptimWrapper"))(optimizer=optimizer, **settings)
