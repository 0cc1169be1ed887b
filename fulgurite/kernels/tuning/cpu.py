"""C++ kernels on CPUs: tuned constants, a table an instruction set.

In: the name of an instruction set. Out: a `CpuTuning`, and its C++ text, which is compiled in front
of the kernels (`kernels.common.cpu_library`): field `gemm_block_k` is the constant `GEMM_BLOCK_K`.

Measured on two cores of a Xeon with AVX-512 VNNI (libgomp), `fulgurite bench quant` and
`fulgurite bench moe`. AVX2 and generic CPUs were not measured; what differs there follows from the
number of vector registers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class CpuTuning:
    """Constants of the C++ kernels."""

    # registers: accumulators of the GEMM kernel are strip_panels * register_tokens vectors
    gemm_strip_panels: int
    gemm_register_tokens: int

    # GEMM with a quantized weight
    gemm_private_x_tokens: int = 4  # each thread prepares x for itself: cheaper than a barrier
    gemm_chunk_tokens: int = 256  # rows of x prepared at a time
    gemm_prefetch_bytes: int = 4096  # codes fetched ahead: past the end of a page
    # products under which a second thread costs more than it gives: a parallel region took 0.9 to
    # 1.1 us, and one thread makes 50 products a nanosecond
    gemm_min_parallel_work: int = 1 << 17
    gemm_block_k: int = 128  # columns dequantized at a time, into L1
    gemm_dequantize_first_tokens: int = 16  # from here on dequantizing apart pays

    # grouped GEMM with dense weights
    grouped_gemm_max_rows: int = 512  # rows whose sums are kept together
    grouped_gemm_block_words: int = 128  # words of K that are transposed at a time: 16 KB, L1
    # rows of an average expert up to which torch's grouped GEMM is slower (8 experts [1536, 2048])
    grouped_gemm_small_m: int = 24
    grouped_gemm_min_parallel_work: int = 1 << 17
    grouped_epilogue_min_parallel_work: int = 1 << 14
    widen_min_parallel_work: int = 1 << 15

    # float32 convolutions and linears (two cores of an EPYC with AVX-512)
    conv_min_parallel_work: int = 1 << 18  # products
    conv_band_bytes: int = 1 << 18  # input rows that are copied at a time: a part of L2
    depthwise_min_parallel_work: int = 1 << 17

    # mixture of experts
    route_min_parallel_work: int = 1 << 12
    combine_min_parallel_work: int = 1 << 15

    # quantize
    quantize_min_parallel_work: int = 1 << 15

    def to_cpp(self) -> str:
        """`const int64_t GEMM_BLOCK_K = 128;`, a line a field."""
        return "\n".join(
            f"const int64_t {field.name.upper()} = {getattr(self, field.name)};"
            for field in fields(self)
        )


CPU_TABLES = {
    "avx512_vnni": CpuTuning(gemm_strip_panels=3, gemm_register_tokens=8),
    "avx2": CpuTuning(gemm_strip_panels=1, gemm_register_tokens=4),
    "generic": CpuTuning(gemm_strip_panels=1, gemm_register_tokens=4),
}
