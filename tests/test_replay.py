"""Recording: the same results on new inputs, and what can't be recorded is named."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fulgurite import replay
from fulgurite.compile import compile
from fulgurite.errors import ReplayError
from fulgurite.executors.fuser import kernels_of
from fulgurite.fuse import fuse
from fulgurite.kernels.elementwise.cpu import rms_norm


def two_kernels(size=37):
    norm = fuse(lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6))
    gate = fuse(lambda a, b: F.silu(a) * b)
    weight = torch.randn(size)

    def step(x):
        y = norm(x, weight)
        return gate(y, y.view(-1).view(x.shape)), y

    return step


@pytest.mark.parametrize("rows", [1, 3])
def test_a_replay_computes_on_what_the_inputs_hold_now(rows):
    step = two_kernels()
    x = torch.randn(rows, 37)
    with torch.no_grad():
        recorded = replay.record(step, x)
        for _ in range(3):
            x.copy_(torch.randn(rows, 37))
            wanted = step(x)
            found = recorded()
            assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert len(recorded.calls) == 2
    assert found[0] is recorded.outputs[0]


def test_large_results_from_the_pool_are_held():
    step = fuse(lambda x: (x + 1) * 2)
    x = torch.zeros(1 << 20)
    recorded = replay.record(step, x)
    others = [torch.full((1 << 20,), 7.0) for _ in range(4)]
    x.fill_(3.0)
    assert (recorded() == 8).all() and all((other == 7).all() for other in others)


def test_temporaries_share_memory_and_results_are_held():
    """Of ten norms three are held at once: the first, and what one reads and writes."""

    def step(x):
        first = rms_norm(x, weight, 1e-6, 0.0)
        y = first
        for _ in range(9):
            y = rms_norm(y, weight, 1e-6, 0.0)
        return first, y

    x, weight = torch.randn(10, 100), torch.rand(100) + 0.5
    recorded = replay.record(step, x)
    assert recorded.workspace.num_bytes == 3 * x.nbytes
    assert all(recorded.workspace.owns(output) for output in recorded.outputs)
    for _ in range(2):
        x.copy_(torch.randn(10, 100))
        found = recorded()
        assert all(torch.equal(a, b) for a, b in zip(step(x), found, strict=True))
    first, last = recorded.outputs
    del recorded, found
    others = [torch.full((10, 100), 7.0) for _ in range(8)]
    assert torch.equal(first, step(x)[0]) and torch.equal(last, step(x)[1]) and len(others) == 8


def test_a_compiled_module_is_recorded():
    class Block(torch.nn.Module):
        def forward(self, x):
            return F.silu(x) * x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) + 1

    compiled = compile(Block(), executors=["fuser", "torch"])
    x = torch.randn(5, 14)
    with torch.no_grad():
        recorded = replay.record(compiled, x)
        x.copy_(torch.randn(5, 14))
        assert torch.equal(recorded(), compiled(x))


def test_what_is_not_native_is_named():
    step = two_kernels()
    with pytest.raises(ReplayError, match="aten::sin"):
        replay.record(lambda x: step(x.sin())[0], torch.randn(2, 37))
    assert not replay.is_recording()


def test_a_view_of_other_memory_is_no_kernel():
    with pytest.raises(ReplayError, match=r"copy_|clone"):
        replay.record(lambda x: x.t().contiguous(), torch.randn(2, 3))


def test_a_bad_index_is_an_error_in_a_replay_too():
    pick = fuse(lambda table, index: table[index] * 2)
    index = torch.tensor([1, 2])
    recorded = replay.record(pick, torch.randn(4, 3), index)
    index[0] = 4
    with pytest.raises(IndexError, match="out of range"):
        recorded()
    index[0] = 3
    recorded()


def test_no_recording_within_a_recording():
    step = two_kernels()
    x = torch.randn(1, 37)
    with pytest.raises(ReplayError, match="inside"):
        replay.record(lambda x: replay.record(step, x).outputs, x, warmups=0)


def test_profile_counts_calls():
    step = two_kernels()
    rows = replay.record(step, torch.randn(1, 37)).profile(repeats=2)
    assert sum(count for _, count, _ in rows) == 2 and all(seconds > 0 for *_, seconds in rows)


def test_profiler_names_generated_kernels():
    compiled = compile(lambda x: torch.softmax(x, -1) * 2)
    x = torch.randn(5, 7)
    compiled(x)
    (kernel,) = kernels_of(compiled.last_trace())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        compiled(x)
        compiled(x)
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts[kernel[1].name] == 2
