"""FSDP2 in place of MMDistributedDataParallel in a runner.

The runner wraps its model when it is made, initialises or loads weights and builds the optimizer over whole parameters.
The model is divided after all that, when training begins, and put together again when it is over.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mmengine.dist import is_main_process
from mmengine.hooks import EMAHook
from mmengine.model import is_model_wrapper
from mmengine.registry import OPTIMIZERS
from mmengine.runner import Runner
from torch.optim import Optimizer

from vram_guard.language import _
from vram_guard.parallel import in_place_of_ddp
from vram_guard.parallel.data_parallel import options_of
from vram_guard.patching import replaced
from vram_guard_mmengine._kinds import is_mmengines

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.guard.applied import Applied
    from vram_guard.parallel.spec import Parallel
    from vram_guard.techniques import Sharding
    from vram_guard_mmengine._optim import OptimFacts

_WRAPPER = "MMDistributedDataParallel"


def why_not(runner: Any, facts: OptimFacts) -> str:
    """The reason why the model cannot be divided by FSDP2 in place of DistributedDataParallel ("" where it can)."""
    if runner.world_size == 1:
        return _("there is one process")
    if not isinstance(runner, Runner):
        return _("{strategy} wraps the model itself", strategy=type(runner.strategy).__name__)
    model = getattr(runner.model, "module", runner.model)
    options = _options(runner)
    if options is None:
        return _("the model's wrapper is not {known}", known=_WRAPPER)
    if getattr(runner, "_resume", False):
        return _("a checkpoint's optimizer states are loaded whole")
    if runner.cfg.get("compile"):
        return _("the compiled train_step is of the wrapped model")
    for hook in runner.hooks:
        if isinstance(hook, EMAHook):  # which copies the model
            return _("{name} copies whole weights", name=type(hook).__name__)
    sent = options.get("forward_sync_buffers", options.get("broadcast_buffers", True))
    if sent and next(model.buffers(), None) is not None:
        return _("broadcast_buffers=True sends buffers in every forward of the wrapper")
    kind = _optimizer_class(runner, facts)
    if why := in_place_of_ddp.why_not_optimizer({base.__name__ for base in kind.__mro__}):
        return why
    return in_place_of_ddp.why_not(model, options, accumulates=facts.accumulate > 1)


def _options(runner: Any) -> Mapping[str, Any] | None:
    """The arguments of the model's wrapper, made or to be made; None where it is another one."""
    if is_model_wrapper(runner.model):
        return options_of(runner.model) if is_mmengines(runner.model, _WRAPPER) else None
    given = (getattr(runner, "_waiting", None) or (None,))[0]
    if given is None:  # as Runner.wrap_model has it
        return {"broadcast_buffers": False, "find_unused_parameters": runner.cfg.get("find_unused_parameters", False)}
    return dict(given) if given.get("type", _WRAPPER) == _WRAPPER else None


def _optimizer_class(runner: Any, facts: OptimFacts) -> type[Any]:
    optimizer = runner.optim_wrapper.optimizer if facts.built else runner.optim_wrapper.get("optimizer") or {}
    if isinstance(optimizer, Optimizer):
        return type(optimizer)
    kind = optimizer.get("type")
    found = OPTIMIZERS.get(kind) if isinstance(kind, str) else kind
    return found if isinstance(found, type) else type(None)


def shardings_of(runner: Any) -> Callable[[], Mapping[Sharding, Parallel]]:
    """Ways to divide the model, which is whole on the GPU before, in the buckets of its wrapper as well."""
    options = {name: value for name, value in (_options(runner) or {}).items() if name == "bucket_cap_mb"}
    found = in_place_of_ddp.layouts(runner.world_size, offload=False)
    made = {
        way: layout.with_(kind=None, init="cuda", apply=in_place_of_ddp.FromReplica(layout, options))
        for way, layout in found.items()
    }
    return lambda: made


def divide(runner: Any, sharding: Sharding, applied: Applied, device: torch.device) -> Callable[[], None]:
    """Divide the model of a runner whose parts are built; returns the function that puts it together again.

    Checkpoints hold whole tensors meanwhile.
    """
    wrapped, optimizer = runner.model, runner.optim_wrapper.optimizer
    module = wrapped.module
    runner.model = module
    del wrapped  # its buckets
    gc.collect()
    put_together = divided(module, optimizer, sharding, device)
    own = runner.save_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        first = is_main_process()
        state = in_place_of_ddp.whole_state(module, keep=first)
        states = in_place_of_ddp.whole_optimizer_state(optimizer, keep=first)
        with (
            replaced(module, {"state_dict": lambda *_args, **_kwargs: state}),
            replaced(optimizer, {"state_dict": lambda *_args, **_kwargs: states}),
        ):
            return own(*args, **kwargs)

    applied.replace(runner, "save_checkpoint", save_checkpoint)

    def whole_again() -> None:
        put_together([optimizer])
        module.to(device)

    return whole_again


def divided(
    module: nn.Module, optimizer: torch.optim.Optimizer, sharding: Sharding, device: torch.device
) -> Callable[[Any], None]:
    """Divide a model whose optimizer has no states yet, and let that update the shards.

    Args:
        module: on the device.
        optimizer: over its whole parameters.
        sharding: how.
        device: that this process trains on.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    _made, put_together = in_place_of_ddp.divide(module, sharding, device, send_buffers=False)
    shards = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [shards[names[id(parameter)]] for parameter in group["params"]]
    return put_together
