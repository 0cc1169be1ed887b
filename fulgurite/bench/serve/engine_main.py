"""`python -m fulgurite.bench.serve.engine_main JSON`: the workload on an `LLM`, without a server.

In: the model and options of the `LLM` on the command line, then a job a line on stdin: conversations, and
clients or arrival times. Out: a line of JSON a job, with the same replies that the HTTP client records. This
is the reference for what the server costs: the same engine, settings, requests and number of requests in
flight.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fulgurite.bench.serve.replies import OK, Reply
from fulgurite.bench.serve.workloads import Conversation, Turn
from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.request import SamplingParams, Update
from fulgurite.serve.llm import LLM
from fulgurite.serve.remote.served_engine import read_llm_options

REFUSED = "refused"


@dataclass
class Play:
    """A conversation in progress."""

    turns: deque[Turn]
    history: list[dict[str, str]] = field(default_factory=list)


class EngineLoad:
    """Keeps `clients` conversations in flight, or begins them at their arrival times."""

    def __init__(self, llm: LLM, conversations: Sequence[Conversation]) -> None:
        self.llm = llm
        self.waiting = deque(Play(deque(one)) for one in conversations)
        self.finished: deque[Play] = deque()  # a turn of these has ended
        self.replies: list[Reply] = []
        self.num_active = 0

    def run_closed_loop(self, clients: int) -> None:
        while self.waiting or self.num_active:
            while self.waiting and self.num_active < clients:
                self._begin(self.waiting.popleft(), time.perf_counter())
            self._step()

    def run_open_loop(self, arrivals: Sequence[float]) -> None:
        start, due = time.perf_counter(), deque(arrivals)
        while self.waiting or self.num_active:
            while self.waiting and start + due[0] <= time.perf_counter():
                self._begin(self.waiting.popleft(), start + due.popleft())
            if self.num_active:
                self._step()
            elif due:
                time.sleep(max(0.0, start + due[0] - time.perf_counter()))

    def _begin(self, play: Play, due: float) -> None:
        self.num_active += 1
        self._send(play, due)

    def _step(self) -> None:
        """One step of the engine, then the next turns of conversations whose turn has ended."""
        if not self.finished:
            self.llm.engine.step()
        while self.finished:
            play = self.finished.popleft()
            if play.turns and self.replies[-1].kind == OK:
                self._send(play, time.perf_counter())
            else:
                self.num_active -= 1

    def _send(self, play: Play, due: float) -> None:
        turn = play.turns.popleft()
        reply = Reply(due, wanted_tokens=turn.output_tokens)
        last = 0.0

        def listen(update: Update) -> None:
            nonlocal last
            now = time.perf_counter()
            if update.token_ids:
                if last:
                    reply.gaps.append(now - last)
                else:
                    reply.first_token = now
                last = now
            if update.result is not None:
                self._end(play, reply, update, now)

        prompt: Any = list(turn.prompt_ids)
        if turn.text:
            play.history.append({"role": "user", "content": turn.text})
            prompt = self.llm.encode_chat(play.history)
        params = SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True)
        try:
            self.llm.engine.add_request(prompt, params, listener=listen)
        except ArgumentError as error:
            reply.fail(REFUSED, str(error))
            reply.end = time.perf_counter()
            self.replies.append(reply)
            self.finished.append(play)

    def _end(self, play: Play, reply: Reply, update: Update, now: float) -> None:
        result = update.result
        assert result is not None
        reply.end, reply.has_usage = now, True
        reply.prompt_tokens, reply.output_tokens = len(result.prompt_ids), len(result.token_ids)
        reply.cached_tokens = result.cached_tokens
        if result.finish_reason not in ("stop", "length"):
            reply.fail(result.finish_reason, result.error or "")
        play.history.append({"role": "assistant", "content": result.text})
        self.replies.append(reply)
        self.finished.append(play)


def run_job(llm: LLM, job: dict[str, Any]) -> dict[str, Any]:
    """The replies and seconds of one job."""
    conversations = [tuple(Turn(**turn) for turn in one) for one in job["conversations"]]
    load = EngineLoad(llm, conversations)
    clock, cpu = time.perf_counter(), time.process_time()
    if job["arrivals"] is None:
        load.run_closed_loop(job["clients"])
    else:
        load.run_open_loop(job["arrivals"])
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
    replies = [encode_reply(reply) for reply in load.replies]
    return {"replies": replies, "seconds": seconds, "cpu_seconds": cpu_seconds}


def encode_reply(reply: Reply) -> dict[str, Any]:
    values = {one.name: getattr(reply, one.name) for one in fields(reply)}
    return {**values, "gaps": reply.gaps.tolist()}


def main() -> None:
    wanted = json.loads(sys.argv[1])
    with LLM(wanted["model"], **read_llm_options(wanted["options"])) as llm:
        llm.engine.warm_up()
        while llm.engine.prepare_step():  # as a server does while it is idle
            pass
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(run_job(llm, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
