"""The engine on a GPU: the same tokens as on the CPU, captured steps, memory as planned."""

from __future__ import annotations

import pytest
import torch

from fulgurite.serve.engine.request import SamplingParams
from tests.serve.engines import check_idle, make_engine, tiny_model

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(seed, seed + length)) for seed, length in enumerate((3, 17, 30, 8, 1))]


@pytest.mark.parametrize("fixed", [True, False])
def test_the_same_tokens_as_on_the_cpu(fixed: bool) -> None:
    params = [
        SamplingParams(max_tokens=20 + index, ignore_eos=True, temperature=index % 2, seed=index)
        for index in range(len(PROMPTS))
    ]
    model = tiny_model()
    wanted = make_engine(model, max_batched_tokens=11).generate(PROMPTS, params)
    engine = make_engine(model.to("cuda"), max_batched_tokens=11)
    if not fixed:
        engine.runner.no_capture_reason = "a test"
    got = engine.generate(PROMPTS, params)
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
    if fixed and engine.runner.no_capture_reason is None:
        assert set(engine.runner.captured_steps) == {1, 2, 4, 8}
    check_idle(engine)


def test_planned_memory_matches_measured() -> None:
    """Within 5% of the most that was allocated."""
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()  # so that the first matmul asks for its own
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = tiny_model(
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=8,
        vocab_size=32000,
        max_position_embeddings=2048,
    ).to("cuda", torch.bfloat16)
    engine = make_engine(
        model, context=2048, max_sequences=4, max_batched_tokens=2048, block_size=16
    )
    prompts = [[seed, *range(2000)] for seed in range(4)]
    engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    measured = torch.cuda.max_memory_allocated() - before
    print(
        engine.plan.format_table(),
        f"\nmeasured {measured / 2**20:.1f} MiB",
        engine.runner.no_capture_reason,
    )
    assert 0.95 * measured < engine.plan.total < 1.05 * measured
