"""Typed access to `fx.Node.meta`: the one place that knows its keys.

In: a node of a captured, functional or final graph. Out: what capture, transforms and executors recorded
on it. No other module of this package reads or writes `node.meta[...]` by key.

    key                  holds
    val                  FakeTensor, symbolic number or tuple of them: what the node evaluates to
    offset_shift         elements between where a view starts and the storage offset of its value
    executor             name of the executor that claimed the node
    aten_op              ATen op of a node whose target the torch executor replaced
    side_effect          an instrumentation call: it stays in place and is never merged or dropped
    comment              text for the node's line in the printed trace
    frozen_input         an input that is a parameter or buffer of a module
    donated              a region's input whose buffer the region may overwrite
    saved_for_backward   a backward input that only this backward keeps alive
    fusion_group         name shared by nodes that form a region of their own
    fusion_schedule      schedule of a fused GEMM, for its lowering
    composite            the composite op that this node was decomposed from
    inner_executor       executor of a node inside a CUDA graph
    cudagraph_output     how a CUDA graph returns the node's value to its caller

The keys `val`, `partitioner_tag`, `recompute`, `ac_graph_id`, `stack_trace`, `nn_module_stack`,
`example_value`, `grapharg`, `tensor_dict`, `desc` and `from_node` are torch's own.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

# where a node comes from in the user's program, and on which side of autograd
_PROVENANCE = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "partitioner_tag",
)


# ---- values ----------------------------------------------------------------------------------------


def fake_value(node: fx.Node) -> Any:
    """FakeTensor, symbolic number or tuple that stands for the node's value; None if unknown."""
    return node.meta.get("val")


def has_fake_value(node: fx.Node) -> bool:
    """Whether metadata is recorded. A recorded value may be None: the node returns nothing."""
    return "val" in node.meta


def set_fake_value(node: fx.Node, value: Any) -> None:
    node.meta["val"] = value


def storage_offset(node: fx.Node) -> Any:
    """Where a tensor starts in its storage. In an inlined sub-graph, its value alone does not tell."""
    return fake_value(node).storage_offset() + offset_shift(node)


def offset_shift(node: fx.Node) -> Any:
    """Elements between where a view starts and the storage offset of its value."""
    return node.meta.get("offset_shift", 0)


def set_offset_shift(node: fx.Node, shift: Any) -> None:
    node.meta["offset_shift"] = shift


def clear_fake_value(node: fx.Node) -> None:
    """Forget the value, so that `fill_metadata` computes it."""
    node.meta.pop("val", None)


def example_value(node: fx.Node) -> Any:
    """What TorchDynamo recorded as the value of a node of its graph; None if nothing."""
    return node.meta.get("example_value")


def set_example_value(node: fx.Node, value: Any) -> None:
    node.meta["example_value"] = value


def adopt_example_value(node: fx.Node) -> None:
    """Record TorchDynamo's value, if there is one, under `val`, where all our graphs keep values."""
    if "example_value" in node.meta:
        node.meta["val"] = node.meta["example_value"]


def captured_value(node: fx.Node) -> Any:
    """The value of a node of any graph: `val`, or TorchDynamo's own record before `val` is set."""
    return node.meta.get("val", node.meta.get("example_value"))


# ---- executors -------------------------------------------------------------------------------------


def executor_of(node: fx.Node) -> str:
    """Name of the executor that claimed the node; empty if none has."""
    return str(node.meta.get("executor", ""))


def is_claimed(node: fx.Node) -> bool:
    return "executor" in node.meta


def set_executor(node: fx.Node, name: str) -> None:
    node.meta["executor"] = name


def aten_op(node: fx.Node) -> Any:
    """The node's ATen op, also where the torch executor replaced its target by a faster function."""
    return node.meta.get("aten_op", node.target)


def set_aten_op(node: fx.Node, op: Any) -> None:
    node.meta["aten_op"] = op


def has_side_effect(node: fx.Node) -> bool:
    """Whether the node is an instrumentation call, which must run where it stands."""
    return bool(node.meta.get("side_effect"))


def mark_side_effect(node: fx.Node) -> None:
    node.meta["side_effect"] = True


def comment_of(node: fx.Node) -> str:
    """Extra text for the node's line in the printed trace."""
    return str(node.meta.get("comment", ""))


def set_comment(node: fx.Node, text: str) -> None:
    node.meta["comment"] = text


# ---- regions ---------------------------------------------------------------------------------------


def fusion_group(node: fx.Node) -> str | None:
    """Nodes with the same group form one region of their own; None: fused by the general rules."""
    return node.meta.get("fusion_group")


def set_fusion_group(node: fx.Node, name: str) -> None:
    node.meta["fusion_group"] = name


def fusion_schedule(node: fx.Node) -> Any:
    """The schedule of the fused GEMM that this node is the first of; None: it has none."""
    return node.meta.get("fusion_schedule")


def set_fusion_schedule(node: fx.Node, schedule: Any) -> None:
    node.meta["fusion_schedule"] = schedule


def is_donated(node: fx.Node) -> bool:
    """Whether a region may overwrite the buffer of this input: nobody reads it afterwards."""
    return bool(node.meta.get("donated"))


def mark_donated(node: fx.Node) -> None:
    node.meta["donated"] = True


def composite_of(node: fx.Node) -> Any:
    """The composite op that the node was decomposed from; None: the node is an op of the program."""
    return node.meta.get("composite")


def set_composite(node: fx.Node, composite: Any) -> None:
    node.meta["composite"] = composite


def clear_composite(node: fx.Node) -> None:
    node.meta.pop("composite", None)


# ---- CUDA graphs -----------------------------------------------------------------------------------


def inner_executor(node: fx.Node) -> str | None:
    """Executor that runs the node inside a CUDA graph; None: the node is in none."""
    return node.meta.get("inner_executor")


def enter_cudagraph(node: fx.Node, executor: str) -> None:
    """Hand the node over to a CUDA-graph executor; its own executor is remembered."""
    node.meta["inner_executor"] = executor_of(node) or "torch"
    node.meta["executor"] = executor


def leave_cudagraph(node: fx.Node) -> None:
    """Give a node inside a CUDA graph its own executor back."""
    if "inner_executor" in node.meta:
        node.meta["executor"] = node.meta.pop("inner_executor")


def cudagraph_output(node: fx.Node) -> Any:
    """How a CUDA graph hands the node's value to its caller."""
    return node.meta["cudagraph_output"]


def set_cudagraph_output(node: fx.Node, policy: Any) -> None:
    node.meta["cudagraph_output"] = policy


# ---- forward and backward --------------------------------------------------------------------------


def is_in_backward(node: fx.Node) -> bool:
    """Whether autograd placed a node of the joint graph in backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def mark_in_backward(node: fx.Node) -> None:
    node.meta["partitioner_tag"] = "is_backward"


def mark_must_recompute(node: fx.Node, *, keep_checkpoint: bool = False) -> None:
    """Let backward recompute the node, whatever saving it would cost.

    keep_checkpoint   a node inside activation checkpointing stays in its own checkpoint
    """
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    if not keep_checkpoint or "ac_graph_id" not in node.meta:
        node.meta["ac_graph_id"] = 0


def mark_must_save(node: fx.Node) -> None:
    """Let forward save the node if backward reads it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta.setdefault("ac_graph_id", 0)


def is_saved_for_backward(node: fx.Node) -> bool:
    """Whether an input of backward is a tensor that forward saved for it and gave to nobody else."""
    return bool(node.meta.get("saved_for_backward"))


def set_saved_for_backward(node: fx.Node, saved: bool) -> None:
    node.meta["saved_for_backward"] = saved


# ---- where inputs come from ------------------------------------------------------------------------


def graph_argument(node: fx.Node) -> Any:
    """TorchDynamo's record of the argument that an input of its graph stands for."""
    return node.meta.get("grapharg")


def is_static_input(node: fx.Node) -> bool:
    """Whether an input of TorchDynamo's graph is a parameter or buffer: it keeps its address."""
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def is_frozen_input(node: fx.Node) -> bool:
    """Whether an input of a functional graph is a parameter or buffer of a module."""
    return bool(node.meta.get("frozen_input"))


def mark_frozen_input(node: fx.Node) -> None:
    node.meta["frozen_input"] = True


def drop_graph_argument(node: fx.Node) -> None:
    node.meta.pop("grapharg", None)


def input_descriptor(node: fx.Node) -> Any:
    """AOTAutograd's description of what an input of its graph is."""
    return node.meta.get("desc")


def captured_op_name(node: fx.Node) -> str:
    """Name of the captured node that this one was traced from; empty if unknown."""
    chain = node.meta.get("from_node")
    return str(chain[-1].name) if chain else ""


# ---- source ----------------------------------------------------------------------------------------


def stack_trace(node: fx.Node) -> str:
    """The user's Python stack when capture met the node."""
    return node.meta.get("stack_trace") or ""


def module_stack(node: fx.Node) -> dict[str, Any]:
    """The nn.Modules that capture was in when it met the node, outermost first."""
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def module_calls(node: fx.Node) -> list[tuple[str, str, str]]:
    """The module calls that a captured node runs in, outermost first: call key, path and class name.

    A module that is called again gets another key.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return [
        (str(key), str(path), getattr(kind, "__name__", str(kind).rpartition(".")[2]))
        for key, (path, kind) in stack.items()
    ]


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    """Give `target` all metadata of `source`."""
    target.meta = dict(source.meta)


def snapshot_meta(node: fx.Node) -> dict[str, Any]:
    """All metadata but the executor, for a node that is about to be erased."""
    return {key: value for key, value in node.meta.items() if key != "executor"}


def restore_meta(node: fx.Node, snapshot: dict[str, Any]) -> None:
    node.meta = dict(snapshot)


def copy_location(source: fx.Node, target: fx.Node) -> None:
    """Add to `target` the user's line and module of `source`."""
    for key in ("stack_trace", "nn_module_stack"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def copy_source(source: fx.Node, target: fx.Node) -> None:
    """Give `target` where `source` comes from, and nothing else."""
    target.meta = {key: source.meta[key] for key in _PROVENANCE if key in source.meta}


def copy_source_and_groups(source: fx.Node, target: fx.Node) -> None:
    """As `copy_source`, with the fusion group and composite op: for an op that replaces `source`."""
    copy_source(source, target)
    for key in ("composite", "fusion_group"):
        if key in source.meta:
            target.meta[key] = source.meta[key]
