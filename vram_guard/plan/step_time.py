"""Cost: how long a training step is predicted to take, so that plans can be compared. A model, not a measurement.

A trace writes down what each operator of the second step computes and moves (:class:`vram_guard.timeline.Work`). Here
each takes the longest of three times, the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009) with a floor:

- its FLOPs over the peak of the unit that works on them (tensor cores in the operator's dtype, or ordinary cores);
- its bytes, read and written, over the memory bandwidth;
- its kernels, :data:`~vram_guard.plan.roofline.LAUNCH` apart.

The GPU works through them one after the other, and so do the copies between host and device on the stream that
computes: ``save_on_cpu`` copies behind what was computed and before what needs it, whether its memory is pinned or not
(torch/autograd/graph.py), and a training loop loads its batch in the same way. Copies on a stream of their own go on
beside the rest of their phase, of which the longer one counts: torchao's ``CPUOffloadOptimizer`` carries gradients down
beside the backward pass, and weights beside the CPU's steps.

Beside the GPU the host starts the operators, :data:`~vram_guard.plan.roofline.HOST_PER_TRAINED_OPERATOR` each and an
optimizer's in less, ahead of the GPU (PyTorch, "CUDA semantics", asynchronous execution): the longer of the two sums is
the step. That is what makes tiny micro-batches expensive. What an optimizer computes in host memory comes on top.

What the model ignores: peaks are never reached (both compute and memory reach some 80 to 90% of theirs, so ratios
suffer less than seconds do); caches, which make small tensors cheaper; tile and wave quantisation, which make odd
shapes dearer; waiting for the data loader and for ``.item()``; views, whose few microseconds on the host are not
counted by themselves; compiled code, whose host starts a kernel sooner than eager mode an operator; power and clocks.
Compare plans of one step on one GPU with it. Do not read its seconds as a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from vram_guard.budget import GPU
from vram_guard.budget.catalogue import catalogue, find_gpu
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.plan._activations import activation_bytes, first_forwards
from vram_guard.plan.model import Plan
from vram_guard.plan.roofline import (
    HOST_PER_CHECKPOINTED_CALL,
    HOST_PER_SELECTED_OPERATOR,
    HOST_PER_TRAINED_OPERATOR,
    StepTime,
    beside,
    link_rate,
    total_time,
)
from vram_guard.step import checked_count
from vram_guard.techniques.kept import KEEPABLE, kept_as
from vram_guard.timeline import Block, Timeline, Work

# --- whole steps ---------------------------------------------------------------------------------------------------


def step_seconds(
    timeline: Timeline, batch_size: int, gpu: GPU | str | None = None, *, micro_batches: int | None = None
) -> StepTime:
    """The predicted time of one optimizer step.

    Args:
        timeline: of the step, or of the step under some option (its own trace counts its own casts, recomputation and
            copies).
        batch_size: samples of one micro-batch.
        gpu: the card, by name or from the catalogue; None: :func:`assumed_gpu` of the timeline's compute capability.
        micro_batches: of one optimizer step, each of ``batch_size`` samples; None: as many as were traced. Later ones
            take as long as the second one did; where only one was traced, as the first one and adding up gradients.

    Raises:
        InvalidInputError: the timeline holds no work, or an argument makes no sense.
    """
    checked_count("batch_size", batch_size)
    timeline = timeline.exact(batch_size)
    if not timeline.work:
        raise InvalidInputError(
            _(
                "this timeline does not say what the step computes (it was not made by trace(), or its operators "
                "differ between batch sizes): trace the step at this batch size"
            )
        )
    card, assumptions = _card(gpu, timeline.compute_capability)
    if timeline.tier == "formula":
        assumptions = (*assumptions, _("the step could not be followed to its end: its time is a lower bound"))
    traced = 1 + max(work.micro_batch for work in timeline.work)
    count = traced if micro_batches is None else checked_count("micro_batches", micro_batches)
    work = timeline.work if timeline.parallel is None else filter(is_own, timeline.work)
    loading, first, later, once = (_of_phases(part, batch_size, card) for part in _parts(work))
    total = loading.times(count / traced) + first + once
    if count > 1:
        more = later.times(1 / (traced - 1)) if traced > 1 else first + _adding_up(timeline, batch_size, card)
        total += more.times(count - 1)
    return total + StepTime(assumptions=assumptions)


def seconds_as_written(made: Plan) -> float:
    """The predicted seconds of an optimizer step as its author wrote it, on the GPU that was planned for.

    Raises:
        InvalidInputError: the plan came without timelines, or they do not say what the step computes.
    """
    if made.timeline_before is None:
        raise InvalidInputError(_("this plan holds no timeline"))
    size, rounds = made.batch_size_before, made.accumulate_before
    return step_seconds(made.timeline_before, size, made.budget.gpu, micro_batches=rounds).seconds


def relative_cost(option: StepTime, as_written: StepTime) -> float:
    """The step time under an option, relative to the step as written; both for the same number of samples."""
    if as_written.seconds == 0:
        raise InvalidInputError(_("the step as written takes no time at all: there is nothing to compare with"))
    return option.seconds / as_written.seconds


def is_own(item: Work) -> bool:
    """False for collectives, whose time depends on links (:mod:`vram_guard.plan.communication`)."""
    return not item.operator.startswith(("c10d.", "_c10d_functional"))


def _parts(work: Iterable[Work]) -> tuple[list[Work], ...]:
    """Loading, the first micro-batch, all later ones, and what happens once a step."""
    loading: list[Work] = []
    first: list[Work] = []
    later: list[Work] = []
    once: list[Work] = []
    for item in work:
        if item.phase == "batch":
            loading.append(item)
        elif item.phase in ("optimizer", "setup"):
            once.append(item)
        else:
            (later if item.micro_batch else first).append(item)
    return loading, first, later, once


def _of_phases(work: Iterable[Work], batch_size: int, gpu: GPU) -> StepTime:
    """The time of some phases, one after the other; copies on a stream of their own go on beside the rest of each."""
    phases: dict[tuple[str, int], tuple[list[Work], list[Work]]] = {}
    for item in work:
        alone = item.stream != 0 and (item.transfer.base > 0 or item.transfer.per_sample > 0)
        phases.setdefault((item.phase, item.micro_batch), ([], []))[alone].append(item)
    total = StepTime()
    for rest, copies in phases.values():
        time = total_time(rest, batch_size, gpu)
        total += time + beside(total_time(copies, batch_size, gpu), time)
    return total


def _adding_up(timeline: Timeline, batch_size: int, gpu: GPU) -> StepTime:
    """Adding a second micro-batch's gradients to the first one's: two read, one written, for each parameter."""
    start = next((phase.start for phase in timeline.phases if phase.step == 2), 0)
    made = {event for event in timeline.events[start:] if event >= 0}
    sizes = [block.bytes_at(batch_size) for i, block in enumerate(timeline.blocks) if i in made and _gradient(block)]
    return StepTime(memory=3 * sum(sizes) / gpu.memory_bandwidth, dispatch=len(sizes) * HOST_PER_TRAINED_OPERATOR)


def _gradient(block: Block) -> bool:
    return block.category == "gradients"


# --- parts, for options that have not been traced --------------------------------------------------------------------


def recompute_seconds(
    work: Iterable[Work],
    modules: Iterable[str],
    batch_size: int,
    gpu: GPU | str | None = None,
    *,
    keeps: Collection[str] = (),
    micro_batches: int = 1,
) -> StepTime:
    """The time that checkpointing these modules adds to a step traced without it: their forward once more.

    Torch stops a recomputation at the last tensor that the backward pass needs (``_StopRecomputationError`` in
    torch/utils/checkpoint.py): what follows it in a module, and a last product, whose operands are all that is needed
    of it, do not run again. The host takes :data:`~vram_guard.plan.roofline.HOST_PER_CHECKPOINTED_CALL` more for each
    call, and :data:`~vram_guard.plan.roofline.HOST_PER_SELECTED_OPERATOR` for each operator of either forward where
    some results are kept.

    Args:
        work: of the step as written.
        modules: dotted paths; what runs inside a module belongs to it.
        batch_size: samples of one micro-batch.
        gpu: the card; None: an A100's compute capability is assumed, see :func:`assumed_gpu`.
        keeps: operators whose results are kept (:data:`vram_guard.techniques.kept.KEEPABLE`), unless they are random.
        micro_batches: of one optimizer step.
    """
    calls = checkpointed_calls(work, frozenset(modules))
    return recompute_seconds_of(calls, batch_size, gpu, keeps=keeps).times(micro_batches)


def recompute_seconds_of(
    calls: Sequence[list[Work]], batch_size: int, gpu: GPU | str | None = None, *, keeps: Collection[str] = ()
) -> StepTime:
    """As :func:`recompute_seconds`, of modules of which the forward work of each call is known."""
    card, assumptions = _card(gpu, (8, 0))
    again = [item for call in calls for item in call[: _needed(call)] if not is_kept(item, keeps)]
    time = total_time(again, batch_size, card) + StepTime(dispatch=len(calls) * HOST_PER_CHECKPOINTED_CALL)
    if keeps:
        time += StepTime(dispatch=2 * sum(map(len, calls)) * HOST_PER_SELECTED_OPERATOR)
    return time + StepTime(assumptions=assumptions)


def is_kept(item: Work, keeps: Collection[str]) -> bool:
    """True if selective checkpointing that keeps these operators does not run this one again."""
    return bool(keeps) and not item.random and kept_as(item.operator) in keeps


def worth_keeping(
    timeline: Timeline, modules: Collection[str], batch_size: int, gpu: GPU | None = None
) -> tuple[str, ...]:
    """The operators whose results are worth keeping where modules are checkpointed, most seconds for a byte first.

    Those whose seconds for a byte of results exceed the modules' seconds for a byte that checkpointing saves.

    Args:
        timeline: of the step as written.
        modules: dotted paths.
        batch_size: samples of one micro-batch.
        gpu: the card; None: see :func:`recompute_seconds`.
    """
    chosen = frozenset(modules)
    timeline = timeline.exact(batch_size)
    made = Counter[str]()
    for block in _made_in_forward(timeline):
        if block.category != "workspace" and not chosen.isdisjoint(ancestors(block.module)):
            made[kept_as(block.operator)] += block.bytes_at(batch_size)
    saved = sum(
        size for path, size in activation_bytes(timeline, batch_size).items() if not chosen.isdisjoint(ancestors(path))
    )
    whole = recompute_seconds(timeline.work, chosen, batch_size, gpu).device
    card = _card(gpu, (8, 0))[0]
    again = [item for call in checkpointed_calls(timeline.work, chosen) for item in call[: _needed(call)]]

    def seconds(operator: str) -> float:
        return total_time((item for item in again if is_kept(item, (operator,))), batch_size, card).device

    for_a_byte = {name: seconds(name) / made[name] for name in KEEPABLE if made[name]}
    worth = [name for name, each in for_a_byte.items() if each * saved > whole]
    return tuple(sorted(worth, key=for_a_byte.__getitem__, reverse=True))


def _made_in_forward(timeline: Timeline) -> Iterator[Block]:
    """What the second step's first micro-batch allocates in its forward."""
    for phase, end in first_forwards(timeline):
        if phase.step == 2:
            yield from (timeline.blocks[event] for event in timeline.events[phase.start : end] if event >= 0)


def checkpointed_calls(work: Iterable[Work], chosen: frozenset[str]) -> list[list[Work]]:
    """The forward work of the chosen modules, one list for each stretch in which one of them runs.

    Args:
        work: of the step as written.
        chosen: dotted paths.
    """
    return [call for _module, call in calls_with_modules(work, chosen)]


def calls_with_modules(work: Iterable[Work], chosen: Collection[str]) -> list[tuple[str, list[Work]]]:
    """As :func:`checkpointed_calls`, each with its module: the outermost one that is chosen."""
    owner: dict[str, str | None] = {}
    calls: list[tuple[str, list[Work]]] = []
    running: str | None = None
    for item in _forward(work):
        path = item.module
        if path not in owner:
            around = [name for name in ancestors(path) if name in chosen]
            owner[path] = around[-1] if around else None  # the outermost
        module = owner[path]
        if module is not None:
            if module != running:
                calls.append((module, []))
            calls[-1][1].append(item)
        running = module
    return calls


def _needed(call: list[Work]) -> int:
    """The number of a call's operators that run again before the last tensor that its backward pass needs is there."""
    end = len(call)
    while end and call[end - 1].operator.startswith(_SAVES_NOTHING):
        end -= 1
    return end - 1 if end and call[end - 1].operator.startswith(_SAVES_OPERANDS) else end


#: Their backward formulas need no tensor, or only tensors that were there before they ran (derivatives.yaml).
_SAVES_NOTHING = ("aten.add.", "aten.sub.", "aten._to_copy.", "aten.clone.", "aten.cat.")
_SAVES_OPERANDS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.convolution.")


def _forward(work: Iterable[Work]) -> Iterator[Work]:
    """The forward pass of one micro-batch, without what runs again."""
    return (item for item in work if item.phase == "forward" and item.micro_batch == 0 and not item.recomputed)


def forward_seconds_by_module(
    work: Iterable[Work], batch_size: int, gpu: GPU | str | None = None
) -> dict[str, StepTime]:
    """Forward time of each module's own operators (not those of the modules inside it), for one micro-batch."""
    card, assumptions = _card(gpu, (8, 0))
    own: dict[str, list[Work]] = {}
    for item in _forward(work):
        own.setdefault(item.module, []).append(item)
    return {path: total_time(part, batch_size, card) + StepTime(assumptions=assumptions) for path, part in own.items()}


def offload_seconds(
    size: int, gpu: GPU | str | None = None, *, pinned: bool = True, both_ways: bool = True
) -> StepTime:
    """The time for moving ``size`` bytes to the host, and back if ``both_ways``. It overlaps with nothing."""
    card, assumptions = _card(gpu, (8, 0))
    rate, unknown = link_rate(card, pinned=pinned)
    return StepTime(transfers=(2 if both_ways else 1) * size / rate, assumptions=(*assumptions, *unknown))


def ancestors(path: str) -> Iterable[str]:
    """A module's path, and the paths of all modules around it: "a.b" gives "a.b", "a" and ""."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


# --- which card ----------------------------------------------------------------------------------------------------


def assumed_gpu(compute_capability: tuple[int, int]) -> GPU:
    """The card that stands for a compute capability while none is named: the slowest that has it.

    Where the catalogue has no such card, the newest older capability stands in, or the oldest there is.
    """
    known = sorted({gpu.compute_capability for gpu in catalogue()})
    nearest = max((one for one in known if one <= compute_capability), default=known[0])
    same = (gpu for gpu in catalogue() if gpu.compute_capability == nearest)
    return min(same, key=lambda gpu: (gpu.fp32_flops, gpu.memory_bandwidth, gpu.name))


def card_of(gpu: GPU | None, compute_capability: tuple[int, int] | None) -> GPU:
    """The card that times are modelled on: the one that is known, or the one assumed for a compute capability."""
    return _card(gpu, compute_capability or (8, 0))[0]


def _card(gpu: GPU | str | None, compute_capability: tuple[int, int]) -> tuple[GPU, tuple[str, ...]]:
    if isinstance(gpu, GPU):
        return gpu, ()
    if gpu is not None:
        return find_gpu(gpu), ()
    assumed = assumed_gpu(compute_capability)
    major, minor = compute_capability
    said = _(
        "no GPU is named: times are relative, on a {name} (compute capability {version})",
        name=assumed.name,
        version=f"{major}.{minor}",
    )
    return assumed, (said,)
