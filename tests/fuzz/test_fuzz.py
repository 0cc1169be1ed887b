"""A few seeds of the fuzzer, and its parts: programs, tolerances, shrinking, scripts.

More of them: scripts/fuzz
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.executors.fuser import FUSER
from fulgurite.fuser.frontend.lower_graph import ELEMENTWISE_LOWERINGS
from tests.fuzz import check, command, findings, op_db
from tests.fuzz.exclusions import is_excluded
from tests.fuzz.generate import Builder, draw_program
from tests.fuzz.inputs import make_arguments
from tests.fuzz.oracle import Reference
from tests.fuzz.processes import WorkerProcess
from tests.fuzz.program import Input, Line, Program, merge
from tests.fuzz.shrink import shrink
from tests.fuzz.templates import KINDS
from tests.fuzz.values import is_same
from tests.fuzz.worker import Report, Worker

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = range(112, 124)
LONG = Program(
    seed=1,
    kind="pointwise",
    inputs=(Input("a0", (3, 5), "float32", "transposed", "normal"), Input("a1", (5,), "float32")),
    lines=(
        Line("t0", "a0 * 2"),
        Line("t1", "a1 + 1"),
        Line("t2", "t0.sin()", approximate=True),
        Line("t3", "t2 + t1"),
        Line("t4", "t3.sum(-1)"),
    ),
    outputs=("t1", "t4"),
)


@pytest.fixture
def wrong_sin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: generated kernels compute cos for sin."""
    monkeypatch.setitem(ELEMENTWISE_LOWERINGS, "sin", ELEMENTWISE_LOWERINGS["cos"])
    monkeypatch.setattr(FUSER, "_lowered", OrderedDict())


def test_some_seeds(tmp_path: Path) -> None:
    report = Worker("cpu", list(KINDS), tmp_path, None).run(SEEDS.start, SEEDS.stop)
    assert not report.findings, [finding.group for finding in report.findings]
    assert report.programs > 8 and report.lines > 20


def test_a_seed_always_gives_the_same_program() -> None:
    for seed in range(30):
        assert draw_program(seed) == draw_program(seed)


def test_text_of_a_program_is_what_the_reference_runs() -> None:
    programs = [p for seed in range(40) if (p := draw_program(seed)) and not p.raises]
    for program in programs:
        reference = Reference(program, program.calls[0], "cpu").run()
        results = program.function()(*reference.arguments())
        for name, value in zip(program.outputs, results, strict=True):
            assert is_same(value, reference.eager[name])


def test_all_kinds_are_drawn() -> None:
    drawn = {kind: [draw_program(seed, [kind]) for seed in range(6)] for kind in KINDS}
    for kind, programs in drawn.items():
        assert any(program and program.lines for program in programs), kind
    assert all(p.raises for p in drawn["error"] if p)
    assert any(len(p.calls) > 1 and p.scalars for p in drawn["symbol"] if p)


def test_a_bug_is_found_and_shrunk_to_one_line(wrong_sin: None) -> None:
    failure = check.check(LONG)
    assert failure is not None and failure.category == "wrong" and failure.output == 1
    small, same = shrink(LONG, failure, check.check)
    assert [line.text for line in small.lines] == ["t0.sin()"]
    assert [(i.layout, i.values) for i in small.inputs] == [("plain", "quarters")]
    assert same.category == "wrong"


def test_a_bug_in_one_of_many_programs_is_attributed(wrong_sin: None, tmp_path: Path) -> None:
    worker = Worker("cpu", list(KINDS), tmp_path, None)
    fine = replace(LONG, seed=2, lines=LONG.lines[:2], outputs=("t1",))
    report = Report(0, 3)
    worker.check_batch([fine, LONG, replace(fine, seed=3)], report)
    assert [finding.seed for finding in report.findings] == [1]
    assert report.programs == 3


def test_script_of_a_finding_shows_it(wrong_sin: None, tmp_path: Path) -> None:
    failure = check.check(LONG)
    assert failure is not None
    finding = findings.save(LONG, failure, "cpu", tmp_path)
    text = Path(finding.path).read_text()
    assert "def program(a0, a1):" in text
    with pytest.raises(AssertionError, match="not close"):
        exec(compile(text, finding.path, "exec"), {})


def test_scripts_of_inputs_that_share_memory() -> None:
    shared = [
        Input("a0", (3,), "float32", low=1, memory="b0"),
        Input("a1", (2, 2), "float32", "transposed", memory="b0"),
        Input("a2", (2,), "float32"),
    ]
    first, second, alone = findings.expressions(shared, {}, "cpu")
    values = eval(f"[{first}, {second}, {alone}]", {"torch": torch})
    assert values[0].data_ptr() == values[1].data_ptr() + 4 != values[2].data_ptr()
    expected = make_arguments(tuple(shared), {}, (), "cpu")
    for ours, made in zip(values, expected, strict=True):
        assert torch.equal(ours, made) and ours.stride() == made.stride()
    names = {given.memory for given in merge([replace(LONG, inputs=tuple(shared))] * 2).inputs}
    assert names == {"b0_0", "b0_1", ""}


def test_merged_programs_compute_all_parts() -> None:
    program = merge([LONG, replace(LONG, seed=5)])
    reference = Reference(program, program.calls[0], "cpu").run()
    assert len(program.outputs) == 4 and len(reference.eager) == 14
    assert is_same(reference.eager["t4_0"], reference.eager["t4_1"])


@pytest.mark.parametrize(("error", "is_wrong"), [(1e-7, False), (1e-4, True)])
def test_an_error_beyond_rounding_is_wrong(error: float, is_wrong: bool) -> None:
    wide = torch.linspace(0.5, 1, 7, dtype=torch.float64)
    eager = wide.float()
    found = check.difference(eager + error, eager, wide, 1.2e-7, lambda: [wide])
    assert bool(found) == is_wrong


def test_cancellation_may_amplify_rounding() -> None:
    """The spread of perturbed runs decides: 1e4 + x - 1e4 has an absolute error of 1e-3."""
    lines = (Line("t0", "a0.sin() + 1e4", approximate=True), Line("t1", "t0 - 1e4"))
    program = replace(LONG, lines=lines, outputs=("t1",), inputs=LONG.inputs[:1])
    reference = Reference(program, {}, "cpu").run()
    eager, wide = reference.eager["t1"], reference.wide["t1"]
    spread = [scope["t1"] for scope, _ in reference.perturbed()]
    assert check.difference(eager + 1e-3, eager, wide, 1.2e-7, lambda: spread) is None
    assert check.difference(eager + 1.0, eager, wide, 1.2e-7, lambda: spread)


def test_rounding_may_hit_a_pole() -> None:
    """log2(2^-1 + 2^-1) is 0, or the rounding of -1, and the gamma function has a pole at 0."""
    lines = (
        Line("t0", "torch.logaddexp2(a0 * 0 - 1, a0 * 0 - 1)", approximate=True),
        Line("t1", "t0.lgamma()", approximate=True),
    )
    program = replace(LONG, lines=lines, outputs=("t1",), inputs=LONG.inputs[:1])
    reference = Reference(program, {}, "cpu").run()
    spread = [scope["t1"] for scope, _ in reference.perturbed()]
    eager, wide = reference.eager["t1"], torch.full((3, 5), 37.5, dtype=torch.float64)
    pole = torch.full_like(eager, torch.inf)
    assert (
        check.difference(pole, torch.full_like(eager, 18.0), wide, 1.2e-7, lambda: spread) is None
    )
    assert check.difference(-pole, torch.full_like(eager, 18.0), wide, 1.2e-7, lambda: spread)


def test_lines_that_eager_does_not_define_are_not_drawn() -> None:
    builder = Builder(0, ["pointwise"])
    builder.inputs = [Input("a0", (2, 1, 1), "float32", values="quarters")]
    builder.restart()

    def is_left_out(line: Line) -> bool:
        return is_excluded(line, builder.reference.program, builder.reference.eager)

    assert is_left_out(Line("t0", 'F.pad(a0, (-1, 1), mode="circular")'))
    assert not is_left_out(Line("t0", 'F.pad(a0, (1, 1), mode="circular")'))
    assert builder.try_line(Line("t9", "F.mse_loss(a0, a0)"))
    assert is_left_out(Line("t0", "t9.as_strided((2,), (1,))"))
    assert not is_left_out(Line("t0", "a0[1:].as_strided((2,), (1,))"))
    assert builder.try_line(Line("t0", "a0 * math.nan"))
    assert is_left_out(Line("t1", "t0.view(torch.int32)", bitwise=True))
    assert not is_left_out(Line("t1", "a0.view(torch.int32)", bitwise=True))


def test_values_that_must_be_exact_are_compared_bit_for_bit() -> None:
    reference = Reference(replace(LONG, lines=LONG.lines[:2], outputs=("t1",)), {}, "cpu").run()
    assert "t1" in reference.exact
    off = torch.nextafter(reference.eager["t1"], torch.tensor(9.0))
    failure = check.compare_values(off, "t1", reference, check.Spread(reference), 0)
    assert failure is not None and failure.what == "an exact value"


def test_an_error_of_eager_is_discarded() -> None:
    program = replace(LONG, lines=(Line("t0", "a0 @ a0"),), outputs=("t0",))
    with pytest.raises(check.Discard, match="eager refuses"):
        check.check(program)


def test_rules_that_predict_another_dtype_are_no_finding() -> None:
    """torch's rule for this op gives another dtype than its kernel; the mask's size is data."""
    backward = "torch.ops.aten._softmax_backward_data"
    program = Program(
        seed=1,
        kind="pointwise",
        inputs=(
            Input("a0", (3,), "bfloat16"),
            Input("a2", (3,), "bool"),
        ),
        lines=(
            Line("t0", f"{backward}(a0, a0, 0, torch.float32)", approximate=True),
            Line("t1", "a0[a2]"),
        ),
        outputs=("t0", "t1"),
    )
    with pytest.raises(check.Discard, match="rules for a dtype"):
        check.check(program)


def test_gradients_of_another_type_are_compared() -> None:
    """Where the gradient is all zeros, torch's capture makes it a plain tensor."""
    program = Program(
        seed=1,
        kind="subclass",
        inputs=(Input("a0", (1,), "float32", "two", requires_grad=True),),
        lines=(Line("t0", "a0.split([1, a0.size(0) - 1])[1]"),),
        outputs=("t0",),
        gradient=True,
    )
    with pytest.raises(check.Discard, match="torch captures another program"):
        check.check(program)


def test_the_shrinker_keeps_indices_in_range_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = replace(LONG, lines=(Line("t0", "a0[3]"),), outputs=("t0",), inputs=LONG.inputs[:1])
    worker = Worker("cuda", list(KINDS), tmp_path, None)
    checked: list[Program] = []
    monkeypatch.setattr(worker, "check", checked.append)
    with pytest.raises(IndexError):
        worker.check_smaller(program)
    assert not checked


@pytest.mark.parametrize(
    ("line", "given"),
    [
        (Line("t1", "F.group_norm(a0, 1)", approximate=True), Input("a0", (9, 7), "float32", values="extreme")),
        (Line("t1", "t0.as_strided((1, 2), (2, 1), 1)"), Input("a0", (3,), "float32")),
        (Line("t1", "a0.index_put((a0.long() % 2,), a0, accumulate=True)"), Input("a0", (99,), "float32", values="odd")),
    ],
    ids=["overflow", "unwritten memory", "denormals"],
)  # fmt: skip
def test_results_without_a_meaning_are_not_compared(line: Line, given: Input) -> None:
    first = Line("t0", "F.smooth_l1_loss(a0, a0)", approximate=True)
    lines = (first, line) if "t0" in line.text else (line,)
    program = replace(LONG, inputs=(given,), lines=lines, outputs=("t1",))
    with pytest.raises(ValueError, match="excluded"):
        Reference(program, {}, "cpu").run()


def test_last_words_are_those_of_the_latest_process(tmp_path: Path) -> None:
    process = WorkerProcess("tests.fuzz.no_such_module", [], tmp_path / "log", 1)
    process.log.write_text("RuntimeError: of an earlier process\n")
    assert process.ask(0) is None
    assert "no_such_module" in process.last_words()


def test_operator_database_unit() -> None:
    outcome = op_db.run_unit(op_db.Unit("positive", "float32", False), "cpu")
    assert outcome.status == "pass" and outcome.samples > 0 and not outcome.failures


def test_operator_database_has_every_dtype() -> None:
    units = list(op_db.all_units("cpu"))
    assert len(units) == len(set(units)) > 5000
    assert {"float32", "bool", "complex64", "int8", "bfloat16"} <= {unit.dtype for unit in units}


def sleeping_worker(folder: Path) -> WorkerProcess:
    process = WorkerProcess("", [], folder / "log", 99)
    process.command = [sys.executable, "-c", "import time; time.sleep(99)"]
    return process


def test_a_worker_that_hangs_is_killed(tmp_path: Path) -> None:
    assert sleeping_worker(tmp_path).ask(0, seconds=0.1) is None


def test_operator_database_ends_in_time_and_keeps_other_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that runs too long is left out; the next call repeats it."""
    monkeypatch.setattr(op_db, "FOLDER", tmp_path)
    monkeypatch.setattr(op_db, "SECONDS_TO_END", 0)
    known = tmp_path / "known.json"
    outcome = asdict(op_db.Outcome("abs", "float32", gradient=True))
    known.write_text(json.dumps({"outcomes": [outcome]}))
    options = ["--opdb", "--ops", "abs", "--time", "0.2", "--known", str(known)]
    run = op_db.OperatorDatabaseRun(command.parse(options))
    monkeypatch.setattr(run, "make_worker", lambda _: sleeping_worker(tmp_path))
    units = len(run.units)
    assert run.run() == 0
    assert json.loads((tmp_path / "opdb-cpu.json").read_text())["outcomes"] == [outcome]
    assert len(op_db.OperatorDatabaseRun(command.parse(["--ops", "abs"])).units) == units > 5


class ScriptedWorker(WorkerProcess):
    """Answers as a worker does for a unit of three samples. Sample 1 ends the process."""

    def __init__(self, folder: Path, ends_eager: bool) -> None:
        super().__init__("", [], folder / "log", 99)
        self.ends_eager = ends_eager
        self.log.write_text("Fatal: device-side assert\n")

    def ask(self, question: Any, seconds: float = 0) -> dict[str, Any] | None:
        unit = op_db.Unit(**question)
        if unit.only in (None, 1) and (self.ends_eager or not unit.eager):
            return None
        there_is = unit.only is not None and unit.only < 3
        status = "pass" if there_is and not unit.eager else "skip"
        outcome = op_db.Outcome(unit.name, unit.dtype, unit.gradient, status, int(there_is))
        return asdict(outcome)


@pytest.mark.parametrize("ends_eager", [False, True])
def test_a_sample_that_ends_the_process_does_not_lose_the_others(
    tmp_path: Path, ends_eager: bool
) -> None:
    run = op_db.OperatorDatabaseRun(
        command.parse(["--ops", "abs", "--output", str(tmp_path / "o")])
    )
    outcome = run.isolate(ScriptedWorker(tmp_path, ends_eager), run.units[0])
    assert outcome is not None and outcome["samples"] == 2
    if ends_eager:
        assert outcome["status"] == "pass" and outcome["refused"] == 1
    else:
        assert outcome["status"] == "dies"
        assert [failure["sample"] for failure in outcome["failures"]] == [None, 1]


def test_ranges_of_seeds() -> None:
    assert command.parse_seeds("3:7") == (3, 7) and command.parse_seeds("3") == (3, 4)
    first, end = command.parse_seeds("3:")
    assert first == 3 and end > 1 << 30


@pytest.mark.parametrize("text", ["7:3", "x", "3:3", ":", "-1:3"])
def test_command_refuses_ranges_without_seeds(text: str) -> None:
    with pytest.raises(SystemExit):
        command.parse([f"--seeds={text}"])


def test_command_refuses_unknown_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--kinds", "views"])
    assert "unknown kinds views" in capsys.readouterr().err


def test_progress_continues_where_the_last_run_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    (tmp_path / "progress-cpu.json").write_text(json.dumps({"next": 96}))
    run = command.Run(command.parse([]))
    assert run.take(48) == (96, 144) and run.take(48) == (144, 192)
