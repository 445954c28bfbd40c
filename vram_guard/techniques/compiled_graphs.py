"""What ``torch.compile`` has compiled while a training ran: the operators of each graph, as its author called them.

Of compiled code autograd keeps one node, which does not say what it computes. So every graph that Dynamo hands to a
compiler is read, in pairs of operators as those of :mod:`vram_guard.techniques.loss_graphs`. Code that is compiled
anew for another size has the pairs that it had before; code that has become another one has others. What was compiled
before any of this was watched is told apart by itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import torch

from vram_guard.patching import replaced
from vram_guard.private_names import PrivateName, missing_names

if TYPE_CHECKING:
    from torch import fx

Node: TypeAlias = "tuple[Any, ...]"
"""An operator's kind, and how it was called."""

PRIVATE_NAMES: Final = (
    PrivateName(
        "torch._dynamo.output_graph:OutputGraph.call_user_compiler",
        "which operators compiled code has",
        ("gm", "example_inputs"),
    ),
)
#: The node of all that a compiler has made into one.
COMPILED: Final = "CompiledFunctionBackward"
#: Arguments that decide over which elements an operator goes.
_SETTINGS = frozenset(
    (
        *("dim", "dims", "dim0", "dim1", "axis", "source", "destination", "batch_dim", "in_dim", "out_dim"),
        *("keepdim", "reduction", "size_average", "reduce", "ignore_index", "training", "is_causal"),
    )
)
#: What is no tensor: sizes and numbers that graphs for any size compute, and checks of them.
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size, type(None))

_COMPUTED: Final = object()

#: A graph's function of autograd -> its operators.
_operators: WeakKeyDictionary[type, frozenset[tuple[Node, Node]]] = WeakKeyDictionary()


def watch() -> None:
    """Read what is compiled from now on, if the compiler is there; call it again where it may have come."""
    output_graph = sys.modules.get("torch._dynamo.output_graph")
    if output_graph is None or not _can_be_watched():
        return
    compile_graph = output_graph.OutputGraph.call_user_compiler
    if getattr(compile_graph, "__module__", "") == __name__:
        return

    def seen(self: Any, gm: fx.GraphModule, example_inputs: Any) -> Any:
        operators = frozenset(_pairs(gm))
        with _functions_made() as made:
            compiled = compile_graph(self, gm, example_inputs)
        _operators.update(dict.fromkeys(made, operators))
        return compiled

    output_graph.OutputGraph.call_user_compiler = seen


@functools.cache
def _can_be_watched() -> bool:
    return not missing_names(PRIVATE_NAMES)


def operators_of(node: Any) -> frozenset[tuple[Node, Node]]:
    """Pairs of operators that a compiled node stands for; where they were not read, what tells it from all others."""
    function = node._forward_cls  # noqa: SLF001
    return _operators.get(function) or frozenset([((), (COMPILED, id(function)))])


@contextlib.contextmanager
def _functions_made() -> Iterator[list[type]]:
    """The functions of autograd that are defined inside the block."""
    made: list[type] = []
    kind: Any = torch.autograd.function.FunctionMeta
    initialise = kind.__init__

    def noted(cls: Any, *args: Any, **kwargs: Any) -> None:
        initialise(cls, *args, **kwargs)
        made.append(cls)

    with replaced(kind, {"__init__": noted}):
        yield made


def _pairs(code: fx.GraphModule) -> Iterator[tuple[Node, Node]]:
    """Each operator with those whose results it takes, of a graph and of those within it."""
    for part in code.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if _is_operator(node):
                kind = _kind(node)
                yield (), kind
                yield from ((kind, _kind(behind)) for behind in node.all_input_nodes if _is_operator(behind))


def _is_operator(node: fx.Node) -> bool:
    """True for what makes tensors."""
    return node.op.startswith("call_") and not isinstance(node.meta.get("example_value", node), _NUMBERS)


def _kind(node: fx.Node) -> Node:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if name == "getitem":
        return "compiled getitem", _places(node.args[1])
    names = _names(target, name)
    given = [(_name_at(names, at), value) for at, value in enumerate(node.args)] + [
        (frozenset((at,)), value) for at, value in node.kwargs.items()
    ]
    settings = ((at, _constant(value)) for at, value in given if at is None or at & _SETTINGS or isinstance(value, str))
    return (f"compiled {name}", *(f"{sorted(at or ())}={value}" for at, value in settings if value is not _COMPUTED))


def _places(index: Any) -> tuple[str, ...]:
    """What an index does at each place, whatever its numbers are."""
    each = index if isinstance(index, tuple) else (index,)
    return tuple("all" if one == slice(None) else type(one).__name__ for one in each)


def _constant(value: Any) -> Any:
    """A setting that is written in the code, or that a graph for any size takes as a number."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("example_value", _COMPUTED)
        if isinstance(value, torch.SymInt):
            value = value.node.hint
    if isinstance(value, (list, tuple)):
        each = [_constant(one) for one in value]
        return _COMPUTED if any(one is _COMPUTED for one in each) else tuple(each)
    return value if value is None or isinstance(value, (bool, int, str)) else _COMPUTED


def _name_at(names: tuple[frozenset[str], ...] | None, at: int) -> frozenset[str] | None:
    """What a positional argument may be called; those after the last belong to it. None where nothing is known."""
    return names[min(at, len(names) - 1)] if names else None


def _names(target: Any, name: str) -> tuple[frozenset[str], ...] | None:
    """What the positional arguments of a function may be called; None where nothing is known of it."""
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001
        return tuple(frozenset((one.name,)) for one in target._schema.arguments)  # noqa: SLF001
    if not isinstance(target, str):
        with contextlib.suppress(TypeError, ValueError):
            return tuple(frozenset((one,)) for one in inspect.signature(target).parameters)
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001
        return None
    schemas = [getattr(packet, overload)._schema.arguments for overload in packet.overloads()]  # noqa: SLF001
    most = max(len(one) for one in schemas)
    return tuple(frozenset(one[at].name for one in schemas if at < len(one)) for at in range(most))
