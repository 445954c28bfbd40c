"""What decides about the memory of a step, looked at between epochs: all that hooks may have changed."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import nn

from vram_guard.capture.loader import Sample, read_loader
from vram_guard.job import JobRun
from vram_guard.language import Message, _
from vram_guard.limits import LONGEST_SWITCHES
from vram_guard.state.containers import MUTABLE
from vram_guard.state.random_generators import random_state_kept
from vram_guard_mmengine._evaluation import is_endless

#: Attributes by which data sets and loaders of OpenMMLab hold what a hook may exchange.
_PARTS = ("_dataset", "dataset", "datasets", "pipeline", "transforms", "sampler", "batch_sampler")

_NOT_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules", "_device"))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WITHOUT__PARTS = (nn.Module, torch.Tensor, type, torch.device, torch.dtype, Enum)


class StepSwitches:
    """All that decides about a step's memory: flags of weights and modules, accumulation, the data set's pipeline.

    Args:
        run: of the trace.
        runner: in it, whose training loop is built.
        sample: of the training's loader.
    """

    def __init__(self, run: JobRun, runner: Any, sample: Sample) -> None:
        self._run, self._runner = run, runner
        self._written = self._sample = sample
        self._data = _parts_of(self._loader)
        self._sizes = _shapes(sample.make(1))
        self.counters: set[str] = set()
        """Numbers that go on by the same amount from place to place, such as an epoch's."""
        self.other_loss = False
        """True once something has changed by which the model may compute another loss."""
        self._known: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._inner: list[Any] = []
        """Objects and containers among the attributes of modules."""
        self._state: dict[str, Any] = {}
        self._glanced: list[Any] = []
        self._seen: list[dict[str, Any]] = []
        self._gone: dict[str, int] = {}
        self._made: Any = None
        """The latest batch, as long as no step has been given it."""

    @property
    def _loader(self) -> Any:
        return self._runner._train_loop.dataloader  # noqa: SLF001 - the public name builds a loop

    def begin(self) -> None:
        """The first steps are over: :meth:`difference` compares with what is now."""
        self._state = self._look()
        self._glanced = self._glance()
        self._seen = [self._state]

    def batch(self) -> Any:
        """A batch as the loader delivers it now; where a plan cuts batches, micro-batches keep their size."""
        if self._read() or self._made is None:
            size = self._run.loaded_samples
            self._made = self._sample.make(-(-size * self._sample.batch_size // self._written.batch_size))
        return self._made

    def used(self) -> None:
        """A step has been given the batch, and may have changed it."""
        self._made = None

    def difference(self) -> str:
        """What is now as it was never before, in words; "" where there is nothing."""
        glanced, read = self._glance(), self._state["train_dataloader"]
        if glanced == self._glanced and read == self._batch_sizes:
            return ""
        self._glanced = glanced
        before, self._state = self._state, self._look()
        self._count(before)
        for counter in self.counters:
            for state in (*self._seen, self._state):
                state.pop(counter, None)
        if any(self._state == state for state in self._seen):
            return ""
        self._seen.append(self._state)
        return self._in_words(before)

    @property
    def _batch_sizes(self) -> tuple[Any, int]:
        return self._sizes, self._sample.batch_size

    def _count(self, before: dict[str, Any]) -> None:
        """Find counters: the same step forward twice in a row."""
        gone = {}
        for name, value in self._state.items():
            old = before.get(name)
            if type(value) is int and type(old) is int and value != old:
                gone[name] = value - old
                if self._gone.get(name) == value - old:
                    self.counters.add(name)
        self._gone = gone

    def _in_words(self, before: dict[str, Any]) -> str:
        now = self._state
        names = [name for name in {**before, **now} if before.get(name) != now.get(name) and name not in self.counters]
        trained = [name for name in names if name.startswith("requires_grad ")]
        words = []
        if trained:
            more = sum(1 if now.get(name) else -1 for name in trained)
            said = _("{count} more parameters are trained", count=more)
            words.append(said if more > 0 else _("{count} fewer parameters are trained", count=-more))
        others = [name for name in names if name not in trained]
        self.other_loss |= any(name not in ("accumulative_counts", "train_dataloader") for name in others)
        return ", ".join([*words, *others[:3], *(["..."] if len(others) > 3 else [])])

    def _glance(self) -> list[Any]:
        """Enough to see that no attribute was set: the objects by their identity, and what can change inside them."""
        wrapper = self._runner.optim_wrapper
        found: list[Any] = [getattr(wrapper, "_accumulative_counts", 1)]
        for module in self._runner.model.modules():
            own = vars(module)
            found.append(tuple(map(id, own.values())))
            found += [one.requires_grad for one in own["_parameters"].values() if one is not None]
        return [*found, [_simple(one) for one in self._inner]]

    def _look(self) -> dict[str, Any]:
        model, wrapper = self._runner.model, self._runner.optim_wrapper
        state: dict[str, Any] = {
            "accumulative_counts": getattr(wrapper, "_accumulative_counts", 1),
            "train_dataloader": self._batch_sizes,
        }
        for name, parameter in model.named_parameters():
            state[f"requires_grad {name}"] = parameter.requires_grad
        self._inner.clear()
        for path, module in model.named_modules():
            own = vars(module)
            inner = [value for name, value in own.items() if name not in _OF_EVERY_MODULE and _has_parts(value)]
            identities = tuple(map(id, own.values()))
            known = self._known.get(id(module))
            if known is None or inner or known[0] != identities:
                simple = {
                    f"{path}.{name}".lstrip("."): _simple(value)
                    for name, value in own.items()
                    if name not in _NOT_OF_MODULES
                }
                known = self._known[id(module)] = identities, {path: type(module).__qualname__, **simple}
            self._inner += inner
            state.update(known[1])
        return state

    def _read(self) -> bool:
        """Samples of a loader that a hook has changed, or exchanged; False where there is none."""
        data = _parts_of(self._loader)
        if data == self._data:
            return False
        self._data = data
        try:
            with random_state_kept():
                self._sample = read_loader(self._loader, endless=is_endless(self._loader))
                self._sizes = _shapes(self._sample.make(1))
        except Exception as error:  # noqa: BLE001 - the user's own code reads the data
            self._run.note(
                Message(
                    "samples of a data set that hooks changed cannot be read ({error}): they are taken as before",
                    error=f"{type(error).__name__}: {error}",
                )
            )
        return True


def _has_parts(value: Any) -> bool:
    """True for what can change without being another object: containers, and objects that are no modules or tensors."""
    return isinstance(value, MUTABLE) or (hasattr(value, "__dict__") and not isinstance(value, _WITHOUT__PARTS))


def _shapes(batch: Any) -> Any:
    from vram_guard.simulate.tracing.batches import leaves_of

    return [tuple(leaf.shape) for leaf in leaves_of(batch) if hasattr(leaf, "shape")]


def _simple(value: Any, depth: int = 2) -> Any:
    """A value as far as it decides about memory: of a factor, whether it is 0."""
    if value is None or isinstance(value, (bool, str, Enum, torch.dtype, torch.device)):
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value == 0
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)) and len(value) <= LONGEST_SWITCHES and depth:
        return [_simple(one, depth - 1) for one in value]
    if isinstance(value, dict) and len(value) <= LONGEST_SWITCHES and depth:
        return {str(key): _simple(one, depth - 1) for key, one in value.items()}
    if callable(value) and not isinstance(value, nn.Module):
        return getattr(value, "__qualname__", type(value).__qualname__)
    own = getattr(value, "__dict__", None)
    if own is None or isinstance(value, nn.Module) or not depth:
        return type(value).__qualname__
    return type(value).__qualname__, {
        name: _simple(one, depth - 1) for name, one in list(own.items())[:LONGEST_SWITCHES]
    }


def _parts_of(part: Any, depth: int = 6) -> Any:
    """What a hook may have exchanged in a loader: objects by identity, and their simple attributes."""
    if not depth:
        return None
    if isinstance(part, (list, tuple)):
        return [_parts_of(one, depth - 1) for one in part]
    if not hasattr(part, "__dict__"):
        return type(part).__qualname__
    simple = {name: _simple(value, 1) for name, value in vars(part).items() if name not in _PARTS}
    inner = {name: _parts_of(vars(part)[name], depth - 1) for name in _PARTS if name in vars(part)}
    return type(part).__qualname__, simple, inner
