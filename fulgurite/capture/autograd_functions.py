"""`torch.autograd.Function` in captured programs.

In: TorchDynamo's tracing of `Function.apply`. Out: the same, corrected.

TorchDynamo traces `backward` with a tensor for each output. After `ctx.set_materialize_grads(False)`, eager
mode passes None for outputs without a gradient, and `backward` may do something else then. So a function
with several differentiable outputs that says so is a graph break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo import exc
from torch._dynamo.variables import higher_order_ops


def install() -> None:
    """Correct TorchDynamo's tracing."""
    variable = higher_order_ops.AutogradFunctionApplyVariable
    trace = getattr(variable, "trace_forward_graph", None)  # older versions break in any case
    if trace is not None:
        variable.trace_forward_graph = _break_at_missing_gradients(trace)


def _break_at_missing_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def trace_forward_graph(self: Any, tx: Any, ctx: Any, *args: Any) -> Any:
        result = original(self, tx, ctx, *args)
        flag = tx.output.side_effects.store_attr_mutations.get(ctx, {}).get("materialize_grads")
        materializes = flag is None or (flag.is_python_constant() and flag.as_python_constant())
        if not materializes and _count_differentiable(result[1], ctx) > 1:
            exc.unimplemented(
                gb_type="autograd.Function whose backward may get None",
                context="ctx.set_materialize_grads",
                explanation="after `ctx.set_materialize_grads(False)`, backward gets None for outputs "
                "without a gradient. TorchDynamo traces it with tensors only",
                hints=[],
            )
        return result

    return trace_forward_graph


def _count_differentiable(outputs: Any, ctx: Any) -> int:
    """The outputs that can have a gradient."""
    if outputs.is_tensor():
        return 1
    excluded = set(ctx.non_differentiable or ())
    tensors = [x for x in getattr(outputs, "items", ()) if x.is_tensor()]
    return sum(x.as_proxy() not in excluded for x in tensors)
