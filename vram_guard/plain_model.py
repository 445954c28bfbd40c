"""Training steps of plain models: what is known is a model and the shape of its input, and the rest is assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vram_guard.capture.optimizer_twin import maker_of
from vram_guard.errors import InvalidInputError, VramGuardError
from vram_guard.language import _, marked
from vram_guard.limits import LARGEST_BATCH, MOST_DIMENSIONS
from vram_guard.step import TrainingStep
from vram_guard.user_code import line_of_error, with_line

if TYPE_CHECKING:
    import torch

#: Types of numbers that an input may have, and their short names.
DTYPES: Final = {
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int64": "int64",
    "long": "int64",
    "int": "int64",
    "bool": "bool",
}

ASSUMED = marked(
    "assumed for {model}: {optimizer}; as loss the model's own, else cross-entropy of scores (samples x classes, or "
    "samples x tokens x vocabulary), else the mean squared error, auxiliary outputs included. A TrainingStep says what "
    "your training really does"
)


@dataclass(frozen=True)
class InputShape:
    """One tensor with which a model is called, without the batch dimension.

    Examples:
        >>> InputShape.parse("3x224x224,10:int64")
        (InputShape(shape=(3, 224, 224), dtype='float32'), InputShape(shape=(10,), dtype='int64'))
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    @classmethod
    def parse(cls, text: str) -> tuple[InputShape, ...]:
        """Inputs from text: ``3x224x224``; ``512:int64`` for tokens; ``:int64`` for one number; several with commas.

        Raises:
            InvalidInputError: it means no shape.
        """
        return tuple(cls._parse_one(part.strip()) for part in text.split(","))

    @classmethod
    def _parse_one(cls, text: str) -> InputShape:
        sizes, colon, dtype = text.lower().partition(":")
        parts = sizes.split("x") if sizes else []
        numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 12]
        if not text or len(numbers) != len(parts) or (colon and dtype not in DTYPES):
            raise InvalidInputError(
                _(
                    "{text} is no shape of an input: write it without the batch, as 3x224x224, or 512:int64 for tokens "
                    "(types: {types})",
                    text=repr(text)[:60],
                    types=", ".join(dict.fromkeys(DTYPES.values())),
                )
            )
        return cls(tuple(numbers), DTYPES[dtype] if colon else "float32")

    @classmethod
    def of(cls, given: str | int | Sequence[Any]) -> tuple[InputShape, ...]:
        """Inputs as Python code gives them: text as for :meth:`parse`, 64, ``(3, 224, 224)``, or a list of these."""
        if isinstance(given, str):
            return cls.parse(given)
        if isinstance(given, int) and not isinstance(given, bool):
            return (cls((given,)),)
        if not isinstance(given, Sequence):
            raise _no_shape(given)
        if all(isinstance(one, int) and not isinstance(one, bool) for one in given):
            return (cls(tuple(map(int, given))),)
        if all(isinstance(one, str | Sequence) for one in given):
            return tuple(found for one in given for found in cls.of(one))
        raise _no_shape(given)

    def __post_init__(self) -> None:
        if len(self.shape) > MOST_DIMENSIONS or not all(0 < one <= LARGEST_BATCH for one in self.shape):
            raise InvalidInputError(
                _(
                    "the sizes of an input must be at least 1, and sensible, not {shape}",
                    shape="x".join(map(str, self.shape)),
                )
            )

    def zeros(self, batch_size: int) -> torch.Tensor:
        """A batch of it."""
        import torch

        return torch.zeros(batch_size, *self.shape, dtype=getattr(torch, self.dtype))


def step_of_model(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    inputs: Sequence[InputShape],
    *,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    **settings: Any,
) -> TrainingStep:
    """A training step of a model of which only the input is known.

    The loss is the model's own where it returns one, else the cross-entropy of scores of shape (samples, classes), or
    of a language model's scores of its vocabulary for every token, else the mean squared error of its first output.
    Outputs beside the first and of its shape, such as the scores of GoogLeNet's auxiliary classifiers, are learned as
    the first is, and the losses summed: the weights that trainings give them change no memory.

    Args:
        model: a module, or a callable that builds one, symbolically.
        inputs: what the model is called with, in order.
        optimizer: of the model's parameters, which stays as it is; or ``parameters -> optimizer``, called with those
            that are trained; None: AdamW.
        settings: further arguments of :class:`~vram_guard.step.TrainingStep`.

    Raises:
        InvalidInputError: there is no input, or the optimizer is over other weights than the model's.

    Example:
        >>> step = step_of_model(torch.nn.Linear(32, 10), InputShape.parse("32"))
        >>> step.loss(step.model, step.batch(4)).shape
        torch.Size([])
    """
    import torch

    if not inputs:
        raise InvalidInputError(_("a plain model needs the shape of its input, such as 3x224x224"))
    return TrainingStep(
        model=model,
        batch=lambda size: (*(one.zeros(size) for one in inputs), torch.zeros(size, dtype=torch.long)),
        optimizer=_maker(optimizer, model),
        **{"loss": _loss, **settings},
    )


def step_of_example(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    example: Any,
    *,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    **settings: Any,
) -> TrainingStep:
    """A training step of a model and an example of what it is called with.

    Args:
        model: a module, or a callable that builds one, symbolically.
        example: a batch: a mapping holds the model's arguments by name, a tuple or list those in order, all else is the
            only one.
        optimizer: as for :func:`step_of_model`.
        loss: ``(model, batch) -> loss``; None: as for :func:`step_of_model`.
        settings: further arguments of :class:`~vram_guard.step.TrainingStep`.

    Raises:
        InvalidInputError: the optimizer is over other weights than the model's.

    Example:
        >>> net = torch.nn.Linear(32, 10)
        >>> step = step_of_example(net, torch.ones(4, 32), optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
        >>> type(step.optimizer(net.parameters())).__name__
        'SGD'
    """
    return TrainingStep(
        model=model, batch=example, loss=loss or _loss_of_example, optimizer=_maker(optimizer, model), **settings
    )


def _maker(optimizer: Any, model: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """``parameters -> optimizer`` of what the user gave."""
    import torch

    if isinstance(optimizer, torch.optim.Optimizer):
        if not isinstance(model, torch.nn.Module):
            raise InvalidInputError(
                _("an optimizer belongs to a model that is there: give the model, not what makes it")
            )
        return maker_of(optimizer, model)
    learning = optimizer or torch.optim.AdamW
    return lambda parameters: learning([one for one in parameters if one.requires_grad])


def is_assumed(step: TrainingStep) -> bool:
    """True for a step whose loss is not the user's: see :data:`ASSUMED`."""
    return step.loss in (_loss, _loss_of_example)


def shapes_of(batch: Sequence[torch.Tensor]) -> str:
    """The inputs of a batch that :func:`step_of_model` makes, without its size: ``3x224x224``."""
    return ", ".join("x".join(map(str, one.shape[1:])) for one in batch[:-1])


def _no_shape(value: object) -> InvalidInputError:
    said = _(
        "input_shape must be a shape without the batch, such as (3, 224, 224), not {value}", value=repr(value)[:60]
    )
    return InvalidInputError(said)


def as_step(
    step: Any, input_shape: str | int | Sequence[Any] | None = None, example: Any = None, **made_with: Any
) -> Any:
    """A training step of what a public function was given: a plain model becomes one.

    Args:
        step: a TrainingStep, or a model.
        input_shape: of a model: the shape of one sample, see :func:`step_of_model`.
        example: of a model: what it is called with, see :func:`step_of_example`.
        made_with: further arguments of either; None where they were not given.

    Raises:
        InvalidInputError: a model without a shape or example, one of them beside a step, or a step whose callables take
            others than what they are called with.
    """
    import torch

    made_with = {name: value for name, value in made_with.items() if value is not None}
    beside = [
        *(["input_shape"] if input_shape is not None else []),
        *(["batch"] if example is not None else []),
        *made_with,
    ]
    if isinstance(step, TrainingStep) and beside:
        raise InvalidInputError(_("{name} is for a plain model; a TrainingStep has its own", name=beside[0]))
    if input_shape is not None and example is not None:
        raise InvalidInputError(_("give input_shape or an example batch, not both"))
    if example is not None:
        return step_of_example(step, example, **made_with)
    if input_shape is not None:
        return step_of_model(step, InputShape.of(input_shape), **made_with)
    if isinstance(step, torch.nn.Module):
        raise InvalidInputError(
            _(
                "a plain model needs input_shape=, the shape of one sample such as (3, 224, 224), or in estimate() a "
                "batch to call it with; or give a TrainingStep"
            )
        )
    if isinstance(step, TrainingStep):
        step.check_calls()
    return step


def _loss(model: Any, batch: Any) -> torch.Tensor:
    *inputs, labels = batch
    try:
        output = model(*inputs)
    except VramGuardError:
        raise
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        shapes = shapes_of(batch)
        problem = with_line(f"{type(error).__name__}: {error}", line_of_error(error))
        if len(inputs) > 1 and isinstance(error, TypeError):
            # TypeError: Python's own for a wrong number of arguments.
            raise InvalidInputError(
                _(
                    "the model fails on {count} inputs of {shapes} (commas separate inputs, x separates the sizes of "
                    "one): {problem}",
                    count=len(inputs),
                    shapes=shapes,
                    problem=problem,
                )
            ) from error
        raise InvalidInputError(
            _("the model fails on an input of {shapes}: {problem}", shapes=shapes, problem=problem)
        ) from error
    return _loss_of_output(model, output, inputs[0], labels)


def _loss_of_example(model: Any, batch: Any) -> torch.Tensor:
    import torch

    by_name = isinstance(batch, Mapping)
    arguments = list(batch.values() if by_name else batch if isinstance(batch, (tuple, list)) else [batch])
    output = model(**batch) if by_name else model(*arguments)
    given = next((one for one in arguments if isinstance(one, torch.Tensor)), None)
    return _loss_of_output(model, output, given, None)


def _loss_of_output(model: Any, output: Any, given: torch.Tensor | None, labels: torch.Tensor | None) -> torch.Tensor:
    """The model's own loss, else one of its scores.

    Args:
        model: that was called.
        output: what it returned.
        given: the first tensor that it was called with; None: there is none among its arguments.
        labels: a class for each sample; None: made here.

    Raises:
        InvalidInputError: it returns no loss, and nothing says how many samples there are.
    """
    import torch

    own = own_loss(output)
    if own is not None:
        return own
    if given is None:
        raise InvalidInputError(_("the model returns no loss, and its arguments are no tensors: give loss="))
    learned = _learned(output)
    if _scores_tokens(model, given, learned[0]):
        learned, labels = [one.flatten(0, 1) for one in learned], given.flatten()
    if labels is None:
        labels = torch.zeros(len(given), dtype=torch.long, device=given.device)
    losses = [_assumed_loss(one, labels) for one in learned]
    return sum(losses[1:], losses[0])


def _scores_tokens(model: Any, given: torch.Tensor, output: torch.Tensor) -> bool:
    """True if the output scores the words of the model's own vocabulary for every token that it was given."""
    import torch

    if given.dtype != torch.int64 or given.dim() != 2 or output.shape[:-1] != given.shape:
        return False
    tables = (one for one in model.modules() if isinstance(one, torch.nn.Embedding))
    return any(one.num_embeddings == output.shape[-1] for one in tables)


def _assumed_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    if output.dim() == 2 and output.is_floating_point() and output.shape[1] > 1:
        return functional.cross_entropy(output, labels)
    return functional.mse_loss(output, output.new_zeros(output.shape))


def own_loss(output: Any) -> torch.Tensor | None:
    """The loss that a model returns by itself: the entry, or the attribute, ``loss``."""
    found: torch.Tensor | None = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found


def _learned(output: Any) -> list[torch.Tensor]:
    """The first tensor that a model returns, and those beside it of its shape and type: other answers to the same."""
    import torch

    beside: list[Any] = [output]
    while not isinstance(output, torch.Tensor):
        if isinstance(output, Mapping):
            output = list(output.values())
        if not isinstance(output, Sequence) or isinstance(output, str) or not output:
            raise InvalidInputError(
                _(
                    "the model returns a {kind}, of which no loss can be made: give a TrainingStep",
                    kind=type(output).__name__,
                )
            )
        beside, output = list(output), output[0]
    return [
        one
        for one in beside
        if isinstance(one, torch.Tensor) and one.shape == output.shape and one.dtype == output.dtype
    ]
