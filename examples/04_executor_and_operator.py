"""A custom operator, and a custom executor.

python examples/04_executor_and_operator.py
"""

import torch
from torch import Tensor

import fulgurite


# An operator: opaque to capture; its schema comes from the hints.
@fulgurite.op("example::clipped_sum")
def clipped_sum(x: Tensor, limits: list[float] | None = None) -> Tensor:
    low, high = limits or [-1.0, 1.0]
    return x.clamp(low, high).sum(-1)


@clipped_sum.fake
def _(x, limits=None):
    return x.new_empty(x.shape[:-1])


@clipped_sum.backward
def _(inputs, output, grad):
    x, limits = inputs
    low, high = limits or [-1.0, 1.0]
    return grad.unsqueeze(-1) * ((x > low) & (x < high)), None


# An executor: claims ops it can run, gets adjacent ones as a region, returns a callable.
class Doubled(fulgurite.Executor):
    """Runs pointwise regions in float64."""

    name = "doubled"

    def claims(self, node):
        return node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)

    def lower(self, region):
        def run(*inputs):
            wide = [i.double() if isinstance(i, Tensor) else i for i in inputs]
            return [out.float() for out in region(*wide)]

        return run


@fulgurite.compile(executors=[Doubled(), "torch"])
def program(x):
    return clipped_sum((x + 1) * x, [-0.5, 0.5])


x = torch.randn(4, 8, requires_grad=True)
y = program(x)
y.sum().backward()
torch.testing.assert_close(y, ((x + 1) * x).clamp(-0.5, 0.5).sum(-1))
print(program.last_trace("forward"))
