"""The errors Fulgurite raises. Each says what went wrong, where, and what to do next.

FulguriteError
├── ArgumentError (also ValueError)    an argument of ours has a value that is not allowed
├── CaptureError                       the program could not be captured
│   ├── GraphBreakError                fullgraph=True and something in the program breaks the graph
│   └── OpError (also RuntimeError)     an op of the program refuses its inputs
├── CompileError                       an op, a transform or an executor failed while compiling
│   ├── VerifyError                    a trace breaks a rule of its stage; names the transform that made it
│   └── FusionError                    fuse() was asked for a kernel that can't be generated
├── TraceTextError (also ValueError)   an edited trace could not be read back
├── NonFiniteError (also ArithmeticError)   the NaN/inf finder found its op
├── FormatError (also ValueError)      a number format can't hold this tensor, or a device can't run it
├── WeightsError (also ValueError)     a checkpoint is missing something, has too much, or is damaged
├── ReplayError                        a step can't be recorded: it is more than native kernels and views
├── CapacityError (also MemoryError)   a model does not fit into the memory there is
├── RankError (also RuntimeError)      another rank is gone, did not come, or left
└── CacheError (also OSError)          the kernel cache can't be used where it is asked to be
"""

from __future__ import annotations


class FulguriteError(Exception):
    """An error with up to three parts, printed one a line.

    `what` is the message itself; `rows` are labelled lines below it, in the order given: by custom
    `where` (the user's source line), `input` (dtype, shape, stride) and `next` (what to do about it).
    """

    def __init__(self, what: str, **rows: str | None) -> None:
        self.what = what
        self.rows = {label: text for label, text in rows.items() if text}
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        width = max((len(label) for label in self.rows), default=0)
        for label, text in self.rows.items():
            first, *rest = text.splitlines()
            lines.append(f"  {label:<{width}}   {first}")
            lines.extend(f"  {'':<{width}}   {line}" for line in rest)
        return "\n".join(lines)


class ArgumentError(FulguriteError, ValueError):
    """An argument has a value that is not allowed; the message lists what is."""


class CaptureError(FulguriteError):
    """The program could not be captured."""


class GraphBreakError(CaptureError):
    """fullgraph=True was asked for and the program breaks the graph."""


class OpError(CaptureError, RuntimeError):
    """An op of the program refuses its inputs, as it would in eager torch."""


class CompileError(FulguriteError):
    """An op, a transform or an executor failed while compiling."""


class VerifyError(CompileError):
    """A trace breaks a rule of its stage."""


class FusionError(CompileError):
    """A whole function was to become generated kernels, and something in it can't."""


class TraceTextError(FulguriteError, ValueError):
    """The text of a trace could not be read back."""


class NonFiniteError(FulguriteError, ArithmeticError):
    """An op made a NaN or an infinity out of finite inputs."""


class FormatError(FulguriteError, ValueError):
    """A number format can't hold this tensor, or this device can't run the format."""


class WeightsError(FulguriteError, ValueError):
    """A checkpoint is missing a tensor, has one too many, or is damaged."""


class CapacityError(FulguriteError, MemoryError):
    """A model does not fit into the memory there is; the message says what would."""


class RankError(FulguriteError, RuntimeError):
    """Ranks that work together lost one; the message names it, `ranks` has its number."""

    def __init__(self, what: str, ranks: tuple[int, ...] = (), **rows: str | None) -> None:
        super().__init__(what, **rows)
        self.ranks = ranks


class ReplayError(FulguriteError):
    """A step can't be recorded: something in it is neither a native kernel nor a view."""


class CacheError(FulguriteError, OSError):
    """The cache folder can't be used."""
