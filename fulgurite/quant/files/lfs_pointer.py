"""Detects Git LFS pointer files: the first bytes of a file in, an error or nothing out.

A repository that was cloned without Git LFS contains a three-line text file in place of each large
file.
"""

from __future__ import annotations

from fulgurite.errors import WeightsError

POINTER_PREFIX = b"version https://git-lfs.github.com/"


def reject_lfs_pointer(head: bytes, where: str) -> None:
    """Raise for a Git LFS pointer. `head`: the first bytes of the file, as long as
    `POINTER_PREFIX`.
    """
    if head.startswith(POINTER_PREFIX):
        raise WeightsError(
            "this file is a Git LFS pointer, not the weights",
            where=where,
            next="run `git lfs pull` in that folder, or download the file",
        )
