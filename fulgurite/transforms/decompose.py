"""Decompose one op into smaller ops, one level at a time.

In: a node of a functional graph. Out: a graph module of the decomposed ops on the same arguments, or None
if there is no decomposition. It uses torch's decomposition table and those of our custom operators.
`inline_decomposition` replaces the op by the decomposed ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
import torch._decomp
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max

from fulgurite.op import get_decomposition
from fulgurite.trace.cost import iter_tensors
from fulgurite.trace.metadata import find_fake_mode, use_fake_mode
from fulgurite.trace.node_meta import copy_source_and_groups, fake_value, set_fake_value
from fulgurite.transforms import isin, nll_loss, smooth_l1_loss, vector_norm
from fulgurite.transforms.traced_sizes import TracedSizes

aten = torch.ops.aten
NEAREST_UPSAMPLE_OPS = (
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
)
SMOOTH_UPSAMPLE_OPS = (
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
)
# torch's decompositions of these don't match eager. Eager first truncates the ends of a linspace for
# integers and rounds them for bfloat16; it interpolates bytes with fixed-point numbers, and a scale
# factor that does not change the size is ignored; ldexp does not compute a power of two, which may
# overflow.
INEXACT_DECOMPOSITIONS = (
    aten.ldexp,
    aten.linspace,
    aten.logspace,
    aten.multilabel_margin_loss_forward,  # counts the places after the first -1
    aten.max_unpool2d,  # an index out of range may write to the next channel
    aten.max_unpool3d,
    aten.nextafter,  # computes in float32, where the steps of bfloat16 are lost
    aten.binary_cross_entropy,  # takes inputs outside of 0 to 1
    aten.grid_sampler_2d,  # multiplies what is outside by 0, which is NaN for infinity
    aten.index_add,  # takes sources that broadcast, and other dtypes
    aten.index_copy,
    aten.select_scatter,
    aten.slice_scatter,
    aten.diagonal_scatter,
    *NEAREST_UPSAMPLE_OPS,
    *SMOOTH_UPSAMPLE_OPS,
)


@lru_cache(maxsize=1)
def decomposition_table() -> dict[Any, Any]:
    """torch's table of decompositions, without those that change results, and ours."""
    table = torch._decomp.decomposition_table
    inexact = {
        getattr(packet, name) for packet in INEXACT_DECOMPOSITIONS for name in packet.overloads()
    }
    exact = {op: function for op, function in table.items() if op not in inexact}
    modules = (isin, nll_loss, smooth_l1_loss, vector_norm)
    own = {op: rule for module in modules for op, rule in module.DECOMPOSITIONS.items()}
    return exact | own


def decompose(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The decomposed ops of `node`, as a graph whose inputs are the node's `all_input_nodes`."""
    function = decomposition_table().get(node.target)
    function = get_decomposition(node.target) if function is None else _as_partial(function)
    return None if function is None else trace_call(module, node, function)


def _as_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition of torch that raises NotImplementedError for arguments that it does not take.

    torch's decompositions take fewer dtypes and argument forms than its kernels, and raise the error
    of whichever check fails first.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            raise
        except (RuntimeError, ValueError, TypeError, AssertionError) as refusal:
            raise NotImplementedError(f"{function.__name__}: {refusal}") from refusal

    return call


def trace_call(
    module: fx.GraphModule, node: fx.Node, function: Callable[..., Any]
) -> fx.GraphModule | None:
    """The ops of `function` on the arguments of `node`; None if it returns NotImplemented for them."""
    sources = node.all_input_nodes
    values = [fake_value(source) for source in sources]
    if any(value is None for value in values):
        return None

    def run(*inputs: Any) -> Any:
        value_of = dict(zip(sources, inputs, strict=True))
        args = _substitute_nodes(node.args, value_of)
        kwargs = {key: _substitute_nodes(value, value_of) for key, value in node.kwargs.items()}
        result = function(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError(f"no decomposition of {node.target} for these arguments")
        if not _is_view_op(node.target):
            storages = {x.untyped_storage()._cdata for x in iter_tensors(inputs)}
            result = pytree.tree_map_only(
                torch.Tensor, lambda x: _copy_if_shared(x, storages), result
            )
        if isinstance(result, tuple):  # not a named tuple
            pairs = zip(result, fake_value(node), strict=False)
            return tuple(_with_layout_of(item, expected, inputs) for item, expected in pairs)
        return _with_layout_of(result, fake_value(node), inputs)

    try:
        # make_fx has global state, and backward runs on its own thread
        with compile_lock, use_fake_mode(find_fake_mode(module)):
            traced = make_fx(run, tracing_mode="real")(*values)
    except (NotImplementedError, GuardOnDataDependentSymNode):
        return None  # not for these arguments, or it depends on data
    is_unusable = any(n.target is node.target or _reads_data(n) for n in traced.graph.nodes)
    return None if is_unusable else traced


def _is_view_op(target: Any) -> bool:
    """Whether results may share memory with arguments, by the op's schema."""
    return any(result.alias_info is not None for result in target._schema.returns)


def _copy_if_shared(result: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """A result that is a view of an argument, as memory of its own, which the op returns."""
    is_shared = result.untyped_storage()._cdata in storages
    return aten.clone(result) if is_shared else result


def _with_layout_of(result: Any, expected: Any, inputs: Sequence[Any]) -> Any:
    """The result of a decomposition, copied if its strides are not those of the op's own result."""
    if not (isinstance(result, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return result
    if result.dtype != expected.dtype or str(result.shape) != str(expected.shape):
        raise NotImplementedError(
            f"the decomposition gives {result.dtype} {result.shape}, the op {expected.shape}"
        )
    if expected.layout != torch.strided or _layout(result) == _layout(expected):
        return result
    sizes = TracedSizes([*inputs, result])
    target = aten.empty_strided(
        [sizes.find(size) for size in expected.shape],
        [sizes.find(stride) for stride in expected.stride()],
        dtype=expected.dtype,
        device=expected.device,
    )
    return aten.copy(target, result)


def _layout(tensor: torch.Tensor) -> list[str]:
    """Sizes and strides as text, so that symbols are compared without guards; any if empty."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    texts = [(str(size), _stride_text(stride)) for size, stride in pairs]
    if any(size == "0" for size, _ in texts):
        return []
    return [size if size == "1" else f"{size}:{stride}" for size, stride in texts]


def _stride_text(stride: int | torch.SymInt) -> str:
    """`Max(1, n)` as n: contiguous strides count an empty dimension as 1, and then there is no element."""
    if isinstance(stride, int):
        return str(stride)
    return str(stride.node.expr.replace(Max, lambda *values: _without_one(values)))


def _without_one(values: tuple[sympy.Expr, ...]) -> sympy.Expr:
    others = [value for value in values if value != 1]
    return others[0] if len(others) == 1 else Max(*values)


def _reads_data(node: fx.Node) -> bool:
    """Whether the node turns tensor data into a size or a number."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.data_dependent_output in tags:
        return True
    tensors = iter_tensors(
        fake_value(node)
    )  # an index has this tag, and fixed sizes without a mask
    return torch.Tag.dynamic_output_shape in tags and any(map(free_unbacked_symbols, tensors))


def _substitute_nodes(value: Any, value_of: dict[fx.Node, Any]) -> Any:
    """An argument with values in place of nodes. Lists are copied: a decomposition may change them."""
    if isinstance(value, fx.Node):
        return value_of[value]
    if isinstance(value, (list, tuple)):
        items = [_substitute_nodes(item, value_of) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def inline_decomposition(
    node: fx.Node, decomposed: fx.GraphModule
) -> tuple[list[fx.Node], list[Any]]:
    """Replace `node` by its decomposed ops. Returns the new nodes and the nodes of its results."""
    graph = node.graph
    result: Any = None
    value_of: dict[fx.Node, Any] = dict(
        zip((n for n in decomposed.graph.nodes if n.op == "placeholder"), node.all_input_nodes)
    )
    new_nodes: list[fx.Node] = []
    with graph.inserting_before(node):
        for op in decomposed.graph.nodes:
            if op.op == "placeholder":
                continue
            if op.op == "output":
                result = fx.node.map_arg(op.args[0], lambda n: value_of[n])
                _replace_uses(node, result)
                break
            copy = graph.node_copy(op, lambda n: value_of[n])
            copy_source_and_groups(node, copy)
            set_fake_value(copy, fake_value(op))
            value_of[op] = copy
            new_nodes.append(copy)
    return new_nodes, pytree.tree_leaves(result)


def _replace_uses(node: fx.Node, result: Any) -> None:
    """Let the users of `node`, or of its items, use `result`; then erase `node`."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        items, _ = pytree.tree_flatten(result)
        for user in list(node.users):
            position = user.args[1]
            assert isinstance(position, int), f"{node.name}: getitem with {position!r}"
            user.replace_all_uses_with(items[position])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
