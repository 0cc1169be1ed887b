"""Compile a function, print its final trace, edit the trace, and run the edited one.

python examples/01_read_a_trace.py
"""

import torch
import torch.nn.functional as F

import fulgurite


@fulgurite.compile(autotune=False)  # the order of executors alone decides who runs what
def gated(x, gate, up):
    return F.silu(x @ gate) * (x @ up)


x, gate, up = torch.randn(4, 8), torch.randn(8, 16), torch.randn(8, 16)
y = gated(x, gate, up)
torch.testing.assert_close(y, F.silu(x @ gate) * (x @ up))

# The final trace is the program that runs. `history` has every stage before it.
print(gated.last_trace())
print("stages:", ", ".join(trace.name for trace in gated.history))

# The text is Python: edit it, and run it in place of the final trace.
edited = str(gated.last_trace()).replace("aten.silu.default", "aten.relu.default")
gated.replace_trace(edited)
torch.testing.assert_close(gated(x, gate, up), torch.relu(x @ gate) * (x @ up))
print("the edited trace ran")
