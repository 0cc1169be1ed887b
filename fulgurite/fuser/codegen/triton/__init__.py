"""Scheduled kernels → Triton text, one module a region."""
