"""Places of experts: every expert somewhere, ranks equally full, the busiest rank near the best."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.models.expert_load import save_expert_load
from fulgurite.parallel.experts.placement import (
    Placement,
    check_model_name,
    contiguous_placement,
    count_expert_load,
    count_moves,
    read_expert_load,
    read_model_name,
    read_placement,
    save_placement,
    simulate_rank_load,
)
from fulgurite.parallel.experts.rebalance import rebalance_experts


def random_load(layers: int, experts: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(spread * torch.randn(layers, experts, generator=generator)) * 100


def best_by_trying_all(load: list[float], ranks: int, slots: int) -> float:
    """The least busiest rank over every choice of replicas and every way to share them out."""
    best, room = float("inf"), slots // ranks
    for counts in itertools.product(range(1, ranks + 1), repeat=len(load)):
        if sum(counts) != slots:
            continue
        items = sorted(
            (load[expert] / count for expert, count in enumerate(counts) for _ in range(count)),
            reverse=True,
        )
        totals, free = [0.0] * ranks, [room] * ranks

        def put(index: int) -> None:
            nonlocal best
            if max(totals) >= best:
                return
            if index == len(items):
                best = max(totals)
                return
            for rank in {(totals[r], free[r]): r for r in range(ranks) if free[r]}.values():
                totals[rank], free[rank] = totals[rank] + items[index], free[rank] - 1
                put(index + 1)
                totals[rank], free[rank] = totals[rank] - items[index], free[rank] + 1

        put(0)
    return best


@pytest.mark.parametrize(
    ("experts", "ranks", "slots"), [(6, 3, 6), (5, 3, 6), (4, 4, 8), (7, 2, 8)]
)
def test_balance_is_close_to_optimal(experts: int, ranks: int, slots: int) -> None:
    load = random_load(12, experts, seed=experts)
    made = simulate_rank_load(load, rebalance_experts(load, ranks, slots=slots)).load_LR.amax(1)
    best = torch.tensor([best_by_trying_all(row, ranks, slots) for row in load.double().tolist()])
    excess = made / best.to(made)
    assert bool((excess > 1 - 1e-6).all())
    assert float(excess.max()) < 1.15 and float(excess.mean()) < 1.08


@pytest.mark.parametrize(
    ("experts", "ranks", "slots", "nodes", "groups"),
    [
        (8, 1, None, 1, 1),
        (8, 8, None, 1, 1),
        (7, 3, None, 1, 1),
        (8, 4, 12, 1, 1),
        (1, 4, 4, 1, 1),
        (5, 4, 20, 1, 1),
        (64, 16, 80, 4, 8),
        (64, 16, 80, 4, 1),
        (64, 8, None, 8, 8),
    ],
)
def test_placement_invariants(
    experts: int, ranks: int, slots: int | None, nodes: int, groups: int
) -> None:
    load = random_load(3, experts, seed=ranks, spread=1.5)
    made = rebalance_experts(load, ranks, slots=slots, nodes=nodes, groups=groups)
    assert made.slots_LS.shape == (3, slots or -(-experts // ranks) * ranks)
    replicas = made.replicas_LE
    assert int(replicas.min()) >= 1 and int(replicas.max()) <= max(ranks, 1)
    balance = simulate_rank_load(load, made)
    assert torch.allclose(balance.load_LR.sum(1), load.double().sum(1))
    busiest_replica = (load / replicas).amax(1)
    bound = balance.load_LR.mean(1) + busiest_replica
    if groups == 1:
        assert bool((balance.load_LR.amax(1) <= bound * (1 + 1e-9)).all())
    assert bool((balance.imbalance_L >= 1 - 1e-9).all()) and balance.imbalance >= 1 - 1e-9


def test_a_group_stays_on_one_node() -> None:
    load = random_load(4, 32)
    made = rebalance_experts(load, 8, slots=40, nodes=4, groups=8)
    groups_LNP = made.slots_LS.unflatten(1, (4, -1)) // 4
    for node_groups in groups_LNP.flatten(0, 1):
        assert len(set(node_groups.tolist())) == 2


def test_more_replicas_of_hot_experts_help() -> None:
    load = torch.full((2, 16), 10.0)
    load[:, 3] = 400.0
    plain = simulate_rank_load(load, contiguous_placement(2, 16, 8)).imbalance
    packed = simulate_rank_load(load, rebalance_experts(load, 8)).imbalance
    spread = simulate_rank_load(load, rebalance_experts(load, 8, slots=24)).imbalance
    assert plain == pytest.approx(410 / (550 / 8)) and packed <= plain
    assert spread < 1.1 < packed


def test_no_load_and_equal_load() -> None:
    nothing = torch.zeros(2, 8)
    assert simulate_rank_load(nothing, rebalance_experts(nothing, 4, slots=12)).imbalance == 1.0
    even = torch.full((1, 8), 3.0)
    assert simulate_rank_load(even, rebalance_experts(even, 4)).imbalance == pytest.approx(1.0)
    assert rebalance_experts(torch.zeros(0, 8), 4).num_layers == 0


def test_rebalance_is_deterministic() -> None:
    load = random_load(5, 48)
    one, two = rebalance_experts(load, 8, slots=56), rebalance_experts(load, 8, slots=56)
    assert torch.equal(one.slots_LS, two.slots_LS)


def test_balanced_placement_is_kept() -> None:
    load = random_load(6, 64)
    old = rebalance_experts(load, 8, slots=72)
    assert count_moves(old, rebalance_experts(load, 8, slots=72, previous=old)) == 0
    drifted = load * torch.exp(0.3 * torch.randn(6, 64, generator=torch.Generator().manual_seed(5)))
    fresh, aligned = (
        rebalance_experts(drifted, 8, slots=72),
        rebalance_experts(drifted, 8, slots=72, previous=old),
    )
    assert simulate_rank_load(drifted, aligned).imbalance == pytest.approx(
        simulate_rank_load(drifted, fresh).imbalance
    )
    assert count_moves(old, aligned) < count_moves(old, fresh)
    assert (
        simulate_rank_load(drifted, aligned).imbalance < simulate_rank_load(drifted, old).imbalance
    )


@pytest.mark.parametrize("moves", [0, 1, 6, 20])
def test_max_moves_is_respected(moves: int) -> None:
    load = random_load(4, 64)
    old = rebalance_experts(load, 8, slots=72)
    drifted = load * torch.exp(0.4 * torch.randn(4, 64, generator=torch.Generator().manual_seed(6)))
    new = rebalance_experts(drifted, 8, slots=72, previous=old, max_moves=moves)
    assert count_moves(old, new) <= 4 * moves
    was, now = (
        simulate_rank_load(drifted, old).load_LR.amax(1),
        simulate_rank_load(drifted, new).load_LR.amax(1),
    )
    assert bool((now <= was * (1 + 1e-9)).all())
    if moves == 20:
        assert simulate_rank_load(drifted, new).imbalance < 1 + 0.5 * (
            simulate_rank_load(drifted, old).imbalance - 1
        )
    # What stays on its rank stays in its slot.
    for rank in range(8):
        for old_P, new_P in zip(old.experts_LRP[:, rank], new.experts_LRP[:, rank], strict=True):
            assert all(a == b or a not in new_P for a, b in zip(old_P, new_P, strict=True))


def test_moves_are_counted_by_rank() -> None:
    old = Placement(torch.tensor([[0, 1, 2, 3]]), 4, 2)
    same = Placement(torch.tensor([[1, 0, 3, 2]]), 4, 2)
    other = Placement(torch.tensor([[0, 2, 1, 3]]), 4, 2)
    assert count_moves(old, same) == 0 and count_moves(old, other) == 2
    with pytest.raises(ArgumentError, match="different models"):
        count_moves(old, contiguous_placement(2, 4, 2))


def test_remap_uses_replicas_round_robin() -> None:
    placement = Placement(torch.tensor([[2, 0, 1, 2, 2, 0], [0, 1, 2, 0, 1, 2]]), 3, 3)
    table = placement.replica_table()
    experts = torch.tensor([[2, 0], [2, 1], [2, 0], [2, 1]])
    assert table.remap(0, experts).tolist() == [[0, 1], [3, 2], [4, 1], [0, 2]]
    assert table.remap(0, experts, first_token=1).tolist() == [[3, 5], [4, 2], [0, 5], [3, 2]]
    assert table.remap(1, experts[:, :1]).tolist() == [[2], [5], [2], [5]]
    assert table.remap(0, experts[:0]).shape == (0, 2)


def test_invalid_expert_has_slot_minus_one() -> None:
    table = Placement(torch.tensor([[2, 0, 1, 0]]), 3, 2).replica_table()
    found = table.remap(0, torch.tensor([[0, -1], [3, 1], [2, 10**9]]))
    assert found.tolist() == [[1, -1], [-1, 2], [0, -1]]


@pytest.mark.parametrize("seed", range(3))
def test_simulated_load_matches_a_routed_batch(seed: int) -> None:
    """The remap of real routes, rank by rank, against the simulated load of their histogram."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.exp(torch.randn(24, generator=generator))
    experts = torch.multinomial(chances.expand(4096, -1), 4, generator=generator)
    load = count_expert_load(experts, 24)[None]
    placement = rebalance_experts(load, 4, slots=32)
    slots = placement.replica_table().remap(0, experts)
    assert torch.equal(placement.slots_LS[0][slots], experts)  # the right expert, always
    visits = torch.bincount(slots.flatten() // placement.slots_per_rank, minlength=4)
    predicted = simulate_rank_load(load, placement).load_LR[0]
    assert float((visits - predicted).abs().max() / predicted.mean()) < 0.05


def test_invalid_layouts_raise() -> None:
    load = random_load(1, 8)
    with pytest.raises(ArgumentError, match="a multiple of 4 from 8 to 32"):
        rebalance_experts(load, 4, slots=10)
    with pytest.raises(ArgumentError, match="4 ranks can't be divided evenly over 3 nodes"):
        rebalance_experts(load, 4, nodes=3)
    with pytest.raises(ArgumentError, match="0 ranks can't be divided"):
        rebalance_experts(load, 0)
    with pytest.raises(ArgumentError, match="a multiple of 8 from 8 to 16"):  # a node has two ranks
        rebalance_experts(load, 8, slots=40, nodes=4, groups=8)
    with pytest.raises(ArgumentError, match="3 groups of 8 experts"):
        rebalance_experts(load, 4, nodes=2, groups=3)
    with pytest.raises(ArgumentError, match="max_moves=3 needs a previous placement"):
        rebalance_experts(load, 4, max_moves=3)
    with pytest.raises(ArgumentError, match="expert 2 of layer 0 is in no slot"):
        Placement(torch.tensor([[0, 1, 1, 3]]), 4, 2)
    with pytest.raises(ArgumentError, match="outside 0 to 3"):
        Placement(torch.tensor([[0, 1, 2, 4]]), 4, 2)
    for ranks in (3, 0, -4):
        with pytest.raises(ArgumentError, match=f"can't be divided evenly over {ranks} ranks"):
            Placement(torch.tensor([[0, 1, 2, 3]]), 4, ranks)
    for bad in (torch.tensor([1.0]), torch.tensor([[-1.0]]), torch.tensor([[float("nan")]])):
        with pytest.raises(ArgumentError, match="an expert load"):
            rebalance_experts(bad, 1)


def test_placement_file_round_trip(tmp_path: Path) -> None:
    made = rebalance_experts(random_load(2, 8), 4, slots=12)
    read = read_placement(save_placement(made, tmp_path / "places.json"))
    assert torch.equal(read.slots_LS, made.slots_LS) and (read.num_experts, read.num_ranks) == (
        8,
        4,
    )
    (tmp_path / "other.json").write_text('{"experts": 8}')
    (tmp_path / "cut.json").write_text('{"experts": 8')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "ragged.json").write_text('{"experts": 2, "ranks": 1, "slots": [[0, 1], [1]]}')
    (tmp_path / "large.json").write_text('{"experts": 2, "ranks": 1, "slots": [[0, 1e30]]}')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "half.json").write_text('{"experts": 2, "ranks": 1, "slots": [[0.5, 1]]}')
    (tmp_path / "missing_one.json").write_text('{"experts": 3, "ranks": 1, "slots": [[0, 1]]}')
    for name in (
        *("other.json", "cut.json", "list.json", "ragged.json", "large.json", "bytes.json"),
        *("half.json", "missing_one.json"),
    ):
        with pytest.raises(ArgumentError, match=rf"{name} is not a placement"):
            read_placement(tmp_path / name)
    with pytest.raises(ArgumentError, match="can't be read"):
        read_placement(tmp_path / "missing.json")
    with pytest.raises(ArgumentError, match="can't be written"):
        save_placement(made, tmp_path / "no" / "folder.json")


def test_a_placement_of_another_model(tmp_path: Path) -> None:
    made = replace(rebalance_experts(random_load(2, 8), 4), model="Qwen3-30B-A3B")
    path = save_placement(made, tmp_path / "placement.json")
    assert read_placement(path).model == "Qwen3-30B-A3B"
    for same in ("", "qwen3-30b-a3b", "Qwen3-30B-A3B-FP8"):
        check_model_name(str(path), "Qwen3-30B-A3B", same)
        check_model_name(str(path), same, "Qwen3-30B-A3B")
    with pytest.raises(ArgumentError, match="placement.json is of Qwen3-30B-A3B, and the model is"):
        check_model_name(str(path), read_placement(path).model, "Qwen3-235B-A22B")


def test_files_of_load(tmp_path: Path) -> None:
    rows = [[1.0, 2.0, 0.0], [5.0, 0.0, 7.0]]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("1,2,0\n5,0,7\n")
    np.save(tmp_path / "a.npy", np.array(rows, dtype=np.int32))
    for suffix in ("json", "csv", "npy"):
        assert read_expert_load(tmp_path / f"a.{suffix}").tolist() == rows
    for suffix in ("json", "csv", "npy"):
        save_expert_load(torch.tensor(rows), tmp_path / f"named.{suffix}", "Qwen3-30B-A3B")
        assert read_expert_load(tmp_path / f"named.{suffix}").tolist() == rows
    names = [read_model_name(tmp_path / f"named.{suffix}") for suffix in ("json", "csv", "npy")]
    assert names == ["Qwen3-30B-A3B", "Qwen3-30B-A3B", ""]
    assert read_model_name(tmp_path / "a.json") == read_model_name(tmp_path / "a.csv") == ""
    (tmp_path / "b.json").write_text("[[1, 2], [3]]")
    (tmp_path / "d.json").write_text('{"model": "m"}')
    (tmp_path / "c.json").write_text("{")
    np.save(tmp_path / "p.npy", np.array([{"pickled": 1}]), allow_pickle=True)
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "bools.json").write_text("[[true, false]]")
    np.save(tmp_path / "complex.npy", np.array([[1 + 2j, 3]]))
    (tmp_path / "negative.json").write_text("[[-1, 2]]")
    for name in (
        *("b.json", "c.json", "d.json", "p.npy"),
        *("empty.csv", "bools.json", "complex.npy", "negative.json"),
    ):
        with pytest.raises(ArgumentError, match=rf"{name} is not an expert load"):
            read_expert_load(tmp_path / name)
    with pytest.raises(ArgumentError, match="can't be read"):
        read_expert_load(tmp_path / "missing.json")
    with pytest.raises(ArgumentError, match="is not an expert load"):
        read_expert_load(tmp_path / "load.pt")
