"""The accuracy rule of torch's own benchmarks, applied to every tensor of a result.

In: results of one call by eager, by a compiler and by eager in float64. Out: the tensors that fail, by name.

`torch._dynamo.utils.same` decides: a tensor passes if it is close to eager's within the tolerance, or if its
root-mean-square error against float64 is at most 2 (small tensors and 16-bit ones: 3) times that of eager plus a
tenth of the tolerance. Shapes, dtypes and names must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import rmse, same

# the benchmarks of torch use 1e-3 for inference and 1e-2 for training of most models, in any dtype
TOLERANCE = {"inference": 1e-4, "training": 1e-3}
HALF_TOLERANCE = {"inference": 1e-3, "training": 1e-2}
# Relative error of eager's whole result against float64 above which the result is not determined by the program.
# Untrained networks with batch normalization of two values are such: two correct float32 programs differ.
MAX_EAGER_ERROR, HALF_MAX_EAGER_ERROR = 0.01, 0.5
PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Difference:
    """A tensor that fails, with the root-mean-square errors against float64."""

    name: str
    reason: str
    error: float = math.nan
    eager_error: float = math.nan

    def __str__(self) -> str:
        if math.isnan(self.error) and math.isnan(self.eager_error):
            return f"{self.name}: {self.reason}"
        return f"{self.name}: {self.reason} (error {self.error:.1e}, eager {self.eager_error:.1e})"


def flatten(value: Any, name: str = "out") -> dict[str, Tensor]:
    """The tensors inside a result by their path: containers, model outputs, caches."""
    return dict(_walk(value, name, set()))


def _walk(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, PLAIN) or id(value) in seen:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{name}.{key}", seen | {id(value)})
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _walk(item, f"{name}.{index}", seen | {id(value)})
    elif hasattr(value, "__dict__"):
        yield from _walk(vars(value), name, seen | {id(value)})


def find_differences(
    eager: Mapping[str, Tensor],
    compiled: Mapping[str, Tensor],
    exact: Mapping[str, Tensor] | None,
    tolerance: float,
) -> list[Difference]:
    """The tensors of `compiled` that fail the rule. `exact` is float64's result, None if it has none."""
    if names := sorted(set(eager) ^ set(compiled)):
        side = "missing" if names[0] in eager else "not in eager's result"
        return [Difference(names[0], side)]
    found = []
    for name, ours in compiled.items():
        reference = exact.get(name) if exact is not None else None
        difference = _compare(name, eager[name], ours, reference, tolerance)
        if difference is not None:
            found.append(difference)
    return found


def relative_error(result: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The norm of the difference over the norm of `exact`, of all finite tensors as one vector."""
    squared_error = squared_norm = 0.0
    for name, reference in exact.items():
        if not reference.is_floating_point() or name not in result:
            continue
        reference = reference.double()
        if result[name].shape == reference.shape and reference.isfinite().all():
            squared_error += float((result[name].double() - reference).square().sum())
            squared_norm += float(reference.square().sum())
    return math.sqrt(squared_error / squared_norm) if squared_norm else 0.0


def _compare(
    name: str, eager: Tensor, ours: Tensor, exact: Tensor | None, tolerance: float
) -> Difference | None:
    if eager.shape != ours.shape:
        return Difference(name, f"shape {tuple(ours.shape)}, eager {tuple(eager.shape)}")
    if eager.dtype != ours.dtype:
        return Difference(name, f"dtype {ours.dtype}, eager {eager.dtype}")
    usable = exact is not None and exact.shape == eager.shape and exact.is_floating_point()
    reference = exact.double() if usable and exact is not None else None
    if eager.is_complex():
        eager, ours = (
            torch.view_as_real(eager.resolve_conj()),
            torch.view_as_real(ours.resolve_conj()),
        )
        reference = None
    if same(eager, ours, reference, tol=tolerance, equal_nan=True, log_error=_ignore):
        return None
    if reference is None or not eager.is_floating_point():
        return Difference(name, f"max difference {_max_difference(eager, ours):.1e}")
    return Difference(
        name, "inaccurate", rmse(reference, ours).item(), rmse(reference, eager).item()
    )


def _max_difference(eager: Tensor, ours: Tensor) -> float:
    return float((eager.double() - ours.double()).abs().max()) if eager.numel() else 0.0


def _ignore(*message: Any) -> None:
    """`same` logs what the caller reports."""
