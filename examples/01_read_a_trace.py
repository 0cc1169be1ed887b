"""Compile a function, read what it became, change it, and run the changed one.

python examples/01_read_a_trace.py
"""

import torch
import torch.nn.functional as F

import fulgurite


@fulgurite.compile(tune=False)  # the order of the executors decides who runs what, and no clock
def gated(x, gate, up):
    return F.silu(x @ gate) * (x @ up)


x, gate, up = torch.randn(4, 8), torch.randn(8, 16), torch.randn(8, 16)
y = gated(x, gate, up)
torch.testing.assert_close(y, F.silu(x @ gate) * (x @ up))

# The last trace is the program that runs. Every stage before it is kept, too.
print(gated.last_trace())
print("stages:", ", ".join(trace.name for trace in gated.history))

# The text is Python: change it, hand it back, and it runs in the old one's place.
edited = str(gated.last_trace()).replace("aten.silu.default", "aten.relu.default")
gated.replace_trace(edited)
torch.testing.assert_close(gated(x, gate, up), torch.relu(x @ gate) * (x @ up))
print("the edited trace ran")
