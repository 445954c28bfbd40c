"""What decides about the memory of a step, looked at between epochs: all that hooks may have changed."""

from __future__ import annotations

from collections.abc import Callable
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
from vram_guard_mmengine._shadow import PARTS, Shadow

_NOT_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules", "_device"))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WITHOUT_PARTS = (nn.Module, torch.Tensor, type, torch.device, torch.dtype, Enum)


class StepSwitches:
    """All that decides about a step's memory: flags of weights and modules, accumulation, the data set's pipeline."""

    def __init__(self, run: JobRun, shadow: Shadow, sample: Sample) -> None:
        self._run, self._shadow, self._written = run, shadow, sample
        self._data = _parts_of(shadow.loader)
        self._sample = sample
        self._sizes = _shapes(self._sample.make(1))
        self.counters: set[str] = set()
        """Numbers that go on by the same amount from place to place, such as an epoch's."""
        self.other_loss = False
        """True once something has changed by which the model may compute another loss."""
        self._known: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._inner: list[Any] = []
        """Objects and containers among the attributes of modules."""
        self._state = self._look()
        self._glanced = self._glance()
        self._seen = [self._state]
        self._gone: dict[str, int] = {}

    def difference(self) -> str:
        """What is now as it was never before, in words; "" where there is nothing."""
        data, glanced = _parts_of(self._shadow.loader), self._glance()
        if data == self._data and glanced == self._glanced:
            return ""
        if data != self._data:
            self._data = data
            self._read()
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
    def accumulative_counts(self) -> int:
        """Batches of an optimizer step as it is now."""
        return int(self._state["accumulative_counts"])

    def batches(self) -> Callable[[int], Any]:
        """Samples of a micro-batch as written -> a micro-batch as it is now."""
        before, after, make = self._written.batch_size, self._sample.batch_size, self._sample.make
        return lambda size: make(-(-size * after // before))

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
        wrapper = self._shadow.runner.optim_wrapper
        found: list[Any] = [getattr(wrapper, "_accumulative_counts", 1)]
        for module in self._shadow.runner.model.modules():
            own = vars(module)
            found.append(tuple(map(id, own.values())))
            found += [one.requires_grad for one in own["_parameters"].values() if one is not None]
        return [*found, [_simple(one) for one in self._inner]]

    def _look(self) -> dict[str, Any]:
        model, wrapper = self._shadow.runner.model, self._shadow.runner.optim_wrapper
        state: dict[str, Any] = {
            "accumulative_counts": getattr(wrapper, "_accumulative_counts", 1),
            "train_dataloader": (self._sizes, self._sample.batch_size),
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

    def _read(self) -> None:
        """Samples of a pipeline that a hook has exchanged."""
        try:
            with random_state_kept():
                self._sample = read_loader(self._shadow.loader)
                self._sizes = _shapes(self._sample.make(1))
        except Exception as error:  # noqa: BLE001 - the user's own code reads the data
            self._run.note(
                Message(
                    "samples of a data set that hooks changed cannot be read ({error}): they are taken as before",
                    error=f"{type(error).__name__}: {error}",
                )
            )


def _has_parts(value: Any) -> bool:
    """True for what can change without being another object: containers, and objects that are no modules or tensors."""
    return isinstance(value, MUTABLE) or (hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_PARTS))


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
    simple = {name: _simple(value, 1) for name, value in vars(part).items() if name not in PARTS}
    inner = {name: _parts_of(vars(part)[name], depth - 1) for name in PARTS if name in vars(part)}
    return type(part).__qualname__, simple, inner
