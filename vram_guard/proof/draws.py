"""Random numbers that do not depend on how a batch is cut: each sample gets its own, in whichever micro-batch it is.

Two runs of one step are compared: with the whole batch, and in micro-batches. Dropout would make them differ although
nothing is wrong. Within :class:`RowDraws`, the n-th draw of a pass gives a sample the same numbers in both. The
generators of NumPy and Python, whose draws are not seen, stand at the same place before each pass.

The number of a draw is kept in torch's own default generator and not beside it: activation checkpointing saves that
generator's state before a block and puts it back before the block runs again, which so draws the same. A generator
that checkpointing does not put back (NumPy's, Python's, a script's own ``torch.Generator``) goes on, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vram_guard.state.random_generators import RandomState
from vram_guard.tensors import map_tensors_in, tensors_in

if TYPE_CHECKING:
    from typing_extensions import Self

Shape: TypeAlias = "tuple[int, ...]"
Layout: TypeAlias = "dict[int, list[Shape]]"
"""Key of a draw -> shapes that were drawn under it in a pass over all samples."""

#: Operators whose numbers depend on a shape and on scalars only; all others that draw also read tensors. With the
#: in-place forms (``uniform_``), complete for the operators of torch 2.4 to 2.13 that are tagged as drawing.
_READ_NO_TENSOR = frozenset(
    [
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "normal_",
        "normal_functional",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "uniform",
    ]
)
_OVERLOADS_THAT_READ_NO_TENSOR = frozenset(
    ("bernoulli_.float", "bernoulli.p", "bernoulli.float_out", "normal.float_float", "normal.float_float_out")
)
#: Their last dimension holds the categories of one sample, and alone no samples.
_LAST_IS_NO_SAMPLE = frozenset(("multinomial", "_sample_dirichlet"))
#: Seed of the first pass, as the default generator names it; the next ones follow. Far from seeds that people choose.
_FIRST_PASS = 0x5A3C_91D7_0000_0000


class _Pass(NamedTuple):
    """The samples of one (micro-)batch among those of the whole batch."""

    start: int
    samples: int


class RowDraws(TorchDispatchMode):
    """A mode in which random numbers are a function of the draw's number within a pass and of the sample's row.

    A tensor's dimension that grows with the number of samples is known from the whole batch's pass: run it first, in
    the same mode, or hand over its :attr:`layout`. Without that, it is the first dimension if that is a multiple of the
    samples, else the one that is as long as the batch. A draw without such a dimension is the same in every pass.

    Only draws on the CPU are answered. A number per sample that a script takes from NumPy or Python one after the other
    is not found: such a step differs between the two runs. ``randperm`` over the batch mixes samples, and differs too.

    Args:
        samples: of the whole batch.
        layout: :attr:`layout` of another process that ran the whole batch.
        stacked: several rows of a sample lie ``samples`` rows apart, as after ``torch.cat([views, views])``; otherwise
            next to each other, as in a batch of sequences flattened to tokens.

    Example:
        >>> with RowDraws(samples=4) as draws:
        ...     draws.begin(0, 4)
        ...     whole = torch.rand(4, 2)
        ...     draws.begin(2, 2)
        ...     last_two = torch.rand(2, 2)
        >>> torch.equal(whole[2:], last_two)
        True
    """

    def __init__(self, samples: int, *, layout: Mapping[int, list[Shape]] | None = None, stacked: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples = samples
        self.layout: Layout = dict(layout or {})
        self._stacked = stacked
        self._passes: list[_Pass] = []
        self._own: dict[torch.Generator, torch.Tensor] = {}

    def __enter__(self) -> Self:
        self._before = RandomState()
        self.begin(0, self.samples)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._put_back()

    def begin(self, start: int, samples: int) -> None:
        """Start a pass, before its forward: all generators are where they were when the mode was entered.

        Args:
            start: row of the (micro-)batch's first sample in the whole batch.
            samples: of the (micro-)batch.
        """
        self._put_back()
        state = torch.get_rng_state()
        # The generator's state begins with its seed, which no draw reads. It says whose pass this is, also to a block
        # that runs again after the next pass began.
        state[:8] = torch.tensor([_FIRST_PASS + len(self._passes)], device="cpu").view(torch.uint8)
        torch.set_rng_state(state)
        self._passes.append(_Pass(start, samples))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer an operator that draws; run every other one."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        draw = _Draw(func, args, kwargs)
        if draw.generator is not torch.default_generator:
            self._own.setdefault(draw.generator, draw.generator.get_state())
        key = draw.advance()
        number = torch.initial_seed() - _FIRST_PASS  # a script that seeds within its step gives another one
        current = self._passes[number if 0 <= number < len(self._passes) else -1]
        if draw.reads_tensors:
            return self._by_sample(draw, key, current)
        return self._as_in_the_whole(draw, key, current)

    def _as_in_the_whole(self, draw: _Draw, key: int, current: _Pass) -> Any:
        """Draw what the whole batch draws, and keep the rows of this pass."""
        result = draw(key)  # for its strides and type, or to be filled in place
        whole, dim = self._whole(key, tuple(result.shape), current)
        drawn = draw.shaped(tuple(result.shape), whole)(key)
        if dim is not None:
            drawn = self._rows(drawn, dim, self.samples, *current)
        return result.copy_(drawn)

    def _by_sample(self, draw: _Draw, key: int, current: _Pass) -> Any:
        """Draw for each sample alone: how many numbers one takes may depend on its values (Poisson, gamma)."""
        shape = max((tuple(tensor.shape) for tensor in draw.tensors), key=len, default=())
        _, dim = self._whole(key, shape, current)
        if dim is None:  # as the whole batch does it
            current = _Pass(0, self.samples)
            dim = _guessed_dim(shape, self.samples)
        if dim is None or (draw.name in _LAST_IS_NO_SAMPLE and dim == len(shape) - 1):
            return draw(key)
        result = draw.on_clones(key)
        for index in range(current.samples):
            rows = partial(self._rows_or_all, shape[dim], dim, current.samples, index)
            drawn = draw.mapped(rows)(key + 1 + current.start + index)
            for target, part in zip(tensors_in([result]), tensors_in([drawn]), strict=True):
                rows(target).copy_(part)
        return result

    def _whole(self, key: int, shape: Shape, current: _Pass) -> tuple[Shape, int | None]:
        """The shape that the whole batch draws, and the dimension that is longer in it; None where none is."""
        samples = current.samples
        if samples == self.samples:
            known = self.layout.setdefault(key, [])
            if shape not in known:
                known.append(shape)
            return shape, None
        for known_shape in self.layout.get(key, ()):
            if len(known_shape) == len(shape):
                differ = [dim for dim, size in enumerate(shape) if size != known_shape[dim]]
                if not differ:
                    return shape, None
                (longer, *others) = differ
                if not others and shape[longer] * self.samples == known_shape[longer] * samples:
                    return known_shape, longer
        dim = _guessed_dim(shape, samples)
        if dim is None:
            return shape, None
        return (*shape[:dim], shape[dim] // samples * self.samples, *shape[dim + 1 :]), dim

    def _rows(self, tensor: torch.Tensor, dim: int, of: int, start: int, samples: int) -> torch.Tensor:
        """The rows of some of a tensor's ``of`` samples; a view where samples lie next to each other or is one."""
        each = tensor.shape[dim] // of
        if not self._stacked:
            return tensor.narrow(dim, start * each, samples * each)
        part: torch.Tensor = tensor.unflatten(dim, (each, of)).narrow(dim + 1, start, samples)
        return part.squeeze(dim + 1) if samples == 1 else part.flatten(dim, dim + 1)

    def _rows_or_all(self, size: int, dim: int, of: int, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of one sample; all of a tensor that has another size there, and serves all samples."""
        alone = tensor.dim() <= dim or tensor.shape[dim] != size
        return tensor if alone else self._rows(tensor, dim, of, index, 1)

    def _put_back(self) -> None:
        self._before.restore()
        for generator, state in self._own.items():
            generator.set_state(state)


class _Draw:
    """A call of an operator that draws."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self.name: str = func.overloadpacket.__name__
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
        self.generator: torch.Generator = next(given, torch.default_generator)
        self.tensors = tensors_in((*args, *kwargs.values()))

    @property
    def reads_tensors(self) -> bool:
        overload = f"{self.name}.{self._func._overloadname}"  # noqa: SLF001
        return not ({self.name, self.name.rstrip("_")} & _READ_NO_TENSOR or overload in _OVERLOADS_THAT_READ_NO_TENSOR)

    def advance(self) -> int:
        """The next number of the generator, from which this draw's are made."""
        return int(torch.empty((), dtype=torch.int64, device=self.generator.device).random_(generator=self.generator))

    def __call__(self, seed: int) -> Any:
        with _seeded(self.generator, seed % 2**63):
            return self._func(*self._args, **self._kwargs)

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> _Draw:
        """The call with ``function`` applied to its tensors."""
        args = tuple(map_tensors_in(function, value) for value in self._args)
        return _Draw(self._func, args, {name: map_tensors_in(function, value) for name, value in self._kwargs.items()})

    def shaped(self, shape: Shape, other: Shape) -> _Draw:
        """The call with new tensors of another shape in place of those of ``shape``, whose content it does not read."""
        names = [argument.name for argument in self._func._schema.arguments]  # noqa: SLF001
        sized = (other if name == "size" else value for name, value in zip(names, self._args, strict=False))
        call = _Draw(self._func, tuple(sized), self._kwargs)
        return call.mapped(lambda each: each.new_empty(other) if tuple(each.shape) == shape else each)

    def on_clones(self, seed: int) -> Any:
        """The result as it would be, in the tensors of the call where it writes to them; what these hold is kept."""
        originals: dict[int, torch.Tensor] = {}
        clones: list[torch.Tensor] = []

        def clone(tensor: torch.Tensor) -> torch.Tensor:
            clones.append(tensor.clone())
            originals[id(clones[-1])] = tensor
            return clones[-1]

        return map_tensors_in(lambda made: originals.get(id(made), made), self.mapped(clone)(seed))


def _guessed_dim(shape: Shape, samples: int) -> int | None:
    """The dimension of the samples, by its length alone."""
    if shape and shape[0] % samples == 0:
        return 0
    return shape.index(samples) if shape.count(samples) == 1 else None


@contextmanager
def _seeded(generator: torch.Generator, seed: int) -> Iterator[None]:
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
