"""Tensor parallelism by a plan: which linear layers are cut by their outputs, and which by their inputs.

Attention and MLP are cut as Megatron-LM cuts them (Shoeybi et al., 2019, section 3): the first layers by their outputs,
so that each rank has some heads or hidden units, the last one by its inputs, after which the ranks' sums are added. The
other layers have whole weights on every rank. All parameters are DTensors afterwards, so that gradients can be clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from vram_guard.errors import InvalidInputError, UnsupportedTechniqueError
from vram_guard.language import _

if TYPE_CHECKING:
    from torch import nn

#: "columns": by the outputs; "gathered": so too, and the outputs put together; "rows": by the inputs, and the sums
#: added; "vocabulary": an embedding by its words; "heads": whole weights that work on a rank's heads alone.
Cut = Literal["columns", "gathered", "rows", "vocabulary", "heads"]

#: transformers' words (``distributed/tensor_parallel.py`` since 5.0, ``integrations/tensor_parallel.py`` before).
_TRANSFORMERS: dict[str, Cut] = {
    "colwise": "columns",
    "rowwise": "rows",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "heads",
}

#: Names of an attention's layers: those cut by columns, and the one cut by rows. Llama's, OPT's, Meta's, T5's.
_ATTENTION: tuple[tuple[tuple[str, ...], str], ...] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("wq", "wk", "wv"), "wo"),
    (("q", "k", "v"), "o"),
)
#: Those of an MLP.
_MLP: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("gate", "up"), "down"),
    (("fc1",), "fc2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
)
#: Names of the layer that computes the scores of words, a module of the model itself.
_SCORES = ("lm_head", "output")

#: Layers that hold several others one after the other: a rank's part of them would be all of the first.
_FUSED = frozenset(
    {
        *(
            "query_key_value",
            "qkv",
            "qkv_proj",
            "Wqkv",
            "wqkv",
            "c_attn",
            "in_proj",
            "attn_qkv",
            "to_qkv",
            "in_proj_weight",
        ),
        *("gate_up_proj", "w12"),
    }
)

#: Attributes of an attention that count heads. Where the layers are cut, a rank has its part of them.
_HEADS = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads"),
    *("n_kv_heads", "n_kv_head", "n_local_heads", "n_local_kv_heads", "heads", "nhead", "nheads", "kv_heads"),
)
#: Those of a config, of which every attention has its part.
_HEADS_OF_CONFIG = ("num_attention_heads", "num_key_value_heads")


def plan_of(model: nn.Module, ranks: int) -> dict[str, Cut]:
    """The layers that are cut, by their names in ``model.named_modules()``.

    Raises:
        InvalidInputError: ``ranks`` does not divide the heads of an attention, or a layer.
        UnsupportedTechniqueError: the model has no layers that are known, or some that cannot be cut so.
    """
    own = getattr(model, "_tp_plan", None)
    plan = _of_transformers(model, own) if isinstance(own, dict) and own else _by_names(model)
    if not plan:
        _refuse(_("no attention or MLP of this model has layers with names that are known"))
    modules = dict(model.named_modules())
    for name, cut in plan.items():
        _check_sizes(modules, name, cut, ranks)
    for name in _tied_and_cut(model, plan):
        plan.pop(name, None)
    return plan


def install(model: nn.Module, mesh: Any) -> None:
    """Cut the layers of a model over the ranks of a mesh of one dimension; the model is changed in place.

    Raises:
        InvalidInputError: the ranks do not divide the heads of an attention, or a layer.
        UnsupportedTechniqueError: the model has no layers that are known, or some that cannot be cut so.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    plan = plan_of(model, mesh.size())
    modules = dict(model.named_modules())
    ties = _ties(model)
    for attention in {name.rpartition(".")[0] for name in plan if _counts_heads(modules, name)}:
        module = modules[attention]
        for attribute in _head_counts(module):
            setattr(module, attribute, getattr(module, attribute) // mesh.size())
    for name, module in modules.items():
        if name in plan:
            parallelize_module(module, mesh, _style(plan[name]))
        elif _may_be_whole(module):
            parallelize_module(module, mesh, _whole())
    _share_inputs(modules, plan, mesh)
    for owners in ties:
        first, *others = owners
        parameter = getattr(modules[first[0]], first[1])
        for owner, attribute in others:
            setattr(modules[owner], attribute, parameter)


class _SharedInput:
    """One DTensor of what several layers of a module are called with.

    The ranks add up the gradients of what becomes a DTensor: once where the layers share it, as Megatron-LM does, and
    by ``ColwiseParallel`` alone for each of them (``torch/distributed/tensor/parallel/style.py``,
    ``_prepare_input_fn``, takes a DTensor as it is).
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._local: Any = None
        self._shared: Any = None

    def __deepcopy__(self, _memo: object) -> _SharedInput:
        """For a copy of the model, on the same ranks: groups of processes cannot be copied."""
        return _SharedInput(self._mesh)

    def enter(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """A hook before the layer's others: the DTensor in place of the tensor."""
        import torch
        from torch.distributed.tensor import DTensor, Replicate

        if not inputs or not isinstance(inputs[0], torch.Tensor) or isinstance(inputs[0], DTensor):
            return inputs
        if inputs[0] is not self._local:
            self._local = inputs[0]
            self._shared = DTensor.from_local(inputs[0], self._mesh, [Replicate()], run_check=False)
        return self._shared, *inputs[1:]

    def leave(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        """A hook of the module that holds the layers: nothing is kept after its forward."""
        self._local = self._shared = None


def _share_inputs(modules: dict[str, nn.Module], plan: dict[str, Cut], mesh: Any) -> None:
    together: dict[str, list[str]] = {}
    for name, cut in plan.items():
        if cut == "columns":
            together.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, names in together.items():
        if len(names) > 1:
            shared = _SharedInput(mesh)
            for name in names:
                modules[name].register_forward_pre_hook(shared.enter, prepend=True)
            modules[parent].register_forward_hook(shared.leave, always_call=True)


def _of_transformers(model: nn.Module, own: dict[str, str]) -> dict[str, Cut]:
    """The model's own plan, whose names have a star for a number."""
    plan: dict[str, Cut] = {}
    for name, _module in model.named_modules():
        said = own.get(name, own.get(".".join("*" if part.isdigit() else part for part in name.split("."))))
        if said is None:
            continue
        if said not in _TRANSFORMERS:
            _refuse(_("the model's own plan cuts {name} in a way that is not known here: {way}", name=name, way=said))
        plan[name] = _TRANSFORMERS[said]
    return plan


def _by_names(model: nn.Module) -> dict[str, Cut]:
    from torch import nn

    plan: dict[str, Cut] = {}
    for path, module in model.named_modules():
        children = dict(module.named_children())
        fused = sorted(_FUSED.intersection((*children, *module._parameters)))  # noqa: SLF001 - nn.Module's own table
        if fused:
            _refuse(_("{name} holds several layers in one, which cannot be cut by rows", name=_joined(path, fused[0])))
        for columns, rows in (*_ATTENTION, *_MLP):
            if all(_is_linear(children.get(name)) for name in (*columns, rows)):
                table = any(isinstance(child, nn.Embedding) for child in children.values())
                if table and (columns, rows) in _ATTENTION:
                    _refuse(_("{name} has a table of positions for all heads", name=path))
                plan |= {_joined(path, name): "columns" for name in columns}
                plan[_joined(path, rows)] = "rows"
                break
    if plan:
        plan |= {name: "gathered" for name, child in model.named_children() if name in _SCORES and _is_linear(child)}
    return plan


def _check_sizes(modules: dict[str, nn.Module], name: str, cut: Cut, ranks: int) -> None:
    module = modules[name]
    if _counts_heads(modules, name):
        attention = name.rpartition(".")[0]
        config = getattr(modules[""], "config", None)
        counts = _head_counts(modules[attention]) or {
            key: value for key in _HEADS_OF_CONFIG if isinstance(value := getattr(config, key, None), int)
        }
        for attribute, heads in counts.items():
            if heads % ranks:
                raise InvalidInputError(
                    _(
                        "tensor={ranks} does not divide the {heads} heads of {name} ({attribute})",
                        ranks=ranks,
                        heads=heads,
                        name=attention,
                        attribute=attribute,
                    )
                )
    size = {"columns": "out_features", "rows": "in_features"}.get(cut, "")
    features = getattr(module, size, 0)
    if features % ranks:
        raise InvalidInputError(
            _(
                "tensor={ranks} does not divide {name}, of {size} {features}",
                ranks=ranks,
                name=name,
                size=size,
                features=features,
            )
        )


def _counts_heads(modules: dict[str, nn.Module], name: str) -> bool:
    """True for the first layers of an attention."""
    parent, _dot, last = name.rpartition(".")
    return any(
        last in columns and all(_joined(parent, other) in modules for other in (*columns, rows))
        for columns, rows in _ATTENTION
    )


def _head_counts(attention: nn.Module) -> dict[str, int]:
    found = ((name, getattr(attention, name, None)) for name in _HEADS)
    return {name: value for name, value in found if isinstance(value, int) and not isinstance(value, bool)}


def _ties(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Parameters that several modules have, as their owners' names and attributes."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        module, _dot, attribute = path.rpartition(".")
        owners.setdefault(id(parameter), []).append((module, attribute))
    return [found for found in owners.values() if len(found) > 1]


def _tied_and_cut(model: nn.Module, plan: dict[str, Cut]) -> Iterator[str]:
    """Modules that would be cut, and share a parameter with one that would not be cut alike: they stay whole."""
    #: Along the first dimension, as a linear layer's weight and an embedding's are stored.
    first = ("columns", "gathered", "vocabulary")
    for owners in _ties(model):
        cuts = {plan.get(owner) in first if owner in plan else None for owner, _attribute in owners}
        if len(cuts) > 1:
            yield from (owner for owner, _attribute in owners)


def _may_be_whole(module: nn.Module) -> bool:
    """True for a layer with parameters of its own and nothing inside, which is called with tensors."""
    return bool(module._parameters) and not any(True for _ in module.children())  # noqa: SLF001 - as above


def _is_linear(module: nn.Module | None) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _style(cut: Cut) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if cut == "heads":
        # The norm of each head: its input is a rank's heads, of which torch has no style but for positions.
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    if cut in ("columns", "gathered"):
        return ColwiseParallel(output_layouts=Replicate() if cut == "gathered" else None)
    return RowwiseParallel(input_layouts=Replicate() if cut == "vocabulary" else None)


def _whole() -> Any:
    """The style of a layer whose weights every rank has: its inputs are the same everywhere, and its outputs too."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, distribute_module
    from torch.distributed.tensor.parallel import ParallelStyle

    def enters(_module: nn.Module, inputs: Any, mesh: Any) -> Any:
        return tuple(
            value
            if isinstance(value, DTensor) or not isinstance(value, torch.Tensor)
            else DTensor.from_local(value, mesh, [Replicate()], run_check=False)
            for value in inputs
        )

    def leaves(_module: nn.Module, outputs: Any, _mesh: Any) -> Any:
        return outputs.to_local() if isinstance(outputs, DTensor) else outputs

    class Whole(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return distribute_module(module, device_mesh, None, enters, leaves)

    return Whole()


def _refuse(why: str) -> NoReturn:
    raise UnsupportedTechniqueError(
        _("{why}: give Parallel(apply=...), your own function that calls parallelize_module", why=why)
    )
