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
    from vram_guard.simulate.memory.recorder import Recorder

#: Phases that end where a forward begins.
_BEFORE_FORWARDS = ("batch", "backward", "optimizer")


class ObservedPhases:
    """The phases of an optimizer step, begun by what is called.

    Args:
        recorder: of the trace.
        number: the number of the optimizer step that is under way.
        backward_ended: called after every backward pass.
    """

    def __init__(
        self, recorder: Recorder, number: Callable[[], int], backward_ended: Callable[[], None] = lambda: None
    ) -> None:
        self._recorder = recorder
        self._number = number
        self._backward_ended = backward_ended
        self._in_backward = False

    def backward_entries(self) -> dict[str, Callable[..., Any]]:
        """Replacements for the functions of ``torch.autograd`` by which all backward passes begin, by name."""
        return {name: self._around_backward(getattr(torch.autograd, name)) for name in ("backward", "grad")}

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward:  # a recomputation inside a backward pass
                return original(*args, **kwargs)
            self._in_backward = True
            self._recorder.phase("backward", self._number())
            try:
                return original(*args, **kwargs)
            finally:
                self._in_backward = False
                self._recorder.in_backward = False
                self._backward_ended()

        return backward

    def forward_begins(self) -> None:
        """A forward begins, if it has not begun before."""
        if self._recorder.phases[-1].name in _BEFORE_FORWARDS:
            self._recorder.phase("forward", self._number())

    def _module_called(self) -> None:
        if not self._in_backward:  # a recomputation
            self.forward_begins()

    def step_begins(self, *_args: Any) -> None:
        """An optimizer is about to step."""
        self._recorder.phase("optimizer", self._number())

    def step_ended(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        """An optimizer has stepped: what it keeps by now is its state."""
        classify_states(self._recorder, optimizer)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Inside the block every backward pass, step of an optimizer and call of a module counts."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(torch.autograd, self.backward_entries()))
            stack.enter_context(replaced(self._recorder, {"module_called": self._module_called}))
            stack.callback(register_optimizer_step_pre_hook(self.step_begins).remove)
            stack.callback(register_optimizer_step_post_hook(self.step_ended).remove)
            yield
