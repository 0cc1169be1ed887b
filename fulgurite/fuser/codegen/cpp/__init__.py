"""Scheduled kernels → C++ text, one translation unit a region."""
