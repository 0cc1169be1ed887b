"""Expert-parallel dispatch and combine: wire format and kernels."""
