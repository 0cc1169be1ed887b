"""Quantization and dequantization kernels."""
