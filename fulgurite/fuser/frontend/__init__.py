"""fx region → IR, one file an op family.

In: the fx graph of a region. Out: an `ir` region. `lower_graph.py` walks the nodes and calls the lowering of each op.
"""
