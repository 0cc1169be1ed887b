"""Program → what is wrong with its compiled form.

In: a program and a target ("cpu", "interpret" or "cuda"). Out: None, or a `Failure`. `Discard` is raised
if there is nothing to compare: eager refuses the program, or torch's own capture does or changes it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import fulgurite
from tests.fuzz import oracle
from tests.fuzz.coverage import count_ops
from tests.fuzz.oracle import REFUSALS, Reference, evaluation
from tests.fuzz.program import Program, live_part
from tests.fuzz.values import comparable, is_same, parts_of

REPEATS = 3  # later calls run the host program, our autograd function or a CUDA graph
SLACK = 16.0  # ulps of the coarsest dtype
SPREAD = 32.0  # times the spread of perturbed runs
COVERAGE: Counter[str] = Counter()  # ops of all programs that this process checked
CUDA_ERROR = re.compile(r"CUDA error|device-side assert|cudaError|CUDA driver error")


class Discard(Exception):
    """There is nothing to compare; the text is the reason."""


class DeviceLost(Exception):
    """A device-side assert or an illegal access: this process can't use the device any more."""


@dataclass(frozen=True)
class Failure:
    """What is wrong.

    category   "wrong", "metadata", "raises" or "accepts" (eager raises, compiled does not)
    what       one line: the error's first line, or the kind of difference
    output     the number of the output that differs; -1 if it is not one
    """

    category: str
    what: str
    detail: str
    output: int = -1

    @property
    def key(self) -> tuple[str, str]:
        return self.category, self.what


@dataclass
class Results:
    """Everything visible of a call."""

    outputs: tuple[Any, ...]
    arguments: list[Any]
    gradients: list[Tensor | None]


def call(function: Callable[..., Any], reference: Reference) -> Results:
    """Call a function with the arguments of a reference."""
    program, arguments = reference.program, reference.arguments()
    leaves = [a for a, given in zip(arguments, program.inputs, strict=False) if given.requires_grad]
    with evaluation(False):
        outputs = function(*arguments)
        gradients = oracle.gradients_of(outputs, leaves) if program.gradient else []
    return Results(outputs, arguments, gradients)


def device_of(target: str) -> str:
    return "cuda" if target == "cuda" else "cpu"


def check(program: Program, target: str = "cpu") -> Failure | None:
    """Compare the compiled program with eager, for all its calls."""
    device = device_of(target)
    if program.raises:
        return check_error(program, device)
    try:
        references = [Reference(program, numbers, device).run() for numbers in program.calls]
    except REFUSALS as error:
        raise_if_lost(error)
        raise Discard("eager refuses it") from error
    torch._dynamo.reset()
    compiled = fulgurite.compile(program.function(), dynamic=program.dynamic)
    for number, reference in enumerate(references):
        earlier: list[Results] = []
        for _ in range(REPEATS):
            try:
                earlier.append(call(compiled, reference))
            except Exception as error:
                raise_if_lost(error)
                if captured(program, references, number) is None:
                    raise Discard("torch can't capture it") from error
                return Failure("raises", error_line(error), str(error)[:2000])
            failure = compare(earlier[-1], reference)
            if failure is not None:
                failure = confirm(failure, earlier[-1], program, references, number)
                if failure is not None:
                    return failure
                break  # strides that torch's rules predict
        failure = compare(earlier[0], reference, strides=False)
        if failure is not None:
            return Failure("wrong", "a later call overwrites a result", failure.detail)
    COVERAGE.update(count_ops(compiled))
    return None


def confirm(
    failure: Failure,
    results: Results,
    program: Program,
    references: Sequence[Reference],
    number: int,
) -> Failure | None:
    """The failure, unless torch's own capture gives the same."""
    theirs = captured(program, references, number)
    if theirs is None:
        raise Discard("torch can't capture it")
    if failure.what in ("dtype", "shape"):
        expected = fake_output(program, references[number], failure.output)
        find = all_dtypes if failure.what == "dtype" else all_shapes
        if find(results.outputs[failure.output :][:1]) == find(expected):
            raise Discard(f"torch's rules for a {failure.what} differ from its kernels")
    if failure.what == "strides":
        if have_known_strides(results, theirs, program, references[number]):
            values = compare(results, references[number], strides=False)
            return values and confirm(values, results, program, references, number)
    if compare(theirs, references[number], strides=False) is None:
        return failure
    if same_results(results, theirs):
        raise Discard("torch captures another program")
    return failure


def check_error(program: Program, device: str) -> Failure | None:
    """Eager refuses the last line; compiled must too."""
    arguments = Reference(program, program.calls[0], device).arguments
    try:
        with evaluation(False):
            program.function()(*arguments())
    except (IndexError, RuntimeError) as error:
        wanted: Exception = error
    else:
        raise Discard("eager runs it on this device")
    torch._dynamo.reset()
    compiled = fulgurite.compile(program.function(), dynamic=program.dynamic)
    try:
        with evaluation(False):
            result = compiled(*arguments())
    except Exception as error:
        raise_if_lost(error)
        return None
    return Failure("accepts", error_line(wanted), f"eager: {wanted}\ncompiled: {result}")


def captured(program: Program, references: Sequence[Reference], number: int) -> Results | None:
    """What torch's capture makes of the program; None if it raises."""
    torch._dynamo.reset()
    compiled = torch.compile(program.function(), backend="aot_eager", dynamic=program.dynamic)
    try:
        for reference in references[: number + 1]:
            results = call(compiled, reference)
    except Exception as error:
        raise_if_lost(error)
        return None
    return results


def raise_if_lost(error: Exception) -> None:
    if CUDA_ERROR.search(str(error)):
        raise DeviceLost(str(error)[:500]) from error


def error_line(error: Exception) -> str:
    """The first line of an error, without what differs between programs."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    causes = re.findall(r"failed on [^:]*: (.*)", first)
    first = re.sub(r"\b[a-z]\d+(_\d+)?\b|0x[0-9a-f]+|[-+]?\d[\d.e+-]*", "N", (causes or [first])[0])
    first = re.sub(r"\b\w+_N\b|'[^']*'|%\w+|\[[^\]]*\]|\([^)]*\)", "_", first)
    return f"{type(error).__name__}: {first[:110]}"


# ---- comparison ----------------------------------------------------------------------------------


def all_strides(outputs: Sequence[Any]) -> list[Any]:
    """Strides of all outputs, where they have a meaning."""
    return [
        [s if n > 1 else -1 for n, s in zip(p.shape, p.stride(), strict=True)] if p.numel() else []
        for value in outputs
        for p in parts_of(value)
    ]


def all_dtypes(outputs: Sequence[Any]) -> list[Any]:
    return [p.dtype for value in outputs for p in parts_of(value)]


def all_shapes(outputs: Sequence[Any]) -> list[Any]:
    return [p.shape for value in outputs for p in parts_of(value)]


def fake_output(program: Program, reference: Reference, number: int) -> tuple[Any, ...]:
    """One output that torch's fake rules predict; none if they refuse the program.

    Other outputs may have sizes that depend on data, which fake rules don't predict.
    """
    alone = live_part(replace(program, outputs=program.outputs[number:][:1]))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = replace(reference, program=alone).arguments()
    arguments = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in given]
    try:
        with mode, evaluation(False):
            return alone.function()(*arguments)
    except Exception as error:
        raise_if_lost(error)
        return ()


def have_known_strides(
    results: Results, theirs: Results, program: Program, reference: Reference
) -> bool:
    """Whether each output's strides are those of eager, of torch's capture or of its fake rules."""
    for number, name in enumerate(program.outputs):
        ours = all_strides(results.outputs[number:][:1])
        known = [all_strides([reference.eager[name]]), all_strides(theirs.outputs[number:][:1])]
        if ours not in known and ours != all_strides(fake_output(program, reference, number)):
            return False
    return True


def same_results(one: Results, two: Results) -> bool:
    """Whether two calls agree within the usual rounding."""
    ours, theirs = ([*r.outputs, *r.arguments, *r.gradients] for r in (one, two))
    pairs = zip(ours, theirs, strict=False)
    kinds = [[type(value) for value in values] for values in (ours, theirs)]
    return kinds[0] == kinds[1] and all(
        torch.allclose(comparable(a), comparable(b).to(comparable(a)), 1e-2, 1e-4, equal_nan=True)
        for value, other in pairs
        if value is not None and other is not None
        for a, b in zip(parts_of(value), parts_of(other), strict=True)
    )


def compare(results: Results, reference: Reference, strides: bool = True) -> Failure | None:
    """The first difference between compiled and eager."""
    program = reference.program
    spread = Spread(reference)
    for number, name in enumerate(program.outputs):
        value, eager = results.outputs[number], reference.eager[name]
        failure = compare_metadata(value, eager, number, strides)
        if failure is None:
            failure = compare_values(value, name, reference, spread, number)
        if failure is not None:
            return failure
    for name, value in zip(program.arguments, results.arguments, strict=True):
        if isinstance(value, Tensor) and not is_same(value, reference.eager[name]):
            failure = compare_values(value, name, reference, spread, -1)
            if failure is not None:
                return Failure("wrong", "a written input", f"{name}: {failure.detail}")
    return compare_gradients(results, reference, spread)


def compare_metadata(ours: Any, eager: Any, number: int, strides: bool) -> Failure | None:
    def metadata(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return type(value)
        known: list[Any] = [type(value), value.dtype, tuple(value.shape), value.device]
        if strides and value.numel() and not isinstance(value, TwoTensor):
            sizes = zip(value.shape, value.stride(), strict=True)
            known.append(tuple(stride if size > 1 else -1 for size, stride in sizes))
        return known

    have, want = metadata(ours), metadata(eager)
    if have == want:
        return None
    names = ("type", "dtype", "shape", "device", "strides")
    pairs = zip(names, have, want, strict=False) if isinstance(want, list) else []
    what = next((name for name, a, b in pairs if a != b), "type")
    return Failure("metadata", what, f"{have} instead of {want}", number)


class Spread:
    """The runs in which every rounding is perturbed; made when first asked for."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.runs: list[Any] | None = None

    def values(self, name: str) -> list[Any]:
        return [scope[name] for scope, _ in self._runs()]

    def gradients(self, number: int) -> list[Any]:
        return [gradients[number] for _, gradients in self._runs()]

    def _runs(self) -> list[Any]:
        if self.runs is None:
            self.runs = self.reference.perturbed()
        return self.runs


def compare_values(
    ours: Any, name: str, reference: Reference, spread: Spread, number: int
) -> Failure | None:
    eager, wide = reference.eager[name], reference.wide[name]
    if is_same(ours, eager):
        return None
    if name in reference.exact:
        return Failure("wrong", "an exact value", f"{name}: {ours}\ninstead of {eager}", number)
    message = difference(ours, eager, wide, reference.eps[name], lambda: spread.values(name))
    return message and Failure("wrong", "a value", f"{name}: {message}", number)


def compare_gradients(results: Results, reference: Reference, spread: Spread) -> Failure | None:
    wanted = reference.gradients
    if len(results.gradients) != len(wanted):
        return Failure(
            "wrong", "other gradients", f"{len(results.gradients)} gradients, not {len(wanted)}"
        )
    eps = max(reference.eps.values(), default=0.0)
    for number, (ours, eager) in enumerate(zip(results.gradients, wanted, strict=True)):
        # AOTAutograd gives zeros where eager gives None, and the reverse
        if ours is None or eager is None:
            rest = next((g for g in (ours, eager) if g is not None), None)
            if rest is not None and any(part.any() for part in parts_of(rest)):
                return Failure(
                    "wrong", "a missing gradient", f"gradient {number}: {ours}, eager {eager}"
                )
            continue
        if is_same(ours, eager):
            continue
        wide = reference.wide_gradients[number]
        # a sum of two equal terms of opposite sign is the rounding of one of them with FMA
        message = difference(
            ours, eager, wide, eps, lambda: spread.gradients(number), floor=4 * eps
        )
        if message:
            return Failure("wrong", "a gradient", f"gradient {number}: {message}")
    return None


def difference(
    ours: Any,
    eager: Any,
    wide: Any,
    eps: float,
    perturbed: Callable[[], list[Any]],
    floor: float = 0.0,
) -> Any:
    """Why a value is wrong; None if it is right: its error is at most twice eager's plus rounding.

    floor   an error that is always allowed
    """
    if type(ours) is not type(eager):  # a gradient of zeros may be no subclass
        return f"{type(ours).__name__} instead of {type(eager).__name__}"
    sets = zip(parts_of(ours), parts_of(eager), parts_of(wide), strict=True)
    for position, (a, b, exact) in enumerate(sets):
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        bad = outliers(a, b, exact, eps, None, floor)
        if bad.any():
            runs = [comparable(parts_of(run)[position]) for run in perturbed()]
            bad = outliers(a, b, exact, eps, torch.stack(runs), floor)
        if bad.any():
            where = bad.nonzero()[0].tolist()
            pick = [float(comparable(t)[tuple(where)]) for t in (a, b, exact)]
            return (
                f"{int(bad.sum())} of {bad.numel()} differ, first at {where}: {pick[0]!r}, eager {pick[1]!r}, "
                f"float64 {pick[2]!r}"
            )
    return None


def outliers(
    a: Tensor, b: Tensor, exact: Tensor, eps: float, runs: Tensor | None, floor: float = 0.0
) -> Tensor:
    """Where our number is further from float64 than rounding explains."""
    dtype = b.dtype.to_real() if b.is_complex() else b.dtype
    ours, eager, right = comparable(a), comparable(b), comparable(exact)
    if not dtype.is_floating_point:
        unstable = (
            (runs != right).any(0) if runs is not None else torch.zeros_like(ours, dtype=torch.bool)
        )
        return (ours != eager) & ~unstable
    kind = kind_of(ours)
    allowed_kinds = [kind_of(eager), kind_of(right), kind_of(right.to(dtype).double())]
    scale = right.abs()
    if b.is_complex():  # the two parts are rounded as one number
        scale = torch.linalg.vector_norm(right, dim=-1, keepdim=True).expand_as(right)
    tiny = max(torch.finfo(dtype).tiny, 1e-38)
    allowed = SLACK * eps * scale + tiny + floor
    error_of_eager = (eager - right).abs()
    finite = error_of_eager.isfinite()
    if bool(finite.any()):
        allowed = allowed + 2 * error_of_eager[finite].max()
    if runs is not None:
        off = (runs - right).abs()
        allowed = allowed + SPREAD * torch.where(off.isnan(), torch.inf, off).amax(0)
        narrow = runs.to(dtype).double()
        allowed_kinds += [*map(kind_of, runs), *map(kind_of, narrow)]
    wrong_kind = torch.stack([kind != other for other in allowed_kinds]).all(0)
    numeric = ours.isfinite() & right.isfinite()
    return wrong_kind | (numeric & ~((ours - right).abs() <= allowed))


def kind_of(x: Tensor) -> Tensor:
    """0 for finite numbers, 1 for inf, -1 for -inf, 2 for NaN."""
    return torch.where(x.isnan(), 2.0, torch.where(x.isinf(), x.sign(), 0.0))
