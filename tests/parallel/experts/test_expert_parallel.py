"""Experts over ranks against all experts on one: outputs and gradients; what must not hang or corrupt."""

from __future__ import annotations

import pytest
import torch

from fulgurite.errors import ArgumentError, FormatError, RankError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.kernels.dispatch.layout import get_dispatch_layout
from fulgurite.kernels.dispatch.wire_format import WIRE_FORMATS, WireFormat
from fulgurite.parallel import AllToAllDispatcher, Mesh, Placement, RankPool, apply_expert_parallel
from fulgurite.parallel.dispatch.dispatcher import SAME_DTYPE
from tests.kernels.dispatch.cases import round_trip
from tests.parallel.experts import expert_cases as cases

FOUR, TWO_AND_TWO = (4, 1, 4), (2, 2, 2)
UNEVEN = (5, 0, 3, 17)
EXACT = 1e-12  # float64, sums of a few dozen terms


def check(pool, *arguments, tolerance=EXACT, **how) -> None:
    for rank, found in enumerate(pool.run(cases.call, cases.compare, arguments, how)):
        for name, error in found.items():
            assert error < tolerance, f"rank {rank}: {name} {error}"


@pytest.mark.parametrize("kind", cases.KINDS)
def test_uneven_tokens(ranks, kind):
    check(ranks(4), FOUR, UNEVEN, kind=kind)
    check(ranks(4), TWO_AND_TWO, UNEVEN, kind=kind)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_every_wire_format(ranks, wire):
    """Equal to rounding tokens first and spreading nothing; gradients pass straight through."""
    exact = wire == "f64"
    dtype = torch.float64 if exact else torch.float32
    check(ranks(4), FOUR, UNEVEN, wire=wire, dtype=dtype, tolerance=EXACT if exact else 2e-5)


def test_bfloat16(ranks):
    """Sums by rank are rounded before they travel: a few units of 2**-8."""
    for kind in cases.KINDS:
        check(ranks(4), FOUR, UNEVEN, kind=kind, dtype=torch.bfloat16, tolerance=10 * 2**-8)


@pytest.mark.parametrize("wire", ["same", "fp8", "nvfp4"])
def test_no_rank_has_tokens(ranks, wire):
    check(ranks(4), FOUR, (0,), wire=wire, dtype=torch.float32, tolerance=1e-6)


def test_one_rank_has_all_tokens_and_one_expert_takes_them(ranks):
    check(ranks(4), FOUR, (0, 0, 9, 0), only=6)
    check(ranks(4), FOUR, (7,), only=0, per_token=1)


def test_one_expert_for_each_token_and_all_of_them(ranks):
    check(ranks(4), FOUR, UNEVEN, per_token=1)
    check(ranks(4), FOUR, UNEVEN, count=4, per_token=4)


def test_experts_that_do_not_divide(ranks):
    """Seven experts on four ranks: eight slots, one expert lies in two of them."""
    placement = Placement(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0]]), num_experts=7, num_ranks=4)
    check(ranks(4), FOUR, UNEVEN, count=7, placement=placement)


def test_replicas_and_another_order(ranks):
    slots = [[7, 0, 3, 3, 1, 3, 2, 4, 5, 0, 6, 7]]
    placement = Placement(torch.tensor(slots), num_experts=8, num_ranks=4)
    check(ranks(4), FOUR, (9, 0, 4, 6), placement=placement)
    check(ranks(4), FOUR, (9, 0, 4, 6), placement=placement, kind="weighs input")


@pytest.mark.slow
@pytest.mark.parametrize("wire", [SAME_DTYPE, "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_eight_ranks(ranks, kind, wire):
    tokens = (3, 0, 11, 1, 0, 6, 2, 9)
    how = dict(kind=kind, wire=wire, count=16, per_token=4, dtype=torch.float32, tolerance=2e-5)
    check(ranks(8), (8, 1, 8), tokens, **how)
    check(ranks(8), (4, 2, 4), tokens, **how)


def test_capacity_is_an_error_on_every_rank(ranks):
    """Expert 5 is on rank 2, where every token goes."""
    for text, after in ranks(4).run(cases.refused, FOUR, (4, 1, 0, 2), 6, None):
        assert text.startswith("CapacityError: rank 2 of the expert axis would receive 7 rows")
        assert "rows by rank: 0, 0, 7, 0" in text and "nothing was sent" in text
        assert "32" in after
    for text, _ in ranks(4).run(cases.refused, FOUR, (4, 1, 0, 2), 7, None):
        assert text == ""


@pytest.mark.parametrize("bad", [8, -1, 10**9])
def test_invalid_expert_raises_on_every_rank(ranks, bad):
    for text, after in ranks(4).run(cases.refused, FOUR, (4, 1, 0, 2), None, bad):
        assert text.startswith("ArgumentError: rank 1 of the expert axis sent 1 tokens")
        assert "32" in after


# ---- ranks that die --------------------------------------------------------------------------------


def test_error_names_a_killed_rank(tmp_path):
    pool = RankPool(4, failure_grace=30)
    with pytest.raises(RankError, match="rank 2 of 4 failed: its process ended, killed by SIGKILL"):
        pool.run(cases.writing, str(tmp_path), 2, "killed", 60.0)
    assert not pool.is_alive
    for rank in (0, 1, 3):
        seconds, text = (tmp_path / str(rank)).read_text().split(" s\n", 1)
        assert text.startswith("RankError: rank 2 is gone: 'expert "), text
        assert float(seconds) < 30, "well within the timeout of 60 s"


def test_error_names_a_rank_that_is_behind():
    with RankPool(4) as pool:
        said = pool.run(cases.die, 1, "slept", 2.0)
    assert said[1] == "slept"
    for rank in (0, 2, 3):
        assert (
            "RankError: rank 1 did not reach 'expert all-gather of dispatch counts' in 2 s"
            in said[rank]
        ), said[rank]


def test_error_names_a_rank_that_left():
    with RankPool(4) as pool:
        said = pool.run(cases.die, 3, "left", 6.0)
    for rank in (0, 1, 2):
        assert "RankError: rank 3 left while others waited" in said[rank], said[rank]


# ---- without ranks ---------------------------------------------------------------------------------


def test_a_mesh_of_one():
    with Mesh() as mesh:
        whole = cases.make_experts("biases", 6, 2, torch.float64)
        x, routes = cases.make_inputs(0, 5, 6, 2, torch.float64, None)
        wanted = whole(x, routes)
        ours = apply_expert_parallel(whole, AllToAllDispatcher(mesh.expert, dispatch_format="f32"))
        torch.testing.assert_close(ours(x, routes), wanted, rtol=1e-5, atol=1e-5)


def test_wire_format_rounding_error():
    x = torch.randn(9, 256) * torch.randn(9, 1).exp()
    worst = {"f64": 0, "f32": 0, "bf16": 2**-8, "f16": 2**-11, "fp8": 2**-4, "nvfp4": 0.25}
    for name, bound in worst.items():
        error = (round_trip(name, x) - x).abs().amax(1) / x.abs().amax(1)
        assert float(error.max()) <= bound, name


def test_a_row_does_not_depend_on_its_neighbours():
    x = torch.randn(7, 48)
    for name in WIRE_FORMATS:
        wire = WireFormat(name, 48)
        together = wire.pack(x)
        assert together.shape == (7, wire.row_bytes) and wire.row_bytes % 16 == 0
        for row in range(7):
            assert torch.equal(wire.pack(x[row : row + 1] * 1.0), together[row : row + 1])
        big = torch.cat((x, 1e4 * torch.ones(1, 48)))
        assert torch.equal(wire.pack(big)[:7], together)


def test_nan_and_infinity_on_the_wire():
    x = torch.tensor([[1.0, float("nan")] * 8, [2.0, float("inf")] * 8, [0.0, -0.0] * 8])
    for name in ("f64", "f32", "bf16", "f16"):
        torch.testing.assert_close(round_trip(name, x), x, rtol=0, atol=0, equal_nan=True)
    assert round_trip("fp8", x)[0].isnan().any()
    assert round_trip("fp8", x)[2].eq(0).all()


def test_invalid_wire_format_raises():
    with pytest.raises(ArgumentError, match="int3"):
        WireFormat("int3", 16)
    with pytest.raises(FormatError, match="blocks of 16"):
        WireFormat("nvfp4", 20)


def test_the_formula_for_buffers():
    """DeepSeek-V3 on 16 ranks, 128 tokens each, written out by hand."""
    sizes = DispatchConfig(128, 8, 7168, 16, "fp8", "bf16").size_buffers(16)
    row, header = 7168 + 7168 // 128 * 4, 16 + 8 * 8
    assert sizes.inbox_bytes == 2 * 16 * 128 * (header + row)
    assert sizes.return_bytes == 2 * 128 * 8 * 7168 * 2
    assert sizes.total_bytes == sizes.inbox_bytes + sizes.return_bytes + 2 * 16 * 16
    assert "16 ranks" in str(sizes) and "MiB" in str(sizes)
    few = DispatchConfig(8, 6, 64, 2).size_buffers(4)
    assert few.rows == 8, "a token goes to a rank once"
    assert few.experts_per_row == 2, "and visits all of its experts at most"
    assert few.ranks_per_token == 4, "and comes back from all ranks at most"
    assert DispatchConfig(8, 6, 64, 2, capacity=5).size_buffers(4).rows == 5


def test_dispatch_layout_matches_sets():
    """Against sets, token by token; slots that don't exist are nobody's."""
    generator = torch.Generator().manual_seed(0)
    for tokens, ranks, per_rank, k in ((0, 2, 2, 2), (1, 1, 3, 2), (9, 3, 2, 4), (20, 4, 4, 5)):
        slots = torch.rand(tokens, ranks * per_rank, generator=generator).topk(k).indices
        if tokens > 2:
            slots[1, 0], slots[2, 1] = -1, ranks * per_rank
        found = get_dispatch_layout(slots, ranks * per_rank, ranks)
        rows = [0] * ranks
        for token in range(tokens):
            real = [s for s in slots[token].tolist() if 0 <= s < ranks * per_rank]
            goes = sorted({slot // per_rank for slot in real})
            assert found.is_token_in_rank_TW[token].nonzero().flatten().tolist() == goes
            for rank in goes:
                assert int(found.row_index_TW[token, rank]) == rows[rank]
                rows[rank] += 1
