"""Heuristic constants of the fuser's C++ kernels, for every CPU family.

In: nothing. Out: numbers that `fuser/schedule/cpu` and `fuser/codegen/cpp` read as attributes of
this module, so that a test or a sweep can override one with `monkeypatch.setattr`.

A constant that was measured says so. For the other constants no measurement of their own is
recorded. They are the values with which `fulgurite bench fusions` ran on two cores of a Xeon with
AVX-512 (`benchmarks/2026-11-15-fusions-cpu.json`).
"""

from __future__ import annotations

# Loop order.
MIN_SIMD_LENGTH = 8  # a shorter loop is not worth a vector
BROADCAST_WEIGHT = 0.25  # of a byte that stays the same along an axis, against a contiguous one

# Threads.
THREAD_GRAIN = 1 << 15  # points of a cheap kernel that are worth a thread: 20 µs of a copy
MIN_THREAD_GRAIN = 256  # the same of an expensive kernel
STATIC_THREADS_GRAINS = (
    64  # a kernel of so many grains takes all threads without computing how many
)
MIN_TASKS_PER_THREAD = 2  # blocks shrink, or threads split the body, until there are as many
MIN_SPLIT_POINTS = 1 << 15  # a smaller body is not split among threads
MIN_SPLIT_RUN = 64  # nor one whose innermost loop is shorter

# Passes over a row.
MIN_BUFFERED_FLOPS = 10  # a value that costs more is buffered from one pass to the next
MAX_ROW_BUFFER_BYTES = 64 << 10  # stack bytes for buffered rows

# Columns: neighbouring grid points that run side by side in SIMD lanes.
MAX_COLUMN_BLOCK = 512  # a few pages of each row
MAX_COLUMN_LANE_BYTES = 32 << 10  # of the accumulators of a block: they stay in L1
MIN_COLUMN_BLOCK = 16
MAX_PACKED_BYTES = 1 << 20  # stack bytes of a thread, for packed columns
COLUMN_UNROLL = (
    4  # body points of one accumulator at once: several streams keep memory busier than one
)
MAX_UNROLLED_FLOPS = 8  # of a body point
COLUMN_PREFETCH_DISTANCE = 16  # body points between a prefetch and its use

# Tiles: rows side by side in SIMD lanes, through transposed buffers. Cycles, fitted on an EPYC with AVX-512
# (2026-11-19) to layer_norm, softmax, rms_norm, sums and argmax of rows of 8 to 509 floats, both ways.
VECTOR_LANES = 16  # floats
TILE_OPERATION_CYCLES = 0.5  # of a vector instruction
ROW_OPERATION_CYCLES = 0.75  # the same along a row, with the short loop around it
TRANSPOSE_CYCLES = 0.7  # of an element
TILE_ROW_CYCLES = 6
FIRST_REDUCTION_CYCLES = (
    6  # from the lanes of an accumulator to one number; the next row overlaps it
)
REDUCTION_CYCLES = 20  # of a reduction that waits for another one, or is made beside it
STRIDED_ACCESS_CYCLES = 2  # of an element that shares no vector with its neighbours
MIN_TILED_LANES = 16
MIN_TILED_BLOCK, MAX_TILED_BLOCK = 32, 64  # lanes; as many as fit in the L1 cache
MAX_TILED_ROW_BYTES = 16 << 10  # of all tiles for one lane: 16 lanes are a part of the L2 cache

TAIL_COPY_OPERATIONS = 10  # to load or store the end of a row through a buffer

# Scans: neighbouring grid points side by side, with accumulators that stay in L1.
MAX_SCAN_BLOCK = 256
MIN_SCAN_BLOCK = 16

# Indexed stores.
MIN_SCATTER_BLOCK = 64  # neighbouring elements that a thread takes: some cache lines

# Sorts.
MAX_SORTED_ROW = 1 << 15  # elements; torch sorts longer rows

# Transposes.
TRANSPOSE_TILE = 64
TRANSPOSE_PADDING = 16  # extra columns: rows of a tile share no cache sets and stay aligned
MIN_TRANSPOSE_LENGTH = 16  # a shorter axis is not worth tiling
MIN_TRANSPOSE_POINTS = 1 << 14  # a smaller kernel stays in L1
# of a byte that a reducing kernel stores, or loads, a cache line an element. Measured on an EPYC with AVX-512, 4
# MiB: 3 to 15, most where strides are powers of two.
STRIDED_ACCESS_COST = 4

# Non-temporal stores and prefetches.
#
# A kernel gains by bypassing the caches from this size on, even when the next kernel reads the
# result at once. Measured on two cores with 2 MiB of L2 each: 0.9 times as fast at 16 MiB, 1.5 at
# 32 MiB.
MIN_NONTEMPORAL_BYTES = 32 << 20
MIN_NONTEMPORAL_RUN = 128  # contiguous bytes of a store that are worth it
MIN_PREFETCH_ROW_BYTES = 4 << 10  # the hardware prefetches shorter rows by itself
STAGING_BLOCK = (
    512  # elements collected before a non-temporal store writes them; a block of reductions
)

# The order of operations of a reduction: `include/reductions.h`. No choice of speed: other numbers change results.
REDUCTION_LANES = 16
REDUCTION_BLOCK = 256  # a sum of float32 adds up so many in float32, then the blocks in float64
REDUCTION_CHUNK = 1024  # elements whose blocks are reduced at once
SCAN_GROUP, SCAN_CHUNK = 8, 8192  # of scans: `codegen/cpp/scan.py`
# Rows whose values a sum over the grid adds in float32; the chunks are added in float64
MIN_GRID_SUM_ROWS, MAX_GRID_SUM_ROWS, GRID_SUM_CHUNKS = 8, 64, 8

# Tables: values without loads that a kernel computes once, before its loops.
MIN_TABLE_USES = 4  # points of the kernel for each element of a table
MIN_TABLE_FLOPS = 8  # of an element; cheaper values are recomputed at every point
MAX_STACK_TABLE_BYTES = 16 << 10  # a larger table is allocated

# Points of a row program's row: shorter rows are combined up to MAX (their buffers fit the L1 cache).
MIN_ROW_PROGRAM_POINTS, MAX_ROW_PROGRAM_POINTS = 256, 4096
