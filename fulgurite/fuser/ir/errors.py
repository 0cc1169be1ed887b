"""Errors of the fuser that its callers handle."""

from __future__ import annotations


class Unsupported(Exception):
    """This op, with these arguments, is not one that the fuser generates code for."""
