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
from fulgurite.parallel.workers import WorkerProcesses, is_single_process
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
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
        assert reason is not None and "communicate with other ranks" in reason and left == 0


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
    with pytest.raises(RankError, match="rank [12] did not start") as caught:
        WorkerProcesses(3, "no_such_module", b"")
    assert caught.value.ranks and dict(os.environ) == before
    assert "No module named no_such_module" in capfd.readouterr().err


def test_axes_that_do_not_fit(folder):
    """Said before anybody is started."""
    with pytest.raises(ArgumentError, match="expert 3 must divide data 1 x tensor 2"):
        LLM(folder("llama"), tensor=2, expert=3, **cases.PLAIN)


@pytest.mark.slow
def test_indivisible_model_fails_on_all_ranks(folder):
    """The error of a share that can't be made; nobody is left, and nothing of a mesh."""
    with pytest.raises(ArgumentError, match="expert=2 needs a model with experts"):
        LLM(folder("llama"), expert=2, **cases.PLAIN)
    assert is_single_process()


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
