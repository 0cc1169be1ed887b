"""A host program does what the Python form of the same trace does: results, aliases, errors, references."""

from __future__ import annotations

import copy
import gc
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

import fulgurite
from fulgurite import native
from fulgurite.compiled_graph import CompiledGraph
from fulgurite.fuser.runtime import memory_pool
from fulgurite.host import HostProgram, unavailable_reason
from tests.host.programs import CASES, Case

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Recorder:
    """The compiled graphs that a test makes, and the inputs of their last calls."""

    def __init__(self) -> None:
        self.graphs: list[CompiledGraph] = []
        self.inputs: dict[CompiledGraph, list[Any]] = {}

    def programs(self) -> list[tuple[HostProgram, Callable[..., Any], list[Any]]]:
        """Every host program with its Python form and inputs."""
        found = []
        for graph in self.graphs:
            program = graph.host_program
            if program is not None:
                found.append((program, program.python_form, self.inputs[graph]))
        return found


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    seen = Recorder()
    original, original_first = CompiledGraph.__init__, CompiledGraph._first_call

    def init(self: CompiledGraph, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        seen.graphs.append(self)

    def first_call(self: CompiledGraph, inputs: list[Any]) -> Any:
        seen.inputs[self] = clone(inputs)
        return original_first(self, inputs)

    monkeypatch.setattr(CompiledGraph, "__init__", init)
    monkeypatch.setattr(CompiledGraph, "_first_call", first_call)
    yield seen


def clone(values: Any) -> Any:
    """Copies of tensors with their strides and offsets modulo 16 bytes; other values as they are."""

    def one(value: Any) -> Any:
        return copy.deepcopy(value.detach()) if isinstance(value, Tensor) else value

    return tree_map(one, values)


def compile_case(case: Case, device: str, train: bool = False) -> None:
    torch.manual_seed(0)
    inputs = case.make_inputs(device)
    if train:
        inputs = tuple(
            v.requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
            for v in inputs
        )
    compiled = fulgurite.compile(case.function, dynamic=case.dynamic, cudagraph=False)
    with torch.set_grad_enabled(train):
        result = compiled(*inputs)
        if train:
            total = sum(
                t.float().sum()
                for t in torch.utils._pytree.tree_leaves(result)
                if isinstance(t, Tensor) and t.requires_grad
            )
            total.backward()


def assert_same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert got.stride() == want.stride() and got.storage_offset() == want.storage_offset()
        assert got.requires_grad == want.requires_grad and got.is_inference() == want.is_inference()
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    elif isinstance(want, tuple | list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    else:
        assert got == want


def without_seeds(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results without the seed and offset of attention, which are not set if there is no dropout."""
    return tuple(
        r
        for r in results
        if not (isinstance(r, Tensor) and r.dtype in (torch.int64, torch.uint64) and r.dim() < 2)
    )


def aliasing(results: Any, inputs: list[Any]) -> list[Any]:
    """Which results are inputs or each other, and which share memory."""
    values = [v for v in (*inputs, *results) if isinstance(v, Tensor)]
    same = [[a is b for a in values] for b in values]
    shared = [
        [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in values]
        for b in values
    ]
    return [same, shared]


@pytest.mark.covering
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", CASES)
def test_a_host_program_does_what_its_trace_does(
    name: str, mode: str, device: str, recorder: Recorder
) -> None:
    if name in ("mutated", "dropout", "python_ops", "integers") and mode == "train":
        pytest.skip("it has no gradient, or is covered by inference")
    if name == "integers" and device == "cuda":
        pytest.skip("torch multiplies no matrices of integers on GPUs")
    compile_case(CASES[name], device, train=mode == "train")
    assert recorder.programs(), "no trace became a host program"
    for program, python_form, inputs in recorder.programs():
        with torch.no_grad():
            for _ in range(2):
                mine, theirs = clone(inputs), clone(inputs)
                torch.manual_seed(1)
                want = python_form(list(theirs))
                torch.manual_seed(1)
                given = list(mine)
                got = program.run(given)
                assert given == [], "the list of inputs is cleared"
                if device == "cuda":
                    torch.cuda.synchronize()
                    got, want = without_seeds(got), without_seeds(want)
                assert_same(got, want)
                assert_same(mine, theirs)  # mutated inputs
                assert aliasing(got, mine) == aliasing(want, theirs)


def find_program(recorder: Recorder) -> tuple[HostProgram, list[Any]]:
    (program, _, inputs) = recorder.programs()[-1]
    return program, inputs


def test_steps_correspond_to_the_lines_of_the_trace(recorder: Recorder) -> None:
    compile_case(CASES["block"], "cpu")
    program, _ = find_program(recorder)
    lines = str(program).splitlines()
    ops = recorder.graphs[-1].trace.ops
    assert len(lines) == sum(node.target is not operator.getitem for node in ops)
    assert {line.rpartition("# ")[2] for line in lines} == {"kernel", "library"}


def test_strides_that_the_kernels_do_not_expect(recorder: Recorder) -> None:
    compile_case(CASES["block"], "cpu")
    program, inputs = find_program(recorder)
    torch.manual_seed(0)
    other = [torch.randn(*reversed(t.shape)).t() if t.dim() == 2 else t for t in inputs]
    with torch.no_grad():
        assert_same(program.run(list(other)), program.python_form(list(other)))


def test_an_index_out_of_range_raises_what_eager_raises(recorder: Recorder) -> None:
    compile_case(CASES["embedding"], "cpu")
    program, inputs = find_program(recorder)
    bad = [t.clone() if t.dtype == torch.int64 else t for t in inputs]
    next(t for t in bad if t.dtype == torch.int64)[0, 0] = 11
    with torch.no_grad():
        for run in (program.python_form, program.run):
            with pytest.raises(IndexError, match="index out of range in self"):
                run(list(bad))


@torch.library.custom_op("fulgurite_test::refuse_zeros", mutates_args=())
def refuse_zeros(x: Tensor) -> Tensor:
    if not x.any():
        raise ArithmeticError("only zeros")
    return x.clone()


@refuse_zeros.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def fails_in_the_middle(x: Tensor) -> Tensor:
    y = (x * 2) @ x
    return (refuse_zeros(y) @ y).relu()


def test_an_error_in_the_middle_leaks_nothing_and_names_the_line(recorder: Recorder) -> None:
    compiled = fulgurite.compile(fails_in_the_middle)
    good, bad = torch.eye(4), torch.zeros(4, 4)
    with torch.no_grad():
        compiled(good)
        program, inputs = find_program(recorder)
        assert program.num_native < len(program.steps.steps)
        references = sys.getrefcount(bad)
        for _ in range(3):
            with pytest.raises(ArithmeticError, match="only zeros") as caught:
                program.run([bad if isinstance(value, Tensor) else value for value in inputs])
        names = [entry.path for entry in caught.traceback]
        assert any("fulgurite inference" in str(name) for name in names)
        del caught
        gc.collect()
        assert sys.getrefcount(bad) == references
        assert_same(program.run(list(inputs)), program.python_form(list(inputs)))


def test_references_are_those_of_the_python_form(recorder: Recorder) -> None:
    compile_case(CASES["aliases"], "cpu")
    program, _ = find_program(recorder)
    x = torch.randn(4, 4)
    with torch.no_grad():
        counts = []
        for run in (program.python_form, program.run):
            result = run([x])
            counts.append([sys.getrefcount(x), *(sys.getrefcount(r) for r in result)])
            del result
            counts.append([sys.getrefcount(x)])
    assert counts[:2] == counts[2:]


def count_tensors() -> int:
    gc.collect()
    return sum(isinstance(o, Tensor) for o in gc.get_objects())


def test_no_memory_grows_over_many_calls(recorder: Recorder) -> None:
    compile_case(CASES["python_ops"], "cpu")
    program, inputs = find_program(recorder)
    with torch.no_grad():
        program.run(list(inputs))
        before = count_tensors()
        for _ in range(100):
            program.run(list(inputs))
        assert count_tensors() <= before


_seen_values: list[weakref.ref[Tensor]] = []
_num_live: list[int] = []


@torch.library.custom_op("fulgurite_test::watch", mutates_args=())
def watch(x: Tensor) -> Tensor:
    """Counts how many of the values that it saw are still alive."""
    _num_live.append(sum(reference() is not None for reference in _seen_values))
    _seen_values.append(weakref.ref(x))
    return x.clone()


@watch.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def keeps_little(x: Tensor) -> Tensor:
    for _ in range(6):
        x = watch(x @ x)
    return x


def test_values_are_freed_after_their_last_use(recorder: Recorder) -> None:
    compiled = fulgurite.compile(keeps_little)
    with torch.no_grad():
        compiled(torch.eye(8))
        program, inputs = find_program(recorder)
        assert 0 < program.num_native < len(program.steps.steps)
        _seen_values.clear()
        _num_live.clear()
        program.run(list(inputs))
    assert _num_live == [0] * 6


_free_bytes: list[int] = []


@torch.library.custom_op("fulgurite_test::note_free_bytes", mutates_args=())
def note_free_bytes(x: Tensor) -> Tensor:
    """Notes the free bytes of the memory pool."""
    _free_bytes.append(memory_pool.pooled_bytes())
    return x.clone()


@note_free_bytes.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def widens(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    for _ in range(4):
        x = F.gelu(x @ up) @ down  # 2 MiB between: gelu overwrites its input
    return note_free_bytes(x)


def test_overwritten_buffers_are_freed_after_their_last_use(recorder: Recorder) -> None:
    inputs = torch.randn(128, 16), torch.randn(16, 4096), torch.randn(4096, 16)
    compiled = fulgurite.compile(widens, executors=["fuser", "torch"])
    with torch.no_grad():
        compiled(*inputs)
        assert "donated: " in str(compiled.last_trace())
        program, inputs = find_program(recorder)
        _free_bytes.clear()
        for run in (program.python_form, program.run):
            run(list(inputs))
    assert _free_bytes[0] == _free_bytes[1]


@pytest.mark.gpu
def test_the_peak_of_memory_is_that_of_the_python_form(recorder: Recorder) -> None:
    case = Case(
        CASES["block"].function,
        lambda device: tuple(
            torch.randn(*shape, device=device)
            for shape in ((512, 512), (512,), (512, 2048), (1024, 512))
        ),
    )
    compile_case(case, "cuda")
    program, inputs = find_program(recorder)
    peaks = []
    with torch.no_grad():
        for run in (program.python_form, program.run):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run(list(inputs))
            peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("device", DEVICES)
def test_threads_share_a_program(device: str, recorder: Recorder) -> None:
    compile_case(CASES["block"], device)
    program, inputs = find_program(recorder)
    failures: list[BaseException] = []
    expected = program.python_form(list(inputs))

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(200):
                    assert_same(program.run(list(inputs)), expected)
        except BaseException as error:  # reported by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.gpu
def test_work_is_queued_on_the_current_stream(recorder: Recorder) -> None:
    compile_case(CASES["block"], "cuda")
    program, inputs = find_program(recorder)
    expected = program.python_form(list(inputs))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        event = torch.cuda.Event()
        result = program.run(list(inputs))
        event.record()
        assert not event.query(), "it did not wait for the stream"
        event.synchronize()
        assert_same(result, expected)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_and_profilers_see_every_op(recorder: Recorder) -> None:
    compile_case(CASES["block"], "cpu")
    program, inputs = find_program(recorder)
    with torch.no_grad():
        with Seen() as seen:
            program.run(list(inputs))
        assert seen.names.count("aten.mm.default") == 2
        with torch.profiler.profile() as profile:
            program.run(list(inputs))
    assert sum(event.name == "aten::mm" for event in profile.events()) == 2


def test_inputs_that_are_no_plain_tensors_run_as_python(recorder: Recorder) -> None:
    class Subclass(Tensor):
        pass

    compile_case(CASES["block"], "cpu")
    program, inputs = find_program(recorder)
    with torch.no_grad():
        wrapped = [t.as_subclass(Subclass) for t in inputs]
        torch.testing.assert_close(
            program.run(list(wrapped))[0].as_subclass(Tensor), program.run(list(inputs))[0]
        )


def test_inference_mode(recorder: Recorder) -> None:
    compile_case(CASES["block"], "cpu")
    program, inputs = find_program(recorder)
    with torch.inference_mode():
        assert_same(program.run(list(inputs)), program.python_form(list(inputs)))


def test_the_environment_turns_host_programs_off() -> None:
    assert unavailable_reason() is None


def test_views_that_leave_share_the_version_of_their_memory(recorder: Recorder) -> None:
    compile_case(CASES["aliases"], "cpu")
    program, inputs = find_program(recorder)
    for run in (program.python_form, program.run):
        with torch.no_grad():
            given = clone(inputs)
            y, flat, transposed = run(list(given))
            before = transposed._version, flat._version
            given[0].add_(1)
            y.add_(1)
        assert (transposed._version, flat._version) == (before[0] + 1, before[1] + 1)


def test_a_call_that_torch_refuses_raises_as_python_does(recorder: Recorder) -> None:
    """The C interface reports a failure without a reason. The step's Python function then raises it."""
    compile_case(CASES["block"], "cpu")
    program, inputs = find_program(recorder)
    wrong = [t[:-1] if t.shape == (64, 256) else t for t in inputs]
    with torch.no_grad():
        for run in (program.python_form, program.run):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                run(list(wrong))
        assert_same(program.run(list(inputs)), program.python_form(list(inputs)))
