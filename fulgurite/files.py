"""Files that are written: whole or not at all, and readable by whom the umask allows.

`tempfile` makes files for this user only, and so does `safetensors.torch.save_file` since 0.8: a server that
runs as another user could not read a model.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from os import PathLike
from pathlib import Path


def write_atomically(path: Path, text: str) -> Path:
    """Write a file completely or not at all, by renaming a temporary file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_name(path) as temporary:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    return path


def share(path: str | PathLike[str]) -> None:
    """Give a file the mode that `open` would have given it."""
    path = Path(path)
    with _temporary_name(path) as temporary:
        temporary.touch(exist_ok=False)
        path.chmod(stat.S_IMODE(temporary.stat().st_mode))


@contextlib.contextmanager
def _temporary_name(path: Path) -> Iterator[Path]:
    """A name beside a file for this thread; what is left there is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
