"""One engine over ranks: the tokens of one rank's, whatever the mesh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fulgurite.errors import ArgumentError, RankError
from fulgurite.parallel import RankPool
from fulgurite.parallel.processes.workers import WorkerProcesses, is_single_process
from fulgurite.serve import llm
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM, LLMConfig, make_expert_options
from tests.models.reference_models import VOCAB_SIZE, build_reference
from tests.parallel import engine_cases as cases
from tests.parallel.checkpoints import save, save_tokenizer
from tests.parallel.test_load_shard import PACKED, fields_of

HYBRIDS = ("qwen3_next", "lfm2")
LENGTHS = (5, 1, 17, 9, 30, 12)  # more than run at once, and one that takes two steps to read


def slow(*values: object):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            if name in HYBRIDS:  # their files have layouts that `save` does not write
                build_reference(name).save_pretrained(path)
                fields = {"vocab_size": VOCAB_SIZE}
                made[name] = path
            else:
                fields = PACKED.get(name) or fields_of(name)
                made[name] = save(path, fields, name if name in PACKED else "")
            save_tokenizer(made[name], int(str(fields["vocab_size"])))
        return made[name]

    return get


def prompts() -> cases.Tokens:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in LENGTHS]


def greedy() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=8 + n % 5, ignore_eos=True) for n in range(len(LENGTHS))]


def alone(path: Path, params: list[SamplingParams], **options) -> cases.Tokens:
    """The same by one rank."""
    llm = LLM(path, **cases.PLAIN | options)
    return [one.token_ids for one in llm.generate(prompts(), params)]


def check(pool, path: Path, shape, params=None, **options) -> None:
    params = greedy() if params is None else params
    found = pool.run(cases.generate, path, shape, prompts(), params, options)
    assert found[0][0] == alone(path, params, **options)
    for _, reason, left in found:
        assert reason is not None and "communicate through the host" in reason and left == 0


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama", (1, 2, 1)),
        ("qwen3_moe", (1, 2, 2)),
        ("deepseek_v3", (1, 2, 2)),
        slow("qwen3_moe", (1, 2, 1)),
        slow("deepseek_v3", (1, 2, 1)),
        slow("gpt_oss", (1, 2, 1)),
        slow("gemma3", (1, 2, 1)),
        ("qwen3_next", (1, 2, 2)),
        slow("qwen3_next", (1, 2, 1)),
        slow("lfm2", (1, 2, 1)),
        slow("llama4", (2, 1, 2)),
    ],
    ids=str,
)
def test_two_ranks(ranks, folder, name, shape):
    check(ranks(2), folder(name), shape)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen3_moe", (2, 2, 4)),
        ("deepseek_v3", (4, 1, 4)),
        slow("llama", (1, 4, 1)),
        slow("llama", (2, 2, 1)),
        slow("qwen3_moe", (1, 4, 2)),
        slow("deepseek_v2", (1, 4, 4)),
    ],
    ids=str,
)
def test_four_ranks(ranks, folder, name, shape):
    """With a data axis, requests are spread over it, and homes without any step along."""
    check(ranks(4), folder(name), shape)


def test_sampling(ranks, folder):
    """Seeds travel; penalties, biases and log-probabilities too."""
    params = [
        SamplingParams(max_tokens=7, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=7, temperature=1.2, top_k=11, seed=6, ignore_eos=True),
        SamplingParams(max_tokens=7, repetition_penalty=1.3, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=7, logit_bias={4: 3.0}, banned_token_ids=(9,), ignore_eos=True),
        SamplingParams(max_tokens=2),
        SamplingParams(max_tokens=5, stop="a", temperature=2.0, seed=1),
    ]
    check(ranks(2), folder("qwen3_moe"), (2, 1, 2), params)
    check(ranks(2), folder("llama"), (1, 2, 1), params)


def test_logprobs_and_grammars_on_all_replicas(ranks, folder):
    """Their results are those of one rank, wherever they ran."""
    path = folder("qwen3_moe")
    params = [
        SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=6, logprobs=0, temperature=0.9, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=9, regex="[ab]{3}x[cd]+"),
        SamplingParams(max_tokens=9, choices=["north", "south", "east"], temperature=1.0, seed=2),
        SamplingParams(max_tokens=9, regex="[0-9]{4}", logprobs=3),
        SamplingParams(max_tokens=6, ignore_eos=True),
    ]
    found = ranks(2).run(cases.generate_results, path, (2, 1, 2), prompts(), params)
    results, replicas, _ = found[0]
    alone = [
        (one.token_ids, one.logprobs, one.finish_reason, one.text)
        for one in LLM(path, **cases.PLAIN).generate(prompts(), params)
    ]
    assert [one[:1] + one[2:] for one in results] == [one[:1] + one[2:] for one in alone]
    for one, wanted in zip(results, alone, strict=True):
        assert (one[1] is None) == (wanted[1] is None)
        for left, right in zip(one[1] or (), wanted[1] or (), strict=True):
            assert left.token_id == right.token_id
            assert [id for id, _ in left.top] == [id for id, _ in right.top]
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert [value for _, value in left.top] == pytest.approx(
                [value for _, value in right.top], abs=1e-4
            )
    assert sorted(replicas.values()) == [0, 0, 0, 1, 1, 1]
    assert [left for _, _, left in found] == [0, 0]


def test_statistics_are_of_all_replicas(ranks, folder):
    """Requests, tokens, blocks, cached prefixes and times: those of other replicas count, too."""
    prompts = [[*range(n, n + 40)] for n in range(6)]  # different from the first token on
    params = [SamplingParams(max_tokens=6, ignore_eos=True)] * 6
    cached, stats, steps, waited = ranks(2).run(
        cases.count_replicas, folder("qwen3_moe"), (2, 1, 2), prompts, params
    )[0]
    assert cached == [32] * 6  # two blocks each
    assert stats.prefill_tokens == 6 * 40 + 6 * (40 - 32)
    assert stats.sampled_tokens == 2 * 6 * 6 and stats.decode_tokens == 2 * 6 * 5
    assert stats.prefix_cached_tokens == 6 * 32
    assert max(running for running, _, _ in steps) == 6 and max(used for *_, used in steps) >= 12
    assert steps[-1] == (0, 0, 0) and (stats.running, stats.waiting) == (0, 0)
    assert all(0 < seconds < 60 for seconds in waited)


@pytest.mark.parametrize(
    ("name", "shape"), [("llama", (1, 2, 1)), ("qwen3_moe", (2, 1, 2))], ids=str
)
def test_ranks_capture_and_replay_the_same_steps(ranks, folder, name, shape):
    """Graphs that call the function, since CPUs have none: the agreement and padding are the real ones.
    The last request is longer than all others: then one replica has none."""
    path = folder(name)
    params = [
        SamplingParams(max_tokens=4, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=14, ignore_eos=True),
    ]
    found = ranks(2).run(cases.generate_with_graphs, path, shape, prompts()[:3], params)
    llm = LLM(path, **cases.PLAIN)
    assert found[0][0] == [one.token_ids for one in llm.generate(prompts()[:3], params)]
    for _, reason, captured, _, most in found:
        assert reason is None and captured == found[0][2] and most >= 1
    assert len(captured) == len(set(captured)) >= 3
    idle = [replays for *_, replays, _ in found]
    assert max(idle) > 5 if shape[0] == 2 else max(idle) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "shape"),
    [("llama", (1, 2, 1)), ("qwen3_moe", (1, 2, 2)), ("qwen3_moe", (2, 1, 2))],
    ids=str,
)
def test_cuda_graphs_over_ranks(monkeypatch, folder, name, shape):
    """Two ranks that share a GPU: symmetric memory only. Graphs change no token, nor do ranks."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    path, params = folder(name), greedy()
    options = {"transport": "symmetric"} if shape[2] > 1 else {}
    arguments = (path, shape, prompts(), params)
    with RankPool(2) as pool:
        eager = pool.run(cases.generate_on_gpu, *arguments, False, options)
        captured = pool.run(cases.generate_on_gpu, *arguments, True, options)
    assert captured[0][0] == eager[0][0] == alone(path, params, device="cuda")
    assert not any(sizes for _, _, sizes in eager)
    for _, reason, sizes in captured:
        assert reason is None and sizes == captured[0][2] and len(sizes) > 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "shape"), [("llama", (1, 2, 1)), ("qwen3_moe", (1, 2, 2))], ids=str
)
def test_bits_of_one_rank_on_a_gpu(monkeypatch, folder, name, shape):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    with RankPool(2) as pool:
        check_bits(pool, folder(name), shape, torch.bfloat16)


def test_capture_that_fails_on_one_rank(ranks, folder):
    """No rank captures from then on, and the tokens are the same."""
    path, params = folder("llama"), greedy()
    found = ranks(2).run(cases.generate_with_graphs, path, (1, 2, 1), prompts(), params, 1)
    assert found[0][0] == alone(path, params)
    reasons = [reason for _, reason, *_ in found]
    assert "another rank could not capture" in str(reasons[0])
    assert "no graph today" in str(reasons[1])


@pytest.mark.parametrize(("shape", "wanted"), [((1, 2, 1), 0), ((2, 1, 1), 2)], ids=str)
def test_host_collectives_of_a_step(ranks, folder, shape, wanted):
    """Besides the message of rank 0: an agreement and a gather of tokens, and only with a data axis."""
    counts = ranks(2).run(cases.count_collectives, folder("llama"), shape, [1, 2, 3])[0]
    messages = counts.pop("message of rank 0")
    of_model = sum(n for label, n in counts.items() if label.startswith("tensor "))
    assert messages == 20 and sum(counts.values()) - of_model == wanted * messages, counts
    if wanted:
        assert counts["world agreement on a step"] == counts["data all-gather of sampled tokens"]


def check_bits(pool, path: Path, shape, dtype: torch.dtype) -> None:
    """Tokens and log-probabilities of deterministic=True are those of one rank, to the bit."""
    params = [SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)] * 3
    params += [SamplingParams(max_tokens=6, temperature=0.9, seed=4, logprobs=0)]
    asked = prompts()[: len(params)]
    found = pool.run(cases.generate_to_the_bit, path, shape, asked, params, dtype)[0]
    llm = LLM(path, dtype=dtype, deterministic=True, **cases.PLAIN)
    wanted = [(one.token_ids, one.logprobs) for one in llm.generate(asked, params)]
    assert [one[:2] for one in found] == wanted


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama", (1, 2, 1)),
        ("qwen3_moe", (1, 2, 2)),
        ("qwen3_moe", (2, 1, 2)),
        slow("qwen3_moe", (1, 2, 1)),
        slow("deepseek_v3", (1, 2, 2)),
        slow("deepseek_v3", (1, 2, 1)),
        slow("gpt_oss", (1, 2, 1)),
        slow("gpt_oss", (2, 1, 2)),
        slow("gemma3", (1, 2, 1)),
        slow("llama4", (2, 1, 2)),
        slow("olmo2", (1, 2, 1)),
        slow("qwen3_next", (1, 2, 2)),
    ],
    ids=str,
)
def test_bits_of_one_rank(ranks, folder, name, shape, dtype):
    check_bits(ranks(2), folder(name), shape, dtype)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("llama", (1, 4, 1), torch.bfloat16),
        ("qwen3_moe", (1, 4, 4), torch.float32),
        slow("qwen3_moe", (2, 2, 4), torch.bfloat16),
        slow("qwen3_moe", (4, 1, 4), torch.bfloat16),
        slow("deepseek_v3", (1, 4, 4), torch.float32),
        slow("olmo2", (1, 4, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_bits_of_one_rank_on_four(ranks, folder, name, shape, dtype):
    check_bits(ranks(4), folder(name), shape, dtype)


def test_blocks_run_out(ranks, folder):
    """All ranks preempt the same requests."""
    check(ranks(2), folder("llama"), (1, 2, 1), context=48, cache_tokens=64)


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 1)], ids=str)
def test_ranks_agree_on_smaller_steps(ranks, folder, shape):
    """Memory for five tokens on one rank: steps get smaller on both, and no token changes."""
    path = folder("llama")
    found = ranks(2).run(cases.generate_with_little_memory, path, shape, prompts(), greedy(), 1)
    assert found[0][0] == alone(path, greedy())
    limits = {limit for _, limit in found}
    assert len(limits) == 1 and limits.pop() <= 5


@pytest.mark.slow
@pytest.mark.parametrize("format", PACKED)
def test_packed(ranks, folder, format):
    check(ranks(2), folder(format), (1, 2, 2), packed=True)


def test_abandoned_stream_is_cancelled_on_all_ranks(ranks, folder):
    path, prompt = folder("llama"), prompts()[2]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    llm = LLM(path, **cases.PLAIN)
    wanted = [one.token_ids for one in llm.generate([prompt, prompt[:3]], params)]
    found = ranks(2).run(cases.cancel_and_go_on, path, (1, 2, 1), prompt)
    assert found[0][0] == wanted
    assert found[0][1] == found[1][1] == sum(llm.plan.group_blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("llama", (1, 2, 1)), ("qwen3_moe", (2, 1, 2)), ("deepseek_v3", (1, 2, 2))]
)
def test_a_soak(ranks, folder, name, shape):
    """Each request gets what it gets alone, as far as it was let; some start with the same tokens."""
    path, generator = folder(name), torch.Generator().manual_seed(4)
    start = torch.randint(0, 97, (20,), generator=generator).tolist()
    asked = [
        (start if number % 3 else [])[: number % 23]
        + torch.randint(0, 97, (1 + number % 11,), generator=generator).tolist()
        for number in range(60)
    ]
    found = ranks(2).run(cases.soak, path, shape, asked, 1)
    assert all(back for _, back in found)
    llm, whole = LLM(path, **cases.PLAIN | {"context": 48}), 0
    for number, tokens in found[0][0].items():
        params = SamplingParams(max_tokens=3 + number % 9, ignore_eos=True)
        wanted = llm.generate([asked[number]], params)[0].token_ids
        assert tokens == wanted[: len(tokens)], number
        whole += len(tokens) == len(wanted)
    assert 30 < whole < 60


@pytest.mark.parametrize("victim", [1, slow(0)])
def test_a_rank_that_dies(folder, victim):
    """Rank 0 notices inside of a step; a rank that waits for rank 0 to say something, outside of any."""
    with RankPool(2, failure_grace=40) as pool, pytest.raises(RankError) as caught:
        pool.run(cases.die, folder("llama"), (1, 2, 1), victim, [1, 2, 3])
    text = str(caught.value)
    assert f"rank {victim} of 2 failed: its process ended, killed by SIGKILL" in text
    assert f"RankError: rank {victim} is gone" in text


def test_requests_go_to_rank_0(ranks, folder):
    said = ranks(2).run(cases.ask_on_every_rank, folder("llama"))
    assert said[0] == "" and "only rank 0 takes requests" in said[1] and "llm.is_driver" in said[1]


def test_single_process_starts_its_workers(folder):
    """An LLM in a plain process; afterwards that is what it is again."""
    path, before = folder("qwen3_moe"), dict(os.environ)
    with LLM(path, tensor=2, expert=2, timeout=60.0, **cases.PLAIN) as llm:
        assert llm.is_driver and llm.workers is not None and not is_single_process()
        found = [one.token_ids for one in llm.generate(prompts(), greedy())]
    assert all(process.returncode == 0 for process in llm.workers.processes)
    assert dict(os.environ) == before and is_single_process()
    assert found == alone(path, greedy())


def test_worker_process_that_does_not_start(capfd):
    before = dict(os.environ)
    with pytest.raises(
        RankError, match="rank [12] did not start: it ended with exit code 1"
    ) as caught:
        WorkerProcesses(3, "no_such_module", b"")
    assert caught.value.ranks and dict(os.environ) == before
    assert "No module named no_such_module" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "it is stopped"),
        ("import time; time.sleep(600)", "it waits"),
    ],
)
def test_worker_process_that_gets_stuck_while_it_starts(tmp_path, monkeypatch, code, message):
    """It is named after the timeout, and not when a start on a busy machine would be too long."""
    (tmp_path / "stuck_worker.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankError, match=f"rank 1 did not start: {message}, and has not reported"):
        WorkerProcesses(2, "stuck_worker", b"", timeout=1.5)
    assert is_single_process()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"tensor": 2, "expert": 3}, "expert 3 must divide data 1 x tensor 2"),
        ("llama", {"expert": 2}, "expert=2 needs a model with experts"),
        ("llama", {"tensor": 100}, "97 can't be sharded over 100 ranks"),
        ("llama", {"tensor": "2"}, "tensor='2' must be 1 or more"),
        ("llama", {"context_parallel": 0}, "context_parallel=0 must be 1 or more"),
        ("llama", {"pipeline": 0}, "pipeline=0 must be 1 or more"),
        ("llama", {"pipeline": 9}, "pipeline=9 stages, but the model has"),
        ("qwen3_next", {"context_parallel": 2}, "context_parallel does not support qwen3_next"),
        (
            "deepseek_v3",
            {"context_parallel": 2, "kv_dtype": "fp8"},
            "no FP8 cache of MLA latents",
        ),
        ("qwen3_moe", {"expert": 2, "wire": "fp4"}, "wire='fp4'"),
        ("qwen3_moe", {"expert": 2, "transport": "symmetric"}, "TRITON_INTERPRET=1"),
        ("qwen3_moe", {"expert": 2, "transport": "hierarchical"}, "nodes=2 emulates two"),
        ("qwen3_moe", {"expert": 2, "placement": "none.json"}, "none.json can't be read"),
        ("qwen3_moe", {"expert": 2, "nodes": 3}, "2 ranks can't be divided into 3 nodes"),
        ("qwen3_moe", {"expert": 2, "deterministic": True, "wire": "fp8"}, "dispatcher of its own"),
        ("llama", {"tensor": 2, "transport": "all_to_all"}, "expert=1"),
        ("llama", {"tensor": 2, "timeout": 0.0}, "timeout=0.0"),
        ("llama", {"tensor": 2, "kv_dtype": "int3"}, "unknown kv_dtype='int3'"),
        ("llama", {"tensor": 2, "context": 10**6}, "a context of 1000000 tokens"),
    ],
    ids=str,
)
def test_layouts_that_can_not_work_start_no_process(folder, monkeypatch, name, options, message):
    monkeypatch.setattr(llm, "WorkerProcesses", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(ArgumentError, match=message):
        LLM(folder(name), **cases.PLAIN | options)


def test_deterministic_ranks_have_no_transport():
    with pytest.raises(ArgumentError, match="deterministic=True has a dispatcher of its own"):
        make_expert_options(LLMConfig(deterministic=True, expert=2, wire="fp8"))


@pytest.mark.slow
def test_the_command(folder):
    """torchrun starts the ranks; the first one writes the reply, the others nothing."""
    path = folder("qwen3_moe")
    words = [
        "generate",
        "hello",
        "--raw",
        "--model",
        str(path),
        "--max-tokens",
        "6",
        "--device",
        "cpu",
    ]
    one = run([sys.executable, "-m", "fulgurite", *words])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    many = run([*torchrun, "-m", "fulgurite", *words, "--tensor", "2", "--expert", "2"])
    assert many.stdout == one.stdout and one.stdout.strip()
    assert many.stderr.count("tokens/s, first token") == 1


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
