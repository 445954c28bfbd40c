"""A script at its first training batch, where it is planned for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from vram_guard.budget import Budget
from vram_guard.capture.loader import Sample
from vram_guard.simulate.compiled import compiles
from vram_guard.simulate.device.cuda_module import ASSUMED_MEMORY
from vram_guard_accelerate._precision import precision_of
from vram_guard_accelerate.apply.loaders import LoadersMade
from vram_guard_accelerate.apply.own_loop import OptimizersMade, OwnLoop
from vram_guard_accelerate.dry_run._script_options import ScriptOptions
from vram_guard_accelerate.launch_plan import LoaderPlace

if TYPE_CHECKING:
    from vram_guard_accelerate.dry_run._engine import EngineProcess
    from vram_guard_accelerate.dry_run._sharded_process import ShardedProcess


@dataclass(frozen=True)
class LaunchShape:
    """The launch that a dry run stands for."""

    capability: tuple[int, int]
    """Compute capability of the simulated GPU."""
    ranks: int
    """Processes of the real launch."""
    local_ranks: int
    """Of them, those that share a machine, and its memory."""
    memory: int
    """Bytes of the simulated GPU: of the whole card; where none is known, an amount that leaves the script as it is."""

    @classmethod
    def of(cls, budget: Budget, ranks: int, local_ranks: int) -> LaunchShape:
        """A launch on GPUs of this budget.

        As in :mod:`vram_guard.plan`, of an unnamed GPU the oldest generation with bfloat16 is assumed. A budget alone
        is no card: libraries take memory of the whole one, and place models by it.
        """
        return cls(budget.compute_capability or (8, 0), ranks, local_ranks, budget.device_memory or ASSUMED_MEMORY)


@dataclass
class ScriptObservations:
    """Facts observed while a script ran by itself, before it trains."""

    options: ScriptOptions = field(default_factory=ScriptOptions)
    optimizers: OptimizersMade = field(default_factory=OptimizersMade)
    loaders: LoadersMade = field(default_factory=LoadersMade)
    resuming_not_followed: str = ""
    """The reason why the memory that ``load_state`` takes is not known; "" where it is, or where nothing is loaded."""
    precision_given: str = ""
    """The precision that the script itself passes to the Accelerator; "" where it passes none."""
    uses_accelerate: bool = False
    """The script has made an Accelerator."""
    reads_precision: bool = False
    """The script asked the Accelerator for its precision, and may have acted on the answer."""
    by_trainer: bool = False
    """The Accelerator is that of Transformers' ``Trainer``, which takes the environment's precision."""

    @property
    def precision_option(self) -> str:
        """The script's own option for mixed precision, where it takes Accelerate's words; "" where there is none."""
        return self.options.precision(self.precision_given)


@dataclass(frozen=True)
class FirstBatch:
    """Everything that a plan is made from."""

    shape: LaunchShape
    script: ScriptObservations
    accelerator: Any
    models: tuple[nn.Module, ...]
    """Those that were prepared, in order."""
    sample: Sample
    process: ShardedProcess | EngineProcess | None = None
    """What divides the model, where the launch, or the script, chose that; None: it stays whole."""
    fails_at_others: str = ""
    """The reason why the loop fails at other batch sizes than its own; "" where none was seen to."""

    @property
    def root(self) -> nn.Module:
        """The model that the plan speaks of: the only one, or all of them by number."""
        return root_of(self.models)

    @property
    def by_itself(self) -> bool:
        """True if the script trains without Accelerate."""
        return isinstance(self.accelerator, OwnLoop)

    @property
    def why_one_size(self) -> str:
        """The reason why it is followed at its own batch size alone; "" where its loader makes batches of any size."""
        return self.fails_at_others or (self.sample.growable if self.sample.loader is None else "")

    @property
    def precision(self) -> str:
        """The script's own."""
        return precision_of(self.accelerator)

    @property
    def batch_size_option(self) -> str:
        """The script's own option for the batch size; "" where there is none."""
        return self.script.options.batch_size(self.sample.batch_size)

    @property
    def loader_place(self) -> LoaderPlace | None:
        """The place where the script makes the training's loader; None where it makes none of its batch size."""
        return self.script.loaders.place_of_training(self.sample)

    @property
    def compiled(self) -> bool:
        """True if ``torch.compile`` compiles a model as a whole."""
        return _by_plugin(self.accelerator) or any(hasattr(part, "_orig_mod") for part in self.root.modules())

    @property
    def compiles(self) -> bool:
        """True if ``torch.compile`` compiles a model or parts of one."""
        return compiled_in(self.accelerator, self.root)


def compiled_in(accelerator: Any, root: nn.Module) -> bool:
    """True if ``torch.compile`` compiles the prepared models or parts of them."""
    return _by_plugin(accelerator) or compiles(root)


def _by_plugin(accelerator: Any) -> bool:
    """True if Accelerate does it: what it returns for a model is compiled, the model itself is not."""
    backend = getattr(accelerator.state.dynamo_plugin, "backend", "NO")
    return str(getattr(backend, "value", backend)).upper() != "NO"


def root_of(models: tuple[nn.Module, ...]) -> nn.Module:
    """The only model, or all of them by number."""
    return models[0] if len(models) == 1 else nn.ModuleList(models)
