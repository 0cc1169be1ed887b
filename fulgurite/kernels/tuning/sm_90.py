"""Numbers of the heuristics for Hopper (sm_90).

Each number names where it comes from. "H200" means measured on one with torch 2.11 and Triton 3.6.
"""

from __future__ import annotations

from fulgurite.kernels.tuning.attention import AttentionHeuristics
from fulgurite.kernels.tuning.elementwise import ElementwiseHeuristics
from fulgurite.kernels.tuning.fused_linear import FusedLinearHeuristics
from fulgurite.kernels.tuning.gemm import GemmHeuristics
from fulgurite.kernels.tuning.gemm_epilogue import GemmEpilogueConfig, GemmEpilogueHeuristics
from fulgurite.kernels.tuning.grouped_gemm import GroupedGemmHeuristics
from fulgurite.kernels.tuning.mla import MlaHeuristics
from fulgurite.kernels.tuning.sampling import SamplingHeuristics


class Sm90Heuristics(
    AttentionHeuristics,
    MlaHeuristics,
    SamplingHeuristics,
    ElementwiseHeuristics,
    FusedLinearHeuristics,
    GemmHeuristics,
    GroupedGemmHeuristics,
    GemmEpilogueHeuristics,
):
    """Measured on an H200: 132 SMs, 227 KiB of shared memory per block."""

    def __init__(self, num_sms: int = 132, shared_memory_bytes: int = 227 << 10) -> None:
        self.num_sms = num_sms
        self.shared_memory_bytes = shared_memory_bytes

    # ---- attention: H200, benchmarks/sweep_decode.py. Many programs want few warps each; in prefill
    # 64 x 64 beat 128 rows and 128 keys, with 290 to 350 TFLOP/s.
    attention_large_key_dim = 256  # blocks of larger keys exceed shared memory
    attention_split_waves = 2
    attention_many_waves = 12
    attention_min_split_keys = 128
    attention_max_splits = 64
    attention_max_split_rows = 64  # a prefill tile has enough programs
    attention_merge_splits = 8
    attention_merge_elements = 8192  # 64 registers of each of 128 threads

    # ---- MLA: H200, benchmarks/sweep_mla.py, 4096 keys, batch 64. With 16 rows, 64 keys x 3 stages read
    # bfloat16 at 87% of the copy bandwidth; 32 keys x 4 stages keep two programs per SM during FP8
    # conversions; with 128 rows 64 keys beat 32 by a fifth.
    mla_full_shared_memory = 227 << 10
    mla_max_expanded_keys = 4096  # bounds the memory of expanded keys
    mla_min_split_keys = 64
    mla_max_splits = 64
    mla_program_cost = 64
    mla_merge_cost = 4
    mla_gather_keys = 16

    # ---- sampling: H200, benchmarks/sweep_decode.py
    sampling_chunk = 2048
    sampling_pivot_chunk = 4096
    sampling_pivot_lanes = 128
    sampling_pivots = 32
    sampling_batched_pivots = 16
    sampling_large_batch = 32
    sampling_stretch = 64
    sampling_capacity = 32768  # normal logits of any width leave about half as many candidates
    sampling_list_tile = 2048
    sampling_list_block = 2048
    sampling_num_warps = 4
    sampling_threshold_num_warps = 8

    # ---- elementwise: H200, benchmarks/sweep_decode.py
    elementwise_block = 1024
    rms_norm_min_elements = 512
    rms_norm_elements_per_warp = 512
    rms_norm_max_row = 16384
    rope_small_batch = 256
    rope_max_heads = 8
    rope_elements = 1024

    # ---- fused linears: H200, benchmarks/sweep_decode.py with 16 rows
    fused_linear_max_rows = 128
    fused_linear_max_gemv_k = 3072
    fused_linear_pipeline_bytes = 160 << 10  # of the 227 KiB of an SM
    fused_linear_prefetch_bytes = 12 << 10  # 96 registers of each thread
    fused_linear_max_prefetch = 3

    # ---- generated GEMMs with an epilogue (fuser/gemm): H200, GEMMs of 8192 x 4096 with K from 512 to
    # 4096. With these numbers the cost model fuses none that was slower.
    gemm_epilogue_capability = (9, 0)
    gemm_epilogue_configs = {  # noqa: RUF012
        GemmEpilogueConfig(128, 256, 64, 8, 3): 1.0,
        GemmEpilogueConfig(128, 128, 64, 8, 4): 0.9,
        GemmEpilogueConfig(64, 128, 64, 4, 4): 0.7,
        GemmEpilogueConfig(64, 64, 64, 4, 5): 0.5,
        GemmEpilogueConfig(64, 32, 64, 4, 5): 0.3,
    }
    gemm_epilogue_multi_configs = {  # noqa: RUF012
        GemmEpilogueConfig(128, 128, 64, 8, 3, tile_loop="plain"): 1.0,
        GemmEpilogueConfig(128, 64, 64, 4, 3, persistent=False): 0.8,
        GemmEpilogueConfig(64, 64, 64, 4, 4, persistent=False): 0.6,
        GemmEpilogueConfig(64, 32, 64, 4, 4, persistent=False): 0.4,
    }
    gemm_epilogue_max_accumulators = 1 << 15  # 128 registers of each thread of eight warps
    gemm_epilogue_launch_seconds = 2e-6
    gemm_epilogue_prologue_seconds = 3e-6
    gemm_epilogue_slowdown = 0.025
    gemm_epilogue_exposed_fraction = 1 / 3
    gemm_epilogue_min_gain = 0.01
    gemm_epilogue_min_m = 1024
    gemm_epilogue_max_k = 4096
    gemm_epilogue_max_weight_elements = 1 << 25

    # ---- GEMM with quantized operands: H200, the linear layers of Llama-8B and DeepSeek-V3, M from 1 to
    # 8192 (fulgurite bench quant)
    gemm_dequantize_first_m = 192
    gemm_table_sms = 132
    gemm_small_programs = 256
    gemm_programs = 132
    scaled_mm_large_m = 512
    scaled_mm_deep_k = 8192
    scaled_mm_deep_k_many_blocks = (7168, 66)
    library_row_scales = ((7168, 14337, 64), (4096, 8192, 128), (-1, 0, 256))
    library_block_scales = ((4096, 32), (2560, 64), (-1, 128))

    # ---- small-M GEMM: the same layers, and the experts of Qwen3-30B-A3B, DeepSeek-V3, Mixtral-8x7B
    small_m_large_n = 8192
    small_m_rows_per_expert = 4
    small_m_rare_sharing = 4
    small_m_programs = 1024

    # ---- grouped GEMM: H200, benchmarks/sweep_moe.py, 1024 and 8192 tokens of the same experts. With few
    # rows per expert, published configs for an H200 (16 x 64 x 64, 5 stages for one token).
    grouped_gemm_dense_rows = 32  # DeepSeek-V3
    grouped_gemm_4bit_rows = (8, 24, 96)
