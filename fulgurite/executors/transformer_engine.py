"""The transformer_engine executor: linears in FP8 by NVIDIA's TransformerEngine.

In: regions of x @ weight.T (+ bias) on a GPU, where the weight is an input of the graph. Out: calls of
`transformer_engine.pytorch.Linear` under its FP8 autocast, one module for each call, because a module keeps
the scaling state of its recipe. It claims nothing where the package is missing, and is in no default list:

    compile(f, executors=["transformer_engine", "fuser", "torch"])

Claimed: float16, bfloat16 and float32 with K and N multiples of 16; rows are padded to a multiple of 8, as
FP8 GEMMs want them. Products of two activations, and those of backward that are not of a weight, stay with
the next executors. Norms are not claimed: whether TransformerEngine's are faster was never measured.

Never run with the real package: it was on none of our machines. Tests check its calls with a stand-in
module of the documented functions in plain torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.executors.base import Executor
from fulgurite.trace.node_meta import fake_value

aten = torch.ops.aten
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ("cuda",)
SIZE_MULTIPLE, ROW_MULTIPLE = 16, 8  # of FP8 GEMMs


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


class TransformerEngineExecutor(Executor):
    """`recipe` is one of `transformer_engine.common.recipe`; None: Float8CurrentScaling."""

    name = "transformer_engine"
    falls_back_if_failed = True

    def __init__(self, recipe: Any = None) -> None:
        self.recipe = recipe

    def claims(self, node: fx.Node) -> bool:
        return has_transformer_engine() and is_linear(node)

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        linears = {
            node: FP8Linear(node, self.recipe) for node in region.graph.nodes if is_product(node)
        }

        def run(*inputs: Any) -> Sequence[Any]:
            values = dict(zip(region.graph.find_nodes(op="placeholder"), inputs, strict=True))
            for node in region.graph.nodes:
                if node.op == "output":
                    return tuple(fx.node.map_arg(node.args[0], values.__getitem__))
                if node.op == "placeholder":
                    continue
                args = fx.node.map_arg(node.args, values.__getitem__)
                values[node] = linears.get(node, node.target)(*args, **node.kwargs)
            raise AssertionError("a region ends in its output")

        return run


def is_product(node: fx.Node) -> bool:
    return node.target in (aten.mm.default, aten.addmm.default)


def is_linear(node: fx.Node) -> bool:
    """Whether a node is x @ weight.T or bias + x @ weight.T, of a size that FP8 GEMMs take."""
    if not is_product(node):
        return False
    *bias, x, transposed = node.args
    if bias and (node.kwargs or fake_value(bias[0]).dim() != 1):  # type: ignore[arg-type]
        return False
    is_weight = transposed.target in TRANSPOSES and transposed.args[0].op == "placeholder"  # type: ignore[union-attr]
    value, rows = fake_value(transposed), fake_value(x)  # type: ignore[arg-type]
    if not is_weight or value.dtype not in DTYPES or rows.dtype != value.dtype:
        return False
    has_size = all(isinstance(n, int) and n > 0 and n % SIZE_MULTIPLE == 0 for n in value.shape)
    return has_size and value.device.type in DEVICES


class FP8Linear:
    """One linear as a TransformerEngine module, which is made at its first call."""

    def __init__(self, node: fx.Node, recipe: Any) -> None:
        self.recipe, self.has_bias = recipe, node.target is aten.addmm.default
        self.module: Any = None

    def __call__(self, *operands: Tensor) -> Tensor:
        import transformer_engine.pytorch as te

        *bias, x, transposed = operands
        if self.module is None:
            self.build(te, transposed)
        rows = x.shape[0]
        missing = -rows % ROW_MULTIPLE
        padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
        parameters = {"weight": transposed.t().contiguous()}
        if bias:
            parameters["bias"] = bias[0]
        with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=self.recipe):
            result: Tensor = torch.func.functional_call(self.module, parameters, (padded,))
        return result[:rows].contiguous() if missing else result

    def build(self, te: Any, transposed: Tensor) -> None:
        """A module without memory of its own: each call gives it the weight and the bias."""
        from transformer_engine.common import recipe

        self.recipe = self.recipe or recipe.Float8CurrentScaling()
        self.module = te.Linear(
            *transposed.shape, bias=self.has_bias, params_dtype=transposed.dtype, device="meta"
        )


TRANSFORMER_ENGINE = TransformerEngineExecutor()
