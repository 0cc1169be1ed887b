"""Files that only say where the weights are: the first bytes of a file in, an error or nothing out.

A repository cloned without Git LFS holds such a text of three lines in place of every large file.
"""

from __future__ import annotations

from fulgurite.errors import WeightsError

BEGINNING = b"version https://git-lfs.github.com/"


def refuse_pointer(first: bytes, where: str) -> None:
    """`first`: at least as many bytes as `BEGINNING` has, where the file has them."""
    if first.startswith(BEGINNING):
        raise WeightsError(
            "this is a pointer of Git LFS, not the weights it stands for",
            where=where,
            next="git lfs pull in that folder, or download the file itself",
        )
