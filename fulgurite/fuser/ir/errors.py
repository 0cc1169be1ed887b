"""Errors of the fuser that its callers handle."""

from __future__ import annotations


class Unsupported(Exception):
    """This op, with these arguments, is not one that the fuser generates code for."""


class KernelBuildError(Exception):
    """A generated kernel that can't be compiled, or loaded onto the device."""

    def __init__(self, kernel: str, problem: Exception) -> None:
        self.kernel = kernel
        super().__init__(f"the kernel {kernel}: {type(problem).__name__}: {problem}")
