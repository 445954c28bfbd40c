"""Optimizer states on the host: torchao's CPUOffloadOptimizer, in a form that schedulers and frameworks can drive.

What it does (torchao/optim/cpu_offload.py): every trained parameter of 4,096 elements or more has a copy of itself and
its gradient in pinned host memory, and its optimizer states in host memory. When its gradient is complete, a hook
copies it there; ``step`` runs one optimizer per parameter on the CPU and copies the new parameter back. Here ``step``
first copies the parameter to the host too, in case other code has written to it since: one more transfer of its bytes,
beside the CPU's work on the parameters before it. Smaller
parameters step on the GPU. Gradients on the GPU stay until ``zero_grad`` (``offload_gradients=True`` frees them, and
breaks accumulation).
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

from vram_guard.errors import MissingLibraryError, UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.quiet import quiet_imports
from vram_guard.techniques.compatibility import STEP_ON_HOST
from vram_guard.techniques.optimizers import unusable
from vram_guard.tensors import version_of

if TYPE_CHECKING:
    import torch


def on_host(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer with its states, and its step, on the host.

    The result has the very parameter groups of the old one (schedulers built over either drive it), its ``defaults``,
    ``state`` by parameter, and a ``state_dict`` in torch's own form: a checkpoint of the plain run continues here, and
    the other way round. Build it when the parameters are on the GPU, with their final dtype.

    Args:
        optimizer: one of torch's :data:`STEP_ON_HOST` classes, before its first step or after.

    Raises:
        UnsupportedTechniqueError: another class, a subclass, or options that torch's fused CPU step does not have.
        MissingLibraryError: torchao is not installed.
    """
    reason = cannot_step_on_host(optimizer)
    if reason:
        raise UnsupportedTechniqueError(reason)
    made: torch.optim.Optimizer = host_optimizer()(optimizer)
    return made


def cannot_step_on_host(optimizer: torch.optim.Optimizer) -> str:
    """The reason why this optimizer cannot step on the host; "" if it can."""
    import torch

    kind = type(optimizer)
    if kind.__name__ not in STEP_ON_HOST or getattr(torch.optim, kind.__name__, None) is not kind:
        known = ", ".join(STEP_ON_HOST)
        return _("{name} cannot step on the host; torch's own {known} can", name=kind.__name__, known=known)
    for option in ("capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            return _("{name} cannot step on the host with {option}=True", name=kind.__name__, option=option)
    return ""


@cache
def host_optimizer() -> Any:
    """The class; made when first asked for, since torchao is optional.

    Raises:
        MissingLibraryError: torchao is not installed, or cannot be imported here.
    """
    import torch

    try:
        with quiet_imports():
            from torchao.optim import CPUOffloadOptimizer
    except ImportError as error:
        raise MissingLibraryError(
            _("optimizer states are kept on the host by torchao: pip install 'torchao>=0.10'")
        ) from error
    except Exception as error:
        raise unusable("torchao", error) from error

    class HostOptimizer(CPUOffloadOptimizer):  # type: ignore[misc]
        """torchao's optimizer with what schedulers, Lightning and MMEngine ask of an optimizer."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            kind = type(optimizer)
            # Fused on the CPU, as torchao does it for AdamW: a loop over single operations would be many times slower.
            options = {"foreach": False, "fused": True}
            groups = [{**group, **options} for group in optimizer.param_groups]
            for group in groups:
                group.pop("param_names", None)  # torchao builds one optimizer for each parameter
            # Everything else that torch.optim.Optimizer's own constructor would have set: hooks above all.
            for name, value in optimizer.__dict__.items():
                if name not in ("param_groups", "state", "step", *_NOT_KEPT):
                    self.__dict__[name] = value
            self._groups = optimizer.param_groups
            super().__init__(groups, kind)
            self._carried: dict[torch.Tensor, tuple[weakref.ref[torch.Tensor], int]] = {}
            for parameter in self.param_d2h_map:  # after torchao's own hook, which carries the gradient over
                parameter.register_post_accumulate_grad_hook(self._note_gradient)
            self._take_states(optimizer.state)

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            """The groups as the user made them; what is written here holds at the next step."""
            return self._groups

        @property
        def state(self) -> dict[torch.Tensor, Any]:
            """States by the parameter on the GPU, wherever they are."""
            found = {} if self.d_opt is None else dict(self.d_opt.state)
            for parameter, host in self.param_d2h_map.items():
                state = self.optim_dict[parameter].state.get(host)
                if state:
                    found[parameter] = state
            return found

        @torch.optim.Optimizer.profile_hook_step  # as its constructor would have done: runs the hooks of the step
        def step(self, closure: Any = None) -> Any:
            """Step with the groups' present hyperparameters."""
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for single, group in self._singles():
                single.update({name: value for name, value in group.items() if name not in _NOT_PASSED})
            self._take_edited_gradients()
            self._take_weights()
            super().step()
            return loss

        vars(step)["hooked"] = True  # or a copy of the optimizer would run them twice

        def _take_weights(self) -> None:
            """Weights that step are as they are now on the GPU: no version counts what is written through ``.data``."""
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.no_grad(), torch.cuda.stream(self.stream):
                for parameter in self.queue:
                    self.param_d2h_map[parameter].copy_(parameter.detach(), non_blocking=True)
                    self.queue[parameter] = self.stream.record_event()

        def _note_gradient(self, parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                self._carried[parameter] = weakref.ref(gradient), version_of(gradient)

        def _take_edited_gradients(self) -> None:
            """Gradients that other code wrote to since they were complete, made or dropped are as they are now."""
            for parameter, host in self.param_d2h_map.items():
                gradient, waiting = parameter.grad, self.queue.get(parameter)
                if gradient is None:
                    self.queue.pop(parameter, None)
                    continue
                known, version = self._carried.get(parameter, (_nothing, -1))
                if waiting is not None and version == version_of(gradient) and known() is gradient:
                    continue
                if waiting is not None:
                    waiting.synchronize()
                host.grad.copy_(gradient.detach())
                self.queue[parameter] = self.stream.record_event()

        def _singles(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
            """Every group that really steps, with the user's group that it belongs to."""
            pairs = []
            for group in self._groups:
                single = [self.optim_dict[p] for p in group["params"] if p in self.optim_dict]
                pairs += [(optimizer.param_groups[0], group) for optimizer in single]
                small = {id(p) for p in group["params"]}
                pairs += [(found, group) for found in self.d_param_groups if id(found["params"][0]) in small]
            return pairs

        def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - torch's own signature
            """Gradients on the GPU are dropped; those on the host are overwritten by the next ones."""
            for group in self._groups:
                for parameter in group["params"]:
                    parameter.grad = None

        def state_dict(self) -> dict[str, Any]:
            """In torch's own form: states by the parameter's number in the groups."""
            numbers = self._numbers()
            groups = [
                {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[p] for p in group["params"]]}
                for group in self._groups
            ]
            return {"state": {numbers[p]: state for p, state in self.state.items()}, "param_groups": groups}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """From a checkpoint of this class or of the plain optimizer."""
            saved = state_dict["param_groups"]
            if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self._groups]:
                raise ValueError(_("loaded state dict has other parameter groups than the optimizer"))
            for group, theirs in zip(self._groups, saved, strict=True):
                group.update({name: value for name, value in theirs.items() if name != "params"})
            states = {}
            for group, theirs in zip(self._groups, saved, strict=True):
                for parameter, number in zip(group["params"], theirs["params"], strict=True):
                    if number in state_dict["state"]:
                        states[parameter] = state_dict["state"][number]
            self._take_states(states)

        def _numbers(self) -> dict[torch.Tensor, int]:
            parameters = [p for group in self._groups for p in group["params"]]
            return {parameter: number for number, parameter in enumerate(parameters)}

        def _take_states(self, states: Any) -> None:
            for parameter, state in states.items():
                host = self.param_d2h_map.get(parameter)
                if host is not None:
                    self.optim_dict[parameter].state[host] = _placed(state, host)
                elif self.d_opt is not None:
                    self.d_opt.state[parameter] = _placed(state, parameter)

        def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - torch's own signature
            """Refused: parameters are registered once, when this is built."""
            raise UnsupportedTechniqueError(
                _("an optimizer on the host takes no further parameter groups; add them before it is moved there")
            )

        def __repr__(self) -> str:
            kind = type(next(iter(self.optim_dict.values()), self.d_opt)).__name__
            return f"{type(self).__name__}({kind}, {len(self._groups)} parameter groups)"

    return HostOptimizer


def _nothing() -> None:
    """In place of a reference to a gradient."""


def _placed(state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """A state next to its parameter, as ``torch.optim.Optimizer.load_state_dict`` does it; fused: the count as well."""
    import torch

    def placed(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = parameter.dtype if parameter.is_floating_point() and name != "step" else torch.float32
        return value.detach().to(device=parameter.device, dtype=dtype, copy=True)

    return {name: placed(name, value) for name, value in state.items()}


#: Of an optimizer's attributes: what belongs to its step's implementation, and is decided anew.
_NOT_KEPT = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused", "_opt_called")

#: Of a group's entries: what the single optimizers do not take from it.
_NOT_PASSED = ("params", "foreach", "fused", "param_names")
