"""Errors that Fulgurite raises.

Each says what went wrong, where, and what to do next. All are subclasses of `FulguriteError`.

    FulguriteError
    ├── ArgumentError (also ValueError)    an argument has a value that is not allowed
    ├── CaptureError                       the program could not be captured
    │   ├── GraphBreakError                fullgraph=True, and the program breaks the graph
    │   └── OpError (also RuntimeError)    an op of the program rejects its inputs
    ├── CompileError                       a transform, an executor or a compiler failed
    │   ├── VerifyError                    a trace breaks a rule of its stage; names the transform at fault
    │   └── FusionError                    fuse() met an op that can't be part of a generated kernel
    ├── TraceTextError (also ValueError)   the text of an edited trace could not be loaded
    ├── NonFiniteError (also ArithmeticError)   find_nonfinite found the op that produced a NaN or infinity
    ├── FormatError (also ValueError)      a number format can't hold the tensor, or the device lacks it
    ├── WeightsError (also ValueError)     a checkpoint lacks a tensor, has an unknown one, or is damaged
    ├── ReplayError                        a step can't be recorded: it runs more than native kernels and views
    ├── CapacityError (also MemoryError)   a model, or the rows of an expert-parallel rank, don't fit
    ├── RankError (also RuntimeError)      another rank failed, timed out or left
    └── CacheError (also OSError)          the kernel cache can't be used

`FallbackWarning` is no error: something of ours failed, and torch runs that part of the program.
"""

from __future__ import annotations


class FulguriteError(Exception):
    """An error message with labelled lines below it.

    `what` is the message. `details` are the labelled lines, usually `where` (the user's source line),
    `input` (dtype, shape, strides) and `next` (what to do about it).
    """

    may_fall_back = True  # False: raised by a transform or an executor of the user

    def __init__(self, what: str, **details: str | None) -> None:
        self.what = what
        self.details = {label: text for label, text in details.items() if text}
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        width = max((len(label) for label in self.details), default=0)
        for label, text in self.details.items():
            first, *rest = text.splitlines()
            lines.append(f"  {label:<{width}}   {first}")
            lines.extend(f"  {'':<{width}}   {line}" for line in rest)
        return "\n".join(lines)

    def one_line(self) -> str:
        """What went wrong and what to do, for JSON and logs."""
        parts = [self.what, self.details.get("next")]
        return " ".join("; ".join(part for part in parts if part).split())


class ArgumentError(FulguriteError, ValueError):
    """An argument has a value that is not allowed. The message lists the allowed ones."""


class CaptureError(FulguriteError):
    """The program could not be captured."""


class GraphBreakError(CaptureError):
    """The program breaks the graph, and `fullgraph=True`.

    frames   file and line of the calls that lead to the break, outermost first
    """

    frames: tuple[tuple[str, int], ...] = ()


class OpError(CaptureError, RuntimeError):
    """An op of the program rejects its inputs, as it would in eager mode."""


class CompileError(FulguriteError):
    """A transform, an executor or a compiler failed."""


class VerifyError(CompileError):
    """A trace breaks a rule of its stage."""


class FusionError(CompileError):
    """`fuse()` met an op that can't be part of a generated kernel."""


class TraceTextError(FulguriteError, ValueError):
    """The text of an edited trace could not be loaded."""


class NonFiniteError(FulguriteError, ArithmeticError):
    """An op produced a NaN or an infinity from finite inputs."""


class FormatError(FulguriteError, ValueError):
    """A number format can't hold this tensor, or this device can't run the format."""


class WeightsError(FulguriteError, ValueError):
    """A checkpoint lacks a tensor, has an unknown one, or is damaged."""


class CapacityError(FulguriteError, MemoryError):
    """A model does not fit into memory, or a rank would receive too many rows. Lists what would fit."""


class RankError(FulguriteError, RuntimeError):
    """Another rank failed, timed out or left. `ranks` holds their numbers."""

    def __init__(self, what: str, ranks: tuple[int, ...] = (), **details: str | None) -> None:
        super().__init__(what, **details)
        self.ranks = ranks


class ReplayError(FulguriteError):
    """A step can't be recorded: something in it is neither a native kernel nor a view."""


class CacheError(FulguriteError, OSError):
    """The kernel cache can't be used."""


class FallbackWarning(UserWarning):
    """A part of a program could not be compiled, and torch runs it. With FULGURITE_STRICT=1: an error."""
