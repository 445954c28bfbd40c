"""Parallel: how a training step is spread over several GPUs, as values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from vram_guard.checks import checked_count, one_of
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import MOST_GPUS

if TYPE_CHECKING:
    from torch import nn

#: How the ranks share weights, gradients and optimizer states. "ddp": every rank has all of them
#: (DistributedDataParallel). "zero1": the optimizer states are divided (ZeroRedundancyOptimizer). "fsdp2": everything
#: is divided (``fully_shard``). "hsdp": divided within a group of ranks, repeated over the groups. "fsdp1":
#: FullyShardedDataParallel. "deepspeed1" to "deepspeed3": DeepSpeed's stages of ZeRO.
Kind = Literal["ddp", "zero1", "fsdp2", "hsdp", "fsdp1", "deepspeed1", "deepspeed2", "deepspeed3"]

KINDS: tuple[str, ...] = get_args(Kind)

#: GPUs of a node where nobody says how many it has: those of a DGX or HGX machine.
GPUS_OF_A_NODE = 8

#: Kinds of parallelism that one rank cannot stand for, and which are therefore refused by name.
NOT_FOLLOWED = {
    "pipeline": "pipeline parallelism",
    "context": "context parallelism",
    "expert": "expert parallelism",
}

_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
}

#: What shards parameters module by module.
_BY_BLOCK = ("fsdp2", "hsdp", "fsdp1")


@dataclass(frozen=True)
class Parallel:
    """How a training step is spread over several GPUs; one of their ranks is predicted.

    Attributes:
        gpus: GPUs of the whole training, one process each.
        node: GPUs of a node; None: 8, or all of them where there are fewer.
        kind: how ranks share what the model needs, see :data:`Kind`. With ``apply``: None.
        tensor: ranks over which each layer is divided (tensor parallelism), within a node; 1: none.
        replicate: for "hsdp", how many times the sharded model is repeated; None: once per node.
        reshard: for "fsdp2", "hsdp" and "fsdp1": True frees unsharded parameters after the forward, False keeps them
            until the backward, a number keeps them sharded over so many ranks ("fsdp2" and "hsdp").
        offload: for "fsdp2", "hsdp" and "fsdp1": parameters, gradients and optimizer states lie in host memory. For
            DeepSpeed's stages: optimizer states and the weights in float32 (its "offload_optimizer"); its own config
            says more.
        blocks: names of the modules that are sharded one by one, as in ``model.named_modules()``; None: the modules
            that repeat.
        param_dtype: dtype in which "fsdp2", "hsdp" and "fsdp1" compute ("bfloat16", "bf16"); None: the parameters' own.
        reduce_dtype: dtype in which they reduce gradients; None: ``param_dtype``.
        init: where the weights lie before they are divided: "meta" (the model is made on the meta device and
            ``to_empty`` after it was sharded), "cpu" (it is made in host memory and carried to the GPU module by module
            as it is sharded), "cuda" (moved there as a whole before). This decides how memory is fragmented. None:
            "cuda" for "ddp" and "zero1"; otherwise "cpu" where the step's model is a module that has values, and "meta"
            where it is a constructor.
        apply: the user's own code in place of all this: ``apply(model, mesh)`` returns the module that the loss is
            called with. It is traced as it is. The mesh has the dimensions of :attr:`dimensions`.

    Raises:
        InvalidInputError: the numbers do not divide, or settings contradict each other.

    Example:
        >>> layout = Parallel(gpus=64, kind="fsdp2", tensor=8, param_dtype="bf16")
        >>> layout.nodes, layout.data_ranks, layout.dimensions
        (8, 8, {'shard': 8, 'tensor': 8})
        >>> Parallel(gpus=16, kind="hsdp").dimensions
        {'replicate': 2, 'shard': 8}
    """

    gpus: int
    node: int | None = None
    kind: Kind | None = None
    tensor: int = 1
    replicate: int | None = None
    reshard: bool | int = True
    offload: bool = False
    blocks: tuple[str, ...] | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    init: Literal["meta", "cpu", "cuda"] | None = None
    apply: Callable[[nn.Module, Any], nn.Module] | None = None

    def __post_init__(self) -> None:
        self._set("gpus", checked_count("gpus", self.gpus))
        if self.gpus > MOST_GPUS:
            raise InvalidInputError(_("gpus must be at most {most}, not {value}", most=MOST_GPUS, value=self.gpus))
        if self.node is not None:
            self._set("node", checked_count("node", self.node))
        self._set("tensor", checked_count("tensor", self.tensor))
        self._check_kind()
        self._check_division()
        self._check_replicas()
        for name in ("param_dtype", "reduce_dtype"):
            self._set(name, _checked_dtype(name, getattr(self, name)))
        self._check_sharding_options()
        if self.init is not None:
            one_of("init", self.init, ("meta", "cpu", "cuda"))
        if self.blocks is not None:
            self._set("blocks", _checked_names(self.blocks))

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process, where the user's own code cannot be called."""
        return {**vars(self), "apply": None if self.apply is None else _elsewhere}

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_kind(self) -> None:
        if self.apply is not None:
            if self.kind is not None:
                raise InvalidInputError(_("apply replaces kind: give one of them"))
            if not callable(self.apply):
                raise InvalidInputError(_("apply must be a callable (model, mesh) -> module"))
            return
        if str(self.kind) in NOT_FOLLOWED:  # as text: it may be something that cannot be hashed
            raise InvalidInputError(
                _(
                    "{kind} cannot be predicted yet: its ranks do different work, and one of them does not stand for "
                    "all",
                    kind=NOT_FOLLOWED[str(self.kind)],
                )
            )
        self._set("kind", self.kind or "ddp")
        one_of("kind", self.kind, KINDS)

    def _check_division(self) -> None:
        node = self.gpus_of_a_node
        if self.gpus % node:
            raise InvalidInputError(
                _(
                    "{gpus} GPUs are no whole number of nodes of {node}: change their number, or that of a node",
                    gpus=self.gpus,
                    node=node,
                )
            )
        if node % self.tensor:
            raise InvalidInputError(
                _(
                    "tensor={tensor} does not divide the {node} GPUs of a node: tensor parallelism stays within a node",
                    tensor=self.tensor,
                    node=node,
                )
            )
        if self.tensor > 1 and self.kind not in (None, "ddp", "fsdp2", "hsdp"):
            raise InvalidInputError(
                _("tensor parallelism goes with fsdp2 and hsdp, or stands alone; not with {kind}", kind=self.kind)
            )
        if self.kind == "ddp" and self.tensor > 1 and self.data_ranks > 1:
            raise InvalidInputError(
                _(
                    "tensor={tensor} leaves {ranks} ranks that see different data, and ddp cannot copy layers that are "
                    'divided: use kind="fsdp2" or "hsdp", or tensor={gpus}',
                    tensor=self.tensor,
                    ranks=self.data_ranks,
                    gpus=self.gpus,
                )
            )

    def _check_replicas(self) -> None:
        if self.replicate is not None:
            self._set("replicate", checked_count("replicate", self.replicate))
            if self.kind not in (None, "hsdp"):
                raise InvalidInputError(_("replicate is for hsdp, not for {kind}", kind=self.kind))
            if self.data_ranks % self.replicate:
                raise InvalidInputError(
                    _(
                        "replicate={replicate} does not divide the {ranks} ranks among which the data is shared",
                        replicate=self.replicate,
                        ranks=self.data_ranks,
                    )
                )

    def _check_sharding_options(self) -> None:
        shards = self.kind in (None, *_BY_BLOCK)
        given = [
            name
            for name, used in (
                ("reshard", self.reshard is not True),
                ("offload", self.offload and not str(self.kind).startswith("deepspeed")),
                ("blocks", self.blocks is not None),
                ("param_dtype", self.param_dtype is not None),
                ("reduce_dtype", self.reduce_dtype is not None),
            )
            if used
        ]
        if given and not shards:
            raise InvalidInputError(
                _(
                    "only fsdp2, hsdp and fsdp1 take {settings}; {kind} does not",
                    settings=", ".join(given),
                    kind=self.kind,
                )
            )
        if not isinstance(self.offload, bool):
            raise InvalidInputError(_("offload must be True or False, not {value}", value=repr(self.offload)))
        if not isinstance(self.reshard, bool):
            self._set("reshard", checked_count("reshard", self.reshard))
            if self.reshard == 1:
                raise InvalidInputError(
                    _("reshard must be True, False or a number of GPUs from 2 on, not 1: False keeps whole weights")
                )
            if self.kind == "fsdp1":
                raise InvalidInputError(_("reshard is True or False for fsdp1"))
            if self.shards % self.reshard:
                raise InvalidInputError(
                    _(
                        "reshard={reshard} does not divide the {shards} ranks that share the parameters",
                        reshard=self.reshard,
                        shards=self.shards,
                    )
                )

    @property
    def gpus_of_a_node(self) -> int:
        """GPUs of a node: ``node``, or 8 where that is None, or all of them where there are fewer."""
        return min(self.node or GPUS_OF_A_NODE, self.gpus)

    @property
    def nodes(self) -> int:
        """Nodes of the training."""
        return self.gpus // self.gpus_of_a_node

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.gpus // self.tensor

    @property
    def shards(self) -> int:
        """Ranks over which a parameter is divided by sharding; 1: none."""
        if self.kind in ("ddp", "zero1", "deepspeed1", "deepspeed2"):
            return 1
        return self.data_ranks // self.replicas

    @property
    def replicas(self) -> int:
        """Times that the sharded model is repeated; 1 unless for "hsdp" or ``apply``."""
        return self.replicate or (self.nodes if self.kind == "hsdp" else 1)

    @property
    def dimensions(self) -> dict[str, int]:
        """Names and sizes of the device mesh, outermost first.

        "data" (ranks that are copies of each other) or "shard", before it "replicate" for hsdp; last "tensor", where
        layers are divided.
        """
        made: dict[str, int] = {}
        if self.replicate is not None or self.kind == "hsdp":
            made["replicate"] = self.replicas
        made["shard" if self.kind in (None, *_BY_BLOCK) else "data"] = self.data_ranks // self.replicas
        if self.tensor > 1:
            made["tensor"] = self.tensor
        return made

    def with_(self, **changes: Any) -> Parallel:
        """The same layout with some fields changed."""
        return replace(self, **changes)


def _elsewhere(_model: nn.Module, _mesh: Any) -> nn.Module:
    raise InvalidInputError(_("apply can be called only in the process that has it"))


def data_parallel(ranks: int) -> Parallel:
    """DistributedDataParallel over so many processes, wherever they run."""
    whole_nodes = ranks <= GPUS_OF_A_NODE or ranks % GPUS_OF_A_NODE == 0
    return Parallel(gpus=ranks, node=None if whole_nodes else ranks, kind="ddp")


def _checked_dtype(name: str, value: object) -> str | None:
    """The name of a floating dtype, given as a name or as a ``torch.dtype``."""
    if value is None:
        return None
    text = str(value).removeprefix("torch.")
    if text not in _DTYPES:
        raise InvalidInputError(
            _("{name} must be one of {known}, not {value}", name=name, known=", ".join(_DTYPES), value=repr(value))
        )
    return _DTYPES[text]


def _checked_names(names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidInputError(_("blocks must be a list of module names, not {value}", value=repr(names)))
    made = tuple(names)
    if not made or not all(isinstance(name, str) and name for name in made):
        raise InvalidInputError(_("blocks must be a list of module names, not {value}", value=repr(names)))
    return tuple(dict.fromkeys(made))
