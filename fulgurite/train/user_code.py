"""`user_code`: runs Python of the user (a config file, a reward); its error in, an `ArgumentError` out."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fulgurite.errors import ArgumentError, FulguriteError

PACKAGE = Path(__file__).parent.parent


@contextmanager
def user_code(what: str, *, where: str | None = None, next: str | None = None) -> Iterator[None]:
    """Turn an error into one that says `what` raised it, and in which line. Ours pass unchanged."""
    try:
        yield
    except FulguriteError:
        raise
    except Exception as error:
        places = "; ".join(filter(None, (find_line(error), where)))
        raise ArgumentError(
            f"{what} raised {type(error).__name__}: {error}", where=places, next=next
        ) from error


def find_line(error: Exception) -> str | None:
    """Where an error was raised, as `file:line`; None: in no line of the user."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and PACKAGE not in Path(frame.filename).parents
    ]
    library = [frame for frame in frames if "lib/python" not in frame.filename]
    return f"{library[-1].filename}:{library[-1].lineno}" if library else None
