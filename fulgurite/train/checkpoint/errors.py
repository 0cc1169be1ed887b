"""Errors and warnings of checkpoints, and how an error of a save is described."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from torch.distributed.checkpoint import CheckpointException

from fulgurite.errors import FulguriteError

# The storage refused a write. The run can go on, and the next save may work.
STORAGE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ESTALE,
    errno.ENOENT,
}


class CheckpointError(FulguriteError, RuntimeError):
    """A checkpoint can't be saved or loaded.

    `is_storage`: the storage refused it (full disk, read-only folder), so a later save may work.
    """

    def __init__(self, what: str, is_storage: bool = False, **details: str | None) -> None:
        super().__init__(what, **details)
        self.is_storage = is_storage


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, has another size, or other bytes than were written."""


class CheckpointWarning(UserWarning):
    """A save failed and the run goes on, or a damaged checkpoint was passed over."""


def describe_failure(error: BaseException, rank: int) -> tuple[str, bool]:
    """One line about an error of rank `rank`, and whether the storage is at fault."""
    if isinstance(error, CheckpointException):
        texts, is_storage = [], False
        for failed_rank, (cause, _trace) in error.failures.items():
            text, cause_is_storage = describe_failure(cause, failed_rank)
            texts.append(text)
            is_storage = is_storage or cause_is_storage
        return "; ".join(texts), is_storage
    if isinstance(error, CheckpointError):
        return error.one_line(), error.is_storage
    refused = find_storage_error(error)
    if refused is not None:
        where = f" ({refused.filename})" if refused.filename else ""
        return f"rank {rank}: {refused.strerror or refused}{where}", True
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"rank {rank}: {type(error).__name__}: {first_line}", False


def find_storage_error(error: BaseException) -> OSError | None:
    """The OSError of the storage in the chain of causes of an error."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in STORAGE_ERRORS:
            return cause
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
