"""Frozen modules wait on the host: a teacher, a text encoder or a VAE takes GPU memory only while it runs.

Applied through accelerate's module hooks. A module's parameters lie in host memory; its forward copies them to the
device and drops the copies after it. They never change, so nothing has to be copied back. Buffers stay on the device
with the rest of the model, as with ``accelerate.cpu_offload``'s default: they are small, and BatchNorm writes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError, MissingLibraryError, UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.module_names import ModuleName
from vram_guard.techniques.host_modules import keep_parameters_in_place, shared_parameter

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Below this many bytes of parameters a module is not worth the two transfers a step: a tenth of a millisecond over
#: PCIe 4.0 x16 (32 GB/s, the bus's specification) is 3 MB.
WORTH_MOVING = 3 * 2**20


def frozen_candidates(model: nn.Module, *, at_least: int = WORTH_MOVING) -> tuple[str, ...]:
    """Names of the outermost modules that train nothing and whose parameters are worth moving.

    Args:
        model: the whole model, as it will be trained.
        at_least: the fewest bytes of parameters that a module must have.

    Returns:
        Names as in ``model.named_modules()``, in that order; never the model itself. Modules that share parameters
        with the rest of the model are left out.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        inside_another = any(name.startswith(outer + ".") for outer in found)
        if not name or inside_another or type(module).forward is _no_forward():
            continue
        parameters = list(module.parameters())
        if not parameters or any(p.requires_grad for p in parameters) or shared_parameter(model, name):
            continue
        if sum(p.numel() * p.element_size() for p in parameters) >= at_least:
            found.append(ModuleName(name, type(module).__name__))
    return tuple(found)


def keep_on_host(model: nn.Module, names: Iterable[str], device: torch.device | str) -> Callable[[], None]:
    """Let the named modules' parameters stay in host memory and come to ``device`` only for their forward.

    Moving the model afterwards (``model.to("cuda")``) moves all but these parameters; a change of dtype reaches them.

    Args:
        model: the model that the names belong to.
        names: as in ``model.named_modules()``; modules without trained parameters that share none with the rest.
        device: where their forward runs.

    Returns:
        A function that takes the hooks away again; the parameters stay on the host.

    Raises:
        InvalidInputError: a name that the model does not have, or a module inside another that is named.
        UnsupportedTechniqueError: a module with trained or shared parameters, or with none; nothing was changed.
            While training: gradients flow through the module, so that its backward pass needs the weights.
        MissingLibraryError: accelerate is not installed.
    """
    import torch

    names = tuple(names)
    hooks = accelerate_hooks()
    modules = dict(model.named_modules())
    for name in names:
        _check(model, modules, name, names)
    undo = [_install(hooks, modules[name], name, torch.device(device)) for name in names]

    def take_away() -> None:
        while undo:
            undo.pop()()

    return take_away


def accelerate_hooks() -> Any:
    """The module of accelerate that is used here.

    Raises:
        MissingLibraryError: accelerate is not installed.
    """
    try:
        import accelerate.hooks
    except ImportError as error:
        raise MissingLibraryError(
            _("frozen modules are kept on the host by accelerate's hooks: pip install accelerate")
        ) from error
    return accelerate.hooks


def _no_forward() -> Any:
    from torch import nn

    return nn.Module.forward  # ModuleList and its like: never called, so no hook would ever run


def _check(model: nn.Module, modules: dict[str, nn.Module], name: str, names: tuple[str, ...]) -> None:
    if not name or name not in modules:
        raise InvalidInputError(_("frozen_on_host: the model has no module named {name}", name=repr(name)))
    outer = next(
        (other for other in names if name.startswith(other + ".") or (name == other and names.count(name) > 1)), None
    )
    if outer is not None:
        raise InvalidInputError(
            _("frozen_on_host: {name} lies inside {outer}, which is named too", name=repr(name), outer=repr(outer))
        )
    module = modules[name]
    trained = next((path for path, p in module.named_parameters() if p.requires_grad), None)
    if trained is not None:
        raise _cannot_wait(name, _("its parameter {parameter} is trained", parameter=trained))
    if next(module.parameters(), None) is None:
        raise _cannot_wait(name, _("it has no parameters"))
    if type(module).forward is _no_forward():
        kind = type(module).__name__
        raise _cannot_wait(name, _("a {kind} has no forward of its own; name what it holds", kind=kind))
    shared = shared_parameter(model, name)
    if shared:
        raise _cannot_wait(name, _("it shares {parameter} with a module outside it", parameter=shared))


def _cannot_wait(name: str, why: str) -> UnsupportedTechniqueError:
    return UnsupportedTechniqueError(_("{name} cannot be kept on the host: {why}", name=name, why=why))


def _install(hooks: Any, module: nn.Module, name: str, device: torch.device) -> Callable[[], None]:
    weights = _Weights(module, name, device)

    class ComesForItsForward(hooks.ModelHook):  # type: ignore[misc]
        """accelerate calls this around the module's forward."""

        def pre_forward(self, _module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            weights.bring()
            return args, kwargs

        def post_forward(self, _module: nn.Module, output: Any) -> Any:
            weights.send_back()
            weights.check(output)
            return output

    weights.wait()
    forward, other = module.__dict__.get("forward"), getattr(module, "_hf_hook", None)
    hooks.add_hook_to_module(module, ComesForItsForward(), append=True)
    # After an exception in the forward (out of memory, say) only hooks of this kind run.
    cleaning = module.register_forward_hook(lambda *_: weights.send_back(), always_call=True)
    undo_placement = keep_parameters_in_place(module)

    def undo() -> None:
        undo_placement()
        cleaning.remove()
        hooks.remove_hook_from_module(module)
        if other is not None:  # a hook that is not ours, which accelerate removed with ours
            hooks.add_hook_to_module(module, other)
        elif forward is None:
            module.__dict__.pop("forward", None)  # accelerate leaves the bound method there, which no pickle likes

    return undo


class _Weights:
    """The parameters of one module: their place in host memory, and their copies while its forward runs."""

    def __init__(self, module: nn.Module, name: str, device: torch.device) -> None:
        self.module = module
        self.name = name
        self.device = device
        self.on_host: dict[int, torch.Tensor] = {}

    def wait(self) -> None:
        """Into host memory, where they are not there yet."""
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to("cpu")

    def bring(self) -> None:
        """Copies on the device."""
        for parameter in self.module.parameters():
            if id(parameter) not in self.on_host:
                self.on_host[id(parameter)] = parameter.data
                parameter.data = parameter.data.to(self.device, copy=True)  # what is written to it is lost anywhere

    def send_back(self) -> None:
        """The copies go, what waited stands there again."""
        for parameter in self.module.parameters():
            waiting = self.on_host.pop(id(parameter), None)
            if waiting is not None:
                parameter.data = waiting

    def check(self, output: Any) -> None:
        """Refuse what would compute wrong gradients, or fail in the backward pass."""
        if any(tensor.requires_grad for tensor in _tensors(output)):
            raise _cannot_wait(
                self.name,
                _(
                    "gradients flow through it, so that the backward pass needs its weights on the device. Take it out "
                    "of frozen_on_host, or call it under torch.no_grad() where no gradient is meant to pass"
                ),
            )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in what a forward returns: nested containers and model outputs."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in vars(value).values():  # diffusers' and users' own output classes
            if isinstance(item, (torch.Tensor, dict, list, tuple)):
                yield from _tensors(item)
