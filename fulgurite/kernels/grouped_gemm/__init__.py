"""Grouped GEMM: rows sorted by expert, one weight per expert."""
