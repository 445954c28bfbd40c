"""GuardRunner: MMEngine's Runner with the guard built in; a config asks for it with ``runner_type``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmengine.registry import RUNNERS
from mmengine.runner import FlexibleRunner, Runner

from vram_guard_mmengine._configs import refuse_before_mmengine
from vram_guard_mmengine._settings import HookSettings, checked_priority, of_config_and_hook
from vram_guard_mmengine.hook import VramGuardHook, first_hook

if TYPE_CHECKING:
    from torch import nn


def check_config(cfg: Any) -> None:
    """The guard's settings, wherever they are in a config, before anything is built.

    Raises:
        InvalidInputError: an unknown key, an invalid budget, an unknown hook position, ...
    """
    refuse_before_mmengine(cfg)
    shared = HookSettings.flat(cfg.get("vram_guard") or {})
    HookSettings(**shared)
    hooks = [*(cfg.get("default_hooks") or {}).values(), *(cfg.get("custom_hooks") or [])]
    for hook in hooks:
        if isinstance(hook, dict) and "VramGuardHook" in str(hook.get("type")):
            checked_priority(hook.get("priority", "NORMAL"))  # MMEngine's own key of every hook
            own = HookSettings.flat({key: value for key, value in hook.items() if key not in ("type", "priority")})
            HookSettings(**of_config_and_hook(shared, own))


class _Guarded:
    """The guard is among the hooks, and its settings are checked before anything is built."""

    cfg: Any
    register_hook: Any

    @classmethod
    def from_cfg(cls, cfg: Any) -> Any:
        """Build a runner from a config.

        Raises:
            InvalidInputError: a setting of the guard makes no sense.
        """
        check_config(cfg)
        return super().from_cfg(cfg)  # type: ignore[misc]

    def register_hooks(self, default_hooks: Any = None, custom_hooks: Any = None) -> None:
        """The config's hooks, and the guard where it is not among them."""
        super().register_hooks(default_hooks, custom_hooks)  # type: ignore[misc]
        if first_hook(self) is None:
            self.register_hook(VramGuardHook(**dict(self.cfg.get("vram_guard") or {})))


@RUNNERS.register_module()
class GuardRunner(_Guarded, Runner):  # type: ignore[misc]
    """``runner_type = "vram_guard_mmengine.GuardRunner"``, and ``vram_guard = dict(...)`` with the guard's settings.

    See :class:`VramGuardHook`. Beyond what the hook does by itself, settings are checked before anything is built, and
    the model waits in host memory until the prediction is made.

    Example:
        >>> GuardRunner.from_cfg({"vram_guard": {"budget": "24 parsecs"}})
        Traceback (most recent call last):
        vram_guard.errors.InvalidInputError: budget='24 parsecs' has a unit other than ...
    """

    model: Any
    _waiting: tuple[Any] | None = None

    def wrap_model(self, model_wrapper_cfg: Any, model: nn.Module) -> nn.Module:
        """Place the model later: by ``train`` after the prediction, by ``val`` and ``test`` at once."""
        self._waiting = (model_wrapper_cfg,)
        return model

    def build_train_loop(self, loop: Any) -> Any:
        """The first thing that ``train`` builds: the prediction is made, so the model may take its place."""
        self._place()
        return super().build_train_loop(loop)

    def val(self) -> Any:
        """Validate."""
        self._place()
        return super().val()

    def test(self) -> Any:
        """Test."""
        self._place()
        return super().test()

    def _place(self) -> None:
        if self._waiting is not None:
            (config,), self._waiting = self._waiting, None
            self.model = super().wrap_model(config, self.model)


@RUNNERS.register_module()
class GuardFlexibleRunner(_Guarded, FlexibleRunner):  # type: ignore[misc]
    """FlexibleRunner's counterpart of :class:`GuardRunner`, for its single-device, DDP and FSDP strategies.

    Under other strategies (DeepSpeed, ColossalAI) nothing can be predicted: the guard says so and leaves the training
    as it is.

    Example:
        >>> GuardFlexibleRunner.from_cfg({"custom_hooks": [{"type": "VramGuardHook", "budget": "24 parsecs"}]})
        Traceback (most recent call last):
        vram_guard.errors.InvalidInputError: budget='24 parsecs' has a unit other than ...
    """
