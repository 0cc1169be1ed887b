"""A transform is a function Trace → Trace. This one replaces x**2 by x*x, and counts how often.

python examples/03_write_a_transform.py
"""

import torch

import fulgurite

aten = torch.ops.aten


@fulgurite.transform(phase="after_autograd")
def square_by_multiplying(trace):
    def change(graph):
        for node in graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
            base, exponent = node.args
            if exponent == 2:
                node.target, node.args = aten.mul.Tensor, (base, base)

    count = sum(n.target is aten.pow.Tensor_Scalar and n.args[1] == 2 for n in trace.ops)
    return trace.edit(change).with_note(f"squares replaced: {count}")


@fulgurite.compile(transforms=[square_by_multiplying], autotune=False)
def norm(x):
    return x / (x**2).sum(-1, keepdim=True).sqrt()


x = torch.randn(4, 8)
torch.testing.assert_close(norm(x), x / x.norm(dim=-1, keepdim=True))
print(norm.last_trace())
assert "aten.mul.Tensor(x, x)" in str(norm.last_trace())

# Built-in tools are transforms, too: find the op that produced a NaN, profiler ranges, time per op.
from fulgurite.transforms import find_nonfinite  # noqa: E402

careful = fulgurite.compile(lambda x: (x - 1).log().sum(), transforms=[find_nonfinite])
try:
    careful(torch.zeros(3))
except fulgurite.FulguriteError as error:
    print(f"{type(error).__name__}: {error}")

times = fulgurite.TimeOps()
timed = fulgurite.compile(lambda x: (x @ x).softmax(-1), transforms=[times.transform])
timed(torch.randn(256, 256))
print(times)
