"""Heuristic constants of the fuser's Triton kernels, for every GPU family.

In: nothing. Out: numbers that `fuser/schedule/gpu` reads as attributes of this module, so that a
test or a sweep can override one with `monkeypatch.setattr`.

A constant that was measured says so; "percent" is percent of a copy kernel's bandwidth on an H200
(sm_90). For the other constants no measurement of their own is recorded. They are the values with
which `fulgurite bench fusions` ran on an H200 (`benchmarks/2026-11-16-fusions-cuda.json`).
"""

from __future__ import annotations

WARP_SIZE = 32
ACCESS_BYTES = 16  # a thread and access, the widest there is
CACHE_LINE_BYTES = 128
SECTOR_BYTES = 32  # the smallest piece of a cache line that memory transfers

# Loop order.
MIN_VECTOR_LENGTH = 8  # contiguous points; a shorter loop is not worth a vector

ELEMENTS_PER_WARP = 1024  # of a block of rows, columns or tiles, where nothing below says otherwise
MAX_WARPS = 16  # of such a block
MIN_PROGRAMS_PER_SM = 2  # blocks shrink until there are as many

# Pointwise kernels.
POINTWISE_THREADS, MAX_POINTWISE_WARPS = 128, 4
MIN_POINTWISE_BLOCK = 32
MANY_READS = 3  # from so many reads of full size on, a thread has fewer accesses in flight
MIN_DIVIDING_BLOCK = 512  # elements; blocks are not made smaller only to divide a loop evenly
MIN_SHARED_BYTES = 8  # a point, read alike by all rows; from here on a program takes several rows
MAX_MULTI_ROW_WIDTH = 64  # elements of a row, where a program has several rows
MIN_MULTI_ROW_PROGRAMS_PER_SM = 4
# A block may leave one in so many elements of a loop empty: with several rows; with one; with one,
# if a flattened loop would have narrow accesses.
MULTI_ROW_WASTE, DIVIDING_WASTE, NARROW_DIVIDING_WASTE = 16, 32, 8

# Transposes.
MIN_TRANSPOSE_POINTS = 1 << 14  # a smaller one stays in the caches
MIN_TRANSPOSE_LENGTH = 16
TRANSPOSE_TILE_BYTES = 256  # of a row of a tile
MIN_TRANSPOSE_TILE, MAX_TRANSPOSE_TILE, MAX_TRANSPOSE_WARPS = 32, 128, 8

# Unrolling of short loops that select between formulas.
MAX_UNROLL_STEPS = 4
MAX_UNROLLED_STORES = 8  # the values of each are in registers at once
MIN_UNROLLED_RUN = 128  # contiguous bytes that each step stores: a cache line
MIN_UNROLLED_POINTS = 1024  # of each step and SM: fewer leave some SMs without work

# Rows in a single block.
MAX_ROW_BLOCK = 1 << 15  # elements of a row that a program's registers hold as float32
MAX_SINGLE_PASS_BLOCK = 8192  # the same where one pass is enough: more is read in a loop
# Longer rows stay in registers in their storage dtype. rms_norm, softmax and layer_norm of 32768
# bfloat16 got 95.6, 94.9 and 94.5 percent instead of 90.4, 77.1 and 81.7; of float32 98.9, 97.8 and
# 95.9 instead of 92.5, 84.9 and 89.0 (`benchmarks/sweep_rows.py`).
MAX_WIDENED_ROW = 1 << 14
MIN_ROW_BYTES = 4096  # of a row with a program of its own; shorter rows share one
MAX_VALUES_PER_THREAD, MAX_ROW_WARPS = 160, 32  # more warps than MAX_WARPS if values don't fit
MAX_RECOMPUTE_FLOPS = 60  # a point, that are recomputed in every pass rather than held

# Rows in a loop over blocks.
LOOPED_ROW_BLOCK, LOOPED_ROW_WARPS = 4096, 8  # of one pass
MAX_ROW_REREAD_BYTES = 1 << 20  # float32 bytes of a row that later passes read again, from L2
MIN_ROWS_SIDE_BY_SIDE = 16  # rows across memory that a program has: full sectors of 32 bytes

# Register-resident rows: blocks that are loaded once and used by every pass.
# A bfloat16 takes half the registers of its float32: 98304 elements fit where 32768 float32 do.
RESIDENT_BLOCK, RESIDENT_WARPS = 8192, 32
# Unaligned rows with nothing else read along them: one access of 16 bytes a thread and block, so
# that the last block is less empty. softmax of 50257 float32 got 92.9 percent instead of 81.0, of
# bfloat16 75.1 instead of 74.0. Norms, whose weights are then read one by one, got less
# (`benchmarks/sweep_rows.py`).
SMALL_RESIDENT_WARPS, SMALL_RESIDENT_BYTES = 16, 200 << 10
# Of 256 KiB of registers: 48 of the 64 registers of each of 1024 threads, where a row fits or all
# but a block.
RESIDENT_BYTES = 192 << 10
# Where more is read again: what compiles for an H200 without spills, with several loads in flight.
# With 128 KiB rms_norm of 65536 float32 got 77.3 percent instead of 82.5
# (`benchmarks/sweep_rows.py`).
PARTLY_RESIDENT_BYTES = 160 << 10
# Beside an online softmax. With 160 KiB softmax of 131072 float32 got 60.2 percent instead of 65.6.
ONLINE_RESIDENT_BYTES = 128 << 10
MULTI_TENSOR_RESIDENT_BYTES = 96 << 10  # of several tensors
# Beside Welford, which takes three values an element, and only up to a row length. layer_norm of
# 73728 float32 got 67.7 percent instead of 61.8, of 131072 40.7 instead of 64.1 (bfloat16: 49.9
# instead of 61.5).
WELFORD_RESIDENT_BYTES, MAX_WELFORD_RESIDENT_ROW = 64 << 10, 96 << 10

# Peeled rows: rows that start at no multiple of 8 bytes.
PEEL_ACCESS_BYTES = 8  # a thread and access
# Rows with at most so many passes have accesses of twice the width. Percent, wide against narrow,
# bfloat16: two passes, rms_norm of 4097 and 4098, 94.8 and 94.7 against 89.2 and 91.3; three
# passes, softmax and layer_norm of 50257, 66.8 and 65.3 against 68.9 and 74.0
# (`benchmarks/sweep_rows.py`).
MAX_WIDE_PEEL_PASSES = 2
# Elements of an access to a row of many blocks: weights are read one by one, and a warp's reads of
# them are as far apart. rms_norm of 50257 bfloat16 got 81.7 percent with 4, 75.0 with 8.
MAX_MULTI_BLOCK_PEEL = 4

# Split reductions.
MIN_SPLIT_POINTS = 1 << 15  # a smaller reduction is not split
MIN_SPLIT_ROW = 2048  # elements of a row in each split
SPLITS_PER_SM = 4
SPLIT_ROW_BLOCK, WELFORD_SPLIT_ROW_BLOCK = 8192, 4096
SPLIT_ELEMENTS_PER_WARP = 256

# Columns.
MIN_COLUMN_BLOCK_POINTS = 2048  # short columns: a program has more of them
MAX_COLUMN_BLOCK_POINTS = 4096
MIN_COLUMN_WIDTH = 16  # columns of a block
WELFORD_ELEMENTS_PER_WARP = 512  # Welford holds four values of each
COLUMN_STAGES = 3  # pipeline depth of a single pass

# Persistent kernels, which also reduce over the grid.
MAX_GRID_SUM_ROW = 1 << 14  # elements of a row, where registers also hold sums over rows
MAX_SCALAR_PARTIALS = 1 << 13  # single values that one program adds up at the end
# Longer rows of 16-bit floats are rematerialized after each reduction.
MAX_REMATERIALIZE_FREE_ROW = 8192
PERSISTENT_ELEMENTS_PER_WARP = 512
MAX_PERSISTENT_WARPS = 8  # of rows that are not longer; MAX_WARPS of longer ones
MAX_PERSISTENT_PROGRAMS_PER_SM = 4
PERSISTENT_ROW_BLOCK, PERSISTENT_ROW_WARPS = 4096, 8
PERSISTENT_POINTWISE_BLOCK = 1024
# Rows, padded, of these bytes are not pipelined: on an H200 (`benchmarks/sweep_short_rows.py`) 76 to 97% of the copy
# bandwidth instead of 36 to 87%; others lose up to 12% by it.
SHORT_ROW_BYTES = (128, 512)
# Several short rows an iteration: accesses of a thread to each tensor; programs of an SM, least and most.
SHORT_ROW_ACCESSES, SHORT_ROW_PROGRAMS_PER_SM = 2, (4, 8)
# All of these programs are to be resident. Registers of a thread: a base, and one for each of its points
# and value: reads, sums over rows, and so many more where rows are masked, or reduced by several warps.
# Norms' backward over rows of 32 to 1024, compiled for an H200 (Triton 3.6), takes 48 to 128.
BASE_REGISTERS, MASK_VALUES, SHARED_ROW_VALUES, REGISTERS_PER_SM = 32, 2, 2, 1 << 16
# Programs per SM and pipeline stages by the bytes of the rows that one iteration loads: the fastest
# on an H200 (`benchmarks/sweep_triton.py sizes`). Longer rows: one program and one stage.
PERSISTENT_STAGES = (
    # bytes, programs per SM, num_stages
    (8 << 10, 2, 4),
    (16 << 10, 2, 3),
    (24 << 10, 1, 4),
    (40 << 10, 1, 3),
)

# The kernel that combines partials. It has few programs, which wait for memory, so each loads many
# partials at once.
COMBINE_WIDTH, COMBINE_DEPTH = 16, 256
COMBINE_SCALAR_BLOCK = 1024
COMBINE_WARPS, LARGE_COMBINE_WARPS, MIN_LARGE_COMBINE = 4, 8, 2048

# Row programs: kernels with a sort, which hold every value of a row in registers.
#
# Elements of a row; torch sorts longer rows. On an H200 (Triton 3.6) sorted rows of 777, 1024 and 2048
# elements took 2.2, 2.9 and 2.8 times torch's time. Compiling a sort of 1024, 2048 and 4096 elements
# takes 3, 7 and 25 seconds of CPU time (Triton 3.9).
MAX_SORTED_ROW = 256
MAX_EXTRACTED_RANKS = 16  # so many smallest elements are searched one by one, without a sort
MAX_EXTRACTED_ROW = 8192
ROW_PROGRAM_POINTS = 1024  # short rows: a program has several
ROW_PROGRAM_POINTS_PER_WARP, MAX_ROW_PROGRAM_WARPS = 256, 16
MAX_RECOMPUTED_FLOPS = 64  # of a value that is read at other points of the row
