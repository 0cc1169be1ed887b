"""Expert-parallel dispatch and combine: wire formats, layout, buffer sizes, and Triton kernels.

In: tokens and the expert slots they are routed to. Out: the same tokens on the ranks of their
experts, and the sums of the experts' results. parallel/dispatch uses it.
"""
