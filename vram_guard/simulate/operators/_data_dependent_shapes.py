"""Operators whose results, or their sizes, depend on values: ``.item()``, ``nonzero``, boolean masks, ``unique``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from vram_guard.language import Message
from vram_guard.scratch import RadixSort
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.branches import chosen
from vram_guard.simulate.device.ranges import bounds_of
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators.kernels import in_backward_formula
from vram_guard.simulate.operators.meta_results import result_of


def local_scalar(recorder: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``.item()``: the real value where it is known, else a placeholder."""
    tensor = args[0]
    number = constants.scalar(tensor)
    guessed = tensor.dtype == torch.bool and constants.compute(tensor) is None
    return chosen(recorder, number) if guessed else number


def equal(recorder: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """``torch.equal``: known values are compared, unknown ones taken for different where the step goes on with that."""
    one, other = (constants.compute(tensor) for tensor in args[:2])
    if one is not None and other is not None:
        return torch.equal(one, other)
    return args[0].shape == args[1].shape and chosen(recorder, default=False)


def _note_bound(recorder: Recorder, func: Any, bound: int) -> None:
    """Once for a line that asks several times: with the largest bound."""
    name = str(func)
    said = Message(
        "the size of {operator}'s result depends on data that is not known before training; counted at its upper "
        "bound of {bound} elements",
        operator=name,
        bound=bound,
    )
    for note in [one for one in recorder.notes if (one.operator, one.source) == (name, recorder.source())]:
        if isinstance(note.said, Message) and note.said.text == said.text:
            if dict(note.said.values)["bound"] >= bound:  # type: ignore[operator]
                return
            del recorder.notes[note]
    recorder.note(said, operator=name, tier="partly symbolic")


def _note_from_batch(recorder: Recorder, func: Any) -> None:
    name = str(func)
    recorder.note(
        Message(
            "the size of {operator}'s result depends on the values in the batch; counted as in the batch that was "
            "given",
            operator=name,
        ),
        operator=name,
        tier="partly symbolic",
        from_values=True,
    )


def nonzero(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Indices (count, dimensions) in int64: counted from known values, else every element."""
    tensor = args[0]
    real = constants.compute(tensor)
    if real is None:
        count = tensor.numel()
        _note_bound(recorder, func, count)
    else:
        count = int(real.count_nonzero())
        _note_from_batch(recorder, func)
    out = torch.empty((count, tensor.dim()), dtype=torch.int64, device="meta")
    if real is not None:
        constants.known(out, real.nonzero())
    return out


def masked_select(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """The selected elements in one dimension: counted from a known mask, else all; their indices for the call.

    IndexKernel.cpp, ``masked_select_out_cuda_impl``: it indexes by the mask.
    """
    tensor, mask = args[:2]
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    real = constants.compute(mask)
    if real is None:
        count = shape.numel()
        _note_bound(recorder, func, count)
    else:
        count = int(real.expand(shape).count_nonzero())
        _note_from_batch(recorder, func)
    name = str(func)
    indices = recorder.hold(8 * max(1, len(shape)) * count, name)
    out = torch.empty(count, dtype=tensor.dtype, device="meta")
    recorder.track(out, name)
    recorder.release([indices])
    return out


def masked_scatter(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Values into the places of a mask: in place, or into a copy; for the call the place of each value, in int64.

    IndexKernel.cu, ``launch_masked_scatter_kernel``: mask and values are made contiguous.
    """
    target, mask, source = args[:3]
    name = str(func)
    out = _written(recorder, func, target)
    count = target.numel()
    held = [recorder.hold(8 * count, name)]
    held += [recorder.hold(count, name)] if mask.shape != target.shape or not mask.is_contiguous() else []
    held += [] if source.is_contiguous() else [recorder.hold(source.numel() * source.element_size(), name)]
    recorder.release(held)
    return out


def index(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask]``: a boolean mask selects as many rows as it has true entries; indices are as everywhere.

    Indices in host memory are copied for the call (TensorAdvancedIndexing.cpp, ``make_info``), and those of several
    dimensions where they do not lie alike once they have one shape (``AdvancedIndex``).
    """
    tensor, indices = args[:2]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        name = str(func)
        copies = [recorder.hold(i.numel() * i.element_size(), name) for i in indices if _on_host(recorder, i)]
        copies += [recorder.hold(size, name) for size in _laid_alike(indices)]
        out = result_of(func, args, kwargs)
        constants.derive(func, args, kwargs, out)
        recorder.track(out, name)
        recorder.release(copies)
        return out
    replaced: list[Any] = []
    for position in indices:
        if position is None or position.dtype not in (torch.bool, torch.uint8):
            replaced.append(position)
            continue
        rows = nonzero(recorder, func, (position,), {})
        recorder.track(rows, str(func))
        replaced.extend(rows[:, dim] for dim in range(position.dim()))
    out = func(tensor, replaced)
    recorder.track(out, str(func))  # while the indices still live
    return out


def _laid_alike(indices: Sequence[torch.Tensor | None]) -> list[int]:
    """Bytes of each copy that gives the indices the same strides (``all_strides_match``)."""
    given = [index for index in indices if index is not None]
    if len(given) < 2:
        return []
    expanded = torch.broadcast_tensors(*given)
    if all(each.stride() == expanded[0].stride() for each in expanded):
        return []
    return [each.numel() * each.element_size() for each in expanded if not each.is_contiguous()]


def _on_host(recorder: Recorder, tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not (is_symbolic(tensor) and recorder.place_of(tensor) == "cuda")


def index_put(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place: returns its target; the functional form returns a copy of it. To accumulate, the indices are sorted.

    A boolean mask becomes indices for the call (TensorAdvancedIndexing.cpp, ``make_info``, ``expandTensors``), except
    where a single number fills what it selects (``canDispatchToMaskedFill``).
    """
    selected, indices = _selected(recorder, func, args)
    out = _written(recorder, func, args[0])
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if accumulates and is_symbolic(args[0]):
        _sorted_accumulation(recorder, str(func), args[0], indices, args[2])
    recorder.release(selected)
    return out


def _written(recorder: Recorder, func: Any, target: torch.Tensor) -> torch.Tensor:
    """What an operator writes to: its target in place, or a copy.

    Backward formulas write into zeros of their own, as in :func:`~vram_guard.simulate.operators.kernels.scatter`.
    """
    if func._schema.name.endswith("_"):
        constants.forget(target)
        return target
    if in_backward_formula(recorder):
        return target
    out = torch.empty_like(target)
    recorder.track(out, str(func))
    return out


#: Shape of indices, and whether they lie in host memory.
_Index = tuple[torch.Size, bool]


def _selected(recorder: Recorder, func: Any, args: tuple[Any, ...]) -> tuple[list[int | None], list[_Index | None]]:
    """What masks become, held for the call, and the indices of each dimension; None where all of it is meant.

    A mask selects as many elements as there are values to put, where these are told one by one.
    """
    target, indices, values = args[:3]
    held: list[int | None] = []
    found: list[_Index | None] = []
    for index in indices:
        if index is None:
            found.append(None)
        elif index.dtype not in (torch.bool, torch.uint8):
            found.append((index.shape, _on_host(recorder, index)))
        else:
            known = constants.compute(index)
            if not values.dim():
                count = 0
            elif known is not None:
                count = int(known.count_nonzero())
                _note_from_batch(recorder, func)
            elif len(indices) == 1 and values.dim() == target.dim() - index.dim() + 1 and values.shape[0] > 1:
                count = values.shape[0]
            else:
                count = index.numel()
                _note_bound(recorder, func, count)
            held.append(recorder.hold(8 * count * index.dim(), str(func)) if count else None)
            found += [(torch.Size((count,)), False)] * index.dim()
    return held, found


def _sorted_accumulation(
    recorder: Recorder, name: str, target: torch.Tensor, indices: list[_Index | None], values: torch.Tensor
) -> None:
    """Indexing.cu, ``index_put_with_sort_kernel``: linear indices, sorted with their positions, and CUB's storage.

    Each index is first wrapped around and multiplied (``computeLinearIndex``), one of the host before it is copied;
    values that are not contiguous are copied.
    """
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not given:
        return
    count = torch.broadcast_shapes(*(shape for _dim, (shape, _host) in given)).numel()
    size = 8 * count
    linear: list[int | None] = []
    for _dim, (_shape, host) in given:
        wrapped = None if host else recorder.hold(size, name)
        multiplied = recorder.hold(size, name)
        recorder.release([wrapped])
        if linear:
            recorder.release([multiplied])  # added to the first
        else:
            linear.append(multiplied)
    selected = count * torch.Size(n for dim, n in enumerate(target.shape) if dim not in dict(given)).numel()
    held = linear
    if not values.is_contiguous() or values.numel() < selected:
        held.append(recorder.hold(selected * values.element_size(), name))
    held += [recorder.hold(size, name), recorder.hold(size, name)]
    keys = math.prod(target.shape[dim] for dim, _index in given)
    recorder.release([recorder.hold(size, name), recorder.hold((RadixSort(), (count, keys)), name)])
    recorder.release(held)


def unique(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``unique`` and its kin: computed for real where the values are known, else as many as there are."""
    tensor = args[0]
    real = constants.compute(tensor)
    if real is not None:
        _note_from_batch(recorder, func)
        results = func(real, *args[1:], **kwargs)
    else:
        bounds = bounds_of(tensor)
        different = torch.arange(tensor.numel(), dtype=torch.int64)
        if bounds is not None:
            different = different % bounds.number + bounds.low
        _note_bound(recorder, func, tensor.numel() if bounds is None else min(tensor.numel(), bounds.number))
        results = func(different.to(tensor.dtype).view(tensor.shape), *args[1:], **kwargs)
    made = tuple(torch.empty_like(result, device="meta") for result in results)
    if real is not None:
        for out, result in zip(made, results, strict=True):
            constants.known(out, result)
    return made
