"""The cudnn executor: scaled dot-product attention by NVIDIA's cuDNN frontend (package `cudnn`).

In: regions of attention on a GPU, forward or backward, as torch's flash attention ops. Out: calls of cuDNN
graphs, one graph for each set of shapes and strides. It claims nothing where the package is missing.

    compile(f, executors=["cudnn", "fuser", "torch"])

Claimed: float16 and bfloat16, head sizes that are multiples of 8 up to 128, static shapes, no dropout;
causal or full, any strides with a contiguous head dimension, fewer key heads than query heads (GQA).

Never run on a GPU: the package was on none of our machines. Tests check its calls with a faked module.
"""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.executors.base import Executor
from fulgurite.trace.node_meta import fake_value

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention.default
BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE = 128, 8


def has_cudnn() -> bool:
    return importlib.util.find_spec("cudnn") is not None


class CudnnExecutor(Executor):
    name = "cudnn"
    falls_back_if_failed = True

    def claims(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            return self.claims(source)
        if node.target not in (FORWARD, BACKWARD) or not has_cudnn():
            return False
        arguments = bind_arguments(node)
        q, k, v = (fake_value(arguments[name]) for name in ("query", "key", "value"))
        if arguments["dropout_p"] or arguments.get("return_debug_mask"):
            return False
        return q.device.type == "cuda" and can_attend(q, k, v)

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        calls = {
            node: Attention(node)
            for node in region.graph.nodes
            if node.target in (FORWARD, BACKWARD)
        }

        def run(*inputs: Any) -> Sequence[Any]:
            values = dict(zip(region.graph.find_nodes(op="placeholder"), inputs, strict=True))
            for node in region.graph.nodes:
                if node.op == "output":
                    return tuple(fx.node.map_arg(node.args[0], values.__getitem__))
                if node.target is operator.getitem:
                    values[node] = values[node.args[0]][node.args[1]]
                elif node in calls:
                    values[node] = calls[node](values)
            raise AssertionError("a region ends in its output")

        return run


def bind_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    names = [a.name for a in schema]
    return bound | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN has a kernel for these shapes, by its documented limits."""
    sizes = (*q.shape, *k.shape, *v.shape, *q.stride(), *k.stride(), *v.stride())
    if not all(isinstance(size, int) for size in sizes) or q.dtype not in DTYPES:
        return False
    head_size = q.shape[-1]
    fits = head_size % HEAD_SIZE_MULTIPLE == 0 and head_size <= MAX_HEAD_SIZE
    is_grouped = k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    is_dense = all(t.stride(-1) == 1 and t.shape[-1] == head_size for t in (q, k, v))
    return fits and is_grouped and is_dense and q.numel() > 0 and k.numel() > 0


class Attention:
    """One attention call, forward or backward, as a cuDNN graph that is built at its first call."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.arguments = node, bind_arguments(node)
        self.is_backward = node.target is BACKWARD
        query = fake_value(self.arguments["query"])
        self.scale = self.arguments.get("scale") or query.shape[-1] ** -0.5
        self.graph: Any = None
        self.tensors: dict[str, Any] = {}  # of the graph, by name

    def __call__(self, values: dict[fx.Node, Any]) -> Any:
        given = {
            name: values[argument]
            for name, argument in self.arguments.items()
            if isinstance(argument, fx.Node)
        }
        return self.run_backward(given) if self.is_backward else self.run_forward(given)

    def run_forward(self, given: dict[str, Tensor]) -> tuple[Any, ...]:
        q = given["query"]
        batch, heads, length, _ = q.shape
        out = torch.empty_like(q)
        stats = q.new_empty((batch, heads, length, 1), dtype=torch.float32)
        inputs = {"q": q, "k": given["key"], "v": given["value"]}
        self.execute(inputs, {"o": out, "stats": stats})
        # the rest describes ragged batches and dropout, which there are none of
        rest = fake_value(self.node)[2:]
        empty = [torch.empty(r.shape, dtype=r.dtype, device=q.device) if isinstance(r, Tensor)
                 else r for r in rest]  # fmt: skip
        return (out, stats.squeeze(-1), *empty)

    def run_backward(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        q, k, v = given["query"], given["key"], given["value"]
        inputs = {
            "q": q, "k": k, "v": v, "o": given["out"], "do": given["grad_out"],
            "stats": given["logsumexp"].unsqueeze(-1),
        }  # fmt: skip
        outputs = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        self.execute(inputs, outputs)
        return tuple(outputs.values())

    def execute(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        import cudnn

        if self.graph is None:
            self.build(cudnn, inputs, outputs)
        device = inputs["q"].device
        handle = cudnn.create_handle()
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        workspace = torch.empty(self.graph.get_workspace_size(), device=device, dtype=torch.uint8)
        tensors = {self.tensors[name]: tensor for name, tensor in {**inputs, **outputs}.items()}
        self.graph.execute(tensors, workspace, handle=handle)
        cudnn.destroy_handle(handle)

    def build(self, cudnn: Any, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        """Describe the graph with the shapes and strides of these tensors, and plan it."""
        float32 = cudnn.data_type.FLOAT
        self.graph = graph = cudnn.pygraph(
            io_data_type=getattr(cudnn.data_type, DTYPES[inputs["q"].dtype]),
            intermediate_data_type=float32,
            compute_data_type=float32,
        )
        self.tensors = {name: graph.tensor_like(tensor) for name, tensor in inputs.items()}
        options = {"attn_scale": self.scale, "use_causal_mask": self.arguments["is_causal"]}
        t = self.tensors
        if self.is_backward:
            results = graph.sdpa_backward(
                q=t["q"], k=t["k"], v=t["v"], o=t["o"], dO=t["do"], stats=t["stats"], **options
            )
        else:
            results = graph.sdpa(q=t["q"], k=t["k"], v=t["v"], is_inference=False, **options)
        for (name, tensor), result in zip(outputs.items(), results, strict=True):
            result.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride()))
            if tensor.dtype == torch.float32:
                result.set_data_type(float32)
            self.tensors[name] = result
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()


CUDNN = CudnnExecutor()
