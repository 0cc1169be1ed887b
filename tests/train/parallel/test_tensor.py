"""Tensor parallelism against one rank: losses, gradient norms, weights; and what can't be split."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from fulgurite.errors import ArgumentError
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.processes.launch import RankPool
from fulgurite.train.batch import IGNORED
from fulgurite.train.config import ParallelSection
from fulgurite.train.parallel.layout_base import Degrees
from fulgurite.train.parallel.tensor import check_tensor_degree
from fulgurite.train.parallel.vocab_loss import SplitLoss, vocab_parallel_cross_entropy
from tests.train.parallel import model_parallel_cases as cases
from tests.train.parallel.model_parallel_cases import Case

TWO = Degrees(tp=2)


@pytest.mark.parametrize("name", ["qwen3", "tied", "dots1", "gemma2"])
def test_two_ranks_train_as_one(pair, name):
    cases.check(pair, Case(name, TWO, steps=8, count=1))


def test_fifty_steps_train_as_one(pair):
    cases.check(pair, Case("qwen3", TWO, steps=50, count=1))


@pytest.mark.parametrize(
    ("name", "steps"),
    [("dots1", 6), *(pytest.param("qwen3", n, marks=pytest.mark.slow) for n in (8, 50))],
)
def test_compiled_layers_train_as_one(pair, name, steps):
    """Collectives are ops of the graphs, which break at the experts only."""
    for outcome in cases.check(pair, Case(name, TWO, steps=steps, count=1, compile=True)):
        assert outcome.compiled.collectives["axis_all_gather"]
        assert outcome.compiled.collectives["axis_reduce_scatter"]
        assert len(outcome.compiled.breaks) == (name == "dots1")
        assert all("how many tokens" in text for text in outcome.compiled.breaks)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_key_heads_that_ranks_share(pool, name):
    """Two key heads on four ranks: gradients are summed over the ranks with the same head."""
    cases.check(pool, Case(name, Degrees(tp=4), steps=8, count=1))


@pytest.mark.parametrize("name", ["olmo2", "gpt_oss", "deepseek_v3"])
def test_other_parts_of_families(pair, name):
    """Norms over all heads; sinks and biases of experts; latent attention."""
    cases.check(pair, Case(name, TWO, steps=6, count=1))


@pytest.mark.parametrize("name", ["tied", "dots1"])
def test_without_sequence_parallelism(pair, name):
    section = ParallelSection(tensor=2, sequence=False)
    cases.check(pair, Case(name, TWO, steps=6, count=1, section=section))


@pytest.mark.covering
@pytest.mark.parametrize("degrees", [Degrees(tp=2, dp_replicate=2), Degrees(tp=2, dp_shard=2)])
@pytest.mark.parametrize("name", ["tied", "dots1"])
def test_with_data_ranks(pool, name, degrees):
    cases.check(pool, Case(name, degrees, steps=6, count=2))


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("dots1", Degrees(tp=2, dp_replicate=2, ep=2)),
        ("dots1", Degrees(tp=2, dp_shard=2, ep=2)),
        ("gpt_oss", Degrees(tp=2, cp=2, ep=2)),  # biases of experts, no shared expert
    ],
)
def test_experts_over_data_and_tensor_ranks(pool, name, degrees):
    """A rank has a quarter of the experts, and its tensor group dispatches to the other one."""
    count = 1 if degrees.cp > 1 else 2
    cases.check(pool, Case(name, degrees, steps=6, count=count))


@pytest.mark.slow  # the parts have tests of their own
def test_compiled_layers_with_fsdp_and_experts_over_data_and_tensor_ranks(pool):
    degrees = Degrees(tp=2, dp_shard=2, ep=2)
    for outcome in cases.check(pool, Case("dots1", degrees, steps=4, count=2, compile=True)):
        assert all("how many rows" in text for text in outcome.compiled.breaks)


def test_state_of_experts_over_data_and_tensor_ranks(pool, tmp_path):
    """Shards of a quarter, Muon's update of whole matrices, and a checkpoint for one rank."""
    degrees = Degrees(tp=2, dp_replicate=2, ep=2)
    for shapes in pool.run(cases.describe_parameters, Case("dots1", degrees)):
        assert shapes["layers.1.feed_forward.experts.gate_up_proj"] == ((8, 48, 32), (2, 48, 32))
    check_muon(pool, Case("dots1", degrees))
    pool.run(cases.save_checkpoint, Case("dots1", degrees, steps=2, count=4), str(tmp_path))
    cases.check_loaded(tmp_path, "dots1", 2)


def test_rows_without_documents_and_a_prime_number_of_tokens(pair):
    """Tokens that don't divide by the ranks: 2 rows of 15 on 4 ranks."""
    cases.check(pair, Case("qwen3", TWO, steps=4, count=1, documents=False, length=15))


def test_evaluation_is_that_of_one_rank(pair):
    wanted = cases.evaluate_alone("dots1")
    for found in pair.run(cases.evaluate_split, Case("dots1", TWO)):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_a_checkpoint_of_shards_loads_on_one_rank(pair, tmp_path):
    pair.run(cases.save_checkpoint, Case("tied", TWO, steps=2, count=4), str(tmp_path))
    cases.check_loaded(tmp_path, "tied", 2)


@pytest.mark.parametrize("name", ["tied", "dots1"])
def test_the_optimizer_of_a_run_steps_as_on_one_rank(pair, name):
    """Muon or AdamW is chosen by the kind of parameter, and matrices are orthogonalized whole."""
    check_muon(pair, Case(name, TWO))


def check_muon(ranks: RankPool, case: Case) -> None:
    wanted = cases.step_with_muon(None, case.name)
    for found in ranks.run(cases.step_with_muon, case, case.name):
        for key, change in wanted.items():  # AdamW's first step is the sign of a gradient
            error = float((found[key] - change).norm()) / max(float(change.norm()), 1e-9)
            assert error < 1e-2, (key, error)


def test_parameters_are_dtensors_of_the_full_shape(pair):
    for shapes in pair.run(cases.describe_parameters, Case("dots1", TWO)):
        assert shapes["layers.1.feed_forward.experts.gate_up_proj"] == ((8, 48, 32), (4, 48, 32))
        assert shapes["embed_tokens.weight"] == ((61, 32), shapes["embed_tokens.weight"][1])
        assert shapes["layers.0.attention.o_proj.weight"] == ((32, 32), (32, 16))
        assert shapes["layers.0.attention_norm.weight"] == ((32,), (32,))


def test_logits_are_never_gathered(pair):
    """No tensor of a step has a row for each token and a column for each entry of the vocabulary."""
    for largest in pair.run(cases.widest_logits, Case("qwen3", TWO)):
        assert largest <= 31  # of 61 columns


@pytest.mark.parametrize(("scale", "cap", "z_weight"), [(1.0, None, 0.0), (0.5, 4.0, 0.1)])
def test_cross_entropy_of_columns_in_float64(scale, cap, z_weight):
    """One rank has all columns: the formula itself, and its gradients."""
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, requires_grad=True)
    weight, bias = torch.randn(11, 5, requires_grad=True), torch.randn(11, requires_grad=True)
    labels = torch.tensor([0, 10, 3, IGNORED, 5, 5, IGNORED])
    options = SplitLoss(Axis("tp", (0,), 0), 0, z_weight, scale, cap)
    total, loss, z = vocab_parallel_cross_entropy(hidden, weight, bias, labels, options)
    total.backward()
    ours = [x.grad for x in (hidden, weight, bias)]
    exact = [copy.deepcopy(x.detach()).double().requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(*exact) * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    wanted_loss = F.cross_entropy(logits, labels, reduction="sum")
    wanted_z = logits.logsumexp(-1).square()[labels != IGNORED].sum()
    (wanted_loss + z_weight * wanted_z).backward()
    assert float(loss) == pytest.approx(wanted_loss.item(), rel=1e-6)
    assert float(z) == pytest.approx(wanted_z.item(), rel=1e-6)
    for found, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(found.double(), wanted.grad, rtol=1e-5, atol=1e-6)


def test_ranks_with_other_numbers_of_columns_reduce_the_same_chunks(pair):
    for total, expected, difference in pair.run(cases.loss_of_uneven_columns):
        assert total == pytest.approx(expected, rel=1e-5)
        assert float(difference.abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("degree", "changed", "says"),
    [
        (3, {}, "4 attention heads don't divide by parallel.tensor=3"),
        (4, {"intermediate_size": 50}, "50 intermediate_size"),
        (4, {"n_routed_experts": 6, "num_experts": 6}, "6 experts"),
        (6, {"num_attention_heads": 12, "num_key_value_heads": 4, "n_routed_experts": 12}, "4 key"),
    ],
)
def test_degrees_that_do_not_divide(degree, changed, says):
    _, config = cases.family_of("dots1", **changed)
    with pytest.raises(ArgumentError, match=says):
        check_tensor_degree(config, degree)
