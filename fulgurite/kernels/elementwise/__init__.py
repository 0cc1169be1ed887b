"""Fused elementwise kernels of a transformer layer: norms, RoPE, gates, residual adds."""
