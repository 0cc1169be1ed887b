"""Attributes and methods of tensors that TorchDynamo captures as calls on FakeTensors, which fail.

In: TorchDynamo's variable of a tensor. Out: the same, with

- `x.nbytes` as a product: a FakeTensor has none if its sizes are symbols;
- `x.__array__()` and `x.__dlpack__()` as graph breaks: they hand out memory.
"""

from __future__ import annotations

import operator
from typing import Any

from torch._dynamo import exc
from torch._dynamo.variables import BuiltinVariable
from torch._dynamo.variables.tensor import TensorVariable

EXPORTS = ("__array__", "__dlpack__")


def install() -> None:
    """Add to TorchDynamo's variable what it lacks."""
    variable: Any = TensorVariable
    variable.method_attr_nbytes = _count_bytes
    for name in EXPORTS:
        setattr(variable, f"method_{name}", _break_graph)


def _count_bytes(self: Any, tx: Any) -> Any:
    factors = [self.call_method(tx, name, [], {}) for name in ("numel", "element_size")]
    return BuiltinVariable(operator.mul).call_function(tx, factors, {})


def _break_graph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> None:
    exc.unimplemented(
        gb_type="Memory of a tensor outside of torch",
        context=str(self),
        explanation="a captured tensor has no memory to hand out",
        hints=[],
    )
