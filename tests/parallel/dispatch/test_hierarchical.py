"""The hierarchical dispatcher against all experts on one rank, and against all-to-all."""

from __future__ import annotations

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.wire_format import WIRE_FORMATS
from fulgurite.parallel import Axis, RankPool
from fulgurite.parallel.dispatch.hierarchical import HierarchicalDispatcher
from fulgurite.parallel.dispatch.node_axes import split_by_node
from tests.parallel import async_cases
from tests.parallel.dispatch import hierarchical_cases as cases
from tests.parallel.experts import expert_cases
from tests.parallel.test_engine import alone, greedy, prompts
from tests.parallel.test_engine import folder as folder  # a fixture

TWO_BY_TWO = (0, 0, 1, 1)
INTERLEAVED = (0, 1, 0, 1)
FOUR_BY_ONE = (0, 1, 2, 3)
ONE_BY_FOUR = (0, 0, 0, 0)
FOUR_BY_TWO = (0, 0, 1, 1, 2, 2, 3, 3)
UNEVEN = (5, 0, 3, 17)
EXACT = 1e-12  # float64, sums of a few dozen terms


def check(pool, *arguments, tolerance=EXACT, **how) -> None:
    for rank, found in enumerate(pool.run(expert_cases.call, cases.compare, arguments, how)):
        for name, error in found.items():
            assert error < tolerance, f"rank {rank}: {name} {error}"


@pytest.mark.parametrize("nodes", [TWO_BY_TWO, INTERLEAVED, FOUR_BY_ONE, ONE_BY_FOUR])
def test_outputs_and_gradients_equal_one_rank(ranks, nodes):
    for kind in expert_cases.KINDS:
        check(ranks(4), nodes, UNEVEN, kind=kind)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_every_wire_format_rounds_once(ranks, wire):
    """Equal to rounding tokens first: a forwarded row is not packed again."""
    exact = wire == "f64"
    dtype = torch.float64 if exact else torch.float32
    check(ranks(4), TWO_BY_TWO, UNEVEN, wire=wire, dtype=dtype, tolerance=EXACT if exact else 2e-5)


def test_no_tokens_and_all_tokens_to_one_expert(ranks):
    check(ranks(4), TWO_BY_TWO, (0,))
    check(ranks(4), TWO_BY_TWO, (0, 0, 9, 0), only=6)
    check(ranks(4), TWO_BY_TWO, (7,), only=0, top_k=1)
    check(ranks(4), TWO_BY_TWO, (1, 0, 0, 0), only=7)
    check(ranks(4), TWO_BY_TWO, UNEVEN, top_k=1)
    check(ranks(4), TWO_BY_TWO, UNEVEN, count=4, top_k=4)


@pytest.mark.parametrize("wire", ["same", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_a_token_on_one_node_give_the_bits_of_all_to_all(ranks, dtype, wire):
    for nodes in (TWO_BY_TWO, ONE_BY_FOUR):  # a node of four ranks: the order of a sum matters
        for wanted, found in ranks(4).run(cases.both, nodes, dtype, wire, True, 4):
            assert torch.equal(wanted, found)


def test_differs_from_all_to_all_by_the_order_of_the_sum_only(ranks):
    for top_k in (1, 3, 8):
        for wanted, found in ranks(4).run(
            cases.both, TWO_BY_TWO, torch.float64, "same", False, top_k
        ):
            torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


def test_capacity_and_invalid_slots_raise_on_every_rank(ranks):
    tokens = (4, 1, 0, 2)
    for text, works in ranks(4).run(cases.raise_on_all, TWO_BY_TWO, tokens, 6, None):
        assert text.startswith("CapacityError: rank 2 of the expert axis would receive 7 rows")
        assert "rows by rank: 0, 0, 7, 0" in text and works
    for text, works in ranks(4).run(cases.raise_on_all, TWO_BY_TWO, tokens, 7, None):
        assert text == "" and works
    for bad in (8, -1, 10**9):
        for text, works in ranks(4).run(cases.raise_on_all, TWO_BY_TWO, tokens, None, bad):
            assert text.startswith("ArgumentError: rank 1 of the expert axis sent 1 tokens")
            assert works


# ---- equal splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [TWO_BY_TWO, INTERLEAVED, FOUR_BY_ONE, ONE_BY_FOUR])
def test_equal_splits_have_the_bits_of_exact_ones(ranks, nodes):
    """Ranks without tokens, all tokens to one expert, every wire format; the host reads no counts."""
    for tokens, only in ((UNEVEN, None), ((0, 0, 9, 0), 6), ((1,), None)):
        for exact, padded in ranks(4).run(cases.pad, nodes, tokens, torch.float32, "same", only):
            assert torch.equal(exact, padded)
    for wire in ("bf16", "fp8", "nvfp4"):
        for exact, padded in ranks(4).run(cases.pad, nodes, UNEVEN, torch.bfloat16, wire, None):
            assert torch.equal(exact, padded)


def test_invalid_slots_of_a_padded_step_raise_in_check_on_every_rank(ranks):
    for bad in (8, -1, 10**9):
        for first, second, is_right in ranks(4).run(cases.check_invalid_slots, TWO_BY_TWO, bad):
            assert first.startswith("ArgumentError: rank 1 of the expert axis sent tokens")
            assert second == "" and is_right


def test_which_steps_are_padded():
    """Small ones whose size is known, without gradients, within the capacity."""
    dispatcher = HierarchicalDispatcher(split_by_node(Axis("expert", (0,), 0)), capacity=100)
    assert not dispatcher.can_capture_step and dispatcher.can_capture
    dispatcher.set_step_tokens(100)
    assert dispatcher.can_capture_step and not dispatcher.is_padded
    with torch.no_grad():
        assert dispatcher.is_padded
    dispatcher.set_step_tokens(101)
    assert not dispatcher.can_capture_step
    x, routes = expert_cases.make_inputs(0, 5, 6, 2, torch.float32, None)
    dispatcher.set_step_tokens(4)
    with torch.no_grad(), pytest.raises(ArgumentError, match="5 tokens in a step .* at most 4"):
        dispatcher.start_dispatch(x, routes.experts_Tk, 6, routes.weights_Tk)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_captured_steps_over_emulated_nodes(ranks, folder, is_ahead):
    """Graphs that call the function: no step of an engine over nodes reads counts on the host."""
    path, params = folder("qwen3_moe"), greedy()
    axes = {"data": 4, "expert": 4}
    options = {"nodes": 2, "transport": "hierarchical", "async_scheduling": is_ahead}
    found = ranks(4).run(async_cases.generate, path, axes, prompts(), params, options, True)
    assert found[0].replies == alone(path, params)
    for one in found:
        assert one.no_capture_reason is None and 1 in one.captured and one.unfinished == 0


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["same", "bf16"])
def test_a_cuda_graph_holds_the_dispatch(monkeypatch, wire):
    """Where the network is symmetric memory: two ranks that share a GPU."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    with RankPool(2) as pool:
        for replays in pool.run(cases.capture_on_gpu, 5, wire):
            for found, wanted in replays:
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # eight processes
@pytest.mark.parametrize("wire", ["same", "fp8", "nvfp4"])
def test_four_nodes_of_two(ranks, wire):
    tokens = (3, 0, 11, 1, 0, 6, 2, 9)
    how = dict(count=16, top_k=4, dtype=torch.float32, tolerance=2e-5)
    for kind in expert_cases.KINDS:
        check(ranks(8), FOUR_BY_TWO, tokens, kind=kind, wire=wire, **how)
    for wanted, found in ranks(8).run(cases.both, FOUR_BY_TWO, torch.bfloat16, wire, True, 4):
        assert torch.equal(wanted, found)


def test_nodes_of_different_sizes_are_refused():
    axis = Axis("expert", (0, 1, 2), 0, nodes=(0, 0, 1))
    with pytest.raises(ArgumentError, match=r"different numbers of ranks: node 0: 2, node 1: 1"):
        split_by_node(axis)


def test_one_rank():
    axes = split_by_node(Axis("expert", (0,), 0))
    x, routes = expert_cases.make_inputs(0, 5, 6, 2, torch.float64, None)
    dispatcher = HierarchicalDispatcher(axes)
    dispatched = dispatcher.start_dispatch(x, routes.experts_Tk, 6, routes.weights_Tk)
    found = dispatcher.combine(cases.expert_stand_in(dispatched), dispatched)
    factor_Tk = (1 + routes.experts_Tk.double() / 7) * routes.weights_Tk
    wanted = torch.sin(3 * x[:, None] * factor_Tk[:, :, None]).sum(1)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ArgumentError, match="unknown wire format 'fp7'"):
        HierarchicalDispatcher(axes, dispatch_format="fp7")
