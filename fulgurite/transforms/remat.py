"""Which values forward saves for backward, and which backward computes again.

In: the joint graph of forward and backward that AOTAutograd traced. Out: the two graphs. Policies:

    none     save everything backward reads; recompute nothing
    mincut   torch's min-cut partitioner: recompute what is cheap, save where that costs the fewest bytes
    full     save the inputs only; backward runs forward again (as checkpointing the whole graph does)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from fulgurite.trace.cost import value_bytes
from fulgurite.trace.trace import copy_module

Remat = Literal["none", "mincut", "full"]
REMAT = get_args(Remat)
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def partitioner(policy: Remat) -> Partition:
    """The partition function of a policy, as AOTAutograd calls it."""

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if policy == "none":
            return default_partition(joint, inputs, **options)
        budget = 0.0 if policy == "full" else functorch_config.activation_memory_budget
        with functorch_config.patch(activation_memory_budget=budget):
            return min_cut_rematerialization_partition(joint, inputs, **options)

    return partition


def saved_bytes(forward: fx.GraphModule, user_outputs: int) -> int:
    """Bytes that stay alive between forward and backward, without the graph's own inputs.

    Inputs (parameters above all) live on anyway; what the policy decides about is everything else.
    """
    saved = forward.graph.output_node().args[0][user_outputs:]  # type: ignore[index]
    nodes = {node for node in saved if isinstance(node, fx.Node) and node.op != "placeholder"}
    return sum(value_bytes(node.meta.get("val")) for node in nodes)


class SavedBytes:
    """What each policy would save, worked out when someone asks.

    Keeps a copy of the joint graph, because partitioning changes the one it is given.
    """

    def __init__(self, joint: fx.GraphModule, inputs: Any, options: dict[str, Any]) -> None:
        self._joint = copy_module(joint)
        self._inputs = inputs
        self._options = options

    def under(self, policy: Remat) -> int:
        options = {k: v for k, v in self._options.items() if k != "static_lifetime_input_nodes"}
        forward, _ = partitioner(policy)(copy_module(self._joint), self._inputs, **options)
        return saved_bytes(forward, self._options["num_fwd_outputs"])
