"""A step: gradients by tree, microbatches, skipped steps."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fulgurite.train.accumulate import (
    SumTree,
    add_lists,
    run_backward,
    store_gradients,
    take_gradients,
    trainable_parameters,
)
from fulgurite.train.batch import IGNORED, Batch
from fulgurite.train.build import freeze_selection_biases
from fulgurite.train.config import OptimizerSection, TrainConfig
from fulgurite.train.loss import LossModule
from fulgurite.train.optim import build_optimizer
from fulgurite.train.sizes import resolve_sizes
from fulgurite.train.step import OneRank, TrainStep
from tests.train.test_loss import VOCAB, build_tiny


def make_batches(rows: int, microbatch: int, seed: int = 0) -> list[Batch]:
    """Rows of two documents with padding at their end, in microbatches."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, 20), generator=generator)
    labels = tokens.roll(-1, 1)
    documents = torch.tensor([0] * 7 + [1] * 10 + [-1] * 3).expand(rows, 20)
    positions = torch.tensor([*range(7), *range(10), -1, -1, -1]).expand(rows, 20)
    labels[:, [6, 16, 17, 18, 19]] = IGNORED
    whole = [tokens, labels, positions, documents]
    parts = zip(*(x.split(microbatch) for x in whole), strict=True)
    return [Batch(*(x.contiguous() for x in part)) for part in parts]


def make_step(architecture: str = "Dots1ForCausalLM", **fields: object) -> TrainStep:
    config = resolve_sizes(replace(TrainConfig(device="cpu", steps=20), **fields))
    model = build_tiny(architecture)
    freeze_selection_biases(model)
    optimizer = build_optimizer(model, config.optimizer, 20)
    return TrainStep(
        LossModule(model, config.loss), model, optimizer, OneRank(config.deterministic), config
    )


def copy_state(step: TrainStep) -> dict[str, Tensor]:
    state = {f"model.{k}": v for k, v in step.model.state_dict().items()}
    for number, one in enumerate(step.optimizer.state.values()):
        state |= {f"{number}.{name}": value for name, value in one.items()}
    return {name: value.detach().clone() for name, value in state.items()}


# ---- trees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [1, 2, 3, 7, 8, 13])
def test_a_tree_sums_its_leaves(leaves):
    tree = SumTree()
    for number in range(leaves):
        tree.push([torch.tensor(float(number)), None])
    total = tree.total()
    assert total[0] == sum(range(leaves)) and total[1] is None
    assert tree.total() == []


def test_shares_of_a_tree_sum_to_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    leaves = [[torch.randn(50, generator=generator) * 10**n] for n in range(8)]

    def sum_of(values: list[list[Tensor]]) -> list[Tensor | None]:
        tree = SumTree()
        for leaf in copy.deepcopy(values):
            tree.push(leaf)
        return tree.total()

    whole = sum_of(leaves)[0]
    for shares in (2, 4):
        size = len(leaves) // shares
        tree = SumTree()
        for start in range(0, len(leaves), size):
            tree.push(sum_of(leaves[start : start + size]), size)
        assert torch.equal(tree.total()[0], whole)
    chain = sum(leaf[0] for leaf in leaves)
    assert not torch.equal(chain, whole), "the leaves are such that order matters"


def test_sixteen_bit_leaves_are_summed_in_float32():
    one = torch.tensor([1.0], dtype=torch.bfloat16)
    small = torch.tensor([2**-10], dtype=torch.bfloat16)
    (total,) = add_lists([one.clone()], [small])
    assert total.dtype == torch.float32 and total.item() == 1 + 2**-10


def test_gradients_are_divided_by_tokens():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.zeros(1))
    store_gradients([weight, frozen], [torch.full((3,), 6.0), None], torch.tensor(3))
    assert weight.grad.dtype == torch.bfloat16 and weight.grad.tolist() == [2.0] * 3
    assert frozen.grad is None
    store_gradients([frozen], [torch.zeros(1)], torch.tensor(0))
    assert frozen.grad.tolist() == [0.0], "a step without labels divides by one"


# ---- microbatches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_microbatches_do_not_change_a_step(deterministic):
    results, gradients = [], []
    for microbatch in (1, 2, 8):
        model = build_tiny("OlmoeForCausalLM")
        layout = OneRank(deterministic)
        module = LossModule(model, TrainConfig().loss)
        totals = layout.run_microbatches(module, make_batches(8, microbatch))
        results.append(totals)
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for totals in results[1:]:
        torch.testing.assert_close(totals.loss, results[0].loss)
        assert torch.equal(totals.tokens, results[0].tokens)
        assert torch.equal(totals.load_LE, results[0].load_LE)
    # The auxiliary loss is of each microbatch; all other gradients agree.
    for name in gradients[0]:
        if "router" in name or "embed" in name or "norm" in name:
            continue
        for other in gradients[1:]:
            scale = gradients[0][name].abs().max().item()
            torch.testing.assert_close(
                other[name], gradients[0][name], rtol=0.05, atol=0.02 * scale, msg=name
            )


def test_microbatches_of_a_dense_model_agree_closely():
    gradients = []
    for microbatch in (1, 4):
        model = build_tiny("Qwen3ForCausalLM")
        OneRank().run_microbatches(LossModule(model), make_batches(4, microbatch))
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("sizes", [(4, 1), (5, 5), (6, 2)])
def test_gradients_are_those_of_the_mean_loss(sizes):
    """Backward divides by the tokens of all microbatches; the loss that is reported is not scaled twice."""
    model, oracle = build_tiny("Qwen3ForCausalLM"), build_tiny("Qwen3ForCausalLM").double()
    batches = make_batches(*sizes)
    totals = OneRank().run_microbatches(LossModule(model), batches)
    sums = [
        LossModule(oracle)(one.tokens_BT, one.labels_BT, one.positions_BT, one.documents_BT)
        for one in batches
    ]
    tokens = sum(one.tokens for one in sums)
    (sum(one.total for one in sums) / tokens).backward()
    assert totals.tokens == tokens
    torch.testing.assert_close(
        totals.loss.double(), sum(one.loss for one in sums) / tokens, rtol=1e-5, atol=0
    )
    for found, expected in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-3, atol=1e-6)


def test_deterministic_gradients_are_those_of_the_tree():
    model = build_tiny("Dots1ForCausalLM")
    freeze_selection_biases(model)
    module, parameters = LossModule(model), trainable_parameters(model)
    batches = make_batches(8, 2)
    halves = []
    for half in (batches[:2], batches[2:]):  # as two ranks would
        tree = SumTree()
        for batch in half:
            sums = run_backward(module, batch)
            tree.push([*take_gradients(parameters), *sums])
        halves.append(tree.total())
    *expected, _total, loss, _z, tokens, _load = add_lists(*halves)
    totals = OneRank(deterministic=True).run_microbatches(module, batches)
    assert torch.equal(totals.loss, loss / tokens)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, gradient * tokens.float().reciprocal())


# ---- steps -----------------------------------------------------------------------------------------


def test_steps_lower_the_loss_and_move_the_balance():
    step = make_step()
    bias = step.model.layers[1].feed_forward.router.correction_bias
    losses = [step(number, make_batches(4, 2)).loss for number in range(8)]
    assert losses[-1] < losses[0] - 0.3
    assert bias.abs().max() > 0, "the selection bias did not move"
    assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value):
    step = make_step()
    step(0, make_batches(4, 2))
    before = copy_state(step)

    def poison(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return out * value

    handle = step.model.layers[0].register_forward_hook(poison)
    result = step(1, make_batches(4, 2))
    handle.remove()
    assert result.is_skipped and not math.isfinite(result.loss)
    after = copy_state(step)
    assert before.keys() == after.keys()
    for name, value_before in before.items():
        assert torch.equal(after[name], value_before), name
    assert not step(2, make_batches(4, 2)).is_skipped


def test_a_gradient_that_is_not_finite_is_skipped_too():
    step = make_step("LlamaForCausalLM")
    before = copy_state(step)
    parameter = step.model.layers[0].attention.q_proj.weight
    handle = parameter.register_hook(lambda grad: grad * math.inf)
    result = step(0, make_batches(4, 2))
    handle.remove()
    assert result.is_skipped and math.isfinite(result.loss)
    assert all(torch.equal(value, before[name]) for name, value in copy_state(step).items())


def test_gradients_are_clipped():
    adamw = OptimizerSection(name="adamw")
    free, tight = make_step(optimizer=adamw), make_step(optimizer=adamw)
    tight.config = replace(tight.config, optimizer=replace(tight.config.optimizer, clip_norm=1e-4))
    norms = [step(0, make_batches(4, 2)).gradient_norm for step in (free, tight)]
    assert norms[0] == pytest.approx(norms[1]), "the norm is that before clipping"
    moments = [
        max(state["exp_avg"].abs().max().item() for state in step.optimizer.state.values())
        for step in (free, tight)
    ]
    assert moments[1] < moments[0] * 1e-2


def test_gradients_below_the_limit_are_not_rewritten(monkeypatch):
    """A factor of 1 would read and write every gradient once more."""
    step = make_step(optimizer=OptimizerSection(name="adamw", clip_norm=1e9))
    monkeypatch.setattr("fulgurite.train.step.clip_gradients", None)
    assert step(0, make_batches(4, 2)).gradient_norm > 0


def test_nothing_is_read_after_the_optimizer(monkeypatch):
    """A read would wait for it on a GPU, and the next step would start late."""
    step = make_step("Qwen3MoeForCausalLM")
    update = step.optimizer.step

    def update_and_forbid():
        update()
        for name in ("item", "tolist", "cpu", "__int__", "__float__"):
            monkeypatch.setattr(torch.Tensor, name, None)

    monkeypatch.setattr(step.optimizer, "step", update_and_forbid)
    result = step(0, make_batches(4, 2))
    monkeypatch.undo()
    assert result.tokens > 0 and result.load_LE is not None
