"""Comparison of compiled results with eager ones.

In: the two results: tensors, numbers, containers. Out: nothing, or an AssertionError that names the
difference. Tolerances are torch.testing's for the dtype. If rounding alone can differ by more, the error
against float64 decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested containers, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def tensor_metadata(tensor: Tensor, strides: bool) -> tuple[Any, ...]:
    """What must be equal besides the values; strides unless they don't matter."""
    known = (tensor.dtype, tuple(tensor.shape), tensor.device, tensor.layout)
    if not strides or tensor.layout is not torch.strided or tensor.numel() == 0:
        return known
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return *known, tuple(stride if size > 1 else -1 for size, stride in pairs)


def assert_same_metadata(compiled: Any, eager: Any, *, strides: bool = True) -> None:
    """Assert equal structure, dtypes, shapes, layouts and, by default, strides."""
    ours, our_tree = pytree.tree_flatten(compiled)
    theirs, their_tree = pytree.tree_flatten(eager)
    assert our_tree == their_tree, f"compiled returns {our_tree}, eager {their_tree}"
    for position, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        assert type(one) is type(two), f"result {position}: {type(one)}, eager {type(two)}"
        if isinstance(one, Tensor):
            ours_is, eager_is = tensor_metadata(one, strides), tensor_metadata(two, strides)
            assert ours_is == eager_is, f"result {position} is {ours_is}, in eager {eager_is}"


def assert_same_values(compiled: Any, eager: Any) -> None:
    """Assert that every tensor and number is equal within the dtype's rounding; NaN equals NaN."""
    ours, theirs = pytree.tree_leaves(compiled), pytree.tree_leaves(eager)
    for position, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(one, (Tensor, int, float, complex)):
            torch.testing.assert_close(
                one,
                two,
                equal_nan=True,
                check_stride=False,
                msg=lambda m: f"result {position}: {m}",
            )
        else:
            assert one == two or one is two, f"result {position}: {one!r}, eager {two!r}"


def assert_error_at_most_twice_eager(
    ours: list[Tensor], eager: list[Tensor], exact: list[Tensor]
) -> None:
    """Assert that the relative error against float64 is at most twice eager's."""
    error, bound = relative_error(ours, exact), 2 * relative_error(eager, exact)
    assert error <= bound, f"error {error:.3g} against float64; twice eager's is {bound:.3g}"


def relative_error(values: list[Tensor], exact: list[Tensor]) -> float:
    """The norm of all differences divided by the norm of all exact values."""
    difference = size = 0.0
    for value, right in zip(values, exact, strict=True):
        value, right = value.detach().to(right.dtype), right.detach()
        error = torch.where(value == right, 0, value - right)  # equal infinities have no error
        difference += float(error.abs().square().nansum())
        size += float(right[right.isfinite()].abs().square().sum())
    return (difference / size) ** 0.5 if size else difference**0.5


def storage_owners(values: list[Tensor]) -> Iterator[int]:
    """For each tensor, the position of the first one in the list with the same storage."""
    owner: dict[int, int] = {}
    for position, value in enumerate(values):
        storage = value.untyped_storage()
        key = storage.data_ptr() if storage.nbytes() else -1 - position
        yield owner.setdefault(key, position)


def clone_inputs(values: list[Any]) -> list[Any]:
    """Copies with the same strides and offsets. Tensors that shared storage still do."""
    copied: dict[int, torch.UntypedStorage] = {}

    def clone(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        fresh = copied.setdefault(storage._cdata, storage.clone())
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(fresh, value.storage_offset(), value.shape, value.stride())

    return [clone(value) for value in values]
