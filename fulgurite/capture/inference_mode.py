"""`torch.inference_mode` inside a captured program: recorded as `torch.no_grad`.

In: a captured graph. Out: the same graph, which enters and leaves inference mode nowhere. AOTAutograd
fails on views in inference mode (`y.detach()`), and the thread then stays in it: everything that it
computes later has no gradient. The results of a compiled graph are no inference tensors in any case.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode


def use_no_grad(module: fx.GraphModule) -> None:
    """Replace inference mode by the grad mode that it implies."""
    is_enabled = torch.is_grad_enabled()
    outside: dict[fx.Node, bool] = {}  # the grad mode before each entry
    for node in module.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            is_enabled = bool(node.args[0])
        elif node.target is _enter_inference_mode:
            outside[node] = is_enabled
            is_enabled = not node.args[0]
            node.target, node.args = torch._C._set_grad_enabled, (is_enabled,)
        elif node.target is _exit_inference_mode:
            is_enabled = outside[node.args[0]]
            node.target, node.args = torch._C._set_grad_enabled, (is_enabled,)
    if outside:
        module.recompile()
