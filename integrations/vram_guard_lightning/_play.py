"""One play of a Trainer's job in a trace: Lightning's hooks, called as Lightning calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vram_guard.guard.places import StepDecisions
from vram_guard.language import Message
from vram_guard.patching import replaced
from vram_guard.proof.effects import StepEffects
from vram_guard_lightning import _namespaces

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from vram_guard.job import JobRun

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py


@dataclass
class Heard:
    """The batch and the output of the step that runs, for hooks that get them."""

    listening: bool = False
    batch: Any = None
    output: Any = None
    effects: StepEffects = field(default_factory=StepEffects)
    """Of the steps of symbolic runs."""

    def step(self, batch: Any, output: Any) -> None:
        """A training_step has run."""
        if self.listening:
            self.batch, self.output = batch, output


@dataclass
class Playing:
    """Lightning's objects on the simulated GPU, in one trace.

    Attributes:
        run: of the trace.
        shadow: the copy of the Trainer, see :mod:`._shadow`.
        module: the user's, whose parameters are symbolic.
        heard: of the steps.
        seen: the copy as user code sees it.
        failed: hooks that have raised, and are called no more.
        asked: what steps have decided by the place in the training.
    """

    run: JobRun
    shadow: Any
    module: LightningModule
    heard: Heard
    seen: Any
    failed: set[str] = field(default_factory=set)
    asked: StepDecisions = field(default_factory=StepDecisions)

    def train(self, steps: int, label: str = "", **changes: Any) -> None:
        """Steps of the run, which are heard asking how far the training is."""
        with replaced(self.seen, {"_asked": self.asked}):
            self.run.train(steps, label, **changes)

    def call(self, *hooks: str) -> None:
        """Hooks of the callbacks and of the module, in the order of Lightning; their memory belongs to set-up."""
        wanted = [hook for hook in hooks if self.has(hook)]
        if wanted:
            with self.run.phase("setup"):
                for hook in wanted:
                    self.hook(hook)

    def hook(self, hook: str, *args: Any) -> None:
        """One hook; where it raises, a note says so, and it is called no more."""
        calls: Any = import_module(f"{_namespaces.of(self.shadow).__name__}.trainer.call")
        with self.followed(Message("the hook {hook}", hook=hook)):
            self.failed.add(hook)
            calls._call_callback_hooks(self.shadow, hook, *args)
            calls._call_lightning_module_hook(self.shadow, hook, *args)
            self.failed.discard(hook)

    def has(self, hook: str) -> bool:
        """True if a callback that is followed, or the module, does something there."""
        if hook in self.failed:
            return False
        base = getattr(_namespaces.of(self.shadow).Callback, hook)
        callbacks = any(getattr(type(callback), hook, base) is not base for callback in self.shadow.callbacks)
        return callbacks or not _namespaces.is_lightnings(self.module, hook)

    @contextlib.contextmanager
    def followed(self, what: Message) -> Iterator[None]:
        """Code that may fail where nothing is computed: the step is predicted all the same, and a note says why."""
        modes = [(part, part.training) for part in self.module.modules()]
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the user's own code runs
            why = f"{type(error).__name__}: {error}"
            said = Message(
                "{phase} cannot be followed to its end ({error}): the rest of it is not included in the prediction",
                phase=what,
                error=why,
            )
            self.run.note(said)
            error.__traceback__ = error.__context__ = error.__cause__ = None  # frames hold symbolic tensors
            for part, training in modes:
                part.training = training
            self.shadow.training = True
