"""GEMM with a quantized weight: which kernel and which launch config.

In: the sizes of a GEMM, x [M, K] times a weight [N, K], and the traits of its weight. Out: a
`LaunchConfig`, or None where the library's GEMM is faster. The numbers are fields, which the table
of a device family sets (`sm_90.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.small_m import SmallMHeuristics
from fulgurite.kernels.tuning.weight_traits import WeightTraits

TABLE_SMS = 132  # multiprocessors of the GPU that `split_k_programs` counts for (an H200)


@dataclass(frozen=True)
class GemmEntry:
    """A line of a GEMM table: the config of up to `max_m` rows of x.

    K is split while there are at most `split_k_programs` programs (on 132 multiprocessors) and
    every program keeps `min_k_blocks` blocks of K. 0 programs: K is never split.
    """

    max_m: int
    config: LaunchConfig
    split_k_programs: int = 0
    min_k_blocks: int = 2


@dataclass(frozen=True)
class LibraryCrossover:
    """A line of a crossover table: the library wins above `m` rows if N or K is above these
    sizes."""

    n_above: int
    k_above: int
    m: int


@dataclass(frozen=True)
class DeepK:
    """K counts as deep from `min_k` on, if the output has more than `tiles_above` tiles."""

    min_k: int
    tiles_above: int


class GemmHeuristics(SmallMHeuristics):
    """GEMM of one weight."""

    num_sms: int

    dequantize_first_m: int
    """Rows of x from which dequantizing the whole weight for the library's GEMM is faster."""
    max_block_k: int
    """Columns of a step for weights that are dequantized in the kernel."""
    e2m1_block_k: int
    """The same before the limit, for e2m1."""
    weight_only_table: tuple[GemmEntry, ...]
    """x in 16 bits. `block_k` comes from the weight."""
    mainloop_scaled_table: tuple[GemmEntry, ...]
    """8 bits times 8 bits; every 128 columns have scales, so their sums need registers of their
    own."""
    epilogue_scaled_table: tuple[GemmEntry, ...]
    """8 bits times 8 bits, scaled once in the epilogue."""
    crowded_block_m: int
    crowded_num_stages: int
    """`epilogue_scaled_table`: fewer stages, so that more programs fit, if there are two waves."""
    deep_k: tuple[DeepK, ...]
    deep_k_programs: int
    """`epilogue_scaled_table`: more programs share a deep K."""
    rowwise_library: tuple[LibraryCrossover, ...]
    blockwise_library: tuple[LibraryCrossover, ...]
    """When torch's scaled_mm is faster. Its kernels start with tiles of 128 rows, so the fewer of
    those there are, the longer ours stay ahead."""

    def weight_only_gemm(self, m: int, n: int, k: int, weight: WeightTraits) -> LaunchConfig | None:
        """x in 16 bits. None: dequantize the weight first and call the library."""
        return None if m >= self.dequantize_first_m else self.dequantized_gemm(m, n, k, weight)

    def dequantized_gemm(self, m: int, n: int, k: int, weight: WeightTraits) -> LaunchConfig:
        """x in 16 bits. Few rows read the weight at memory speed; more fill the tensor cores."""
        if m <= self.max_small_m:
            return self.small_m_gemm(m, n, k, weight)
        entry = find_entry(self.weight_only_table, m)
        block_k = min(self.preferred_block_k(weight), self.max_block_k)
        return self._split_k(entry, replace(entry.config, block_k=block_k), m, n, k)

    def preferred_block_k(self, weight: WeightTraits) -> int:
        """Columns of a step: a group where each step has one scale."""
        if weight.scaling == "mainloop":
            return weight.group_size
        return self.e2m1_block_k if weight.dequant == "e2m1" else self.max_block_k

    def scaled_gemm(self, m: int, n: int, k: int, scaling: str) -> LaunchConfig:
        """8 bits times 8 bits."""
        if scaling == "mainloop":
            entry = find_entry(self.mainloop_scaled_table, m)
            return self._split_k(entry, entry.config, m, n, k)
        entry = find_entry(self.epilogue_scaled_table, m)
        config = entry.config
        tiles = num_tiles(config, m, n)
        if config.block_m <= self.crowded_block_m and tiles > 2 * self.num_sms:
            return replace(config, num_stages=self.crowded_num_stages)
        is_deep = any(k >= deep.min_k and tiles > deep.tiles_above for deep in self.deep_k)
        if is_deep and entry.split_k_programs:
            entry = replace(entry, split_k_programs=self.deep_k_programs)
        return self._split_k(entry, config, m, n, k)

    def prefers_library_scaled_mm(self, block: tuple[int, int], m: int, n: int, k: int) -> bool:
        """Whether torch's scaled_mm was measured faster, by the weight's scale block (0: all).

        One scale a tensor goes to cuBLAS, which is good at any size.
        """
        if block == (0, 0):
            return True
        table = self.rowwise_library if block[1] == 0 else self.blockwise_library
        return m > next(c.m for c in table if n > c.n_above or k > c.k_above)

    def _split_k(
        self, entry: GemmEntry, config: LaunchConfig, m: int, n: int, k: int
    ) -> LaunchConfig:
        max_programs = entry.split_k_programs * self.num_sms // TABLE_SMS
        tiles, split = num_tiles(config, m, n), 1
        while (
            tiles * split * 2 <= max_programs
            and split * 2 * entry.min_k_blocks * config.block_k <= k
        ):
            split *= 2
        return replace(config, split_k=split)


def find_entry(table: tuple[GemmEntry, ...], m: int) -> GemmEntry:
    """The first line for at least `m` rows."""
    return next(entry for entry in table if m <= entry.max_m)


def num_tiles(config: LaunchConfig, m: int, n: int) -> int:
    """Tiles of an output [m, n]."""
    return -(-n // config.block_n) * -(-m // config.block_m)
