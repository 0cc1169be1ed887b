"""Mixture of experts: routing, sorting, expert GEMMs, combine."""
