"""DistributedDataParallel and ZeroRedundancyOptimizer in a trace: the real ones, over pretended ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import Message, _
from vram_guard.parallel.data_parallel import divided_states, fullest_rank, replicated
from vram_guard.parallel.deepspeed import STAGES, deepspeed_library
from vram_guard.patching import replaced
from vram_guard.private_names import missing_names
from vram_guard.simulate.parallel.groups import pretended_ranks
from vram_guard.simulate.private_api import COLLECTIVE_NAMES, PARALLEL_NAMES, REDUCER_NAMES

if TYPE_CHECKING:
    from vram_guard.parallel.spec import Parallel
    from vram_guard.simulate.memory.recorder import Recorder


@contextlib.contextmanager
def replicas_followed() -> Iterator[None]:
    """Inside the block a DistributedDataParallel can be made over pretended ranks.

    What its C++ compares between the ranks are shapes, which pretended ones do not send; that takes 8 bytes for each
    dimension of each parameter, for a moment. All else runs as it is: weights are sent in buckets, gradients reduced.
    """
    import torch.distributed as dist
    from torch.nn.parallel import distributed

    logger: Any = vars(dist)["Logger"]

    class Quiet(logger):  # type: ignore[misc]
        """Measures no times: there are none, and that there are none would be said on stderr."""

        def set_runtime_stats_and_log(self) -> None:
            return None

    unverified = {"_verify_param_shape_across_processes": lambda *_args, **_kwargs: None}
    with replaced(distributed, unverified), replaced(dist, {"Logger": Quiet}):
        yield


def import_libraries(parallel: Parallel | None) -> None:
    """Import now what compiles itself when it is imported, which it could not in the middle of a trace."""
    if parallel is not None and parallel.kind in STAGES:
        deepspeed_library()
    if parallel is not None and parallel.kind == "zero1":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, by torch itself
            importlib.import_module("torch.distributed.optim")


def reduction_of(
    model: nn.Module, layout: Parallel, options: Mapping[str, Any], recorder: Recorder
) -> GradientReduction | None:
    """DistributedDataParallel for a loop that calls the model by itself.

    None where nothing is trained, and where this torch lacks a private name that its trace leans on, which is noted.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return None
    missing = missing_names((*PARALLEL_NAMES, *COLLECTIVE_NAMES, *REDUCER_NAMES))
    if not missing:
        return GradientReduction(model, layout, options, recorder)
    said = Message(
        "buckets of DistributedDataParallel are not counted: torch {version} has no {names}",
        version=torch.__version__,
        names=", ".join(name.dotted for name in missing),
    )
    recorder.note(said, tier="partly symbolic")
    return None


class UnusedParametersError(UnsupportedStepError):
    """Parameters got no gradient, and DistributedDataParallel was not told to expect that."""


#: Where a framework's loop is followed, which may reduce gradients in its own way.
COUNTED_AS_FOUND = Message(
    "some parameters get no gradient, for which DistributedDataParallel stops in the second step: counted as with "
    "find_unused_parameters=True"
)


@contextlib.contextmanager
def unused_parameters_said() -> Iterator[None]:
    """Where the Reducer stops because a parameter has got no gradient, the error says what to do.

    Raises:
        UnusedParametersError: in place of torch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        raise UnusedParametersError(
            _(
                "DistributedDataParallel stops in the second step: some parameters got no gradient in the first one. "
                "It goes on with find_unused_parameters=True (in ddp_options)"
            )
        ) from error


class GradientReduction:
    """DistributedDataParallel for a loop that calls the model, or parts of it, by itself.

    Frameworks run a whole training step where a plain loop calls the wrapper (Lightning's ``training_step``, MMEngine's
    ``train_step``).
    """

    def __init__(self, model: nn.Module, layout: Parallel, options: Mapping[str, Any], recorder: Recorder) -> None:
        self._recorder = recorder
        tensors = (*model.named_parameters(), *model.named_buffers())
        elsewhere = [name for name, tensor in tensors if recorder.place_of(tensor) != "cuda"]
        # DistributedDataParallel leaves those alone: they are of another device.
        ignored = {"_ddp_params_and_buffers_to_ignore": elsewhere} if elsewhere else {}
        with replaced(model, ignored), replicas_followed(), pretended_ranks(layout) as mesh:
            self._replica: Any = replicated(model, mesh, options)

    @property
    def running(self) -> bool:
        """True within a forward."""
        return DistributedDataParallel._active_ddp_module is self._replica

    def call(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns that runs as the forward of the part that DistributedDataParallel wraps.

        Compiled code that runs inside is divided where the buckets end (Dynamo's DDPOptimizer), so that each is sent
        while the next is computed.
        """
        before = self._begin()
        try:
            output = run(*args, **kwargs)
        finally:
            self._end(before)
        return self._replica_output(output)

    # Dynamo, which compiles what runs inside, leaves these alone, as it leaves the wrapper's own code alone.

    @_disable_dynamo
    def _begin(self) -> Any:
        """Before the second forward, the buckets are made anew in the order of the gradients."""
        self._replica._pre_forward()
        before, DistributedDataParallel._active_ddp_module = DistributedDataParallel._active_ddp_module, self._replica
        return before

    @_disable_dynamo
    def _end(self, before: Any) -> None:
        DistributedDataParallel._active_ddp_module = before

    @_disable_dynamo
    def _replica_output(self, output: Any) -> Any:
        return self._replica._post_forward(output)

    def around(self, loss: Callable[[Any, Any], Any], micro_batches: int) -> Callable[[Any, Any], Any]:
        """The loss as the part that DistributedDataParallel wraps; gradients are reduced after the last micro-batch.

        A static graph is reduced each time: its Reducer counts gradients also where nothing is reduced yet.

        Args:
            loss: (model, batch) -> loss. One with a method ``through`` calls the wrapped part itself: what that makes
                of :meth:`call` is run in its place.
            micro_batches: that are traced of a step.
        """
        through = getattr(loss, "through", None)
        run = functools.partial(self.call, loss) if through is None else through(self.call)

        def wrapped(model: Any, batch: Any) -> Any:
            last = self._recorder.micro_batch == micro_batches - 1
            self._replica.require_backward_grad_sync = last or self._replica.static_graph
            return run(model, batch)

        return wrapped


@contextlib.contextmanager
def calls_reduced(reductions: Iterable[tuple[nn.Module, GradientReduction]]) -> Iterator[None]:
    """Inside the block calls of these modules are those of a DistributedDataParallel around each.

    Hooks would be compiled with the module, and the wrapper is not.
    """
    original = nn.Module.__call__
    known = {id(model): reduction for model, reduction in reductions}

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What compiles a module holds it, or names it (Accelerate's regional compilation: a module of the same parts).
        compiled = self._modules.get("_orig_mod") or vars(self).get("_orig_mod")
        reduction = known.get(id(self)) or known.get(id(compiled))
        if reduction is None or reduction.running:
            return original(self, *args, **kwargs)
        return reduction.call(original, self, *args, **kwargs)

    with replaced(nn.Module, {"__call__": called}):
        yield


def states_of_the_fullest(optimizer: torch.optim.Optimizer, mesh: Any, rank: int | None) -> torch.optim.Optimizer:
    """The optimizer with divided states, as the rank that gets most of them has it.

    Args:
        optimizer: over whole parameters.
        mesh: of the pretended ranks.
        rank: another rank that is asked for.
    """
    import torch.distributed as dist

    asked = fullest_rank(optimizer.param_groups, mesh.size()) if rank is None else rank
    with replaced(dist, {"get_rank": lambda *_args, **_kwargs: asked}):
        return divided_states(optimizer, mesh)
