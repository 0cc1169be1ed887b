"""Paged attention: operator, reference, C++ and Triton."""
