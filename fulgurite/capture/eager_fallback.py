"""Run a call in eager mode if its capture fails where eager succeeds.

In: the function, and the error of an op on FakeTensors. Out: the function's result in eager mode, with one
`FallbackWarning`. Some ops accept inputs that their FakeTensor rules refuse: `F.grouped_mm` of float32
numbers on a CPU. If eager raises as well, the program is at fault.

A function is run again from its start, so only if nothing of it ran before: not if an earlier part, before a
graph break, has run. With `FULGURITE_STRICT=1` and with `fullgraph=True` the error is raised.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fulgurite.config import settings
from fulgurite.errors import FallbackWarning, FulguriteError, OpError
from fulgurite.logs import LOG

# folders, with their separator: torchvision is not a part of torch
PACKAGES = tuple(
    os.path.join(Path(module.__file__ or "").parent, "")
    for module in (torch, sys.modules["fulgurite"])
)


class EagerFallback:
    """Remembers the kinds of inputs whose capture failed."""

    def __init__(self, function: Callable[..., Any], fullgraph: bool) -> None:
        self.function = function
        self.fullgraph = fullgraph
        self.failed: set[Any] = set()

    def is_known_to_fail(self, args: Any, kwargs: Any) -> bool:
        """Whether a call with inputs of these kinds has failed to be captured."""
        return bool(self.failed) and _input_kinds(args, kwargs) in self.failed

    def can_run(self, error: BaseException, translated: FulguriteError) -> bool:
        """Whether eager mode may run a call that failed so."""
        is_of_op = isinstance(translated, OpError)
        return is_of_op and not (settings().strict or self.fullgraph or _has_run(error))

    def run(self, translated: FulguriteError, args: Any, kwargs: Any) -> Any:
        """The result in eager mode; `translated` if eager raises, too."""
        try:
            result = self.function(*args, **kwargs)
        except Exception as error:
            raise translated from error
        self.failed.add(_input_kinds(args, kwargs))
        LOG.warning("capture failed, eager mode runs it: %s", translated.what)
        warnings.warn(
            f"a function could not be captured: {translated.what}\n"
            f"  runs instead   eager mode, for inputs of these dtypes\n"
            f"  where          {translated.details.get('where', '')}\n"
            "  next           torch refuses these inputs while capturing, though the op takes them; "
            "FULGURITE_STRICT=1 raises the error",
            FallbackWarning,
            stacklevel=4,
        )
        return result


def _input_kinds(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Dtype, device and rank of tensors, types of other inputs."""
    leaves = pytree.tree_leaves((args, kwargs))
    return tuple(
        (leaf.dtype, leaf.device, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in leaves
    )


def _has_run(error: BaseException) -> bool:
    """Whether the user's code was running when the capture failed: a later part of a function."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(PACKAGES):
            return True
        frame = frame.tb_next
    return False
