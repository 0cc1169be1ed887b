"""GraphedFunction with fake captures: when a call is captured, what is copied, shared, or run plain."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fulgurite.cudagraph import CaptureMemory, GraphedFunction, GraphInterface, capture
from fulgurite.cudagraph.driver_graph import NEEDS_GENERATOR
from fulgurite.cudagraph.graphed import MAX_CAPTURES, MAX_SHAPES
from tests.cudagraph.fake import FakeCapturedCall, FakeStopwatch, make_fake_backend


def make(run=None, modes=("copied",), memory=None, forced=True, stopwatch=None, **interface):
    run = run or (lambda x, w: (x * w,))
    memory = memory or CaptureMemory(make_fake_backend(stopwatch))
    described = GraphInterface(tuple(modes), torch.device("cpu"), **interface)

    def boxed(inputs):
        arguments = list(inputs)
        inputs.clear()
        return run(*arguments)

    return GraphedFunction("graph_0", boxed, described, memory, forced=forced)


def call(graphed, *inputs):
    return graphed(list(inputs))


def test_user_outputs_are_right_and_never_overwritten():
    graphed, w = make(), torch.tensor([2.0, 3.0])
    given = []
    inputs = [torch.full((2,), float(step)) for step in range(6)]
    for step, x in enumerate(inputs):
        (result,) = call(graphed, x, w)
        given.append(result)
        w += 1  # read in place, whatever it holds
        assert result.tolist() == [(2.0 + step) * step, (3.0 + step) * step]
    assert given[3].tolist() == [15.0, 18.0], "a later replay changed a result"
    assert graphed.replays == 4 and graphed.plain_calls == 2 and graphed.captures == 1


def test_static_input_that_moves_is_copied_after_a_second_capture():
    graphed, x = make(), torch.ones(2)
    weights = [torch.full((2,), float(k)) for k in range(12)]
    for w in [weights[0]] * 4 + weights:
        assert call(graphed, x, w)[0].tolist() == w.tolist()
    assert graphed.captures == 2, "from the second capture on it is copied"
    assert graphed.replays > 8


def test_addresses_that_alternate_are_captured_without_copies():
    graphed, w = make(), torch.tensor([2.0, 3.0])
    buffers = [torch.ones(2), torch.ones(2)]
    for step in range(16):
        x = buffers[step % 2].fill_(float(step))
        assert call(graphed, x, w)[0].tolist() == [2.0 * step, 3.0 * step]
    (state,) = graphed._states.values()
    assert any(not one.copied for one in state.calls()) or graphed.captures == 1


def test_many_addresses_end_in_one_capture_with_copies():
    graphed, w = make(), torch.ones(2)
    batches = [torch.full((2,), float(k)) for k in range(20)]
    for _ in range(4):
        for x in batches:
            assert call(graphed, x, w)[0].tolist() == x.tolist()
    assert graphed.captures <= 3 and graphed.replays >= 70


def test_capture_is_given_up_if_static_inputs_keep_moving(monkeypatch):
    monkeypatch.setattr("fulgurite.cudagraph.graphed.MAX_CAPTURES", 3)
    graphed = make(lambda *inputs: (sum(inputs),))
    values = [torch.ones(2) for _ in range(12)]
    for moving in range(12):
        for _ in range(4):
            call(graphed, *values)
        values[moving] = torch.full((2,), 2.0)
        assert call(graphed, *values)[0].tolist() == [12 + moving + 1.0] * 2
    assert graphed.captures == 3 < MAX_CAPTURES and "keep moving" in str(graphed)


def test_shared_outputs_are_not_overwritten_while_held():
    graphed, w = make(lambda x, w: (x * w, x + w), ("copied", "shared")), torch.ones(2)
    inputs = [torch.full((2,), float(step)) for step in range(8)]
    held = [call(graphed, x, w)[1] for x in inputs]
    assert [h.tolist() for h in held] == [[k + 1.0] * 2 for k in range(8)]
    assert "still held" in str(graphed)
    held.clear()
    replays = graphed.replays
    assert call(graphed, torch.full((2,), 9.0), w)[1].tolist() == [10.0, 10.0]
    assert graphed.replays == replays + 1, "released outputs can be shared again"


def test_accumulation_replays_a_second_capture():
    """One output stays held, as `p.grad` does while gradients accumulate."""
    graphed, w = make(lambda x, w: (x + w,), ("shared",)), torch.ones(2)
    x, replays = torch.ones(2), []
    for cycle in range(4):
        total = None  # as `zero_grad` does
        for step in range(10):
            x.fill_(float(step))
            (gradient,) = call(graphed, x, w)
            total = gradient if total is None else total.add_(gradient)
            replays.append(graphed.replays)
            gradient = None
        assert total.tolist() == [55.0, 55.0], cycle
    assert graphed.captures == 2 and replays[-1] - replays[15] == 24, str(graphed)


def test_result_that_is_held_until_the_next_one_replays_two_captures():
    """As in a loop `gradients = torch.autograd.grad(...)`."""
    graphed, w, x = make(lambda x, w: (x + w,), ("shared",)), torch.ones(2), torch.ones(2)
    for step in range(20):
        x.fill_(float(step))
        (gradient,) = call(graphed, x, w)
        assert gradient.tolist() == [step + 1.0] * 2
    assert graphed.captures == 2 and graphed.replays >= 14, str(graphed)


def test_view_of_a_shared_output_counts_as_held():
    graphed, w = make(modes=("shared",)), torch.ones(2)
    for _ in range(3):
        view = call(graphed, torch.ones(2), w)[0][1:]
    call(graphed, torch.zeros(2), w)
    assert view.tolist() == [1.0]


def test_outputs_that_are_views_of_inputs():
    run = lambda x, w: (x * w, w.t(), x[1:], w)  # noqa: E731
    graphed, w = make(run, ("copied", "shared", "copied", "shared")), torch.randn(2, 2)
    for _ in range(5):
        x = torch.randn(2, 2)
        _, turned, rest, same = call(graphed, x, w)
        assert torch.equal(turned, w.t()) and turned.data_ptr() == w.data_ptr()
        assert torch.equal(rest, x[1:]) and rest.data_ptr() == x[1:].data_ptr() and same is w
    assert graphed.replays == 3 and graphed.captures == 1


def test_saved_copy_of_an_input_is_the_static_buffer():
    """Backward then finds it at one address, and no later call overwrites it while it is held."""
    graphed, w = make(lambda x, w: (x * w, x), ("copied", "shared")), torch.ones(2)
    inputs = [torch.full((2,), float(step)) for step in range(6)]
    for x in inputs[:3]:
        call(graphed, x, w)
    saved = call(graphed, inputs[3], w)[1]
    call(graphed, inputs[4], w)
    assert saved.tolist() == [3.0, 3.0] and saved.data_ptr() != inputs[3].data_ptr()


def test_view_of_an_input_with_another_dtype_runs_plain():
    graphed = make(lambda x: (x.view(torch.int32), x + 1), ("copied", "copied"))
    x = torch.ones(2)
    for _ in range(5):
        assert call(graphed, x)[1].tolist() == [2.0, 2.0]
    assert graphed.replays == 0 and "another dtype" in str(graphed)


def test_captures_hold_no_inputs():
    graphed, w = make(lambda x, w: (x * 2, w), ("copied", "shared")), torch.ones(2)
    for _ in range(6):
        call(graphed, torch.ones(2), w)
    assert graphed.replays == 4
    dead = weakref.ref(w)
    del w
    assert dead() is None


def test_each_shape_is_captured_by_itself():
    graphed = make(dynamic_inputs=(0, 1))
    inputs = [torch.arange(float(size)) for size in [3, 5, 3, 5, 3, 5, 0, 0, 0]]
    for x in inputs:
        assert call(graphed, x, x)[0].tolist() == (x * x).tolist()
    assert graphed.captures == 3 and graphed.replays == 3
    for size in range(100, 100 + MAX_SHAPES):
        call(graphed, torch.ones(size), torch.ones(size))
    assert "pad to fewer" in str(graphed)


def test_strides_and_several_outputs():
    run = lambda x, w: (x.t() * w, (x * w)[:, :1], x + w, x - w)  # noqa: E731
    graphed = make(run, ["copied"] * 4)
    for _ in range(5):
        x, w = torch.randn(3, 2), torch.ones(())
        for ours, expected in zip(call(graphed, x, w), run(x, w), strict=True):
            assert ours.stride() == expected.stride() and torch.equal(ours, expected)
    assert graphed.replays == 3


def test_constants_among_inputs_and_outputs():
    graphed = make(lambda n, x: (x * n, n + 1, None), ["copied"] * 3, dynamic_inputs=(0,))
    for n in [2, 3] * 6:
        product, following, nothing = call(graphed, n, torch.ones(2))
        assert product.tolist() == [n, n] and following == n + 1 and nothing is None
    assert graphed.captures == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_failed_capture_runs_plain_once_and_for_all(monkeypatch, error):
    attempts = []

    def fail(*arguments):
        attempts.append(arguments)
        raise error

    monkeypatch.setattr(FakeCapturedCall, "__init__", fail)
    graphed = make(lambda x: (x + 1,))
    for _ in range(8):
        assert call(graphed, torch.zeros(1))[0].item() == 1
    assert graphed.replays == 0 and len(attempts) == 1
    assert str(error).splitlines()[0] in graphed.describe()


@pytest.mark.parametrize("moment", ["warm-up", "capture", "replay"])
def test_interrupt_leaves_a_consistent_state(moment):
    counter = torch.zeros(2)
    interrupts: list[int] = []
    plain_calls = {"warm-up": 4, "capture": 5, "replay": 6}  # runs of the function before it

    def run(x, counter):
        interrupts.append(1)
        counter.add_(1)
        if len(interrupts) == plain_calls[moment]:
            raise KeyboardInterrupt
        return (x + counter,)

    graphed = make(run, mutated_inputs=(1,))
    completed = 0
    while completed < 8:
        x, before = torch.ones(2), counter.clone()
        try:
            (result,) = call(graphed, x, counter)
        except KeyboardInterrupt:
            counter.copy_(before)  # eager may have written, too
            continue
        completed += 1
        assert counter.tolist() == [completed] * 2
        assert result.tolist() == [1.0 + completed] * 2
    assert graphed.replays >= 4 and not graphed.memory.lock.locked()


def test_overlapping_input_runs_plain():
    graphed = make()
    for _ in range(5):
        assert call(graphed, torch.ones(1).expand(3), torch.ones(3))[0].tolist() == [1.0] * 3
    assert graphed.replays == 0 and "overlaps itself" in str(graphed)


def test_second_thread_runs_plain_while_one_replays():
    graphed = make(lambda x: (x + 1,))
    graphed.memory.lock.acquire()
    assert call(graphed, torch.zeros(1))[0].item() == 1
    graphed.memory.lock.release()
    assert graphed.plain_calls == 1 and "another call" in str(graphed)


def test_other_streams_and_enclosing_captures_run_plain(monkeypatch):
    # native code asks CUDA itself: test_on_gpu.py
    monkeypatch.setattr("fulgurite.cudagraph.native_replay.load_library", lambda: None)
    graphed, x, stream, capturing = make(lambda x: (x + 1,)), torch.ones(2), [2], [False]
    monkeypatch.setattr(graphed, "_current_stream", lambda: stream[0])
    name = "_cuda_isCurrentStreamCapturing"
    monkeypatch.setattr(torch._C, name, lambda: capturing[0], raising=False)
    call(graphed, x)  # warmed up on another stream than it is used on
    stream[0] = 1
    for _ in range(4):
        assert call(graphed, x)[0].tolist() == [2.0, 2.0]
    assert graphed.replays == 3 and graphed.memory.stream == 1
    for stream[0], capturing[0] in [(2, False), (1, True)]:
        assert call(graphed, x)[0].tolist() == [2.0, 2.0]
    assert graphed.replays == 3 and "another stream" in str(graphed)
    stream[0], capturing[0] = 1, False
    call(graphed, x)
    assert graphed.replays == 4


def test_threads_get_their_own_results():
    graphed, w, wrong = make(), torch.ones(64), []

    def work(number: int) -> None:
        for step in range(200):
            x = torch.full((64,), float(1000 * number + step))
            if not torch.equal(call(graphed, x, w)[0], x):
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and graphed.replays > 0


def test_mutated_inputs():
    """Each call counts once: warming up runs the function too, and copied inputs are copied back."""

    def run(x, still, moving):
        still.add_(x)
        moving.mul_(2)
        return (x + still,)

    graphed, still = make(run, mutated_inputs=(1, 2)), torch.zeros(2)
    for step in range(1, 7):
        x, moving = torch.ones(2), torch.full((2,), float(step))
        (result,) = call(graphed, x, still, moving)
        assert still.tolist() == [step, step] and result.tolist() == [step + 1.0] * 2
        assert moving.tolist() == [2.0 * step] * 2
    assert graphed.replays == 4


def test_outputs_of_later_captures_block_earlier_ones():
    """They may lie in the memory that the earlier one uses for intermediate values."""
    memory = CaptureMemory(make_fake_backend())
    first = make(lambda x: (x + 1,), ("shared",), memory)
    second = make(lambda x: (x * 2,), ("shared",), memory)
    x = torch.ones(2)
    for _ in range(4):
        call(second, call(first, x)[0])
    (held,) = call(second, call(first, x)[0])
    assert first.replays and second.replays
    replays = first.replays
    call(first, x)
    assert first.replays == replays and held.tolist() == [4.0, 4.0]
    del held
    call(first, x)
    assert first.replays == replays + 1


def test_captures_of_one_program_chain_without_copies():
    memory = CaptureMemory(make_fake_backend())
    layers = [make(lambda x: (x + 1,), ("shared",), memory) for _ in range(5)]
    for step in range(40):
        x = torch.full((2,), float(step))
        for layer in layers:
            (x,) = call(layer, x)
        assert x.tolist() == [step + 5.0] * 2
        del x
    for layer in layers[1:]:
        (state,) = layer._states.values()
        assert not next(state.calls()).copied, (
            "the static output of another capture is read in place"
        )


def test_layers_that_share_a_function_have_a_capture_each():
    """Their parameters are read in place, and the capture that follows is found at once."""
    graphed = make(lambda x, w: (x * w,))
    layers = [torch.nn.Parameter(torch.full((2,), float(k))) for k in range(12)]
    with torch.no_grad():
        for step in range(20):
            for weight in layers:
                x = torch.full((2,), float(step))
                assert torch.equal(call(graphed, x, weight)[0], x * weight)
    (state,) = graphed._states.values()
    assert graphed.captures == 12 and len(state.layers) == 12 and graphed.replays == 12 * 18
    assert all(one.copied in ([], [0]) for one in state.calls())
    expected = graphed._expected[0]()
    assert expected is not None and expected.matches([x, layers[0]])


# ---- what is measured ----------------------------------------------------------------------------


def run_auto(hosts, devices, walls=None, calls=24):
    stopwatch = FakeStopwatch(hosts, devices, walls)
    graphed, w = make(forced=False, stopwatch=stopwatch), torch.ones(2)
    for step in range(calls):
        x = torch.full((2,), float(step))
        assert call(graphed, x, w)[0].tolist() == [step, step]
    return graphed


def test_host_bound_function_is_captured():
    graphed = run_auto([90e-6, 80e-6, 85e-6, 9e-6, 8e-6, 12e-6], [20e-6, 50e-6, 21e-6, 22e-6])
    assert graphed.captures == 1 and graphed.replays == 16
    assert graphed.describe() == (
        "captured: host 8 µs, device 22 µs, wall 30 µs; "
        "without: host 80 µs, device 20 µs, wall 100 µs"
    )


def test_device_bound_function_is_not_captured():
    graphed = run_auto([25e-6], [300e-6])
    assert graphed.captures == 0 and graphed.replays == 0
    text = "not captured: the device bounds a call (host 25 µs, device 300 µs, wall 325 µs)"
    assert text in str(graphed)


def test_gaps_between_kernels_are_worth_a_graph():
    """The device is busy for longer than the host, but waits for it between kernels."""
    graphed = run_auto([1.2e-3] * 3 + [50e-6], [1.9e-3] * 3 + [1.85e-3], [2.3e-3] * 3 + [1.9e-3])
    assert graphed.captures == 1 and graphed.describe().startswith("captured: host 50 µs")


def test_few_percent_of_a_long_step_are_worth_a_graph():
    """Gaps of 1 µs between 300 kernels of 11 ms."""
    graphed = run_auto([2e-3] * 3 + [50e-6], [11e-3] * 3 + [10.7e-3], [11.2e-3] * 3 + [10.8e-3])
    assert graphed.captures == 1 and graphed.describe().startswith("captured: host 50 µs")


def test_gain_of_single_calls_does_not_pay_for_a_slower_loop():
    graphed = run_auto([1.2e-3] * 3 + [50e-6], [1.8e-3] * 3 + [1.9e-3], [2.3e-3] * 3 + [1.95e-3])
    assert "a replay is not faster" in graphed.describe()


@pytest.mark.parametrize(("host", "device"), [(30e-6, 5e-6), (5e-6, 31e-6)])
def test_capture_that_is_not_faster_is_given_up(host, device):
    graphed = run_auto([30e-6] * 3 + [host], [5e-6] * 3 + [device])
    assert graphed.captures == 1 and graphed.replays == 7, str(graphed)
    assert "a replay is not faster" in graphed.describe()
    assert not any(list(state.calls()) for state in graphed._states.values()), "its memory is freed"


@pytest.mark.parametrize("are_held", [False, True])
def test_memory_of_a_capture_that_is_given_up_is_freed(are_held):
    """Also that of shared outputs, once nobody holds them."""
    memory = CaptureMemory(make_fake_backend(FakeStopwatch([30e-6], [5e-6])))
    graphed = make(forced=False, memory=memory, modes=("shared",))
    w, held = torch.ones(2), []
    for step in range(20):
        (out,) = call(graphed, torch.full((2,), float(step)), w)
        assert out.tolist() == [step, step]
        if are_held and graphed.replays == 7 and not held:
            held.append(out)  # of the last replay
        del out
    pool = memory.pool(0)
    assert graphed.captures == 1 and "a replay is not faster" in graphed.describe()
    assert not pool._pools and len(pool._calls) == 0
    assert len(pool.shared) == len(held)
    for out in held:
        assert out.tolist() == out.tolist() and not out.isnan().any()
    held.clear()
    out = None
    pool.free_if_unused()
    assert not pool.shared


def test_decision_of_a_busy_machine_is_measured_again():
    """The first measurement saw a device that other programs used."""
    hosts, devices = [80e-6] * 6 + [9e-6], [900e-6] * 3 + [20e-6]
    graphed = run_auto(hosts, devices, calls=240)
    assert graphed.captures == 1 and graphed.replays > 10
    assert graphed.describe().startswith("captured: host 9 µs")


def test_captures_of_parameters_that_moved_are_freed():
    graphed, x = make(), torch.ones(2)
    weights = [torch.full((2,), float(k)) for k in range(4)]
    for w in weights:
        for _ in range(120):
            assert call(graphed, x, w)[0].tolist() == w.tolist()
    (state,) = graphed._states.values()
    assert graphed.captures <= 4 and len(list(state.calls())) <= 2


def test_memory_is_freed_with_the_function():
    memory = CaptureMemory(make_fake_backend())
    graphed = make(memory=memory)
    for _ in range(5):
        call(graphed, torch.ones(2), torch.ones(2))
    pool = memory.pool(0).on(torch.device("cpu"))
    assert pool.outputs
    gc.disable()
    try:
        del graphed
        assert not pool.outputs, "no reference cycle keeps captures alive"
    finally:
        gc.enable()


def test_layers_of_parameters_that_moved_are_forgotten():
    graphed, parameter = make(), torch.nn.Parameter(torch.ones(2))
    kept = []  # so that no address is used twice
    for step in range(10):
        kept.append(torch.full((2,), float(step)))
        parameter.data = kept[-1]
        for _ in range(5):
            (result,) = call(graphed, torch.ones(2), parameter)
            assert result.tolist() == [step, step]
    (state,) = graphed._states.values()
    assert graphed.replays >= 20
    assert len(state.layers) == 1 and len(list(state.calls())) == 1


class FakeGraphs:
    """`capture_graph` that records which kind of graph it was asked for, and fails as told."""

    def __init__(self, errors):
        self.errors, self.kinds = errors, []

    def __call__(self, run, *, graph, **_):
        self.kinds.append(type(graph).__name__)
        error = self.errors.get(self.kinds[-1])
        if error is not None:
            raise error
        return capture.CapturedGraph(graph, run())


@pytest.fixture
def fake_graphs(monkeypatch):
    class CUDAGraph(SimpleNamespace):
        replay = None

    class DriverGraph(CUDAGraph):
        pass

    def install(**errors):
        fake = FakeGraphs(errors)
        monkeypatch.setattr(capture, "capture_graph", fake)
        monkeypatch.setattr(capture, "DriverGraph", DriverGraph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        return fake

    return install


def capture_on_gpu_3():
    stream = SimpleNamespace(device=torch.device("cuda", 3))
    pool = SimpleNamespace(stream=stream, handle=(0, 1), prepare_torch_graphs=lambda: None)
    return capture.CudaCapturedCall(lambda inputs: [1], [], pool)


def test_torchs_generator_takes_part_only_where_it_must(fake_graphs):
    fake = fake_graphs()
    assert capture_on_gpu_3().outputs == [1] and fake.kinds == ["DriverGraph"]
    fake = fake_graphs(DriverGraph=RuntimeError(f"a generator is {NEEDS_GENERATOR}."))
    assert capture_on_gpu_3().outputs == [1] and fake.kinds == ["DriverGraph", "CUDAGraph"]


@pytest.mark.parametrize(
    "error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError()]
)
def test_other_failures_are_not_tried_with_torchs_graph(fake_graphs, error):
    fake = fake_graphs(DriverGraph=error)
    with pytest.raises(type(error)):
        capture_on_gpu_3()
    assert set(fake.kinds) == {"DriverGraph"}


def test_no_capture_after_an_invalidated_one(monkeypatch, fake_graphs):
    monkeypatch.setattr(capture, "_invalidated_devices", {3})
    capture_was_fine = fake_graphs()
    capture_on_gpu_3()
    assert capture_was_fine.kinds == ["DriverGraph"]
    fake = fake_graphs(DriverGraph=RuntimeError(NEEDS_GENERATOR))
    with pytest.raises(RuntimeError, match="no more captures with its random numbers"):
        capture_on_gpu_3()
    assert fake.kinds == ["DriverGraph"]
