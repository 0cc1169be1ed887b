"""Random small programs, compiled against eager.

Hypothesis draws inputs (odd shapes, strides, dtypes, views of one another) and three to ten lines of
pointwise, reduction, view, indexing and in-place ops. The compiled program must match eager in values,
dtypes, strides, gradients, mutated inputs and aliasing of outputs. Every stage of its history is printed,
loaded and run with the same results.

A failing program is printed as Python. For more programs: pytest -m slow tests/suites/test_programs.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

import fulgurite
from fulgurite.capture.program_errors import OVERLAPPING_WRITE
from fulgurite.errors import CaptureError, GraphBreakError, OpError
from tests.suites.comparison import (
    assert_same_metadata,
    assert_same_values,
    clone_inputs,
    storage_owners,
    tensors_of,
)

EXECUTORS = [["torch"], ["fuser", "torch"]]  # the suite runs once with each

FLOATS = ("float32", "float64", "bfloat16", "float16")
DTYPES = (*FLOATS, "float32", "int64", "int32", "uint8", "bool", "complex64")
SIZES = (0, 1, 1, 2, 3, 3, 5, 7)
LAYOUTS = ("contiguous", "transposed", "stepped", "expanded", "offset")

POINTWISE = """
    -{x} | {x}.abs() | {x}.sin() | {x}.exp() | torch.relu({x}) | {x}.sigmoid() | {x}.sqrt() | {x} * 2
    {x} + 1.5 | {x} / 3 | {x} - 1 | {x}.square() | {x}.sign() | {x}.clamp(-1, 1) | {x}.isnan() | {x} > 0
    {x}.logical_not() | {x}.float() | {x}.to(torch.bfloat16) | {x}.to(torch.int64) | {x}.round() | {x} ** 3
    torch.nn.functional.gelu({x}) | {x}.nan_to_num() | {x}.conj() | {x}.clone() | {x}.contiguous() | {x} * 1
    {x} + 0 | {x}.real | torch.zeros_like({x}) | torch.full_like({x}, 3) | {x}.bool() | {x}.bitwise_not()
"""
BINARY = """
    {x} + {y} | {x} - {y} | {x} * {y} | {x} / {y} | torch.maximum({x}, {y}) | torch.minimum({x}, {y})
    {x} < {y} | {x} == {y} | torch.where({x} == {y}, {x}, {y}) | torch.add({x}, {y}, alpha=2)
    torch.atan2({x}, {y}) | {x} & {y} | {x}.masked_fill({y} > 0, 2) | torch.lerp({x}, {y}, 0.25)
    torch.cat([{x}.flatten(), {y}.flatten()]) | torch.fmod({x}, 3) * {y} | {x}.expand_as({y})
"""
REDUCTIONS = """
    {x}.sum() | {x}.sum({d}) | {x}.sum({d}, keepdim=True) | {x}.mean({d}) | {x}.amax({d}) | {x}.amin({d}, True)
    {x}.prod({d}) | {x}.any({d}) | {x}.all() | {x}.argmax({d}) | {x}.cumsum({d}) | {x}.var({d}, correction=0)
    {x}.softmax({d}) | {x}.logsumexp({d}) | {x}.max({d})[0] | {x}.max({d})[1] | {x}.norm() | {x}.cumprod({d})
    {x}.sort({d}, stable=True)[0] | {x}.count_nonzero({d})
"""
VIEWS = """
    {x}.transpose({d}, {e}) | {x}.unsqueeze({d}) | {x}.squeeze() | {x}.flatten() | {x}.reshape(-1)
    {x}[..., ::2] | {x}[{i}:] | {x}[:, {i}:] | {x}[{i}] | {x}.select({d}, {i}) | {x}.narrow({d}, {i}, 1)
    {x}.expand(3, *{x}.shape) | {x}.diagonal() | {x}.unfold({d}, 2, 1) | {x}.T | {x}.mT | {x}.detach()
    {x}.movedim({d}, {e}) | {x}.view({x}.shape) | {x}.unbind({d})[-1] | {x}.chunk(2, {d})[0]
    torch.view_as_real({x}) | {x}[None] | {x}[..., -1:] | {x}[1::3]
    {x}.split(2, {d})[-1] | {x}.view_as({x}) | {x}.expand_as({x}) | {x}.as_strided(({i},), (1,))
"""
INDEXING = """
    {x}[[0, -1]] | {x}[:, [0, 0]] | {x}.index_select({d}, torch.tensor([0, 0])) | {x}.flip({d}) | {x}.roll(1, {d})
    {x}.gather({d}, torch.zeros_like({x}, dtype=torch.int64)) | {x}.take(torch.tensor([0])) | {x}.tril()
    {x}.index_fill({d}, torch.tensor([0]), 4) | {x}.scatter({d}, torch.zeros_like({x}, dtype=torch.int64), 1)
    {x}.repeat_interleave(2, {d}) | torch.stack([{x}, {x}], {d}) | {x}[..., torch.tensor(0)] | {x}.repeat(2, *[1] * {x}.dim())
    torch.nn.functional.pad({x}, (1, 2)) | {x}.index_add({d}, torch.tensor([0]), {x}.narrow({d}, 0, 1))
"""
IN_PLACE = """
    {x}.add_(1) | {x}.mul_(2) | {x}.neg_() | {x}.zero_() | {x}.fill_(3) | {x}.relu_() | {x}.clamp_(min=0)
    {x}[..., ::2] = 1 | {x}[{i}] = 2 | {x}[..., {i}:].mul_(3)
    {x}.masked_fill_({x} > 0, 5) | {x}.select({d}, {i}).add_(1) | {x}.transpose({d}, {e}).cumsum_(0) | {x}.sin_()
    {x}[[0, -1]] = 1 | {x}.index_fill_({d}, torch.tensor([0]), 7) | {x}.detach().mul_(2) | {x}.flatten().add_(1)
    {x}.view(-1).sub_(1) | {x}.tril_() | {x}.diagonal().zero_() | {x}.unbind({d})[0].copy_({x}.unbind({d})[-1])
"""
IN_PLACE_BINARY = """
    {x}.add_({y}) | {x}.mul_({y}) | {x}.copy_({y}) | {x}[..., :] = {y} | {x}.transpose({d}, {e}).add_({y})
    {x}[{i}] = {y} | {x}[{i}:].sub_({y}) | {x}[..., ::2].copy_({y})
    {x}.index_put_((torch.tensor([0]),), {y}, accumulate=True) | {x}.masked_fill_({y} > 0, 2)
"""


def _lines(table: str) -> list[str]:
    return [entry.strip() for line in table.strip().splitlines() for entry in line.split("|")]


def make(
    shape: list[int], dtype: str, layout: str, seed: int, requires_grad: bool = False
) -> Tensor:
    """A tensor of random numbers with a given layout."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)

    def fill(*size: int) -> Tensor:
        if kind.is_floating_point or kind.is_complex:
            return torch.randn(size, generator=generator, dtype=torch.float64).to(kind)
        low = 0 if dtype in ("bool", "uint8") else -3
        high = 2 if dtype == "bool" else 5
        return torch.randint(low, high, size, generator=generator).to(kind)

    if layout == "transposed" and shape:
        tensor = fill(*reversed(shape)).permute(*reversed(range(len(shape))))
    elif layout == "stepped" and shape:
        tensor = fill(*shape[:-1], 2 * shape[-1])[..., ::2]
    elif layout == "expanded" and shape:
        tensor = fill(1, *shape[1:]).expand(shape)
    elif layout == "offset":
        tensor = fill(2, *shape)[1]
    else:
        tensor = fill(*shape)
    return tensor.requires_grad_(requires_grad)


@dataclass(frozen=True)
class RandomProgram:
    """Source text: `inputs()` creates the arguments, `program(...)` is compiled."""

    inputs_source: str
    source: str
    computes: bool  # whether any line computes or mutates a visible tensor

    def __repr__(self) -> str:
        return f"\n{self.inputs_source}\n{self.source}"

    def inputs(self) -> list[Tensor]:
        return _run_text(self.inputs_source)["inputs"]()

    def function(self) -> Callable[..., Any]:
        return _run_text(self.source)["program"]


def _run_text(text: str) -> dict[str, Any]:
    namespace = {"torch": torch, "make": make}
    exec(compile(text, "<random program>", "exec"), namespace)
    return namespace


REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
FAMILIES = {
    "pointwise": _lines(POINTWISE),
    "binary": _lines(BINARY),
    "reduction": _lines(REDUCTIONS),
    "view": _lines(VIEWS),
    "indexing": _lines(INDEXING),
    "in place": _lines(IN_PLACE),
    "in place, binary": _lines(IN_PLACE_BINARY),
}


class Builder:
    """Draws a program line by line, running it as it goes so that every line is legal in eager."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.values: dict[str, Tensor] = {}
        self.input_lines: list[str] = []
        self.lines: list[str] = []

    def add_input(self, name: str, gradients: bool) -> None:
        if self.values and self.draw(st.integers(0, 4)) == 0:
            first = next(iter(self.values))
            view = self.draw(st.sampled_from(["[...]", "[..., ::2]", ".flatten()", ".mT", "[1:]"]))
            line = f"{name} = {first}{view}"
        else:
            shape = self.draw(st.lists(st.sampled_from(SIZES), max_size=3))
            dtype = self.draw(st.sampled_from(FLOATS[:2] if gradients else DTYPES))
            layout = self.draw(st.sampled_from(LAYOUTS))
            grad = gradients and self.draw(st.booleans())
            line = f"{name} = make({shape}, {dtype!r}, {layout!r}, {len(self.values)}, {grad})"
        if self.runs(line):
            self.input_lines.append(line)

    def add_line(self, serial: int) -> None:
        family = self.draw(st.sampled_from(list(FAMILIES)))
        template = self.draw(st.sampled_from(FAMILIES[family]))
        x = self.draw(st.sampled_from(list(self.values)))
        fitting = [n for n, v in self.values.items() if _broadcasts(v, self.values[x])]
        dims = self.values[x].dim()
        places = {
            "x": x,
            "y": self.draw(st.sampled_from(fitting or [x])),
            "d": self.draw(st.integers(-dims, max(dims - 1, 0))),
            "e": self.draw(st.integers(-dims, max(dims - 1, 0))),
            "i": self.draw(st.integers(0, 2)),
        }
        line = template.format(**places)
        if "in place" not in family:
            line = f"v{serial} = {line}"
        if self.runs(line):
            self.lines.append(line)

    def runs(self, line: str) -> bool:
        """Run the line; False if eager refuses it."""
        namespace: dict[str, Any] = {"torch": torch, "make": make, **self.values}
        try:
            exec(line, namespace)
        except REFUSALS:
            return False
        name = line.partition(" = ")[0]
        if name.isidentifier():
            self.values[name] = namespace[name]
        return True


def _broadcasts(one: Tensor, two: Tensor) -> bool:
    pairs = zip(reversed(one.shape), reversed(two.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


@st.composite
def programs(draw: Any) -> RandomProgram:
    builder = Builder(draw)
    gradients = draw(st.integers(0, 3)) == 0
    with torch.random.fork_rng():
        for name in "abc"[: draw(st.integers(1, 3))]:
            builder.add_input(name, gradients)
        names = list(builder.values)
        for serial in range(draw(st.integers(3, 10))):
            builder.add_line(serial)
    made = [name for name in builder.values if name not in names]
    results = draw(st.lists(st.sampled_from(list(builder.values)), max_size=3))
    results = [*results, *made[-1:]]
    inputs = "".join(f"    {line}\n" for line in builder.input_lines)
    body = "".join(f"    {line}\n" for line in builder.lines)
    returned = "".join(f"{name}, " for name in results)
    return RandomProgram(
        f"def inputs():\n{inputs}    return [{', '.join(names)}]",
        f"def program({', '.join(names)}):\n{body}    return ({returned})",
        bool(made),
    )


# ---- checking ------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Everything visible of a call."""

    results: tuple[Any, ...]
    inputs: list[Tensor]  # afterwards
    gradients: list[Tensor | None]


def call(function: Callable[..., Any], inputs: list[Tensor]) -> Outcome:
    results = function(*inputs)
    ends = [result for result in results if result.requires_grad]
    leaves = [value for value in inputs if value.requires_grad and value.is_leaf]
    gradients: list[Tensor | None] = []
    if ends and leaves:
        cotangents = [torch.ones_like(end) for end in ends]
        gradients = list(torch.autograd.grad(ends, leaves, cotangents, allow_unused=True))
    return Outcome(results, inputs, gradients)


def zeros_as_none(gradients: list[Tensor | None], eager: list[Tensor | None]) -> list[Any]:
    """AOTAutograd gives zeros where eager gives None, for an input that is written and then unused."""
    pairs = zip(gradients, eager, strict=True)
    return [None if e is None and g is not None and not g.any() else g for g, e in pairs]


def check(program: RandomProgram, executors: list[str]) -> Any:
    """Compiled and eager behave the same, in the first call and the second."""
    torch._dynamo.reset()
    try:
        expected = call(program.function(), program.inputs())
    except RuntimeError:  # backward needs what a later line overwrote
        reject()
    compiled = fulgurite.compile(program.function(), executors=executors, fullgraph=True)
    for _ in range(2):
        agree(_call_or_reject(compiled, program), expected, program)
    assert len(compiled.graphs) <= 1, "the second call compiled again"
    assert compiled.graphs or not program.computes, "nothing was compiled"
    return compiled


def _call_or_reject(compiled: Any, program: RandomProgram) -> Outcome:
    """What it gives; writes that torch can't capture (to memory that overlaps itself, say) are refused aloud."""
    try:
        return call(compiled, program.inputs())
    except GraphBreakError as error:
        if OVERLAPPING_WRITE not in str(error):
            raise
        broken = fulgurite.compile(program.function(), executors="torch")
        eager = call(program.function(), program.inputs())
        assert_same_values(visible_values(call(broken, program.inputs())), visible_values(eager))
        reject()
    except (RuntimeError, OpError, CaptureError, AssertionError):
        if captured_by_torch(program) is not None:
            raise
        reject()


def captured_by_torch(program: RandomProgram) -> Outcome | None:
    """What torch's own capture makes of it, without us; None if it raises."""
    try:
        return call(torch.compile(program.function(), backend="aot_eager"), program.inputs())
    except (RuntimeError, AssertionError):  # Dynamo's errors, and AOTAutograd's of views of inputs
        return None


def agree(ours: Outcome, eager: Outcome, program: RandomProgram) -> None:
    ours.gradients = zeros_as_none(ours.gradients, eager.gradients)
    try:
        assert_same_metadata([ours.results, ours.inputs], [eager.results, eager.inputs])
    except AssertionError:  # capture may turn strides after a write through a transposed view
        captured = captured_by_torch(program)
        if captured is None:
            raise
        assert_same_metadata([ours.results, ours.inputs], [captured.results, captured.inputs])
    assert_same_metadata(ours.gradients, eager.gradients, strides=False)
    try:
        assert_same_values(visible_values(ours), visible_values(eager))
    except (
        AssertionError
    ):  # a write to memory that overlaps itself is another one in torch's capture
        captured = captured_by_torch(program)
        if captured is None:
            raise
        assert_same_values(visible_values(ours), visible_values(captured))
    ours_all, eager_all = [*ours.inputs, *ours.results], [*eager.inputs, *eager.results]
    assert list(storage_owners(ours_all)) == list(storage_owners(eager_all)), (
        "memory is shared differently"
    )
    if _same_objects(ours_all) != _same_objects(
        eager_all
    ):  # inputs that share memory are made anew
        captured = captured_by_torch(program)
        assert captured is not None, "other results are one object"
        assert _same_objects(ours_all) == _same_objects([*captured.inputs, *captured.results])
    ours_grad, eager_grad = ([v.requires_grad for v in values] for values in (ours_all, eager_all))
    assert ours_grad == eager_grad, f"requires_grad {ours_grad}, in eager {eager_grad}"


def visible_values(outcome: Outcome) -> list[Any]:
    return [outcome.results, outcome.inputs, outcome.gradients]


def _same_objects(values: list[Tensor]) -> list[int]:
    return [next(i for i, other in enumerate(values) if other is value) for value in values]


def check_round_trip(program: RandomProgram, compiled: Any) -> int:
    """Check that every stage, printed and loaded, matches the final trace. Returns their number."""
    calls: list[tuple[Any, Any, list[Any]]] = []
    for record in compiled.graphs:
        for kind, built in record.compiled_graphs.items():
            built.run = _record_inputs(built.run, record, kind, calls)
    call(compiled, program.inputs())
    count = 0
    for record, kind, inputs in calls:
        record.compiled_graphs[kind].restore()
        for stage in record.stages(kind):
            ours, final = clone_inputs(inputs), clone_inputs(inputs)
            with torch.no_grad():
                result, expected = stage.load()(*ours), record.final_trace(kind).run(*final)
            assert_same_metadata(list(result), list(expected))
            assert_same_values(list(result), list(expected))
            shared = [
                list(storage_owners(tensors_of(v))) for v in ([ours, result], [final, expected])
            ]
            assert shared[0] == shared[1], f"{stage.name}: memory is shared differently"
            count += 1
    for record in compiled.graphs:
        check_captured(program, record.captured)
        count += 1
    return count


def _record_inputs(run: Callable[..., Any], record: Any, kind: str, calls: list[Any]) -> Any:
    def recorded(inputs: list[Any]) -> Any:
        calls.append((record, kind, clone_inputs(inputs)))
        return run(inputs)

    return recorded


def check_captured(program: RandomProgram, captured: Any) -> None:
    """Check that the loaded captured trace mutates its inputs as eager does and returns the same."""
    outcomes = []
    for run in (captured.load(), captured.run):
        inputs = program.inputs()
        by_name = dict(zip(program.function().__code__.co_varnames, inputs, strict=False))
        outcomes.append((run(*(by_name[node.name] for node in captured.inputs)), inputs))
    (ours, mutated), (expected, _) = outcomes
    assert_same_metadata(list(ours), list(expected))
    assert_same_values(list(ours), list(expected))
    assert_same_values(mutated, call(program.function(), program.inputs()).inputs)


def hypothesis_settings(examples: int) -> Any:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.filterwarnings("ignore")
@hypothesis_settings(100)
@given(program=programs())
def test_random_programs(program: RandomProgram) -> None:
    check_round_trip(program, check(program, ["torch"]))


@pytest.mark.filterwarnings("ignore")
@hypothesis_settings(20)
@given(program=programs())
def test_random_programs_fused(program: RandomProgram) -> None:
    check_round_trip(program, check(program, ["fuser", "torch"]))


@pytest.mark.slow
@pytest.mark.parametrize("executors", EXECUTORS, ids="-".join)
@pytest.mark.filterwarnings("ignore")
@hypothesis_settings(600)
@given(program=programs())
def test_many_random_programs(program: RandomProgram, executors: list[str]) -> None:
    check_round_trip(program, check(program, executors))
