"""NVIDIA Hopper (sm_90): what was measured on an H200, 132 multiprocessors, torch 2.11, triton 3.6.

Every section names the benchmark that its numbers come from.
"""

from __future__ import annotations

import sys

from fulgurite.kernels.tuning.base import Heuristics
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.gemm import DeepK, GemmEntry, LibraryCrossover
from fulgurite.kernels.tuning.gemm_epilogue import GemmEpilogueConfig

ANY_M = sys.maxsize
NO_K = sys.maxsize


class Sm90Heuristics(Heuristics):
    """H200: 132 multiprocessors, 227 KiB of shared memory a program."""

    # ---- GEMM with a quantized weight: `fulgurite bench quant --device cuda`, over the linear layers
    # of Llama-3.1-8B and DeepSeek-V3, M from 1 to 8192
    dequantize_first_m = 192
    max_block_k = 128
    e2m1_block_k = 256
    weight_only_table = (
        GemmEntry(32, LaunchConfig(32, 128, num_warps=8, num_stages=3, group_n=8), 256),
        GemmEntry(191, LaunchConfig(64, 128, num_warps=8, num_stages=3, group_n=8), 132),
        GemmEntry(ANY_M, LaunchConfig(128, 128, num_warps=8, num_stages=3, group_n=8), 132),
    )
    mainloop_scaled_table = (
        GemmEntry(16, LaunchConfig(16, 64, 128, 4, 4, group_n=8), 600, min_k_blocks=7),
        GemmEntry(64, LaunchConfig(32, 64, 128, 4, 4, group_n=8), 600, min_k_blocks=7),
        GemmEntry(ANY_M, LaunchConfig(64, 128, 128, 8, 4, group_n=8), 264, min_k_blocks=14),
    )
    epilogue_scaled_table = (
        GemmEntry(16, LaunchConfig(16, 64, 128, 4, 6, group_n=8), 132),
        GemmEntry(32, LaunchConfig(32, 64, 128, 4, 6, group_n=8), 132),
        GemmEntry(512, LaunchConfig(64, 64, 128, 4, 6, group_n=8), 132),
        GemmEntry(ANY_M, LaunchConfig(128, 256, 128, 8, 3, group_n=8)),
    )
    crowded_block_m = 64
    crowded_num_stages = 4  # three programs on a multiprocessor instead of two
    deep_k = (DeepK(8192, 0), DeepK(7168, 66))
    deep_k_programs = 264
    rowwise_library = (
        LibraryCrossover(7168, 14336, 64),
        LibraryCrossover(4096, 8191, 128),
        LibraryCrossover(-1, -1, 256),
    )
    blockwise_library = (
        LibraryCrossover(4096, NO_K, 32),
        LibraryCrossover(2560, NO_K, 64),
        LibraryCrossover(-1, -1, 128),
    )

    # ---- small-M GEMM: the same layers, and the experts of Qwen3-30B-A3B, DeepSeek-V3 and Mixtral-8x7B
    max_small_m = 16
    # FP8, N and K 4096 to 28672: 0.95 to 1.6 times as fast up to 8 rows, 0.7 to 1.3 times with 16
    max_unquantized_m = 8
    large_n = 8192
    max_rows_per_expert = 4
    min_experts_per_row = 4
    resident_programs = 1024

    # ---- grouped GEMM: benchmarks/sweep_moe.py, Qwen3-30B-A3B, DeepSeek-V3 and Mixtral-8x7B, 1024 and
    # 8192 tokens. Configs of few rows are published ones for an H200 (16x64x64 with 5 stages).
    large_m_rows = 32  # DeepSeek-V3
    grouped_group_n = 8
    dense_large_m = LaunchConfig(128, 256, 64, 8, 4, group_n=8)
    dense_extra_rows = 64
    fp8_large_m = LaunchConfig(128, 256, 128, 8, 4, group_n=8)
    fp8_max_registers = 216
    # OLMoE, Qwen3-30B-A3B and Mixtral-8x7B, 8192 and 16384 tokens
    wgrad = LaunchConfig(32, 128, 256, 8, 5)
    # 1.2 to 1.6 times as fast as torch's up to 64 rows, equal at 256 (E 8 to 256, K 1024 to 7168,
    # N 1408 to 14336; device time)
    grouped_mm_max_rows = 64
    tile_map_num_warps = 1
    permute_x = LaunchConfig(block_m=16, num_warps=4)
    grouped_epilogue = LaunchConfig(block_n=1024, num_warps=4)

    # ---- mixture of experts: `fulgurite bench moe --device cuda`
    max_small_batch = 2  # Qwen3-30B-A3B; with 4 tokens sorting is as fast
    small_batch_gate_up = LaunchConfig(1, 8, 512, 4, 3)
    small_batch_num_warps = 8
    max_experts_per_token = 16
    router_register_elements = 16384
    router_max_hidden_size = 8192
    router_max_experts = 512
    route = LaunchConfig(block_m=4, num_warps=4)
    sort_chunk_pairs = 256
    sort_small = LaunchConfig(block_m=16, num_warps=4)
    sort_count = LaunchConfig(block_m=16, num_warps=4)
    sort_scan = LaunchConfig(block_m=256, num_warps=4)
    sort_scatter = LaunchConfig(block_m=32, num_warps=8)
    combine = LaunchConfig(block_n=1024, num_warps=4)

    # ---- quantize: `fulgurite bench quant --device cuda`
    max_register_row = 16384
    quantize_elements = 4096
    max_tensor_block_n = 2048
    amax_programs = 1056  # eight for each multiprocessor
    amax_bf16x2 = LaunchConfig(1, 2048, num_warps=8)
    amax_bf16x2_programs_per_sm = 8
    quantize_128x128 = LaunchConfig(128, 128, num_warps=8)
    quantize_128x128_bf16x2 = LaunchConfig(128, 128, num_warps=8)
    store_words = 8
    quantize_transposed = LaunchConfig(128, 64, num_warps=4)
    quantize_transposed_bf16x2 = LaunchConfig(128, 64, num_warps=4)
    column_amax = LaunchConfig(32, 128, num_warps=4)
    column_amax_bf16x2 = LaunchConfig(32, 64, num_warps=4)
    column_amax_bf16x2_rows = 512
    quantize_4bit_warp_elements = 1024
    quantize_4bit_num_warps = 4
    quantize_nvfp4_num_warps = 1
    store_bytes = 16
    gguf_block_n = 32

    # ---- attention: H200, benchmarks/sweep_decode.py. Many programs want few warps each; in prefill
    # 64 x 64 beat 128 rows and 128 keys, with 290 to 350 TFLOP/s.
    attention_large_key_dim = 256  # blocks of larger keys exceed shared memory
    attention_split_waves = 2
    attention_many_waves = 12
    attention_min_split_keys = 128
    attention_max_splits = 64
    attention_max_split_rows = 64  # a prefill tile has enough programs
    attention_merge_splits = 8
    store_kv_num_warps = 1  # a head of one token
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
    mla_gather = LaunchConfig(block_m=16, num_warps=4)
    mla_absorb = LaunchConfig(block_m=16, num_warps=1)
    mla_absorb_fp8 = LaunchConfig(block_m=4, num_warps=4)
    mla_merge_num_warps = 4
    mla_fp8_block_m = 64
    mla_warp_rank = 256  # of a latent from which storing it takes four warps

    # ---- expert-parallel dispatch: H200, `fulgurite bench dispatch --device cuda`
    dispatch_max_row_items = 8192
    dispatch_max_combine_items = 1024
    dispatch_layout = LaunchConfig(block_m=512, num_warps=8)
    dispatch_warp_items = 2048
    dispatch_combine_programs_per_sm = 16

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
    elementwise = LaunchConfig(block_n=1024, num_warps=4)
    cross_entropy = LaunchConfig(block_n=8192, num_warps=16)
    rms_norm_min_elements = 512
    rms_norm_elements_per_warp = 512
    rms_norm_max_row = 16384
    rope_small_batch = 256
    rope_max_heads = 8
    rope_elements = 1024

    # ---- linear attention: not measured yet; tiles that fit into registers
    causal_conv = LaunchConfig(block_m=16, block_n=64, num_warps=4)
    delta_rule_inverse = LaunchConfig(num_warps=4)
    delta_rule_chunked = LaunchConfig(block_n=64, num_warps=8, num_stages=1)
    delta_rule_recurrent = LaunchConfig(block_n=16, num_warps=1)

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
