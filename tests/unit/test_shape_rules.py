"""Every direct rule against torch's own answer on the meta device: shape, strides, dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vram_guard.simulate.operators import shape_rules

aten = torch.ops.aten
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
FLOATS = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=5)


@st.composite
def tensors(draw: Any, shape: Any = SHAPES, dtype: Any = DTYPES) -> torch.Tensor:
    """A meta tensor: contiguous, permuted, sliced in any dimension, in steps, expanded or channels last."""
    size = draw(shape) if not isinstance(shape, (list, tuple, torch.Size)) else list(shape)
    kind = draw(dtype) if isinstance(dtype, st.SearchStrategy) else dtype
    made = torch.empty(size, dtype=kind, device="meta")
    layout = draw(
        st.sampled_from(["plain", "plain", "plain", "permuted", "sliced", "narrowed", "stepped", "expanded", "last"])
    )
    if layout == "permuted" and made.dim() > 1:
        order = draw(st.permutations(range(made.dim())))
        back = [order.index(dim) for dim in range(made.dim())]
        made = torch.empty([size[dim] for dim in order], dtype=kind, device="meta").permute(back)
    elif layout == "sliced" and made.dim():
        made = torch.empty([*size[:-1], size[-1] + 3], dtype=kind, device="meta")[..., : size[-1]]
    elif layout == "narrowed" and made.dim():
        dim = draw(st.integers(0, made.dim() - 1))
        wide = [extent + 2 * (at == dim) for at, extent in enumerate(size)]
        made = torch.empty(wide, dtype=kind, device="meta").narrow(dim, 1, size[dim])
    elif layout == "stepped" and made.dim():
        made = torch.empty([*size[:-1], 2 * size[-1]], dtype=kind, device="meta")[..., ::2]
    elif layout == "expanded" and made.dim():
        made = torch.empty([1, *size[1:]], dtype=kind, device="meta").expand(size)
    elif layout == "last" and made.dim() == 4:
        made = made.contiguous(memory_format=torch.channels_last)
    return made


def assert_as_torch_says(func: Any, *args: Any, **kwargs: Any) -> bool:
    """The rule's answer, if it gives one, is torch's; returns whether it gave one."""
    rule = shape_rules.rule_for(func)
    assert rule is not None
    found = rule(args, kwargs)
    if found is None:
        return False
    expected = func(*args, **kwargs)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for one, other in pairs:
        if other is None or one is None:
            assert one is None
            assert other is None or other.numel() == 0
            continue
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        assert _steps(one) == _steps(other), (func, args)
    return True


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element: all that says where an element lies."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _defined(name: str, first: torch.Tensor, second: torch.Tensor) -> Any:
    """The operator, for operands that torch itself takes."""
    func = getattr(aten, name).Tensor
    try:
        func(first, second)
    except RuntimeError:
        assume(False)
    return func


UNARY = ["neg", "rsqrt", "exp", "tanh", "sigmoid", "silu", "relu", "abs", "gelu", "sqrt", "sin", "cos", "log"]


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", UNARY)
@given(data=st.data())
def test_unary(name: str, data: Any) -> None:
    assert_as_torch_says(getattr(aten, name).default, data.draw(tensors(dtype=FLOATS)))


@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("name", ["mul", "add", "sub", "div"])
@given(first=tensors(), second=tensors())
def test_binary_with_any_two_tensors(name: str, first: torch.Tensor, second: torch.Tensor) -> None:
    func = _defined(name, first, second)
    assert_as_torch_says(func, first, second)


@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("name", ["mul", "add", "sub", "div"])
@given(data=st.data())
def test_binary_where_the_second_broadcasts(name: str, data: Any) -> None:
    first = data.draw(tensors())
    ends = list(first.shape[data.draw(st.integers(0, first.dim())) :])
    shape = [1 if data.draw(st.booleans()) else size for size in ends]
    second = data.draw(tensors(shape=shape))
    func = _defined(name, first, second)
    assert_as_torch_says(func, first, second)
    assert_as_torch_says(func, second, first)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=DTYPES)
def test_updates_in_place(data: Any, dtype: torch.dtype) -> None:
    """The target itself, of the layout that it had; and nothing that torch would refuse is let through."""
    target = data.draw(tensors(dtype=dtype))
    other = data.draw(st.one_of(tensors(shape=target.shape, dtype=dtype), tensors()))
    third = data.draw(tensors(shape=target.shape, dtype=dtype))
    calls = [(getattr(aten, f"{name}_").Tensor, (target, other), {}) for name in ("mul", "add", "sub", "div")]
    calls += [(aten.mul_.Tensor, (target, 0.9), {}), (aten.add_.Tensor, (target, other), {"alpha": 2})]
    calls += [(aten.lerp_.Scalar, (target, other, 0.1), {})]
    calls += [(getattr(aten, name).default, (target, other, third), {"value": 1}) for name in ("addcmul_", "addcdiv_")]
    for func, args, kwargs in calls:
        before = target.shape, target.stride(), target.dtype
        found = shape_rules.rule_for(func)(args, kwargs)
        assert found is None or found is target
        if found is not None:
            func(*args, **kwargs)  # torch refuses nothing that the rule takes
        assert (target.shape, target.stride(), target.dtype) == before


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=FLOATS, affine=st.booleans())
def test_group_norm(data: Any, dtype: torch.dtype, affine: bool) -> None:
    samples, groups, each, side = (data.draw(st.integers(1, 4)) for _ in range(4))
    channels = groups * each
    tensor = data.draw(tensors([samples, channels, side, side], dtype))
    weight = torch.empty(channels, dtype=dtype, device="meta") if affine else None
    func = aten.native_group_norm.default
    assert_as_torch_says(func, tensor, weight, weight, samples, channels, side * side, groups, 1e-5)


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ["tanh_backward", "sigmoid_backward", "silu_backward", "gelu_backward"])
@given(data=st.data())
def test_backward_of_activations(name: str, data: Any) -> None:
    gradient = data.draw(tensors(dtype=FLOATS))
    saved = data.draw(tensors(shape=gradient.shape, dtype=gradient.dtype))
    assert_as_torch_says(getattr(aten, name).default, gradient, saved)
    if name == "gelu_backward":
        assert_as_torch_says(aten.threshold_backward.default, gradient, saved, 0)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), dtype=FLOATS)
def test_matrix_products(data: Any, dtype: torch.dtype) -> None:
    rows, inner, columns = (data.draw(st.integers(1, 5)) for _ in range(3))
    left, right = data.draw(tensors([rows, inner], dtype)), data.draw(tensors([inner, columns], dtype))
    assert_as_torch_says(aten.mm.default, left, right)
    bias = data.draw(tensors(data.draw(st.sampled_from([[columns], [1], [rows, columns], [1, columns]])), dtype))
    assert_as_torch_says(aten.addmm.default, bias, left, right)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_dropout_softmax_and_zeros(data: Any) -> None:
    tensor = data.draw(tensors(shape=st.lists(st.integers(1, 4), min_size=2, max_size=4), dtype=FLOATS))
    assert_as_torch_says(aten.native_dropout.default, tensor, 0.3, True)
    mask = data.draw(tensors(shape=tensor.shape, dtype=torch.bool))
    assert_as_torch_says(aten.native_dropout_backward.default, tensor, mask, 1.4)
    for func in (aten._softmax.default, aten._log_softmax.default):
        assert_as_torch_says(func, tensor, -1, False)
        if tensor.dtype == torch.float16:
            assert_as_torch_says(func, tensor, -1, True)
    for func in (aten.zeros_like.default, aten.empty_like.default):
        assert_as_torch_says(func, tensor)
        assert_as_torch_says(func, tensor, memory_format=torch.preserve_format)
        assert_as_torch_says(func, tensor, dtype=torch.float64)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_sums(data: Any) -> None:
    tensor = data.draw(tensors())
    assert_as_torch_says(aten.sum.default, tensor)
    assert_as_torch_says(aten.sum.default, tensor, dtype=torch.float64)
    rank = tensor.dim()
    dims = data.draw(st.lists(st.integers(-rank, max(rank - 1, 0)), max_size=rank, unique_by=lambda dim: dim % rank))
    for keep in (False, True):
        assert_as_torch_says(aten.sum.dim_IntList, tensor, dims, keep)
    assert_as_torch_says(aten.sum.dim_IntList, tensor, None)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_means(data: Any) -> None:
    tensor = data.draw(tensors(dtype=FLOATS))
    assert_as_torch_says(aten.mean.default, tensor)
    rank = tensor.dim()
    dims = data.draw(st.lists(st.integers(-rank, max(rank - 1, 0)), max_size=rank, unique_by=lambda dim: dim % rank))
    for keep in (False, True):
        assert_as_torch_says(aten.mean.dim, tensor, dims, keep)
    assert_as_torch_says(aten.mean.dim, tensor, dims, False, dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_copies(data: Any) -> None:
    tensor = data.draw(tensors())
    for func in (aten.clone.default, aten._to_copy.default, aten.zeros_like.default):
        assert_as_torch_says(func, tensor)
        for form in (torch.preserve_format, torch.contiguous_format):
            assert_as_torch_says(func, tensor, memory_format=form)
    assert_as_torch_says(aten._to_copy.default, tensor, dtype=torch.bfloat16)
    named = {"dtype": torch.float32, "layout": torch.strided, "device": torch.device("meta")}
    assert_as_torch_says(aten._to_copy.default, tensor, **named)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dtype=DTYPES, count=st.integers(1, 3))
def test_joined_tensors(data: Any, dtype: torch.dtype, count: int) -> None:
    shape = data.draw(SHAPES)
    alike = [data.draw(tensors(shape=shape, dtype=dtype)) for _number in range(count)]
    for dim in range(-len(shape) - 1, len(shape) + 1):
        assert_as_torch_says(aten.stack.default, alike, dim)
    if shape:
        dim = data.draw(st.integers(-len(shape), len(shape) - 1))
        sizes = [[extent + (at == dim % len(shape)) * number for at, extent in enumerate(shape)] for number in range(2)]
        others = [data.draw(tensors(shape=size, dtype=dtype)) for size in sizes]
        assert_as_torch_says(aten.cat.default, others, dim)
        assert_as_torch_says(aten.cat.default, [*alike, *others], dim)
