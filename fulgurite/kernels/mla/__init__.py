"""Multi-head latent attention (MLA) over a paged cache: operator, reference, C++ and Triton."""
