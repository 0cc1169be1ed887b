"""Autotuning: slower regions fall back to torch, and the decision is cached and shown."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite import cache, timing
from fulgurite.errors import ArgumentError
from fulgurite.executors import autotune
from fulgurite.fuser.runtime.cpu_region import FusedRegion
from fulgurite.trace.decisions import make_example_input
from fulgurite.trace.signature import region_signature


@pytest.fixture(autouse=True)
def _own_decisions(tmp_path, monkeypatch):
    monkeypatch.setenv("FULGURITE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_measured_keys", set())
    monkeypatch.setattr(autotune, "SECOND_LOOK_PAUSE", 0.0)


@pytest.fixture
def clock(monkeypatch):
    """A clock that says what a test wants; `seen` are the functions it was asked about."""

    class Clock:
        def __init__(self):
            self.times = {"fuser": 1e-6, "torch": 1e-6}
            self.seen = []
            self.looks = None  # times of the next looks, if they differ

        def best_on(self, calls, *inputs, **options):
            self.seen.append({name: call(*inputs) for name, call in calls.items()})
            if self.looks is not None:
                assert self.looks, "measured once more than expected"
                return self.looks.pop(0)
            return self.times and {name: self.times[name] for name in calls}

    made = Clock()
    monkeypatch.setattr(timing, "best_times_on", made.best_on)
    return made


def normalized(x, w):
    return F.layer_norm(x, (6,), w).relu()


def inputs():
    return torch.randn(5, 6), torch.randn(6)


def lines(compiled):
    return [line for line in str(compiled.last_trace()).splitlines() if "# torch" in line]


def test_slower_region_falls_back_with_composite_ops_restored(clock):
    clock.times = {"fuser": 4e-6, "torch": 2e-6}
    x, w = inputs()
    compiled = fulgurite.compile(normalized, autotune="auto")
    torch.testing.assert_close(compiled(x, w), normalized(x, w))
    text = str(compiled.last_trace())
    assert "@fulgurite.region" not in text and "native_layer_norm" in text and "relu" in text
    assert "var_mean" not in text, "layer_norm was not restored"
    assert "fallback: fuser takes 2.0×" in text
    (decision,) = compiled.graphs[0].decisions
    assert decision.winner == "torch" and not decision.cached
    shown = str(compiled.explain())
    assert "autotuned           1 region: torch 1" in shown and "fallback" in shown
    torch.testing.assert_close(compiled.last_trace().load()(x, w)[0], normalized(x, w))


def test_both_candidates_compute_the_region(clock):
    x, w = inputs()
    fulgurite.compile(normalized, autotune="auto")(x, w)
    (results,) = clock.seen
    torch.testing.assert_close(results["fuser"], results["torch"])


def test_torch_must_win_by_a_margin(clock):
    clock.times = {"fuser": 1.05e-6, "torch": 1e-6}
    compiled = fulgurite.compile(normalized, autotune="auto")
    compiled(*inputs())
    assert "@fulgurite.region('fuser')" in str(compiled.last_trace())


def test_decisions_are_cached_for_equal_regions_only(clock):
    clock.times = {"fuser": 4e-6, "torch": 2e-6}
    for function, asked in (  # a fallback is measured twice
        (normalized, 2),
        (lambda a, b: normalized(a, b), 2),
        (lambda x, w: normalized(x + 1, w), 4),
    ):
        compiled = fulgurite.compile(function, autotune="auto")
        compiled(*inputs())
        assert len(clock.seen) == asked
    cache.clear()
    fulgurite.compile(normalized, autotune="auto")(*inputs())
    assert len(clock.seen) == 6


def compile_in_a_new_process(function):
    """Compile as a process would that has measured nothing yet."""
    autotune._measured_keys.clear()
    compiled = fulgurite.compile(function, autotune="auto")
    compiled(*inputs())
    return compiled, [decision.winner for decision in compiled.graphs[0].decisions]


BUSY, QUIET = {"fuser": 19.7e-3, "torch": 1e-4}, {"fuser": 5e-5, "torch": 1e-4}


def test_a_second_look_overrules_a_busy_moment(clock):
    clock.looks = [BUSY, QUIET]
    compiled, winners = compile_in_a_new_process(normalized)
    assert "@fulgurite.region('fuser')" in str(compiled.last_trace())
    assert winners == [], "two looks that disagree decide nothing"
    clock.looks = [QUIET]
    assert compile_in_a_new_process(normalized)[1] == ["fuser"]


def test_a_fallback_that_was_measured_on_a_busy_machine_heals(clock):
    clock.looks = [BUSY, BUSY]
    assert compile_in_a_new_process(normalized)[1] == ["torch"]
    clock.looks = [QUIET]
    assert compile_in_a_new_process(normalized)[1] == ["fuser"]
    clock.looks = []  # settled: nobody is asked again
    compiled, winners = compile_in_a_new_process(normalized)
    assert winners == ["fuser"] and compiled.graphs[0].decisions[0].cached


@pytest.mark.parametrize(
    ("times", "processes"), [({"fuser": 4e-5, "torch": 2e-5}, 2), (BUSY, 5)], ids=str
)
def test_implausible_fallbacks_need_more_confirmations(clock, times, processes):
    for _ in range(processes):
        clock.looks = [times, times]
        assert compile_in_a_new_process(normalized)[1] == ["torch"]
        assert clock.looks == []
    assert compile_in_a_new_process(normalized)[1] == ["torch"], "nobody is asked again"


def test_the_shorter_of_two_looks_counts(clock):
    clock.looks = [{"fuser": 9e-5, "torch": 2e-5}, {"fuser": 4e-5, "torch": 3e-5}]
    compiled, _ = compile_in_a_new_process(normalized)
    assert compiled.graphs[0].decisions[0].seconds == {"fuser": 4e-5, "torch": 2e-5}


def test_unsettled_timings_decide_nothing(clock, caplog):
    clock.times = None
    compiled = fulgurite.compile(normalized, autotune="auto")
    with caplog.at_level("INFO", logger="fulgurite"):
        compiled(*inputs())
    assert "no settled timings, fuser keeps it" in caplog.text
    assert "@fulgurite.region('fuser')" in str(compiled.last_trace())
    assert not compiled.graphs[0].decisions
    fulgurite.compile(normalized, autotune="auto")(*inputs())
    assert len(clock.seen) == 2, "nothing was stored"


def test_deterministic_mode_measures_nothing(clock):
    clock.times = {"fuser": 1e-3, "torch": 1e-6}
    compiled = fulgurite.compile(normalized, autotune="auto")
    with fulgurite.deterministic():
        compiled(torch.randn(3, 6), torch.randn(6))
    assert not clock.seen and "autotuned" not in str(compiled.explain())
    assert "@fulgurite.region('fuser')" in str(compiled.last_trace())


def test_autotune_off_measures_nothing(clock, monkeypatch):
    fulgurite.compile(normalized, autotune=False)(*inputs())
    monkeypatch.setenv("FULGURITE_AUTOTUNE", "0")
    fulgurite.compile(normalized)(*inputs())
    assert not clock.seen
    monkeypatch.setenv("FULGURITE_AUTOTUNE", "auto")
    fulgurite.compile(normalized)(*inputs())
    assert len(clock.seen) == 1
    monkeypatch.setenv("FULGURITE_AUTOTUNE", "often")
    with pytest.raises(ArgumentError, match="FULGURITE_AUTOTUNE='often'"):
        fulgurite.compile(normalized)


def test_random_and_empty_regions_are_not_run_twice(clock):
    fulgurite.compile(lambda x: torch.rand_like(x) * 2 + x, autotune="auto")(torch.ones(4))
    fulgurite.compile(lambda x: x * 2 + 1, autotune="auto")(torch.ones(0, 4))
    assert not clock.seen


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_sizes_that_depend_on_data_are_not_made_up():
    """Made-up counts of rows don't add up to the rows that are multiplied: neither candidate would run."""

    def experts(x, order, counts, gates, w):
        parts = x[order].split(counts.tolist())
        out = torch.cat([part @ w[k] for k, part in enumerate(parts)])
        return torch.zeros_like(x).index_add(0, order, out * gates[:, None])

    torch.manual_seed(0)
    inputs = torch.randn(12, 4), torch.randperm(12), torch.tensor([3, 0, 9]), torch.rand(12)
    w = torch.randn(3, 4, 4)
    compiled = fulgurite.compile(experts, autotune="auto")
    torch.testing.assert_close(compiled(*inputs, w), experts(*inputs, w))


def test_offsets_in_padded_windows_are_not_made_up(clock):
    """Offset 0 of the first window is before the tensor: torch's kernel wrote there, and crashed."""
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    compiled = fulgurite.compile(lambda x: F.max_pool2d(x, 3, 2, padding=1), autotune="auto")
    y = compiled(x)
    clock.seen.clear()
    (found,) = torch.autograd.grad(y.sum(), x)  # compiles the backward graph
    (wanted,) = torch.autograd.grad(F.max_pool2d(x, 3, 2, padding=1).sum(), x)
    torch.testing.assert_close(found, wanted)
    assert not clock.seen


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_example_offsets_of_bags_are_in_order(clock, mode, include_last):
    """Made-up offsets in any order are refused by torch, and read elsewhere by its kernels."""
    lookups = torch.tensor([1, 2, 8, 0, 0, 3, 8, 8, 4, 5, 6, 8])
    offsets = torch.tensor([0, 3, 3, 7, 12] if include_last else [0, 3, 3, 7])

    def bags(w):
        return F.embedding_bag(
            lookups, w, offsets, mode=mode, padding_idx=0, include_last_offset=include_last
        )

    w = torch.randn(9, 5, requires_grad=True)
    found = fulgurite.compile(bags, autotune="auto")(w)
    torch.testing.assert_close(found, bags(w))
    (gradient,) = torch.autograd.grad(found.sum(), w)
    torch.testing.assert_close(gradient, *torch.autograd.grad(bags(w).sum(), w))
    assert len(clock.seen) == 2, "forward and backward are timed"


def test_regions_whose_example_inputs_torch_refuses_are_not_timed(clock, monkeypatch):
    def refuse(*_):
        raise RuntimeError("lengths must add up")

    monkeypatch.setattr(autotune.TorchExecutor, "lower", lambda *_: refuse)
    x, w = torch.arange(5), torch.randn(7, 3)
    compiled = fulgurite.compile(lambda i, w: w[i] * 2 + 1, autotune="auto")
    torch.testing.assert_close(compiled(x, w), w[x] * 2 + 1)
    assert not clock.seen and "@fulgurite.region('fuser')" in str(compiled.last_trace())


def test_large_savings_in_bytes_need_no_clock(clock):
    x = torch.ones(2048, 2048)
    compiled = fulgurite.compile(lambda x: ((x + 1) * 2 - x).relu(), autotune="auto")
    compiled(x)
    assert not clock.seen and "@fulgurite.region('fuser')" in str(compiled.last_trace())


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last_batch_norms_are_not_left_to_torch(clock, memory_format):
    """torch adds their images one after another: errors are 10 to 50 times those of contiguous tensors."""
    clock.times = {"fuser": 4e-6, "torch": 2e-6}
    x = torch.randn(2, 8, 5, 5).to(memory_format=memory_format)
    mean, variance = torch.zeros(8), torch.ones(8)

    def function(x):
        return F.batch_norm(x, mean, variance, training=True).relu()

    torch.testing.assert_close(fulgurite.compile(function, autotune="auto")(x), function(x))
    assert bool(clock.seen) == (memory_format is torch.contiguous_format)


def test_one_thread_is_timed_by_its_cpu_time(monkeypatch):
    x = torch.ones(3)
    monkeypatch.setattr(autotune, "num_cpu_threads", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert autotune._choose_clock([x, 3]) is time.thread_time
    assert autotune._choose_clock([x.to("meta")]) is time.perf_counter
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert autotune._choose_clock([x]) is time.perf_counter


def test_measuring_leaves_the_random_state_alone():
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    fulgurite.compile(normalized, autotune="auto")(torch.ones(5, 6), torch.ones(6))
    assert torch.equal(torch.randn(4), expected)


@pytest.mark.parametrize(("growth", "settles"), [(2.0, False), (1.01, True)])
def test_best_on_wants_two_readings_that_agree(monkeypatch, growth, settles):
    now, pause = 0.0, 1e-3

    def slower_each_time():
        nonlocal now, pause
        now, pause = now + pause, pause * growth

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    found = timing.best_times_on({"slow": slower_each_time}, clock=lambda: now)
    assert (found is not None) == settles
    assert not settles or found["slow"] == pytest.approx(1e-3 * growth**2)


def test_a_signature_has_no_names():
    def region(one, two):
        graph = torch.fx.Graph()
        a = graph.placeholder(one)
        a.meta["val"] = torch.empty(3)
        b = graph.call_function(torch.ops.aten.neg.default, (a,), name=two)
        b.meta["val"] = torch.empty(3)
        graph.output((b,))
        return torch.fx.GraphModule({}, graph)

    assert region_signature(region("x", "y")) == region_signature(region("weight", "other"))


@pytest.mark.parametrize(
    ("shape", "strides", "dtype"),
    [
        ((), (), torch.float64),
        ((7,), (1,), torch.float32),
        ((4093,), (1,), torch.bfloat16),
        ((4094, 3), (3, 1), torch.float16),
        ((8, 5, 6, 7), (210, 1, 35, 5), torch.bfloat16),
        ((3, 4), (1, 0), torch.float32),
        ((5, 3), (1, 1), torch.float32),
        ((2, 5), (9, 1), torch.complex64),
        ((9001,), (1,), torch.float8_e4m3fn),
        ((6, 2), (1, 6), torch.int64),
    ],
)
def test_example_inputs_match_the_metadata(shape, strides, dtype):
    like = torch.empty_strided(shape, strides, dtype=dtype)
    made = make_example_input(like)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, strides, dtype)
    numbers = (made.real if dtype.is_complex else made).float()
    low, high = (0.5, 1.5) if dtype.is_floating_point or dtype.is_complex else (0, 0)
    assert bool(((numbers >= low) & (numbers <= high)).all()), "an element was left as it was"
    if numbers.numel() > 4093:
        assert torch.equal(numbers.flatten()[4093:4100], numbers.flatten()[:7])


def test_the_launcher_in_python_is_not_timed(clock, monkeypatch):
    """A host program runs the kernels without it. It had made torch win most small regions."""
    fused_calls = []
    launch = FusedRegion.__call__

    def counted(self, *arguments):
        fused_calls.append(self)
        return launch(self, *arguments)

    monkeypatch.setattr(FusedRegion, "__call__", counted)
    x, w = inputs()
    fulgurite.compile(normalized, autotune="auto")(x, w)
    before = len(fused_calls)
    assert before > 0
    call = fused_calls[0]
    recorded = autotune._without_launcher(call, (x, w))
    made = len(fused_calls)
    x.copy_(torch.randn(5, 6))
    (result,) = recorded(x, w)
    assert len(fused_calls) == made
    torch.testing.assert_close(result, normalized(x, w))
