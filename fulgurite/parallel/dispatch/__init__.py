"""Token dispatchers: tokens and their expert slots in, rows for the experts of each rank out, and back.

dispatcher.py            the interface `TokenDispatcher`
all_to_all.py            collectives, on every backend; payload.py packs its rows
hierarchical.py          one row a node over the network, then inside the node
legs.py, node_axes.py    its two all-to-alls, and their groups
symmetric.py             kernels write into other ranks' memory; symmetric_gradients.py trains with it
deterministic.py         the sums of one rank, to the bit
"""
