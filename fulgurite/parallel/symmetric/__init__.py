"""Symmetric memory: memory that every rank of an axis can address, and what is built on it.

memory.py               one buffer a rank, and its address on every rank
collectives.py          all-reduce, all-gather and reduce-scatter without the host
collective_kernels.py   their Triton kernel
one_sided.py            put, signal and wait
"""
