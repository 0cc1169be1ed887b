"""A model captured as one graph, or with its layers as separate graphs if that fails.

In: the model captured whole (graph breaks are errors), and the same model run block by block. Out: a
callable that uses the first until a capture fails, then the second. A failed capture has run nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from fulgurite.capture.outer_graph import is_plain_data
from fulgurite.errors import CaptureError, GraphBreakError, OpError
from fulgurite.logs import LOG
from fulgurite.trace.cost import strides_or_ones

MAX_EQUAL_CAPTURES = 4  # of calls that look the same: the model reads state that changes
Run = Callable[..., Any]


class WholeModel:
    """Runs a model as one graph if it can be captured so.

    whole         the captured model
    make_blocks   makes the model whose layers are separate graphs
    num_graphs    how many graphs were compiled so far
    """

    def __init__(
        self, whole: Run, make_blocks: Callable[[], Run], num_graphs: Callable[[], int]
    ) -> None:
        self.whole = whole
        self.make_blocks = make_blocks
        self.num_graphs = num_graphs
        self.blocks: Run | None = None
        self.reason = ""  # why the layers are separate graphs; empty: they are not
        self.captured: list[Any] = []  # kinds of the calls that were captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reason or _is_inside_ddp() or not _can_capture_arguments(args, kwargs):
            return self.run_blocks(*args, **kwargs)
        known = self.num_graphs()
        try:
            result = self.whole(*args, **kwargs)
        except (GraphBreakError, CaptureError, OpError) as error:
            self.use_blocks(error.what)
        except FailOnRecompileLimitHit:
            self.use_blocks("it was captured too often")
        else:
            if self.num_graphs() != known:
                self.count_capture(args, kwargs)
            return result
        return self.run_blocks(*args, **kwargs)

    def count_capture(self, args: Any, kwargs: Any) -> None:
        """Give up capturing the whole model if equal calls are captured again and again."""
        kind = _call_kind(args, kwargs)
        self.captured.append(kind)
        if self.captured.count(kind) >= MAX_EQUAL_CAPTURES:
            self.use_blocks("the model reads state that changes from call to call")

    def use_blocks(self, reason: str) -> None:
        self.reason = reason
        LOG.info("the layers of the model are separate graphs: %s", reason)

    def run_blocks(self, *args: Any, **kwargs: Any) -> Any:
        if self.blocks is None:
            self.blocks = self.make_blocks()
        return self.blocks(*args, **kwargs)


def _is_inside_ddp() -> bool:
    """Whether DistributedDataParallel calls the model.

    It reduces gradients as each backward graph returns: with one graph per layer, this overlaps.
    """
    return DistributedDataParallel._active_ddp_module is not None


def _can_capture_arguments(args: Any, kwargs: Any) -> bool:
    """Whether the call passes no KV cache or other stateful object, which changes from call to call.

    Calls that record gradients rarely pass one.
    """
    return torch.is_grad_enabled() or is_plain_data((args, kwargs))


def _call_kind(args: Any, kwargs: Any) -> Any:
    """What TorchDynamo's guards see of a call besides the model's own state."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    kinds = [*map(_leaf_kind, leaves)]
    return structure, torch.is_grad_enabled(), torch._C._is_any_autocast_enabled(), kinds


def _leaf_kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = strides_or_ones(value)
        return tuple(value.shape), strides, value.dtype, value.device, value.requires_grad
    return value if isinstance(value, bool | int | float | str | None) else type(value)
