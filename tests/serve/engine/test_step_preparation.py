"""Steps that an idle engine prepares: which ones, that they change nothing, when they stop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from fulgurite import replay
from fulgurite.errors import ReplayError
from fulgurite.models import CausalLM
from fulgurite.serve.engine import step_preparation
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.recorded_step import StepShape
from tests.serve.engine.test_runner import count_layer_runs, greedy, use_fake_graphs
from tests.serve.engine.test_sequential_oracle import VOCAB, random_params
from tests.serve.engines import check_idle, make_engine, quantized_model


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return quantized_model()


def prepare_all(engine: Engine) -> int:
    """How many steps were prepared."""
    count = 0
    while engine.prepare_step():
        count += 1
        assert count < 1000
    return count


def test_requests_run_no_python_in_the_layers_of_prepared_steps(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, max_sequences=6)
    engine.scheduler.max_mixed_tokens = 21
    assert prepare_all(engine) and not engine.prepare_step()
    runs = count_layer_runs(monkeypatch)
    prompts = [[seed] * 40 for seed in range(9)]
    engine.generate(prompts, [greedy(5 + 3 * seed) for seed in range(9)])
    assert runs == []
    check_idle(engine)


def test_preparing_changes_no_key_and_no_token(model: CausalLM) -> None:
    """Before the first request, and between requests that share prefixes."""
    rng = random.Random(3)
    prompts = [rng.choices(range(VOCAB), k=rng.choice([2, 9, 40])) for _ in range(12)]
    params = [random_params(rng) for _ in prompts]
    engine, plain = (make_engine(model, max_sequences=5) for _ in range(2))
    plain.runner.no_capture_reason = "a test"
    prepare_all(engine)
    for chosen in (slice(0, 6), slice(6, 12), slice(0, 12)):
        found, wanted = (
            [
                (one.token_ids, one.logprobs)
                for one in each.generate(prompts[chosen], params[chosen])
            ]
            for each in (engine, plain)
        )
        assert found == wanted
        before = {layer: keys.clone() for layer, keys in engine.kv_cache.key_caches.items()}
        engine.preparation = None
        engine.runner.drop_captured_steps()
        prepare_all(engine)
        for layer, keys in engine.kv_cache.key_caches.items():
            assert torch.equal(keys, before[layer])
    check_idle(engine)


def test_nothing_is_prepared_while_requests_run(model: CausalLM) -> None:
    engine = make_engine(model)
    engine.add_request([3, 5], greedy(4))
    assert not engine.prepare_step() and engine.preparation is None
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.prepare_step()


def test_the_shapes_of_an_engine(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model, max_sequences=3)
    shapes = step_preparation.find_shapes(engine.runner)
    assert shapes[:3] == [StepShape(n, n) for n in (1, 2, 3)]
    assert [shape.num_tokens for shape in shapes[3:]] == [8, 16, 24, 32, 40, 48, 56, 64]
    use_fake_graphs(engine, monkeypatch)
    assert step_preparation.find_shapes(engine.runner) == [StepShape(n, n) for n in (1, 2, 4)]


def test_captured_steps_are_prepared_for_the_variants_in_use(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, max_sequences=4)
    captured = use_fake_graphs(engine, monkeypatch)
    plain = make_engine(model, max_sequences=4)
    engine.generate([[3, 5]], [greedy(4)])
    prepare_all(engine)
    assert set(engine.runner.captured_steps) == {1, 2, 4}
    count = len(captured)
    prompts = [[seed, 5] for seed in range(4)]
    found, wanted = (each.generate(prompts, [greedy(6)] * 4) for each in (engine, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert len(captured) == count


def test_a_step_that_can_not_be_recorded_ends_the_preparation(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(names: Sequence[str]) -> None:
        raise ReplayError("aten::cumsum computes something outside of native kernels")

    monkeypatch.setattr(replay, "_check_no_computation", refuse)
    engine = make_engine(model)
    runs = count_layer_runs(monkeypatch)
    prepare_all(engine)
    assert set(runs) == {1}  # the first shape
    assert "aten::cumsum" in str(engine.stats().no_capture_reason)


def test_slow_steps_and_steps_that_fail_end_the_preparation(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(shape: StepShape) -> bool:
        raise RuntimeError("no kernel\nof this size")

    def count_with(prepare: Callable[[StepShape], bool]) -> int:
        engine = make_engine(model)
        monkeypatch.setattr(engine.runner, "prepare_step", prepare)
        count = prepare_all(engine)
        assert not engine.prepare_step()
        engine.generate([[3, 5]], [greedy(4)])
        return count

    assert count_with(fail) == 0
    assert "steps are not prepared: no kernel" in caplog.text and "of this size" not in caplog.text
    monkeypatch.setattr(step_preparation, "MAX_STEP_SECONDS", -1.0)
    assert count_with(lambda shape: False) == 1  # the first step may compile
