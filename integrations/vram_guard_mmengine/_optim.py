"""Facts that a config states about the optimizer, without building it; and its wrapper in another precision."""

from __future__ import annotations

import contextlib
import copy
import inspect
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
    """The user's optimizer over a model's parameters, by the user's constructor."""
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
    if isinstance(config.get("optimizer"), torch.optim.Optimizer):
        raise UnsupportedStepError(
            _("optim_wrapper.optimizer is built already; describe it as a dict(type=...) instead")
        )
    clip = dict(config.get("clip_grad") or {})
    precision = _precision(kind, config.get("dtype"))
    norm, value = _clipping(str(clip.get("type", "norm")), clip)

    def make(model: nn.Module) -> torch.optim.Optimizer:
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
    make = _rebuilder(wrapper.optimizer)
    return OptimFacts(type(wrapper), precision, wrapper._accumulative_counts, norm, value, make, built=True)  # noqa: SLF001


def _rebuilder(optimizer: torch.optim.Optimizer) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """The same optimizer over a model whose parameters have been exchanged."""
    holders = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    options = set(inspect.signature(type(optimizer).__init__).parameters)
    defaults = {name: value for name, value in optimizer.defaults.items() if name in options}
    extras = [{name: v for name, v in group.items() if name != "params"} for group in optimizer.param_groups]

    def make(model: nn.Module, names: dict[int, str]) -> torch.optim.Optimizer:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        groups = [
            {**extra, "params": [parameters[names[one]] for one in held]}
            for extra, held in zip(extras, holders, strict=True)
        ]
        return type(optimizer)(groups, **defaults)

    return _Rebuilt(make)


class _Rebuilt:
    """Remembers the names of the real parameters until the symbolic ones have taken their places."""

    def __init__(self, make: Callable[[nn.Module, dict[int, str]], torch.optim.Optimizer]) -> None:
        self._make = make
        self._names: dict[int, str] = {}

    def look_at(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return self._make(model, self._names)


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
    if kind.__name__ == "ApexOptimWrapper":
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
    changed = copy.deepcopy(config)
    if device == "cpu":
        changed["type"] = CpuMixedOptimWrapper
        return changed
    changed["type"] = "AmpOptimWrapper"
    half = precision == "16-mixed"
    changed["dtype"] = "float16" if half else "bfloat16"
    changed["loss_scale"] = "dynamic" if half else {"enabled": False}
    return changed
