"""What hand-written kernels share: device functions, cached launches, PDL, the C++ library."""
