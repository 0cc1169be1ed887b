"""Launch configs and cost constants of generated GEMMs with a fused epilogue (`fuser/gemm`).

In: the sizes of the GEMMs that one kernel computes. Out: `GemmEpilogueConfig`s, the most promising first,
and the numbers by which `fuser/gemm/heuristics.py` decides whether fusing is worth it. The numbers of a
device family are in its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fulgurite.kernels.tuning.config import LaunchConfig


@dataclass(frozen=True)
class GemmEpilogueConfig(LaunchConfig):
    """The launch config of a generated GEMM.

    group_m     rows of tiles that neighboring programs work on, so that they share operands in L2
    tile_loop   a persistent program's loop over tiles: "flatten" (with the loop over K), "plain" or
                "warp_specialize"
    tma_store   outputs are stored by tensor descriptors too
    """

    group_m: int = 8
    use_tma: bool = True
    persistent: bool = True
    tile_loop: Literal["flatten", "plain", "warp_specialize"] = "flatten"
    tma_store: bool = False


ConfigRates = Mapping[GemmEpilogueConfig, float]  # fraction of the best config's throughput


@dataclass(frozen=True)
class GemmEpilogueProblem:
    """The sizes of the GEMMs of one kernel: they share the left matrix.

    n              columns of the epilogue
    num_gemms      accumulators of a tile
    block_columns  columns that the epilogue reduces together (to quantize); 0: it is elementwise
    num_sms        streaming multiprocessors of the device
    """

    m: int
    n: int
    num_gemms: int
    block_columns: int
    num_sms: int


class GemmEpilogueHeuristics:
    """Decisions about generated GEMMs. A device family's table sets the numbers."""

    shared_memory_bytes: int
    gemm_epilogue_capability: tuple[
        int, int
    ]  # where fusion was measured; elsewhere autotune=True may
    gemm_epilogue_configs: ConfigRates  # one GEMM
    gemm_epilogue_multi_configs: ConfigRates  # several GEMMs of one left matrix
    gemm_epilogue_max_accumulators: int  # elements of all accumulators of a program

    # the cost model of fusion, in fuser/gemm/heuristics.py
    gemm_epilogue_launch_seconds: float  # between two kernels of a stream
    gemm_epilogue_prologue_seconds: float  # descriptors, the first tiles, the last tiles
    gemm_epilogue_slowdown: float  # of a generated GEMM, as a fraction of the library's time
    gemm_epilogue_exposed_fraction: float  # of the epilogue's flops, not hidden behind the GEMM
    gemm_epilogue_min_gain: float  # fraction of the unfused time
    gemm_epilogue_min_m: int
    gemm_epilogue_max_k: int
    gemm_epilogue_max_weight_elements: int  # of all right matrices

    def rank_gemm_epilogue_configs(self, problem: GemmEpilogueProblem) -> list[GemmEpilogueConfig]:
        """The configs worth a try, the one with the lowest predicted time first."""
        count = problem.num_gemms
        table = self.gemm_epilogue_configs if count == 1 else self.gemm_epilogue_multi_configs
        if problem.block_columns:
            table = block_reduction_configs(problem.block_columns)
        limit = self.gemm_epilogue_max_accumulators
        rates = {
            config: rate
            for config, rate in table.items()
            if self.fits_gemm_epilogue(config, count)
            and config.block_m * config.block_n * count <= limit
        }

        def predicted_time(config: GemmEpilogueConfig) -> float:
            """In units of the time per element at full throughput."""
            tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
            waves = -(-tiles // problem.num_sms)
            return waves * config.block_m * config.block_n / rates[config]

        widest = max(32, 1 << max(problem.n - 1, 0).bit_length())
        narrow = [c for c in rates if problem.block_columns or c.block_n <= widest]
        smallest = replace(list(table)[-1], block_m=64, num_stages=2)
        return sorted(narrow, key=predicted_time) or [smallest]

    def fits_gemm_epilogue(self, config: GemmEpilogueConfig, num_gemms: int) -> bool:
        """Whether shared memory holds the 16-bit operand blocks of all pipeline stages."""
        block = (config.block_m + num_gemms * config.block_n) * config.block_k * 2
        return block * config.num_stages <= self.shared_memory_bytes

    def autotune_gemm_epilogue_configs(
        self, problem: GemmEpilogueProblem, warp_specialize: bool
    ) -> list[GemmEpilogueConfig]:
        """What autotuning times: the three best configs, each with a few variants."""
        found: dict[GemmEpilogueConfig, None] = {}
        for config in self.rank_gemm_epilogue_configs(problem)[:3]:
            variants = [
                config,
                replace(config, persistent=True, tile_loop="plain"),
                replace(config, persistent=False),
                replace(config, num_stages=config.num_stages + 1),
                replace(config, tma_store=True),
            ]
            if warp_specialize:
                variants.append(
                    replace(config, num_warps=4, persistent=True, tile_loop="warp_specialize")
                )
            found |= dict.fromkeys(
                v for v in variants if self.fits_gemm_epilogue(v, problem.num_gemms)
            )
        return list(found)


def block_reduction_configs(block_columns: int) -> ConfigRates:
    """Configs whose block_n is one block of columns that the epilogue reduces."""
    block_m = 256 if block_columns <= 128 else 128
    return {
        GemmEpilogueConfig(block_m, block_columns, 64, 8, 3): 1.0,
        GemmEpilogueConfig(128, block_columns, 64, 4, 4): 0.95,
        GemmEpilogueConfig(64, block_columns, 64, 4, 4): 0.7,
    }
