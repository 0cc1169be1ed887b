"""`LaunchConfig`: how one launch of a hand-written GPU kernel is blocked.

In: nothing. Out: the dataclass that every heuristic of this folder returns and every launcher
reads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchConfig:
    """Block sizes and launch options of one kernel. Fields a kernel has no use for keep their
    default.

    block_m          rows of x (queries of attention) in a program
    block_n          rows of the weight, which are columns of the output (keys of attention)
    block_k          columns of K in a step of the main loop
    num_stages       steps in flight in the software pipeline
    split_k          programs that share K; their partial sums are added at the end
    part_k           columns of K (keys of attention) in a partial sum; 0: those of a program
    group_m, group_n tiles of M or N that run side by side, so that they share an operand in L2
    use_tma          operands are copied by tensor descriptors
    persistent       one program a multiprocessor, which loops over tiles
    small_m          the small-M kernel: every warp reduces a slice of K of its own
    max_registers    limit of registers a thread, for kernels that spill without one
    prefetch_blocks  blocks of the weight that are loaded before the inputs are ready (PDL)
    prefetch_lines   cache lines of each weight row that are prefetched into L2 before that
    """

    block_m: int = 1
    block_n: int = 1
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 3
    split_k: int = 1
    part_k: int = 0
    group_m: int = 1
    group_n: int = 1
    use_tma: bool = False
    persistent: bool = False
    small_m: bool = False
    max_registers: int | None = None
    prefetch_blocks: int = 0
    prefetch_lines: int = 0
