"""The user's objects are lent to a trace and come back bit-identical: symbolic stand-ins in, everything restored."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.simulate.device.tf32 import precision_switches
from vram_guard.simulate.memory.recorder import PLACE, Recorder
from vram_guard.simulate.tracing import _quantised
from vram_guard.simulate.tracing._in_backward import Hooked, hooked, optimizers_in_backward
from vram_guard.state.containers import contents_of, look
from vram_guard.state.modules import ModuleState
from vram_guard.state.random_generators import RandomState
from vram_guard.tensors import inner_tensors, is_dense


@contextlib.contextmanager
def process_state_restored() -> Iterator[None]:
    """RNG of torch, NumPy and Python, default dtype and device, and torch's switches (below): as before."""
    generators = RandomState()
    default_dtype = torch.get_default_dtype()
    grad_enabled = torch.is_grad_enabled()
    default_device = _default_device()
    switches = [(getter, setter, _read(getter)) for getter, setter in _switches()]
    try:
        yield
    finally:
        for getter, setter, value in switches:
            # Setting a switch again is not nothing: what followed a wider one would no longer follow it.
            if value is not None and _read(getter) != value:
                setter(value)
        if _default_device() != default_device:
            _set_default_device(default_device)
        torch.set_grad_enabled(grad_enabled)
        torch.set_default_dtype(default_dtype)
        generators.restore()


def _read(getter: Callable[[], Any]) -> Any:
    """The value of a switch; None where torch refuses to tell, as its old switches for TF32 do beside the new ones."""
    try:
        return getter()
    except RuntimeError:
        return None


def _default_device() -> torch.device | None:
    """Device that ``torch.set_default_device`` was last told; None where it never was."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _set_default_device(device: torch.device | None) -> None:
    torch.set_default_device(device)
    if device is None and hasattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context"):
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # torch 2.4 cannot read the None that it leaves there


def _switches() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Getter and setter of each global switch that a training step may touch."""
    for kind in ("cuda", "cpu"):
        yield partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    yield torch.is_anomaly_enabled, torch.set_anomaly_enabled
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield from precision_switches()
    for name in ("benchmark", "deterministic", "enabled"):
        yield partial(getattr, torch.backends.cudnn, name), partial(setattr, torch.backends.cudnn, name)
    sdp = torch.backends.cuda
    yield sdp.flash_sdp_enabled, sdp.enable_flash_sdp
    yield sdp.mem_efficient_sdp_enabled, sdp.enable_mem_efficient_sdp
    yield sdp.math_sdp_enabled, sdp.enable_math_sdp
    yield sdp.cudnn_sdp_enabled, sdp.enable_cudnn_sdp


#: Package -> its classes that wrap a model and run its collectives.
_WRAPPERS = {
    **dict.fromkeys(("torch", "fairscale"), ("FullyShardedDataParallel",)),
    "deepspeed": ("DeepSpeedEngine", "PipelineEngine", "PipelineModule"),
}


def check_module(model: nn.Module) -> None:
    """Refuse models that are not plain torch modules, before anything is touched.

    Raises:
        UnsupportedStepError: lazy modules whose shapes are not known yet, sharded parameters.
    """
    for path, module in model.named_modules():
        kind = type(module).__name__
        library = _quantised.compiled_elsewhere(module)
        if library:
            raise UnsupportedStepError(
                _(
                    "{path} is a {kind} of {library}: its layers run compiled kernels, and what these allocate is not "
                    "known; weights of bitsandbytes and torchao are followed",
                    path=path or _("the model"),
                    kind=kind,
                    library=library,
                )
            )
        if kind in _WRAPPERS.get(type(module).__module__.partition(".")[0], ()):
            raise UnsupportedStepError(
                _(
                    "{path} is wrapped in {kind}, which cannot be run symbolically; give vram_guard the model before "
                    "it is wrapped",
                    path=path or _("the model"),
                    kind=kind,
                )
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise UnsupportedStepError(
                _(
                    "{name} belongs to a lazy module whose shape is not known yet; run one real batch through "
                    "the model (on the CPU) or replace Lazy* layers by layers with explicit sizes",
                    name=name,
                )
            )
        if hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "placements"):  # DTensor
            raise UnsupportedStepError(
                _(
                    "{name} is a {kind}, which cannot be run symbolically; give vram_guard the model before it is "
                    "sharded",
                    name=name,
                    kind=type(tensor).__name__,
                )
            )


class Substitution:
    """Symbolic stand-ins for the parameters and buffers of a module, by identity, so that ties stay ties."""

    def __init__(self, dtype: torch.dtype | None = None, in_place: list[Hooked] | None = None) -> None:
        self._dtype = dtype
        self._in_place = in_place
        """Parameters that are symbolic themselves, because hooks of the user's know them; None: there are none."""
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._packed: dict[int, torch.Tensor] = {}
        """Storages of quantised weights -> their twins: a layer keeps the same memory as another tensor."""

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The symbolic twin of a tensor, made at its first mention."""
        known = self._made.get(id(tensor))
        if known is None:
            twin = self._make(tensor)
            if self._in_place is not None and getattr(tensor, "_post_accumulate_grad_hooks", None):
                self._in_place.append(hooked(tensor, twin))
                twin = tensor
            known = self._made[id(tensor)] = (tensor, twin)
        return known[1]

    def known(self, value: Any) -> torch.Tensor | None:
        """The twin of a tensor that has one already."""
        found = self._made.get(id(value))
        return None if found is None else found[1]

    def copied(self, value: Any) -> Any:
        """An object that a quantised weight or its layer keeps, over symbolic tensors; the same for the same one."""
        if not _quantised.from_bitsandbytes(value) and not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, torch.Tensor):
            return self._exactly(value)
        if id(value) not in self._copies:
            self._copies[id(value)] = value, _quantised.copied(value, self._exactly)
        return self._copies[id(value)][1]

    def _wrapped(self, tensor: Any) -> torch.Tensor:
        """The twin of a wrapper around tensors (torchao's quantised weights), made by its own flatten protocol."""
        if not hasattr(tensor, "__tensor_flatten__"):
            return self._exactly(tensor)
        names, context = tensor.__tensor_flatten__()
        inner = {name: self._wrapped(getattr(tensor, name)) for name in names}
        twin: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        return twin

    def _exactly(self, tensor: torch.Tensor) -> torch.Tensor:
        """The twin of a tensor that keeps its dtype."""
        twin = self._packed.get(tensor.untyped_storage()._cdata)
        if twin is not None:
            return twin.detach()
        if id(tensor) not in self._made:
            twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            setattr(twin, PLACE, "cuda")
            self._made[id(tensor)] = tensor, twin
        return self._made[id(tensor)][1]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        if _quantised.packs(tensor):
            weight = _quantised.packed(tensor, self._dtype, self.copied)
            for one in (weight, *_quantised.kept(weight)):
                setattr(one, PLACE, "cuda")
            self._packed[tensor.untyped_storage()._cdata] = weight
            return weight
        if hasattr(tensor, "__tensor_flatten__"):
            return self._dressed(tensor, self._wrapped(tensor))
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        if is_dense(tensor):
            twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")
        else:
            twin = torch.empty(tensor.size(), dtype=dtype, device="meta")
        return self._dressed(tensor, twin)

    def _dressed(self, tensor: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            twin.requires_grad_()
        own = vars(twin)
        for name, value in vars(tensor).items():
            if name not in own or not hasattr(tensor, "__tensor_flatten__"):
                setattr(twin, name, value)
        setattr(twin, PLACE, "cuda")
        return twin

    def flatten_rnn(self, module: nn.RNNBase) -> None:
        """CuDNN keeps all weights of an RNN in one buffer (``flatten_parameters`` on moving to the GPU)."""
        weights = [p for p in module._parameters.values() if p is not None]
        if len({id(weight) for weight in weights}) != len(weights) or any(self.known(w) is not None for w in weights):
            return
        dtype = self._dtype or weights[0].dtype
        if dtype not in torch.backends.cudnn.CUDNN_TENSOR_DTYPES:
            return  # bfloat16: every call gathers the weights anew
        flat = torch.empty(sum(weight.numel() for weight in weights), dtype=dtype, device="meta")
        offset = 0
        for weight in weights:
            view = flat[offset : offset + weight.numel()].view(weight.shape)
            offset += weight.numel()
            self._made[id(weight)] = (weight, self._dressed(weight, view.detach()))


def modules_as_moved(model: nn.Module) -> list[nn.Module]:
    """The modules in the order in which ``model.to("cuda")`` moves what each holds itself: children first.

    ``torch.nn.Module._apply``; :meth:`~torch.nn.Module.modules` gives parents first.
    """
    found = dict.fromkeys(itertools.chain(*map(modules_as_moved, model.children())))
    return [*found, model]


def arrive(moved: list[torch.Tensor], recorder: Recorder) -> None:
    """The weights come to the GPU; those that share one buffer come by themselves first.

    ``RNNBase._apply`` of torch.nn moves its weights, and then ``flatten_parameters`` copies them into cuDNN's buffer.
    """
    for _storage, group in itertools.groupby(moved, lambda tensor: tensor.untyped_storage()._cdata):
        tensors = list(group)
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        parts: list[int | None] = []
        if (
            len(tensors) > 1
            and sum(sizes) == tensors[0].untyped_storage().nbytes()
            and not recorder.host.holds(tensors[0])
        ):
            parts = [recorder.hold(size, "") for size in sizes]
        for tensor in tensors:
            recorder.track(tensor, "")
        recorder.release(parts[::-1])


@contextlib.contextmanager
def symbolic_model(
    model: nn.Module, dtype: torch.dtype | None = None, recorder: Recorder | None = None
) -> Iterator[list[torch.Tensor]]:
    """The module with symbolic parameters and buffers; afterwards every module's attributes are as they were.

    Attributes that hold the same tensors (``_flat_weights`` of RNNs, lists of parameters) follow. Lists, dicts and sets
    that modules keep are copied before and put back after, so that what a forward pass appends is gone again.

    Args:
        model: the module.
        dtype: that floating-point parameters get; None: their own.
        recorder: where given, parameters with hooks are symbolic themselves, and hears of optimizers that hooks step.

    Yields:
        The symbolic parameters and buffers in the order in which ``module.to("cuda")`` would move them.
    """
    modules = modules_as_moved(model)
    saved = [ModuleState(module, _contents(module)) for module in modules]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    own: list[Hooked] = []
    steps = contextlib.nullcontext() if recorder is None else optimizers_in_backward(own, recorder)
    try:
        moved = _substituted(modules, Substitution(dtype, own if recorder is not None else None))
        with steps:
            yield moved
    finally:
        for one in own:
            one.give_back()
        for state in saved:
            state.restore()
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:  # the user's own code may know the real parameters
                parameter.grad = gradient


def _substituted(modules: list[nn.Module], substitution: Substitution) -> list[torch.Tensor]:
    """Put stand-ins into the modules; only these and the result hold them, so that they die with their use."""
    moved: list[torch.Tensor] = []
    for module in modules:
        if isinstance(module, nn.RNNBase):
            substitution.flatten_rnn(module)
        for kind in ("_parameters", "_buffers"):
            own = getattr(module, kind)
            module.__dict__[kind] = {
                name: None if tensor is None else substitution.stand_in(tensor) for name, tensor in own.items()
            }
            for tensor in filter(_is_there, module.__dict__[kind].values()):
                moved += [*_quantised.kept(tensor), *inner_tensors(tensor)]
    for module in modules:
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                follows = _followed(value, substitution)
                if follows is not value:
                    module.__dict__[name] = follows
                    moved += _quantised.kept(follows)
    return moved


def _is_there(tensor: torch.Tensor | None) -> bool:
    return tensor is not None


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """The mutable containers among a module's attributes, each with a copy of what it holds."""
    found = contents_of(value for name, value in vars(module).items() if name != "_modules")
    # The modules themselves are restored as they are, but which of them there are may change.
    return [*found, (module._modules, look(module._modules))]


def _followed(value: Any, substitution: Substitution) -> Any:
    """``value`` with every tensor that has a twin replaced by it; the value itself where there is none."""
    if isinstance(value, torch.Tensor):
        twin = substitution.known(value)
        return value if twin is None else twin
    if type(value) in (list, tuple):
        items = [_followed(item, substitution) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        items_by_key = {key: _followed(item, substitution) for key, item in value.items()}
        return items_by_key if any(items_by_key[key] is not value[key] for key in value) else value
    return substitution.copied(value)


def build_symbolically(constructor: Any) -> nn.Module:
    """Call a model's constructor so that its weights take no memory.

    Raises:
        UnsupportedStepError: what the callable returned is no ``nn.Module``.
    """
    with torch.device("meta"):
        model = constructor()
    if not isinstance(model, nn.Module):
        raise UnsupportedStepError(_("model() returned a {kind}, not an nn.Module", kind=type(model).__name__))
    return model
