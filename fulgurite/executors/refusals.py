"""Ops that torch's kernel refuses for their dtypes: torch runs them, and raises eager mode's error.

In: an op of a functional trace. Out: whether its kernel refuses the dtypes. FakeTensor rules accept
more of them than kernels do (`gelu` of integers, `argmax` of a mask), and a generated kernel would
compute something. So the CPU kernel is asked: it runs once, on one element, for each combination.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.trace.node_meta import fake_value

# ops that are not elementwise, and take the same arguments for one element as for many
OTHER_OPS = frozenset(
    {"argmax", "argmin", "median", "nanmedian", "var", "std", "var_mean", "std_mean", "_softmax",
     "_log_softmax", "sort", "logcumsumexp", "cumsum", "cumprod", "cummax", "cummin", "rand_like",
     "randn_like", "bernoulli", "normal", "uniform", "complex", "polar", "bucketize", "isin"}
)  # fmt: skip
PLACEMENT = ("device", "layout", "pin_memory")
# CPU kernels of some ops lack these dtypes, and CUDA kernels have them
NARROW_FLOATS = (torch.float16, torch.bfloat16)
_refused: dict[tuple[Any, ...], bool] = {}


def is_refused(node: fx.Node) -> bool:
    """Whether torch's kernel of the op refuses the dtypes of its arguments."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    if torch.Tag.pointwise not in op.tags and op._schema.name.split("::")[1] not in OTHER_OPS:
        return False
    values = [fake_value(source) for source in node.all_input_nodes]
    if op._schema.is_mutable or not all(map(_is_plain, values)):
        return False
    kinds = tuple((value.dtype, value.dim()) for value in values)
    if any(v.device.type != "cpu" and v.dtype in NARROW_FLOATS for v in values):
        return False
    number = {source: f"%{k}" for k, source in enumerate(node.all_input_nodes)}
    key = (op, kinds, repr(fx.node.map_arg((node.args, dict(node.kwargs)), number.__getitem__)))
    if key not in _refused:
        _refused[key] = _try_one_element(node, kinds)
    return _refused[key]


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _try_one_element(node: fx.Node, kinds: tuple[Any, ...]) -> bool:
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    state = torch.random.fork_rng(devices=[]) if is_random else nullcontext()
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False), state:
        try:
            ones = [torch.ones((1,) * rank).to(dtype) for dtype, rank in kinds]
        except NotImplementedError:  # packed numbers, which the fuser refuses by itself
            return False
        one_of = dict(zip(node.all_input_nodes, ones, strict=True))
        args = fx.node.map_arg(node.args, lambda source: one_of[source])
        kwargs = {
            name: fx.node.map_arg(value, lambda source: one_of[source])
            for name, value in node.kwargs.items()
            if name not in PLACEMENT
        }
        try:
            node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError, IndexError):
            return True
    return False
