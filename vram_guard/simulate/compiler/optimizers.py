"""Steps of optimizers as Dynamo follows them: it asks the optimizer itself, which makes its states meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch._dynamo.variables.optimizer import OptimizerVariable

from vram_guard.patching import replaced

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    from vram_guard.simulate.device.fake_cuda import FakeCudaState

#: Methods that ask where parameters lie, those that this torch has.
_ASKING = ("_set_capturable", "_safe_to_set_capturable")


@contextlib.contextmanager
def optimizers_in_trace(state: FakeCudaState, mode: TorchDispatchMode) -> Iterator[None]:
    """Inside the block, what Dynamo has an optimizer do while it follows its step happens in the trace.

    That is where parameters are asked whether they lie on CUDA (``capturable``), and where states are made.

    Args:
        state: of the simulated device.
        mode: the trace's own.
    """
    call_method = OptimizerVariable.call_method

    @contextlib.contextmanager
    def in_trace() -> Iterator[None]:
        before, state.in_kernel = state.in_kernel, False
        try:
            yield
        finally:
            state.in_kernel = before

    def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        own = getattr(self.value, name, None)
        if name != "_init_group" or own is None:
            return call_method(self, tx, name, args, kwargs)

        def init_group(*given: Any, **named: Any) -> Any:
            with in_trace(), mode:
                return own(*given, **named)

        with replaced(self.value, {name: init_group}):
            return call_method(self, tx, name, args, kwargs)

    def asking(own: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            with in_trace():
                return own(*args, **kwargs)

        return asked

    asked = {name: asking(vars(OptimizerVariable)[name]) for name in _ASKING if name in vars(OptimizerVariable)}
    with replaced(OptimizerVariable, {"call_method": called, **asked}):
        yield
