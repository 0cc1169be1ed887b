"""What the tests of lost ranks share: a tiny model, its requests, and a fault in the middle of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fulgurite.serve.engine.request import Result, SamplingParams, Update
from fulgurite.serve.llm import LLM
from tests.parallel.checkpoints import save, save_tokenizer
from tests.parallel.engine_cases import PLAIN
from tests.parallel.test_engine import prompts
from tests.parallel.test_load_shard import fields_of

TOKENS = 20
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=3)
PARAMS = [GREEDY, SAMPLED, SamplingParams(max_tokens=9, repetition_penalty=1.3), GREEDY, GREEDY]


def save_model(folder: Path, name: str = "llama") -> Path:
    fields = fields_of(name)
    path = save(folder, fields)
    save_tokenizer(path, int(str(fields["vocab_size"])))
    return path


def run_undisturbed(folder: Path) -> list[list[int]]:
    """The tokens of one rank that nobody disturbs."""
    return [one.token_ids for one in LLM(folder, **PLAIN).generate(*asked())]


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """More requests than run at once."""
    return prompts()[: len(PARAMS)], PARAMS


class Run:
    """Requests of an engine, and a fault after so many tokens of all of them."""

    def __init__(self, llm: LLM, at_token: int, fault: Callable[[], None]) -> None:
        self.llm, self.at_token, self.fault = llm, at_token, fault
        self.streamed: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.results: dict[str, Result] = {}
        self.num_tokens, self.longest_step = 0, 0.0

    def listen(self, update: Update) -> None:
        self.streamed.setdefault(update.id, []).extend(update.token_ids)
        self.texts[update.id] = self.texts.get(update.id, "") + update.text
        if update.result is not None:
            self.results[update.id] = update.result
        before, self.num_tokens = self.num_tokens, self.num_tokens + len(update.token_ids)
        if before < self.at_token <= self.num_tokens:
            self.fault()

    def run(self) -> list[Result]:
        engine = self.llm.engine
        ids = [
            engine.add_request(*one, listener=self.listen).id for one in zip(*asked(), strict=True)
        ]
        while engine.has_unfinished_requests:
            start = time.monotonic()
            engine.step()
            self.longest_step = max(self.longest_step, time.monotonic() - start)
        results = [self.results[id] for id in ids]
        for result in results:  # no token and no text twice, none is missing
            assert self.streamed[result.id] == result.token_ids
            assert self.texts[result.id] == result.text
        assert set(engine.audit().values()) == {0}
        return results


def kill(llm: LLM, *ranks: int, how: signal.Signals = signal.SIGKILL) -> None:
    assert llm.workers is not None
    for rank in ranks:
        os.kill(llm.workers.processes[rank - 1].pid, how)
