"""Phases of code that runs its own backward passes and optimizer steps, read off the calls of torch that it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vram_guard.patching import replaced
from vram_guard.simulate.tracing.optimizer_states import classify_states

if TYPE_CHECKING:
    from vram_guard.simulate.device.fake_cuda import FakeCudaState
    from vram_guard.simulate.memory.recorder import Recorder

#: Phases that end where a forward begins.
_BEFORE_FORWARDS = ("batch", "backward", "optimizer")


class ObservedPhases:
    """The phases of an optimizer step, begun by what is called.

    Args:
        recorder: of the trace.
        device: of the trace.
        number: the number of the optimizer step that is under way.
        backward_ended: called after every backward pass.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: FakeCudaState,
        number: Callable[[], int],
        backward_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._number = number
        self._backward_ended = backward_ended
        self.in_backward = False
        """A backward pass is under way: an optimizer that steps now is stepped by a hook on gradients."""
        self._stepping = False

    def backward_entries(self) -> dict[str, Callable[..., Any]]:
        """Replacements for what starts a backward pass, by its name in ``torch.autograd``.

        ``Tensor.backward`` calls ``backward``. The third is what both others call, also where a script imported them by
        name before.
        """
        names = ("backward", "grad", "_engine_run_backward")
        return {name: self._around_backward(getattr(torch.autograd, name)) for name in names}

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            # A recomputation inside a backward pass; the compiler, which derives a backward graph.
            if self.in_backward or self._device.in_kernel:
                return original(*args, **kwargs)
            self.in_backward = True
            self._recorder.phase("backward", self._number())
            try:
                return original(*args, **kwargs)
            finally:
                self.in_backward = False
                self._recorder.in_backward = False
                self._backward_ended()
                if self._stepping:  # the closure of an optimizer, whose own work follows
                    self.step_begins()

        return backward

    def forward_begins(self) -> None:
        """A forward begins, if it has not begun before."""
        if self._recorder.phases[-1].name in _BEFORE_FORWARDS:
            self._recorder.phase("forward", self._number())

    def _module_called(self) -> None:
        if not self.in_backward:  # where a module is computed again
            self.forward_begins()

    def step_begins(self) -> None:
        """An optimizer is about to step."""
        self._recorder.phase("optimizer", self._number())

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: what it keeps by now is its state."""
        classify_states(self._recorder, optimizer)

    def _own_step_begins(self, *_args: Any) -> None:
        if not self.in_backward:  # where hooks on gradients step: that is a part of the backward pass
            self._stepping = True
            self.step_begins()

    def _own_step_ended(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        self._stepping = False
        self.step_ended(optimizer)

    @contextlib.contextmanager
    def observed(self, *, micro_batches: bool = False) -> Iterator[None]:
        """Inside the block every backward pass, step of an optimizer and call of a module counts.

        Args:
            micro_batches: True where passes before a step are those of its micro-batches. False where nothing tells
                passes over parts of a batch from passes over other losses: all are of one micro-batch.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(torch.autograd, self.backward_entries()))
            own = {"module_called": self._module_called, "counts_micro_batches": micro_batches}
            stack.enter_context(replaced(self._recorder, own))
            stack.callback(register_optimizer_step_pre_hook(self._own_step_begins).remove)
            stack.callback(register_optimizer_step_post_hook(self._own_step_ended).remove)
            yield
