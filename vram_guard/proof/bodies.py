"""Bodies: modules that treat each row of their arguments by itself, so that they may run over slices of a batch.

Found in symbolic runs of a step: the outermost module that returns rows and in which most is computed, or one inside
it. Of that every operator is followed (:mod:`vram_guard.proof.samples_apart`) at two sizes of the batch. So what is
found holds for every value; what a body reads or changes besides is looked for as well.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.limits import MOST_CANDIDATES
from vram_guard.modes import compiled_with_caller, function_modes
from vram_guard.proof.effects import Listening
from vram_guard.proof.functions import OwnBackward
from vram_guard.proof.later_changes import CodeRun, functions_of
from vram_guard.proof.samples_apart import COLLECTIVE, SamplesApart, sizes_of_looks
from vram_guard.proof.step_state import StepState
from vram_guard.state.collector import ObjectsBefore
from vram_guard.state.containers import alike, contents_of, is_cache, leaves
from vram_guard.state.forwards import INSTANCE_NORMALISATION, NORMALISATION
from vram_guard.techniques.patched_forward import PatchedForward, arguments_by_name, has_forward, patch_forwards
from vram_guard.techniques.recipe import Body
from vram_guard.tensors import storage_of, tensors_of, without_modes

if TYPE_CHECKING:
    from vram_guard.step import TrainingStep

#: The share of what the modules compute with gradients that a body computes at least: less would save little.
LEAST_SHARE = 0.5

#: Modules with hooks that hand on what they see as results alone (``output_hidden_states``).
_HARMLESS_HOOKS = frozenset(("transformers.utils.output_capturing",))

#: Values that are compared by what they are, and may be put together from those of slices.
_PLAIN = (type(None), bool, int, float, str)


class Watch(Protocol):
    """What is looked at in a step: it can be sent to another process, and so can what it has found."""

    def reset(self) -> None:
        """Forget what was seen."""

    def around(self) -> TorchDispatchMode:
        """The mode that is on while a loss is computed."""

    def installed(self, model: nn.Module) -> Callable[[], None]:
        """Watch forwards of the model; a function that puts them back."""

    def found(self) -> Any:
        """What was seen while losses were computed.

        Raises:
            UnsupportedTechniqueError: what stands in the way of slices.
        """


def find_body(step: TrainingStep, batch_size: int, companions: tuple[object, ...] = ()) -> Body:
    """The body of a step. Call it where the step may be run symbolically.

    Args:
        step: as written.
        batch_size: of a whole batch.
        companions: objects of the training whose functions run between steps.

    Raises:
        UnsupportedTechniqueError: there is none; names what stands in the way.
        Exception: whatever the user's code raises.
    """
    return body_of(partial(_look, step), batch_size, lambda: functions_of(companions)).body


def body_of(
    look: Callable[[Watch, int], Any], batch_size: int, between_steps: Callable[[], Iterable[FunctionType]]
) -> BodyFacts:
    """The same of a step that is run elsewhere.

    Args:
        look: runs two symbolic steps at a batch size; what the watch has found in the second.
        batch_size: of a whole batch.
        between_steps: functions of the user's that run between steps, asked for where the step is run.

    Raises:
        UnsupportedTechniqueError: there is none; names what stands in the way.
        Exception: whatever ``look`` raises.
    """
    large, small = sizes_of_looks(batch_size)
    refusal = ""
    for name in look(_ModuleCalls(), large)[:MOST_CANDIDATES]:
        watch = _BodyCalls(name, between_steps)
        try:
            found: list[BodyFacts] = [look(watch, size) for size in dict.fromkeys((large, small, 2))]
            if all(one == found[0] for one in found):
                return found[0]
            why = _("it computes something else for other numbers of samples")
        except UnsupportedTechniqueError as error:
            why = str(error)
        refusal = refusal or _("'{body}': {why}", body=name, why=why)
    raise UnsupportedTechniqueError(refusal or _("no module of it returns a row for each sample"))


def _look(step: TrainingStep, watch: Watch, size: int) -> Any:
    """Two symbolic steps, the model's forwards patched while the loss is computed."""
    from vram_guard.simulate.tracing.run import run_step

    def loss(model: Any, batch: Any) -> Any:
        watch.reset()
        undo = watch.installed(model)
        try:
            with watch.around():
                return step.loss(model, batch)
        finally:
            undo()

    run_step(step.with_(loss=loss, job=None), size, (8, 0), looks=True)
    return watch.found()


# --- which modules are called -----------------------------------------------------------------------------------------


class _ModuleCall:
    """One call of a module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.returns_rows = False
        self.computed = 0
        """Bytes of all results inside it that have gradients."""
        self.inner: list[_ModuleCall] = []


class _ModuleCalls:
    """The calls of a model's modules."""

    def __init__(self) -> None:
        self.outermost: list[_ModuleCall] = []
        self._open: list[_ModuleCall] = []

    def reset(self) -> None:
        """Forget them."""
        self.outermost.clear()

    def around(self) -> TorchDispatchMode:
        """The mode that counts what is computed."""
        return _Counting(self._open)

    def installed(self, model: nn.Module) -> Callable[[], None]:
        """Watch every module of the model."""
        names = {id(part): name for name, part in model.named_modules() if _may_be_patched(part)}
        return patch_forwards(model, names.values(), lambda module: _CountedForward(module, names[id(module)], self))

    def found(self) -> list[str]:
        """Names of modules that may be a body, the best first."""
        return list(_candidates(self.outermost))

    def begin(self, name: str) -> _ModuleCall:
        """Enter a module."""
        call = _ModuleCall(name)
        (self._open[-1].inner if self._open else self.outermost).append(call)
        self._open.append(call)
        return call

    def end(self) -> None:
        """Leave the innermost module."""
        self._open.pop()


def _may_be_patched(module: nn.Module) -> bool:
    """False for what replicates the module that it holds, and is called once for each batch."""
    return has_forward(module) and not isinstance(module, (nn.DataParallel, DistributedDataParallel))


class _CountedForward(PatchedForward):
    def __init__(self, module: nn.Module, name: str, calls: _ModuleCalls) -> None:
        super().__init__(module)
        self._name = name
        self._calls = calls

    def run(self, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.begin(self._name)
        try:
            out = self.as_written(*args, **kwargs)
        finally:
            self._calls.end()
        trains = self.module.training and torch.is_grad_enabled()
        given = [one for one in tensors_of((args, kwargs)) if one.dim()]
        made = tensors_of(out)
        rows = len(given[0]) if given else 0
        call.returns_rows = trains and rows > 1 and bool(made) and all(one.dim() and len(one) == rows for one in made)
        return out


class _Counting(TorchDispatchMode):
    """Counts the bytes of results of the modules that are being called, where they have gradients."""

    def __init__(self, calls: list[_ModuleCall]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (torch.is_grad_enabled() and any(one.requires_grad for one in _tensors((args, kwargs)))):
            return out  # a teacher's forward, or frozen layers: nothing of it is kept for a backward pass
        size = sum(one.numel() * one.element_size() for one in _tensors(out))
        for call in self._calls:
            call.computed += size
        return out


def _candidates(calls: list[_ModuleCall]) -> Iterator[str]:
    """Names of modules that return rows, from the outermost on along those in which most is computed."""
    total = sum(call.computed for call in calls)
    while calls:
        computed: dict[str, int] = {}
        for call in calls:
            computed[call.name] = computed.get(call.name, 0) + call.computed
        name = max(computed, key=lambda one: computed[one])
        if computed[name] < total * LEAST_SHARE:
            return
        same = [call for call in calls if call.name == name]
        if all(call.returns_rows for call in same):
            yield name
        calls = [inner for call in same for inner in call.inner]


# --- what one of them does --------------------------------------------------------------------------------------------


class BodyFacts(NamedTuple):
    """What is the same for every number of samples."""

    body: Body
    results: tuple[int, ...]
    """Keys of how each result was computed."""
    random: bool
    """True if it draws random numbers."""


class _BodyCalls:
    """Follows every call of one module.

    Args:
        name: of the module.
        between_steps: functions of the user's that run between steps.
    """

    def __init__(self, name: str, between_steps: Callable[[], Iterable[FunctionType]]) -> None:
        self.name = name
        self.between_steps = between_steps
        self.writes = False
        """Whether its functions write to something."""
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.facts: list[BodyFacts] = []
        self.leaving = _Leaving()
        self._refusal: UnsupportedTechniqueError | None = None

    def found(self) -> BodyFacts:
        """What every call does.

        Raises:
            UnsupportedTechniqueError: it joins rows, or does something that slices would do otherwise.
        """
        if self._refusal is not None:
            raise self._refusal
        if self.leaving.waits:
            raise UnsupportedTechniqueError(
                _("each slice would call {operator}, for which processes wait", operator=self.leaving.waits)
            )
        if self.leaving.used:
            raise UnsupportedTechniqueError(
                _("what is computed inside it is used outside as well ({operator})", operator=self.leaving.used)
            )
        if len({facts.body for facts in self.facts}) != 1:
            raise UnsupportedTechniqueError(_("it is called with different arguments"))
        results = tuple(key for facts in self.facts for key in facts.results)
        return BodyFacts(self.facts[0].body, results, any(facts.random for facts in self.facts))

    def around(self) -> TorchDispatchMode:
        """The mode that sees what leaves the module."""
        return self.leaving

    def installed(self, model: nn.Module) -> Callable[[], None]:
        """Follow the module's forward."""
        return patch_forwards(model, [self.name], lambda module: _FollowedForward(module, model, self))

    def refuse(self, error: UnsupportedTechniqueError) -> None:
        """Remember the first thing that stands in the way; the step goes on."""
        self._refusal = self._refusal or error


class _FollowedForward(PatchedForward):
    """A module's forward, every operator of which is followed."""

    def __init__(self, module: nn.Module, model: nn.Module, look: _BodyCalls) -> None:
        super().__init__(module)
        self._model = model
        self._look = look

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.as_written(*args, **kwargs)
        called = arguments_by_name(args, kwargs)
        state, own, ran = (
            _Attributes(self.module),
            OwnBackward(),
            CodeRun(ObjectsBefore() if self._look.writes else None),
        )
        reached = StepState(self.module, self.as_written)
        rows = next((len(one) for one in tensors_of(called) if one.dim()), 0)
        apart = SamplesApart(called, rows, None, self.module)
        with self._look.leaving.inside(), Listening() as heard, own.heard(), apart, apart.reading(), ran:
            out = self.as_written(*args, **kwargs)
        self._look.writes = self._look.writes or ran.is_needed
        self._look.leaving.returned(out)
        try:
            self._check(state, reached, apart, ran, own, heard)
            results = tuple(_results(out, rows, apart))
            self._look.facts.append(BodyFacts(self._body(called, rows), results, heard.random))
        except UnsupportedTechniqueError as error:
            self._look.refuse(error)
        return out

    def _check(
        self,
        state: _Attributes,
        reached: StepState,
        apart: SamplesApart,
        ran: CodeRun,
        own: OwnBackward,
        heard: Listening,
    ) -> None:
        reasons = itertools.chain(
            [_("torch.compile compiles it as one with what calls it; blocks inside it may be compiled")]
            if compiled_with_caller()
            else [],
            _normalisation(self.module),
            _hooks(self.module),
            state.changed(),
            (_("its forward sets {name}", name=name) for name, _shape in reached.changed()),
            (
                _("its forward may change {name} ({kind}), which cannot be looked into", name=name, kind=kind)
                for name, kind in reached.beyond.items()
            ),
            ran.writes_elsewhere(reached.known()),
            [apart.read] if apart.read else [],
            [_("it writes to a tensor that it has not made")] if apart.written & apart.before else [],
            [_("it draws from a generator of NumPy or Python")] if heard.of_python else [],
            heard.written,
            ran.takes_gradients(),
            own.reasons(),
            (
                _("its forward runs inside {mode}, where slices that run again may not", mode=name)
                for name in function_modes()
            ),
            ran.changed_later(self._model, self._look.between_steps()),
        )
        for why in reasons:
            raise UnsupportedTechniqueError(why)

    def _body(self, called: dict[str, Any], rows: int) -> Body:
        """The arguments that are cut, and those that are given whole."""
        tensors = {name: tensors_of(part) for name, part in called.items()}
        cut = {
            name: {bool(one.dim()) and len(one) == rows for one in found} for name, found in tensors.items() if found
        }
        mixed = next((name for name, kinds in cut.items() if len(kinds) > 1), None)
        if mixed is not None:
            raise UnsupportedTechniqueError(_("its argument {name} holds samples and other tensors", name=mixed))
        names = {kind: tuple(name for name, kinds in cut.items() if kinds == {kind}) for kind in (True, False)}
        return Body(self._look.name, names[True], names[False])


def _results(out: Any, rows: int, apart: SamplesApart) -> Iterator[int]:
    """The keys of a module's results, each of which has a row for each row of the arguments, in their order.

    Raises:
        UnsupportedTechniqueError: one has not, or joins rows.
    """
    for one in leaves(out):
        if is_cache(one) or isinstance(one, _PLAIN):
            continue
        if not isinstance(one, torch.Tensor):
            raise UnsupportedTechniqueError(
                _("it returns a {kind}, which cannot be put together", kind=type(one).__name__)
            )
        why = apart.joined(one)
        if why:
            raise UnsupportedTechniqueError(_("it joins samples: {why}", why=why))
        with without_modes():
            label = apart.label(one)
            ids = label.ids
            in_order = ids.numel() == rows and ids.shape[:1] == (rows,) and ids.flatten().tolist() == list(range(rows))
        if label.const or not in_order:
            raise UnsupportedTechniqueError(_("its results do not have a row for each row of its arguments"))
        yield label.key


def _normalisation(module: nn.Module) -> Iterator[str]:
    for name, one in module.named_modules():
        of_each_sample = isinstance(one, INSTANCE_NORMALISATION) and not one.track_running_stats
        if isinstance(one, NORMALISATION) and one.training and not of_each_sample:
            yield _("'{module}' normalises over the batch", module=name)


def _hooks(module: nn.Module) -> Iterator[str]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    for name, one in module.named_modules():
        for hook in (hook for kind in kinds for hook in vars(one)[kind].values()):
            where = getattr(hook, "__module__", "") or ""
            if where in _HARMLESS_HOOKS or where.startswith("vram_guard"):  # ours, in a symbolic run
                continue
            said = getattr(hook, "__qualname__", type(hook).__qualname__)
            yield _("a hook of '{module}' ({hook}) would see slices of the batch", module=name, hook=said)


class _Attributes:
    """Attributes of a module and of those inside it, and what its containers hold."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.named_modules())
        self._before = [vars(one).copy() for _name, one in self._modules]
        self._contents = contents_of(value for _name, one in self._modules for value in vars(one).values())

    def changed(self) -> Iterator[str]:
        """Sentences about what is other than it was."""
        for (path, module), before in zip(self._modules, self._before, strict=True):
            now = vars(module)
            for name in {**before, **now}:
                if before.get(name, _Attributes) is not now.get(name, _Attributes):
                    yield _("its forward sets {name}", name=f"{path}.{name}".lstrip("."))
        if not all(alike(container, content) for container, content in self._contents):
            yield _("its forward changes a list or another container of a module")


class _Leaving(TorchDispatchMode):
    """Notes whether operators outside a module use tensors that were made inside it, other than its results.

    Attributes:
        used: the first operator that does; "" where none does.
        waits: the first operator inside the module for which processes wait for each other; "" where there is none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used = self.waits = ""
        self._made: dict[int, StorageWeakRef] = {}
        self._inside = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside the block operators are those of the module's forward."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def returned(self, out: Any) -> None:
        """These are the module's results, which are used outside."""
        with without_modes():
            for one in tensors_of(out):
                self._made.pop(storage_of(one), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._inside and func.namespace in COLLECTIVE:
            self.waits = self.waits or str(func)
        with without_modes():
            if self._inside:
                given = {storage_of(one) for one in _tensors((args, kwargs))}
                for one in _tensors(out):
                    if storage_of(one) not in (*given, -1):
                        self._made[storage_of(one)] = StorageWeakRef(one.untyped_storage())
            elif not self.used and any(storage_of(one) in self._made for one in _tensors((args, kwargs))):
                self.used = str(func)
        return out


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """Those among the arguments or results of an operator."""
    return (one for one in tree_leaves(part) if isinstance(one, torch.Tensor))
