"""The dry run under DeepSpeed: Accelerate makes its engine of the symbolic model, one of many pretended processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vram_guard.errors import VramGuardError
from vram_guard.language import _
from vram_guard.parallel import deepspeed
from vram_guard.parallel.spec import GPUS_OF_A_NODE, Parallel
from vram_guard.patching import replaced
from vram_guard_accelerate.dry_run.results import stopped

if TYPE_CHECKING:
    from vram_guard.simulate.tracing.external_loop import ExternalLoopTracer


def plugin_of(given: Any) -> Any:
    """The settings of DeepSpeed that an Accelerator will have: the script's, or those of the launch; or None.

    Args:
        given: that the script passes to the Accelerator, if it does.
    """
    if given is None and not _variable_set():
        return None
    try:
        deepspeed.deepspeed_library()
    except VramGuardError as error:
        stopped(str(error))
    if isinstance(given, dict):
        stopped(
            _("several DeepSpeed plugins are given ({names}), of which one can be predicted", names=", ".join(given))
        )
    from accelerate import DeepSpeedPlugin

    return DeepSpeedPlugin() if given is None else given


def prepare_transformers(ranks: int, *, asked: bool) -> None:
    """Have Transformers complete a DeepSpeed config for all processes, and make its models on the host.

    Under stage 3 it makes them in ``deepspeed.zero.Init`` otherwise, which divides each weight as it is made; the
    engine divides them where they were made whole.

    Args:
        ranks: processes of the launch.
        asked: ``TrainingArguments`` asks, and names a config.
    """
    if "transformers" not in sys.modules or not (asked or _variable_set()):
        return
    theirs: Any = importlib.import_module("transformers.integrations.deepspeed")
    own = theirs.HfTrainerDeepSpeedConfig.trainer_config_process
    if getattr(own, "ranks", None) is not None:
        return

    def process(self: Any, arguments: Any, *args: Any, **kwargs: Any) -> None:
        with replaced(type(arguments), {"world_size": property(lambda _arguments: ranks)}):
            own(self, arguments, *args, **kwargs)

    vars(process)["ranks"] = ranks
    theirs.HfTrainerDeepSpeedConfig.trainer_config_process = process
    theirs.set_hf_deepspeed_config = lambda _config: None


def _variable_set() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


class EngineProcess:
    """A process whose Accelerator takes itself for one of several that were launched with DeepSpeed.

    Args:
        plugin: Accelerate's settings of DeepSpeed.
        ranks: processes of the launch.
        local_ranks: of them, those that share a machine.
    """

    fsdp_version: int | None = None
    """It is none of FSDP."""

    def __init__(self, plugin: Any, ranks: int, local_ranks: int) -> None:
        self.plugin = plugin
        node = local_ranks if ranks % local_ranks == 0 else GPUS_OF_A_NODE
        config = deepspeed.filled(plugin.deepspeed_config)
        try:
            self.layout: Parallel = deepspeed.layout_of(config, gpus=ranks, node=node)
        except VramGuardError as error:
            stopped(str(error))

    @contextlib.contextmanager
    def making(self, tracer: ExternalLoopTracer) -> Iterator[None]:
        """While Accelerate completes its config and makes the engine: for one of the pretended processes.

        Args:
            tracer: follows the model already.
        """
        library = deepspeed.deepspeed_library()
        made = library.initialize

        def initialize(**given: Any) -> Any:
            config = given.pop("config_params", None) or given.pop("config", {})
            result = made(**given, config=deepspeed.as_traced(self.layout, config), dist_init_required=False)
            tracer.engine_made(result[0])
            return result

        with replaced(library, {"initialize": initialize}):
            yield
