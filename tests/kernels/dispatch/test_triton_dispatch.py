"""Dispatch and combine between ranks that live in one process, in the interpreter (or on a GPU).

The experts here multiply by their number, so every token says where it has been.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, CapacityError, RankError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.parallel.dispatch.dispatcher import DispatchedTokens
from fulgurite.parallel.mesh import Axis
from fulgurite.quant import QuantTensor
from tests.kernels.dispatch.cases import round_trip
from tests.kernels.triton_support import DEVICE

from fulgurite.parallel.symmetric.memory import allocate_local_buffers  # isort: skip
from fulgurite.parallel.dispatch.symmetric import SymmetricMemoryDispatcher  # isort: skip

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def transports(
    ranks: int, plan: DispatchConfig, polls: int = 10
) -> list[SymmetricMemoryDispatcher]:
    memory = allocate_local_buffers(ranks, plan.num_bytes(ranks), DEVICE)
    axes = [Axis("expert", tuple(range(ranks)), rank) for rank in range(ranks)]
    return [
        SymmetricMemoryDispatcher(axis, plan, part, polls)
        for axis, part in zip(axes, memory, strict=True)
    ]


def visit(transport: SymmetricMemoryDispatcher, arrived: DispatchedTokens) -> Tensor:
    """Each row times the number of its expert among all, from 1; nobody's rows are poison."""
    experts = transport.config.experts_per_rank
    number = arrived.experts_S + 1 + transport.axis.index * experts
    y_SD = arrived.x_SD * (number * arrived.weights_S)[:, None].to(arrived.x_SD.dtype)
    return y_SD.masked_fill((arrived.experts_S >= experts)[:, None], float("nan"))


def routes(
    tokens: int, plan: DispatchConfig, slots: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, plan.hidden_size, generator=generator)
    chosen = torch.rand(tokens, slots, generator=generator).topk(plan.top_k, dim=-1).indices
    return x, chosen, torch.rand(tokens, plan.top_k, generator=generator)


def wanted(x: Tensor, chosen: Tensor, weights: Tensor, wire: str) -> Tensor:
    """The definition, in float64."""
    x = round_trip(wire, x).double()
    return ((weights.double() * (chosen + 1))[..., None] * x[:, None]).sum(1)


def step(
    running: list[SymmetricMemoryDispatcher], inputs: list[tuple[Tensor, Tensor, Tensor]]
) -> list[Tensor]:
    """One dispatch and combine of all ranks, phase by phase."""
    slots = running[0].config.experts_per_rank * len(running)
    inputs = [tuple(part.to(DEVICE) for part in one) for one in inputs]
    sent = [
        t.start_dispatch(x, chosen, slots, w)
        for t, (x, chosen, w) in zip(running, inputs, strict=True)
    ]
    arrived = [t.finish_dispatch(one) for t, one in zip(running, sent, strict=True)]
    for transport, one in zip(running, arrived, strict=True):
        transport.start_combine(visit(transport, one), one)
    return [t.finish_combine(one).cpu() for t, one in zip(running, arrived, strict=True)]


def check(
    running: list[SymmetricMemoryDispatcher], inputs: list[tuple[Tensor, Tensor, Tensor]]
) -> None:
    outs = step(running, inputs)
    plan = running[0].config
    for transport, out, (x, chosen, weights) in zip(running, outs, inputs, strict=True):
        transport.check()
        expected = wanted(x, chosen, weights, plan.dispatch_format)
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(
            out.double(), expected, rtol=0, atol=TOLERANCE[x.dtype] * max(scale, 1.0)
        )


@pytest.mark.parametrize("wire", ["f32", "bf16", "f16", "fp8", "nvfp4"])
def test_every_wire_format(wire):
    plan = DispatchConfig(4, 2, 32, 2, dispatch_format=wire, combine_format="f32")
    running = transports(3, plan)
    for seed, counts in enumerate([(4, 0, 3), (1, 4, 2)]):  # both copies of the buffers
        check(running, [routes(n, plan, 6, 9 * seed + r) for r, n in enumerate(counts)])


def test_no_tokens_and_a_single_rank():
    plan = DispatchConfig(3, 2, 16, 4, dispatch_format="f32", combine_format="f32")
    running = transports(2, plan)
    for counts in ((0, 0), (0, 3), (0, 0), (3, 1)):
        check(running, [routes(n, plan, 8, r) for r, n in enumerate(counts)])
    check(transports(1, plan), [routes(3, plan, 4, 0)])


@pytest.mark.parametrize("hidden, wire", [(1, "f32"), (129, "fp8"), (1030, "bf16")])
def test_odd_hidden_sizes(hidden, wire):
    """Not a multiple of anything; scales of which the last is for one value; more than one block."""
    plan = DispatchConfig(2, 2, hidden, 1, dispatch_format=wire, combine_format="f32")
    check(transports(2, plan), [routes(2, plan, 2, seed) for seed in range(2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    plan = DispatchConfig(4, 3, 32, 2, dispatch_format=name, combine_format=name)
    inputs = [routes(4, plan, 4, seed) for seed in range(2)]
    check(transports(2, plan), [(x.to(dtype), chosen, w) for x, chosen, w in inputs])


def test_one_expert_takes_everything():
    plan = DispatchConfig(6, 1, 16, 2, dispatch_format="f32", combine_format="f32")
    inputs = [routes(6, plan, 6, seed) for seed in range(3)]
    check(transports(3, plan), [(x, torch.full_like(chosen, 4), w) for x, chosen, w in inputs])


def test_more_rows_and_columns_than_one_program_handles():
    """More rows than programs, more columns than a block, and more results than are loaded together:
    of experts of one rank, and of ranks."""
    cases = [(2, DispatchConfig(7, 2, 16, 2, "f32", "f32"), 4), (2, DispatchConfig(2, 10, 1030, 12, "f32", "f32"), 12),
             (9, DispatchConfig(1, 9, 16, 1, "f32", "f32"), 9)]  # fmt: skip
    for ranks, plan, slots in cases:
        running = transports(ranks, plan)
        for transport in running:
            transport.combine_programs = 3
        for again in range(3 if ranks == 2 else 1):  # then results of the first step lie there
            seeds = range(again * ranks, (again + 1) * ranks)
            check(running, [routes(plan.max_tokens, plan, slots, seed) for seed in seeds])


def test_two_steps_in_flight():
    """The second step is sent before the first has come back, as overlapped layers do."""
    plan = DispatchConfig(4, 2, 16, 2, dispatch_format="f32", combine_format="f32")
    running = transports(2, plan)
    for seed in range(2):
        both = [[routes(4, plan, 4, seed * 10 + 2 * r + s) for r in range(2)] for s in range(2)]
        both = [[tuple(p.to(DEVICE) for p in one) for one in inputs] for inputs in both]
        sent = [
            [t.start_dispatch(x, chosen, 4, w) for t, (x, chosen, w) in zip(running, inputs)]
            for inputs in both
        ]
        with pytest.raises(ArgumentError, match="in flight"):
            running[0].start_dispatch(*both[0][0][:2], 4, both[0][0][2])
        for inputs, steps in zip(both, sent, strict=True):
            arrived = [t.finish_dispatch(one) for t, one in zip(running, steps)]
            for transport, one in zip(running, arrived, strict=True):
                transport.start_combine(visit(transport, one), one)
            for transport, one, (x, chosen, w) in zip(running, arrived, inputs, strict=True):
                out = transport.finish_combine(one)
                expected = wanted(x.cpu(), chosen.cpu(), w.cpu(), "f32").float()
                torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_capacity_is_an_error_on_every_rank_and_nothing_is_overwritten():
    plan = DispatchConfig(6, 1, 16, 2, dispatch_format="f32", combine_format="f32", capacity=3)
    running = transports(2, plan)
    inputs = [routes(n, plan, 4, n) for n in (3, 5)]
    inputs = [(x, torch.full_like(chosen, 1), w) for x, chosen, w in inputs]
    # What lies behind the rows from rank 1 in the inbox of rank 0: the results that come back.
    before = running[0].buffer.data.clone()
    slots = 4
    for transport, (x, chosen, w) in zip(running, inputs, strict=True):
        transport.start_dispatch(x.to(DEVICE), chosen.to(DEVICE), slots, w.to(DEVICE))
    start, end = running[0].returns_offset, running[0].flags_offset
    copy = running[0].buffer_bytes
    after = running[0].buffer.data
    assert torch.equal(after[copy + start : copy + end], before[copy + start : copy + end])
    for transport in running:
        transport._wait_flags(
            transport.step, torch.zeros(2, dtype=torch.int32, device=DEVICE), False
        )
        with pytest.raises(CapacityError, match="rank 1 had more than 3 rows"):
            transport.check()


def test_error_names_a_rank_that_never_sends():
    plan = DispatchConfig(2, 1, 16, 1, dispatch_format="f32", combine_format="f32")
    running = transports(3, plan)
    x, chosen, w = (part.to(DEVICE) for part in routes(2, plan, 3, 0))
    sent = [running[rank].start_dispatch(x, chosen, 3, w) for rank in (0, 2)]
    assert running[0].finish_dispatch(sent[0]).experts_S.shape == (6,)
    with pytest.raises(RankError, match="rank 1 did not answer") as caught:
        running[0].check()
    assert caught.value.ranks == (1,)


def test_a_slot_that_does_not_exist():
    plan = DispatchConfig(2, 1, 16, 1, dispatch_format="f32", combine_format="f32")
    running = transports(2, plan)
    x, chosen, w = routes(2, plan, 2, 0)
    for bad in (2, -1, 2**31 - 1):
        outs = step(running, [(x, torch.tensor([[0], [bad]]), w), (x, chosen, w)])
        torch.testing.assert_close(outs[1].double(), wanted(x, chosen, w, "f32"), atol=1e-5, rtol=0)
        with pytest.raises(ArgumentError, match="rank 0 sent a token to an expert"):
            running[0].check()


def test_duplicate_expert_of_a_token():
    """It has more visits than its header has room for: they are not written over its neighbour's."""
    plan = DispatchConfig(4, 3, 16, 2, dispatch_format="f32", combine_format="f32")
    running = transports(2, plan)
    x, chosen, w = routes(4, plan, 4, 0)
    twice = chosen.clone()
    twice[1] = 1
    outs = step(running, [(x, twice, w), (x, chosen, w)])
    right = wanted(x, chosen, w, "f32")
    torch.testing.assert_close(outs[1].double(), right, atol=1e-5, rtol=0)
    torch.testing.assert_close(outs[0][[0, 2, 3]].double(), right[[0, 2, 3]], atol=1e-5, rtol=0)
    with pytest.raises(ArgumentError, match="(?s)rank 0 sent .* must differ"):
        running[0].check()
    running[1].check()


def test_inputs_that_do_not_match_the_config_raise():
    plan = DispatchConfig(2, 1, 16, 1)
    transport = transports(2, plan)[0]
    x, chosen, w = routes(2, plan, 2, 0)
    with pytest.raises(ArgumentError, match="3 tokens"):
        transport.start_dispatch(
            torch.zeros(3, 16), torch.zeros(3, 1, dtype=torch.long), 2, torch.zeros(3, 1)
        )
    with pytest.raises(ArgumentError, match="slots"):
        transport.start_dispatch(x, chosen, 5, w)
    with pytest.raises(ArgumentError, match="no gradients"):
        transport.start_dispatch(x.requires_grad_(), chosen, 2, w)
    assert "inbox" in str(transport) and "MiB" in str(
        DispatchConfig(128, 8, 7168, 32).size_buffers(8)
    )


def test_under_pressure():
    """Many steps with changing numbers of tokens through the same two copies."""
    plan = DispatchConfig(7, 2, 16, 2, dispatch_format="f32", combine_format="f32")
    running = transports(3, plan)
    generator = torch.Generator().manual_seed(0)
    for seed in range(4 if DEVICE == "cpu" else 100):
        counts = torch.randint(0, 8, (3,), generator=generator).tolist()
        check(running, [routes(n, plan, 6, 7 * seed + r) for r, n in enumerate(counts)])


@pytest.mark.gpu
def test_as_a_cuda_graph():
    """Recorded once and replayed with other tokens: step numbers are counted on the device."""
    plan = DispatchConfig(6, 2, 64, 2, dispatch_format="bf16", combine_format="f32")
    running = transports(3, plan, polls=1 << 20)
    inputs = [tuple(p.to(DEVICE) for p in routes(6, plan, 6, r)) for r in range(3)]

    def whole_step() -> list[Tensor]:
        sent = [t.start_dispatch(x, chosen, 6, w) for t, (x, chosen, w) in zip(running, inputs)]
        arrived = [t.finish_dispatch(one) for t, one in zip(running, sent)]
        for transport, one in zip(running, arrived, strict=True):
            transport.start_combine(visit(transport, one), one)
        return [t.finish_combine(one) for t, one in zip(running, arrived)]

    whole_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = whole_step()
    for seed in range(5):
        fresh = [routes(6, plan, 6, 50 * seed + r) for r in range(3)]
        for held, new in zip(inputs, fresh, strict=True):
            for tensor, value in zip(held, new, strict=True):
                tensor.copy_(value)
        graph.replay()
        for transport, out, (x, chosen, w) in zip(running, outs, fresh, strict=True):
            transport.check()
            torch.testing.assert_close(
                out.cpu().double(), wanted(x, chosen, w, "bf16"), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("hidden", [128, 300])
def test_fp8_rows_stay_in_fp8(hidden):
    """Codes and scales of every assignment are those that its sender packed."""
    plan = DispatchConfig(4, 2, hidden, 2, dispatch_format="fp8", combine_format="f32")
    running = transports(2, plan)
    inputs = [routes(n, plan, 4, seed) for seed, n in enumerate((4, 3))]
    values: dict[int, Tensor] = {}
    for keep_fp8 in (False, True):
        sent = [
            t.start_dispatch(x.to(DEVICE), chosen.to(DEVICE), 4, w.to(DEVICE))
            for t, (x, chosen, w) in zip(running, inputs, strict=True)
        ]
        arrived = [
            t.finish_dispatch(one, keep_fp8=keep_fp8) for t, one in zip(running, sent, strict=True)
        ]
        for transport, one in zip(running, arrived, strict=True):
            x_SD = one.x_SD.dequantize() if keep_fp8 else one.x_SD
            assert isinstance(one.x_SD, QuantTensor) == keep_fp8
            is_used = one.experts_S < plan.experts_per_rank
            expected = values.setdefault(transport.axis.index, x_SD[is_used])
            assert torch.equal(x_SD[is_used], expected), "the same values as dequantized ones"
        for transport, one in zip(running, arrived, strict=True):
            transport.start_combine(torch.zeros(one.x_SD.shape, device=DEVICE), one)
        for transport, one in zip(running, arrived, strict=True):
            transport.finish_combine(one)


def test_the_size_of_a_step():
    """Rows are packed more densely in the buffers, in every step anew; the results are the same."""
    plan = DispatchConfig(6, 2, 16, 2, dispatch_format="f32", combine_format="f32")
    running = transports(2, plan)
    for tokens, counts in ((None, (6, 3)), (3, (3, 1)), (1, (0, 1)), (0, (0, 0)), (6, (6, 6))):
        for transport in running:
            transport.set_step_tokens(tokens)
        check(running, [routes(n, plan, 4, r) for r, n in enumerate(counts)])
    running[0].set_step_tokens(2)
    with pytest.raises(ArgumentError, match="agreed on at most 2"):
        x, chosen, weights = (part.to(DEVICE) for part in routes(3, plan, 4, 0))
        running[0].start_dispatch(x, chosen, 4, weights)
