"""Predicts the time of the kernels of loop nests, for choices between forms of one region.

In: the loop nests of a region. Out: seconds, by the roofline model. Values that a nest computes at
several points are counted at each, unlike in the description of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir import cost
from fulgurite.fuser.ir.expression import BoundsCheck, Expression, Load, Masked, Operation
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.ir.primitives import PRIMITIVES
from fulgurite.fuser.ir.statement import Tensor

STRIDED_STORE_FACTOR = 2  # of the bytes of a store that is not contiguous: sectors are half full
GATHERED_FACTOR_CPU = 8  # of operations on gathered values: C++ kernels compute them one by one


def predict_nests(nests: Sequence[LoopNest], device: DeviceInfo, is_cpu: bool) -> float:
    """Returns the predicted time of all kernels."""
    return sum(
        cost.predict_seconds(device, _count_bytes(nest), _count_flops(nest, is_cpu))
        for nest in nests
    )


def _count_bytes(nest: LoopNest) -> int:
    """Returns the bytes that a kernel loads, at most its tensors, and those that it stores."""
    loads: dict[str, set[Index]] = {}
    for tensor, index, is_store in nest.accesses():
        if not is_store:
            loads.setdefault(tensor.name, set()).add(index)
    total = sum(_stored_bytes(store.tensor) for store in nest.stores)
    for name, indices in loads.items():
        tensor = nest.memory[name]
        points = sum(_count_points(index.axes()) for index in indices)
        total += min(cost.tensor_bytes(tensor), points * tensor.itemsize)
    return total


def _stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a store, more for one that fills sectors only in part."""
    strides = [
        abs(cost.size_hint(stride))
        for size, stride in zip(tensor.sizes, tensor.strides, strict=True)
        if size != 1
    ]
    is_strided = min(strides, default=1) > 1
    return cost.tensor_bytes(tensor) * (STRIDED_STORE_FACTOR if is_strided else 1)


def _count_points(axes: set[Axis]) -> int:
    return cost.count_elements(tuple(axis.size for axis in axes))


def _count_flops(nest: LoopNest, is_cpu: bool) -> int:
    """Returns the operations of a kernel, each distinct one of a point once."""
    counter = _OperationCounter(is_cpu)
    axes_of: dict[str, set[Axis]] = {}
    total = 0.0

    def add(expression: Expression) -> set[Axis]:
        nonlocal total
        axes = expression.axes() & {*nest.axes}
        axes = axes.union(*(axes_of.get(x.name, set()) for x in nest.references(expression)))
        total += counter.count(expression) * _count_points(axes)
        return axes

    for local in nest.locals.values():
        axes = add(local.expression)
        if local.role == "row_step":
            axes = {*nest.grid, *local.axes}
            total += local.flops * _count_points(axes | {*local.reduced_axes})
        elif local.reduction is not None and local.role != "scan":
            reduced = {*nest.body} if local.role == "row_reduction" else {*nest.grid}
            axes = set() if local.role == "full_reduction" else axes - reduced
        axes_of[local.name] = axes
    for store in nest.stores:
        for expression in store.expressions:
            add(expression)
    return int(total)


class _OperationCounter:
    """Counts the operations of expressions, equal ones once.

    C++ kernels split rows where a mask changes: they compute each side at its own points only.
    """

    def __init__(self, is_cpu: bool) -> None:
        self.is_cpu = is_cpu
        self.ids: dict[object, int] = {}
        self.shares: dict[int, float] = {}  # of the points at which an operation is computed
        self.gathered: set[int] = set()  # expressions that depend on gathered values
        self.total = 0.0

    def count(self, expression: Expression) -> float:
        """Returns the operations per point that no expression had before."""
        before = self.total
        self._visit(expression, 1.0)
        return self.total - before

    def _visit(self, expression: Expression, share: float) -> int:
        """Adds an expression. Returns a number that equal expressions have."""
        children = expression.children()
        if not children:
            return self.ids.setdefault(expression, len(self.ids))
        shares = [share] * len(children)
        if isinstance(expression, Masked) and self.is_cpu and len(children) == 2:
            inside = _estimate_share(expression.bounds)
            shares[:2] = share * inside, share * (1 - inside)
        visited = tuple(map(self._visit, children, shares))
        name: object
        if isinstance(expression, Operation):  # not its text, which has all that is below it
            name = expression.name, expression.dtype
        else:
            name = str(expression)
        key = self.ids.setdefault((name, visited), len(self.ids))
        if isinstance(expression, Load) or self.gathered.intersection(visited):
            self.gathered.add(key)
        if isinstance(expression, Operation):
            known = self.shares.get(key, 0.0)
            self.shares[key] = min(known + share, 1.0)
            factor = GATHERED_FACTOR_CPU if self.is_cpu and key in self.gathered else 1
            flops = factor * PRIMITIVES[expression.name].flops
            self.total += flops * (self.shares[key] - known)
        return key


def _estimate_share(bounds: tuple[BoundsCheck, ...]) -> float:
    """Returns the share of points at which bounds checks hold."""
    share = 1.0
    for bound in bounds:
        points = _count_points(bound.index.axes())
        share *= min(cost.size_hint(bound.size) / max(points, 1), 1.0)
    return share
