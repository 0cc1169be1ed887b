"""GEMM and GEMV with quantized or dense weights, and fused projections."""
