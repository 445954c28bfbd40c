"""Recorder: turns tensors that come and go into the events of a Timeline."""

from __future__ import annotations

import contextlib
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch

from vram_guard.language import Message
from vram_guard.scratch import Rule
from vram_guard.simulate.memory._host_recorder import HostRecorder, StorageRef
from vram_guard.simulate.memory.repeats import Repeat, paired
from vram_guard.simulate.memory.streams import Issued, StreamLog
from vram_guard.state.containers import leaves
from vram_guard.techniques.comparing import comparing
from vram_guard.tensors import tensors_in
from vram_guard.timeline import (
    COMPARED,
    STEP_PHASES,
    Affine,
    Block,
    Border,
    Category,
    Collective,
    Deferred,
    Growth,
    Marks,
    Note,
    Phase,
    Scratch,
    Tier,
    lower,
)

_TORCH_ROOT = str(Path(torch.__file__).parent) + os.sep
#: This package's folder, as code objects have it (links and all); the file is at
#: ``vram_guard/simulate/memory/recorder.py``.
_OWN_ROOT = str(Path(__file__).parents[2]) + os.sep
#: Classes whose tensors wrap no others; asking for an attribute that is not there takes longer.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

#: The simulated GPU, host memory, or the user's own meta device, which takes no memory anywhere.
Place = Literal["cuda", "cpu", "meta"]
#: Attribute of a symbolic tensor with its place: one that was made before the trace began.
PLACE = "_vram_guard_place"

#: Categories of which a parameter has one.
_OF_PARAMETERS = frozenset({"gradients", "optimizer_states", "parameters"})

#: Functions of ours that run a step, by their modules: what called them is not the step's.
_BEGINNINGS = {"vram_guard.simulate.tracing.run": "run_step", "vram_guard.simulate.tracing.job_run": "_traced_step"}

#: How the names of modules begin that hand on what they are given: our adapters' (the code that they wrap is not ours),
#: and Accelerate's, in whose ``backward`` and ``step`` the script's own line is the one to know.
_HANDING_ON = ("vram_guard_", "accelerate.")

#: Globals of modules that were met in which no frame's line is told, torch's and ours, by their identity.
_passed: dict[int, dict[str, Any]] = {}


class Recorder:
    """Collects blocks and events while a step runs symbolically, all at one batch size.

    A block's category is decided as late as possible: what becomes a gradient or optimizer state is known when
    torch stores it there, what is an activation when the forward pass ends and it is still alive.
    """

    def __init__(self) -> None:
        self.optimizer = ""
        """Name of the class of the optimizer that stepped last."""
        self.events: list[int] = []
        self.phases: list[Phase] = []
        self.notes: dict[Note, None] = {}
        self.tier: Tier = "symbolic"
        self._from_start: Tier = "symbolic"
        """That of every phase: lowered by what stands before the first step, or is set up later."""
        self._collectives: list[tuple[Collective, Issued | None]] = []
        self.repeats: list[Repeat] = []
        self.repeated: dict[int, int] = {}
        """Blocks that stand for several -> how many."""
        self._made_of: dict[int, set[int]] | None = None
        """In a round that stands for several: blocks of sums and joined tensors -> the blocks of their parts."""
        self.larger: dict[int, str] = {}
        """Blocks that are counted as large as after all rounds, larger than their tensors are -> where they grow."""
        self.label = ""
        """Of the phases that begin."""
        self.modules: list[str] = [""]
        """Stack of the module paths whose forward is running; the last one is current."""
        self.in_backward = False
        self.batch_factor = 1
        """Loading a batch takes this many times its traced size (a whole batch of several micro-batches)."""
        self.measured_step = 2
        """The optimizer step whose work is counted: the first of several still sets things up."""
        self.measures_first = False
        """The first one's is counted too, since it may be the only one."""
        self.measured = 0
        """The number of the step that is running, where its work is counted; else 0."""
        self.micro_batch = 0
        """The micro-batch of the optimizer step that is running, from 0."""
        self._sizes: list[int] = []
        self._streams: list[int] = []
        self._categories: list[Category | None] = []
        self._origins: list[tuple[str, str, str]] = []
        self._optional: set[int] = set()
        self._unknown: set[int] = set()
        self._scratch: dict[int, tuple[Rule, Sequence[int]]] = {}
        self._taken: set[Rule] = set()
        self._live: dict[int, StorageRef] = {}
        self.host = HostRecorder()
        self.streams = StreamLog(lambda: len(self.events))
        self._on_meta: dict[int, StorageRef] = {}
        self.users_own_meta = True
        """False: symbolic tensors that nobody has seen before are not the user's own, but on the GPU (FSDP's)."""
        self._default_category: Category | None = None
        self._nodes: list[int] = []
        self._node_origins: list[tuple[str, str]] = []
        self._node_streams: list[int] = []
        self._backward_on = 0
        """The stream that the backward pass was started on."""
        self._side_nodes = False
        """True if any node's forward ran on another stream than the default one."""
        self._labels: dict[int, tuple[str | None, CodeType]] = {}
        """By the identity of the code, which is kept for that: code takes long to hash."""
        self.borders: list[Border] | None = None
        """Where forwards of modules begin and end; None: that is not asked for."""
        self._accumulated: list[tuple[int, int]] = []
        self._used: dict[tuple[int, str, int], int] = {}
        """(phase, module, block) -> where a backward pass last reads the block; in that order."""
        self._before_backward = 0
        """Blocks that were there when the backward pass began."""
        self._closed = False
        self.module_called: Callable[[], None] | None = None
        """Called where a module's forward begins."""
        self.counts_micro_batches = True
        """Whether a forward behind a backward pass of its step is of another micro-batch."""
        self.asked: dict[tuple[int, int], tuple[int, int, int]] = {}
        """Loops of this phase that a value would end, by code and line: what is known of their rounds."""

    # --- phases -------------------------------------------------------------------------------------------

    def phase(self, name: str, step: int, category: Category | None = None) -> None:
        """A new phase begins; what it allocates has ``category`` unless something better is known."""
        if self.phases and self.phases[-1].name == "forward" and name != "forward":
            self._settle_forward()
        self._count_micro_batches(name, step)
        self.asked.clear()
        self.phases.append(Phase(name, step, len(self.events), self.label, self._from_start))  # type: ignore[arg-type]
        self._default_category = category
        self.in_backward = name == "backward"
        self._before_backward = len(self._sizes)
        self._backward_on = self.streams.current

    def _count_micro_batches(self, name: str, step: int) -> None:
        counted = step == self.measured_step or (step == 1 and self.measures_first)
        self.measured = step if counted and name in STEP_PHASES else 0
        before = self.phases[-1] if self.phases else None
        if before is None or before.step != step:
            self.micro_batch = 0
        elif self.counts_micro_batches and before.name == "backward" and name in ("batch", "forward"):
            self.micro_batch += 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """What is allocated inside the block is a batch, all of it."""
        before = self._default_category, self.batch_factor
        self._default_category, self.batch_factor = "batch", 1
        try:
            yield
        finally:
            self._default_category, self.batch_factor = before

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Nothing that is allocated inside the block is counted; what was there before must stay alive."""
        before, self._closed = self._closed, True
        try:
            with self.host.aside():
                yield
        finally:
            self._closed = before

    def leave_out_empty_phase(self) -> None:
        """The last phase ends; where nothing was allocated or freed in it, it is as if it had not been."""
        if len(self.phases) > 1 and self.phases[-1].start == len(self.events):
            self.phases.pop()

    def _settle_forward(self) -> None:
        """Classify what the forward pass made: activations are still alive, the rest were temporaries."""
        start = self.phases[-1].start
        alive = {ref.block for ref in self._live.values()}
        for event in self.events[start:]:
            if event >= 0 and self._categories[event] is None:
                self._categories[event] = "activations" if event in alive else "temporaries"

    def collective(
        self,
        name: str,
        *,
        size: int = 0,
        ranks: int = 1,
        dimension: str = "",
        position: int = 0,
        by_layout: bool = False,
    ) -> None:
        """A call that waits for other processes; see :class:`vram_guard.timeline.Collective`."""
        if not self.phases:
            return
        phase = self.phases[-1]
        made = Collective(
            name,
            self.source(),
            phase.name,
            phase.step,
            Affine(size, 0),
            ranks,
            dimension,
            self.streams.current,
            self.micro_batch,
            position,
            by_layout,
        )
        self._collectives.append((made, self.streams.issued()))

    def collectives(self) -> tuple[Collective, ...]:
        """The calls that wait for other processes, in order."""
        return tuple(
            made if issued is None else made._replace(after=issued.after, needed=self.streams.needed(issued))
            for made, issued in self._collectives
        )

    # --- allocations --------------------------------------------------------------------------------------

    def track(self, tensor: torch.Tensor, operator: str) -> None:
        """Count the tensor's storage, if it is new."""
        if tensor.layout != torch.strided:
            said = Message("{operator} makes a sparse tensor, which is not counted", operator=operator)
            self.note(said, operator, tier="partly symbolic")
            return
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key in self._live or key in self._on_meta or self.host.holds(tensor):
            return
        size = storage.nbytes()
        if size == 0 or self._closed:
            return
        if self._default_category == "batch":
            size *= self.batch_factor
        self._live[key] = StorageRef.of(storage, self._freed, self._allocate(size, operator))

    def temporary(self, size: int, operator: str, category: Category = "temporaries") -> None:
        """Bytes that an operator takes from the allocator and gives back before it returns."""
        if size > 0 and not self._closed:
            block = self._allocate(size, operator)
            self._categories[block] = category
            self.events.append(~block)

    def together(self, sizes: Iterable[int], operator: str, *, workspace: int = 0, unknown: int = 0) -> None:
        """Several temporaries that an operator holds at the same time, and a workspace that it can do without.

        Args:
            sizes: of the temporaries.
            operator: that holds them.
            workspace: its size, where that is known.
            unknown: the most that it takes, where its size is not known.
        """
        if self._closed:
            return
        held = [self._allocate(size, operator) for size in sizes if size > 0]
        for block in held:
            self._categories[block] = "temporaries"
        if workspace or unknown:
            held.append(block := self._allocate(workspace or unknown, operator))
            self._categories[block] = "workspace"
            self._optional.add(block)
            if not workspace:
                self._unknown.add(block)
        self.events.extend(~block for block in held)

    def scratch(self, rules: Iterable[Rule], numbers: Sequence[int], operator: str, *, copied: int = 0) -> None:
        """Temporaries that a kernel holds together, sized by rules, and beside them a copy of an operand."""
        origin = self._origin()
        held = [self.hold(copied, operator, origin)] if copied else []
        self.release([*held, *(self.hold((rule, numbers), operator, origin) for rule in rules)])

    def hold(
        self, size: int | tuple[Rule, Sequence[int]], operator: str, origin: tuple[str, str] | None = None
    ) -> int | None:
        """A temporary that lives until it is released; its size in bytes, or a rule and what that is asked with."""
        if self._closed:
            return None
        block = self._allocate(size if isinstance(size, int) else 0, operator, origin)
        self._categories[block] = "temporaries"
        if not isinstance(size, int):
            self._scratch[block] = size
        return block

    def release(self, held: Sequence[int | None]) -> None:
        """Free temporaries as C++ does, the youngest first."""
        if not self._closed:
            self.events.extend(~block for block in reversed(held) if block is not None)

    def permanent(self, size: int, operator: str, category: Category) -> None:
        """Bytes that are taken and never given back (library workspaces)."""
        if not self._closed:
            self._categories[self._allocate(size, operator)] = category

    def once(self, rule: Rule, operator: str) -> None:
        """What a library takes at its first call and never gives back, by a rule."""
        if not self._closed and rule not in self._taken:
            self._taken.add(rule)
            block = self._allocate(0, operator)
            self._categories[block] = "workspace"
            self._scratch[block] = rule, ()

    @property
    def blocks_so_far(self) -> int:
        """Number of blocks; the next one gets this index."""
        return len(self._sizes)

    def alive(self) -> set[int]:
        """The blocks of tensors that are there now."""
        return {ref.block for ref in self._live.values()}

    @property
    def allocated(self) -> int:
        """Bytes of the tensors that are there now."""
        return self._bytes_of(self.alive())

    def _bytes_of(self, blocks: Iterable[int]) -> int:
        return sum(self._sizes[block] for block in blocks)

    @contextlib.contextmanager
    def repeat(self, count: int) -> Iterator[None]:
        """The round inside the block stands for ``count``: what it leaves behind is counted so many times."""
        start, before = len(self.events), self.alive()
        parts: dict[int, set[int]] = {}
        self._made_of = parts
        try:
            yield
        finally:
            self._made_of = None
        after = self.alive()
        gone = before - after
        pairs = [
            (block, instead if instead is not None else max(gone & parts.get(block, set()), default=None))
            for block, instead in paired(after - before, gone, self._origins)
        ]
        left = tuple(block for block, instead in pairs if instead is None)
        self.repeated |= dict.fromkeys(left, count)
        grown = [(block, old) for block, old in pairs if old is not None and self._sizes[block] > self._sizes[old]]
        if grown and count > 1:
            for block, old in grown:
                # As in the last round: what is grown, and what it is made of.
                more = (self._sizes[block] - self._sizes[old]) * (count - 1)
                self._sizes[block] += more
                self._sizes[old] += more
            self.larger |= {block: self._origins[block][1] for block, _old in grown}
        kept = count * self._bytes_of(left) + self._bytes_of(part for pair in grown for part in pair)
        self.repeats.append(Repeat(start, len(self.events), count - 1, left, kept))

    def computed_of(self, args: Iterable[object]) -> None:
        """An operator has allocated something, sized by its arguments: a note where one of them is counted larger."""
        tensors = [one for one in tensors_in(args) if one.layout == torch.strided]
        blocks = [self.block_of(one.untyped_storage()._cdata) for one in tensors]
        line = next((self.larger[block] for block in blocks if block in self.larger), None)
        if line is not None:
            said = Message(
                "{line} keeps more with every round: it is counted as large as after all rounds, what is computed of "
                "it is not",
                line=line,
            )
            self.note(said, tier="formula")

    def made_of(self, made: object, parts: object) -> None:
        """A tensor has been made by adding or joining these."""
        if self._made_of is None or not isinstance(made, torch.Tensor):
            return
        tensors = [one for one in leaves(parts) if isinstance(one, torch.Tensor) and one.layout == torch.strided]
        blocks = {self.block_of(one.untyped_storage()._cdata) for one in tensors}
        block = self.block_of(made.untyped_storage()._cdata)
        if block is not None:
            self._made_of.setdefault(block, set()).update(blocks - {None, block})  # type: ignore[arg-type]

    def as_often(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, those that a repeated round has left behind as often as there are rounds."""
        found = []
        for tensor in tensors:
            block = self.block_of(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
            found += [tensor] * (1 if block is None else self.repeated.get(block, 1))
        return found

    def grown(self, first: int, before: set[int]) -> tuple[Growth, ...]:
        """The blocks from ``first`` on that have stayed, beyond those of ``before`` that they stand in place of.

        Gradients and optimizer states are as many as there are parameters: they do not count.
        """
        after = self.alive()
        made = {block for block in after if block >= first and self._categories[block] not in _OF_PARAMETERS}
        pairs = paired(made, before - after, self._origins)
        return tuple(Growth(one, old) for one, old in pairs if old is None or self._sizes[one] > self._sizes[old])

    def named(self, growth: Iterable[Growth], kept: Iterable[tuple[str, object]]) -> tuple[Growth, ...]:
        """The growth with the names that keep it: of its tensors, or of one whose graph may hold it."""
        names: dict[int, str] = {}
        graphs: list[str] = []
        for name, value in kept:
            for tensor in (one for one in leaves(value) if isinstance(one, torch.Tensor)):
                block = self.block_of(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
                if block is not None:
                    names.setdefault(block, name)
                if tensor.grad_fn is not None:
                    graphs.append(name)
        graph = graphs[0] if graphs else ""
        return tuple(one._replace(kept_in=names.get(one.block, graph)) for one in growth)

    def block_of(self, storage: int) -> int | None:
        """The index of the block that a storage stands for (``_cdata``); None where it is not counted."""
        ref = self._live.get(storage)
        return None if ref is None else ref.block

    def _allocate(self, size: int, operator: str, origin: tuple[str, str] | None = None) -> int:
        block = len(self._sizes)
        self._sizes.append(size)
        self._streams.append(self._stream())
        recomputing = self.in_backward and torch.is_grad_enabled()
        self._categories.append("activations" if recomputing else self._default_category)
        module, source = origin or self._origin()
        self._origins.append((module, source, COMPARED if comparing.now else operator))
        self.events.append(block)
        return block

    def _stream(self) -> int:
        """The stream of a new block. Autograd runs a node on the stream of its forward, unless a hook selects one."""
        current = self.streams.current
        if self.in_backward and self._side_nodes and current == self._backward_on:
            at = self._place_of_node()
            return current if at is None else self._node_streams[at]
        return current

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """This stream, too, uses the tensor (``Tensor.record_stream``)."""
        if hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                self.record_stream(getattr(tensor, name), stream)
        elif tensor.layout == torch.strided:
            block = self.block_of(tensor.untyped_storage()._cdata)
            if block is not None and self._streams[block] != stream:
                self.streams.uses(block, stream)

    def _freed(self, ref: StorageRef) -> None:
        # The same address may already belong to a younger storage: only the reference that stands there goes.
        if self._live.get(ref.key) is ref:
            del self._live[ref.key]
        if not self._closed:
            self.events.append(~ref.block)

    def resized(self, tensor: torch.Tensor, operator: str) -> None:
        """The storage of a tensor changed its size in place: the old block goes once the new one stands."""
        storage = tensor.untyped_storage()
        ref = self._live.get(storage._cdata)
        if ref is None:
            self.track(tensor, operator)
        elif storage.nbytes() != self._sizes[ref.block]:
            old = ref.block
            ref.block = self._allocate(storage.nbytes(), operator)
            self.events.append(~old)

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was emptied, or filled again: its block is freed, and a new one taken, while tensors keep it."""
        key: int = storage._cdata
        known = self._live.pop(key, None)  # with the reference goes its callback: the block dies here, not later
        if self._closed:
            return
        if known is not None:
            self.events.append(~known.block)
        if storage.nbytes():
            self._live[key] = StorageRef.of(storage, self._freed, self._allocate(storage.nbytes(), "resize_"))

    def close(self) -> None:
        """Nothing after this is recorded (objects may die in any order)."""
        self._closed = True
        self._live.clear()
        self.host.close()

    # --- categories ---------------------------------------------------------------------------------------

    def classify(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None:
        """Give the blocks behind these tensors their category."""
        for tensor in tensors:
            if tensor is not None and tensor.layout == torch.strided:
                ref = self._live.get(tensor.untyped_storage()._cdata)
                if ref is not None:
                    self._categories[ref.block] = category

    def accumulated(self, tensors: Iterable[torch.Tensor]) -> None:
        """A gradient was stored, or added to the one that was there."""
        if self.borders is not None:
            blocks = (self.block_of(tensor.untyped_storage()._cdata) for tensor in tensors)
            self._accumulated += [(len(self.events), block) for block in blocks if block is not None]

    def read_by_backward(self, tensors: Iterable[object]) -> None:
        """An operator of a backward pass has read these."""
        module: str | None = None
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                block = self.block_of(tensor.untyped_storage()._cdata)
                if block is not None and block < self._before_backward:
                    module = self.module_now() if module is None else module
                    key = len(self.phases), module, block
                    self._used.pop(key, None)
                    self._used[key] = len(self.events)

    def forget(self) -> None:
        """Let go of what a timeline has taken over: cycles keep a closed recorder until Python's collector runs."""
        for recorded in (self.events, self._sizes, self._streams, self._categories, self._origins, self._accumulated):
            recorded.clear()
        self._scratch.clear()
        self._used.clear()
        if self.borders is not None:
            self.borders.clear()

    @property
    def marks(self) -> Marks | None:
        """Where parts of the timeline begin and end, where that is asked for."""
        if self.borders is None:
            return None
        used = tuple((at, block) for (_phase, _module, block), at in self._used.items())
        return Marks(tuple(self.borders), tuple(self._accumulated), used)

    # --- host tensors -------------------------------------------------------------------------------------

    def on_host(self, tensor: torch.Tensor) -> bool:
        """True if this symbolic tensor lives in host memory (it was moved there)."""
        if not self.host:
            return False
        if hasattr(tensor, "__tensor_flatten__"):  # a wrapper lies where what it wraps lies
            return self.on_host(getattr(tensor, tensor.__tensor_flatten__()[0][0]))
        return tensor.layout == torch.strided and self.host.holds(tensor)

    def place_of(self, tensor: torch.Tensor) -> Place:
        """Where this symbolic tensor lies. One that no operator of the trace has made is the user's own meta tensor."""
        if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
            return self.place_of(getattr(tensor, tensor.__tensor_flatten__()[0][0]))
        if tensor.layout != torch.strided:
            return "cuda"
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key in self._live:
            return "cuda"
        if self.host.holds(tensor):
            return "cpu"
        if key in self._on_meta:
            return "meta"
        if self._closed or not self.users_own_meta or not storage.nbytes():
            return "cuda"
        place: Place = tensor.__dict__.get(PLACE, "meta")
        self.put(tensor, place)
        return place

    def all_on_gpu(self, tensors: Iterable[torch.Tensor]) -> bool:
        """True where every tensor is a symbolic one on the GPU: the usual case, told quickly."""
        live = self._live  # storages of symbolic tensors alone
        for tensor in tensors:
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                return False
            if tensor.untyped_storage()._cdata not in live:
                return False
        return True

    def put(self, tensor: torch.Tensor, place: Place, *, pinned: bool = False, operator: str = "") -> None:
        """This symbolic tensor lies there from now on."""
        if tensor.layout != torch.strided:
            return self.track(tensor, operator)
        storage = tensor.untyped_storage()
        self._on_meta.pop(storage._cdata, None)
        if place == "cuda":
            self.track(tensor, operator)
        elif place == "cpu":
            self.mark_host(tensor, pinned=pinned)
        else:
            self._on_meta[storage._cdata] = StorageRef.of(storage, self._left_meta, -1)
        return None

    def _left_meta(self, ref: StorageRef) -> None:
        if self._on_meta.get(ref.key) is ref:
            del self._on_meta[ref.key]

    def mark_host(self, tensor: torch.Tensor, *, pinned: bool = False) -> None:
        """This symbolic tensor lives in host memory: it takes nothing from the GPU."""
        if tensor.untyped_storage()._cdata not in self._live:
            self.host.add(tensor, pinned=pinned)

    @property
    def has_host_tensors(self) -> bool:
        """True if any symbolic tensor lives in host memory: only then does an operator's place need a look."""
        return bool(self.host)

    # --- where it came from -------------------------------------------------------------------------------

    def module_now(self) -> str:
        """Path of the module whose forward, or whose backward, is running; "" outside any."""
        origin = self._origin_of_node() if self.in_backward else None
        return self.modules[-1] if origin is None else origin[0]

    def module_changes(self) -> None:
        """The forward of a module begins or ends: autograd's nodes until now are of the module that was running.

        Also those of operators that allocated nothing in the forward pass (``relu_``), but do in the backward pass.
        """
        if not self.in_backward and torch.is_grad_enabled() and self.events:
            node = torch._C._autograd._get_sequence_nr() - 1
            if self._nodes and node > self._nodes[-1]:
                self._remember_node((self.modules[-1], self.source()))

    def _origin(self) -> tuple[str, str]:
        origin = self._origin_of_node() if self.in_backward else None
        if origin is None:
            origin = self.modules[-1], self.source()
            if torch.is_grad_enabled() and not self.in_backward:
                self._remember_node(origin)
        return origin

    def _remember_node(self, origin: tuple[str, str]) -> None:
        # The autograd node of the operator that is running was numbered just before the operator began.
        node = torch._C._autograd._get_sequence_nr() - 1
        if not self._nodes or node > self._nodes[-1]:
            self._nodes.append(node)
            self._node_origins.append(origin)
            self._node_streams.append(self.streams.current)
            self._side_nodes = self._side_nodes or self.streams.current != 0

    def _origin_of_node(self) -> tuple[str, str] | None:
        """The module and line whose forward made the node that runs now (nodes carry sequence numbers)."""
        if len(self.modules) > 1:  # a recomputation runs the module's own forward again
            return None
        at = self._place_of_node()
        return None if at is None else self._node_origins[at]

    def _place_of_node(self) -> int | None:
        node = torch._C._current_autograd_node()
        if not self._nodes or node is None:
            return None
        at = bisect_left(self._nodes, node._sequence_nr())
        return at if at < len(self._nodes) else None

    def source(self) -> str:
        """The line of the innermost frame that is neither torch's nor ours, as "folder/file.py:123"; "" if nowhere."""
        frame: FrameType | None = sys._getframe(1)
        labels = self._labels
        while frame is not None:
            if id(frame.f_globals) in _passed:  # cheaper than its code, which is a question that audit hooks hear
                frame = frame.f_back
                continue
            code = frame.f_code
            known = labels.get(id(code))
            if known is None:
                known = labels[id(code)] = _label(frame), code
            label = known[0]
            if label is not None:
                return f"{label}:{frame.f_lineno}" if label else ""
            frame = frame.f_back
        return ""

    def note(self, said: Message, operator: str = "", tier: Tier | None = None, *, from_values: bool = False) -> None:
        """Remember something the reader must know; ``tier`` lowers the answer's tier, never raises it."""
        # Between steps the batches are those of other loaders, whose size is no question.
        current = self.phases[-1].name if self.phases else "setup"
        from_values = from_values and current in ("setup", *STEP_PHASES)
        self.notes[Note(said, self.source(), operator, from_values)] = None
        if tier is not None:
            self._lower(tier)

    def take_notes(self, aside: Recorder) -> None:
        """Remember what another recorder has noted."""
        self.notes |= aside.notes
        self._lower(aside.tier)

    def _lower(self, tier: Tier) -> None:
        self.tier = lower(self.tier, tier)
        if not self.phases or self.phases[-1].name == "setup":
            self._from_start = lower(self._from_start, tier)
        if self.phases:
            current = self.phases[-1]
            self.phases[-1] = current._replace(tier=lower(current.tier, tier))

    # --- result -------------------------------------------------------------------------------------------

    def blocks(self) -> tuple[Block, ...]:
        """All blocks, with exact sizes of this batch size."""
        made = []
        for index, (size, category) in enumerate(zip(self._sizes, self._categories, strict=True)):
            module, source, operator = self._origins[index]
            rule, numbers = self._scratch.get(index, (None, ()))
            made.append(
                Block(
                    Affine(size, 0),
                    category or "temporaries",
                    module,
                    source,
                    operator,
                    index in self._optional,
                    None if rule is None else Scratch(rule, tuple(Affine(number, 0) for number in numbers)),
                    index in self._unknown,
                    self._streams[index],
                )
            )
        return tuple(made)

    def deferred(self) -> tuple[Deferred, ...]:
        """The frees that may happen later than where they stand."""
        return self.streams.deferred(self.events, self.phases)


def _label(frame: FrameType) -> str | None:
    """The file of a frame's code; None: look further out; "": the trace itself began here, look no further."""
    code, space = frame.f_code, frame.f_globals
    name, module, file = code.co_filename, str(space.get("__name__")), str(space.get("__file__"))
    if module.startswith(_HANDING_ON):
        _passed[id(space)] = space
        return None
    if file.startswith(_TORCH_ROOT) or (file.startswith(_OWN_ROOT) and module not in _BEGINNINGS):
        _passed[id(space)] = space
    if name.startswith(_OWN_ROOT) and code.co_name == _BEGINNINGS.get(module):
        return ""
    if name.startswith((_TORCH_ROOT, _OWN_ROOT, "<frozen")) or name == "<string>":
        return None
    return "/".join(Path(name).parts[-2:])
