"""Lowers an fx region to the IR, one file per op family.

In: the fx graph of a region. Out: an `ir` region. `lower_graph.py` iterates over the nodes and
calls the lowering of each op.
"""
