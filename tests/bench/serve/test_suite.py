"""`fulgurite bench serve` against small servers, and the processes that it starts."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite import cli
from fulgurite.bench.serve import candidates, processes, suite
from fulgurite.bench.serve.candidates import HttpOptions, Load, make_job, open_server
from fulgurite.bench.serve.engine_main import encode_reply, run_job
from fulgurite.bench.serve.http_client import Expected
from fulgurite.bench.serve.load import SKIPPED
from fulgurite.bench.serve.processes import Server, ServerError
from fulgurite.bench.serve.replies import OK
from fulgurite.bench.serve.workloads import Lengths, Workload
from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.request import Result, SamplingParams, Update
from fulgurite.serve.llm import LLM
from tests.bench.serve.fake_server import FakeOpenAI
from tests.serve.tiny_checkpoint import save_checkpoint

SHORT = Workload(prompt=Lengths(3, 3), output=Lengths(5, 5))


def measure(server: FakeOpenAI, workload: Workload, load: Load, **expected: Any) -> Any:
    with server.run() as address:
        options = HttpOptions(expected=Expected(**expected))
        with open_server(Server(address), options) as measure_job:
            return measure_job(make_job(workload, load))


@pytest.mark.parametrize("load", [Load(20, clients=4), Load(20, rate=400.0)])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_chat", [True, False])
def test_every_request_is_sent_once(load: Load, is_stream: bool, is_chat: bool) -> None:
    server = FakeOpenAI()
    workload = Workload(prompt=Lengths(3, 3), output=Lengths(5, 5), is_chat=is_chat)
    run, cpu = measure(server, workload, load, is_stream=is_stream)
    assert [reply.kind for reply in run.replies] == [OK] * 20 and cpu is None
    assert {(reply.prompt_tokens, reply.output_tokens) for reply in run.replies} == {(3, 5)}
    sent = server.bodies[-20:]  # after the warm-up
    name = "messages" if is_chat else "prompt"
    assert len({json.dumps(body[name]) for body in sent}) == 20
    assert {body["model"] for body in sent} == {"fake"}
    warmup = {json.dumps(body[name]) for body in server.bodies[:-20]}
    assert warmup and not warmup & {json.dumps(body[name]) for body in sent}
    assert all(reply.start <= reply.first_token <= reply.end for reply in run.replies)


def test_tokens_are_counted_for_servers_without_usage() -> None:
    run, _ = measure(FakeOpenAI(has_usage=False), SHORT, Load(6, clients=2))
    assert [reply.output_tokens for reply in run.replies] == [5] * 6


def test_conversations_send_their_history() -> None:
    server = FakeOpenAI()
    workload = Workload("multi-turn", Lengths(2, 2), Lengths(3, 3), turns=3)
    run, _ = measure(server, workload, Load(6, clients=1))
    sent = server.bodies[-6:]
    assert [len(body["messages"]) for body in sent] == [1, 3, 5, 1, 3, 5]
    assert sent[2]["messages"][:3] == sent[1]["messages"]
    assert sent[1]["messages"][1] == {"role": "assistant", "content": "word word word "}
    assert [reply.prompt_tokens for reply in run.replies][:3] == [2, 7, 12]


def test_a_conversation_ends_with_a_failure() -> None:
    workload = Workload("multi-turn", Lengths(2, 2), Lengths(3, 3), turns=4)
    run, _ = measure(FakeOpenAI(fail_every=4), workload, Load(4, clients=1))  # 2 are warm-ups
    assert [reply.kind for reply in run.replies] == [OK, "http 429", SKIPPED, SKIPPED]


def test_a_server_that_refuses_everything_is_an_error() -> None:
    with pytest.raises(ServerError, match="answers no request: http 429") as caught:
        measure(FakeOpenAI(fail_every=1), SHORT, Load(4, clients=1))
    assert "too many" in str(caught.value)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    with FakeOpenAI(fail_every=9).run() as address:
        command = (
            f"bench serve --device cpu --url {address} --clients 1,4 --requests 8 --repeats 2 "
            f"--prompt-tokens 3:5 --output-tokens 4 --goodput ttft:60000 --output {path}"
        )
        assert cli.main(command.split()) == 0
    content = json.loads(path.read_text())
    rows = content["rows"]
    assert [row["load"] for row in rows] == ["1 client", "4 clients"]
    assert all(row["requests"] == 8 and row["repeats"] == 2 for row in rows)
    assert sum(row["errors"].get("http 429", 0) for row in rows) > 0
    assert all(row["goodput_per_s"] == row["requests_per_s"] > 0 for row in rows)
    text = capsys.readouterr().out
    assert "random 3 to 5 in, 4 out · completions · medians of 2" in text and "http 429" in text


def test_modes_share_the_file_of_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeOpenAI().run() as address:
        command = f"bench serve --device cpu --url {address} --clients 1 --requests 2 --repeats 1"
        for more in ("", "--no-stream", "--api chat", ""):
            assert cli.main([*command.split(), *more.split(), "--output-tokens", "2"]) == 0
    (path,) = (tmp_path / "benchmarks").glob("*-serve-cpu.json")
    groups = [row["group"].partition(" · ")[2] for row in json.loads(path.read_text())["rows"]]
    shape = "random 128 in, 2 out"
    assert groups == [
        f"{shape} · completions, not streamed",
        f"{shape} · chat",
        f"{shape} · completions",
    ]


def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serve.json"
    opened = iter([suite.open_server])  # the second repeat finds no server
    monkeypatch.setattr(suite, "open_server", lambda *given: next(opened)(*given))
    with FakeOpenAI().run() as address, pytest.raises(StopIteration):
        command = f"bench serve --device cpu --url {address} --clients 1 --requests 2"
        cli.main([*command.split(), "--output", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["ok"], row["repeats"]) == (2, 1)


def test_keys_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "bench serve --api-key secret --llama-cpp /tmp/llama-server --quick --llama-cpp"
    monkeypatch.setattr(sys, "argv", ["fulgurite", *arguments.split(), "--mock"])
    command = suite.results.describe_machine("cpu")["command"]
    assert command.endswith("bench serve --llama-cpp --quick --llama-cpp --mock")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--url http://x --mock", "--url, --mock exclude"),
        ("--mock --engine-only", "--mock, --engine-only exclude"),
        ("--routing --llama-cpp", "--routing, --llama-cpp exclude"),
        ("--clients 0", "--clients 0"),
        ("--clients 1,x", "--clients 1,x"),
        ("--clients 1.5", "--clients 1.5"),
        ("--rate -1", "--rate -1"),
        ("--workload other", "--workload other"),
        ("--output-tokens 0", "--output-tokens 0"),
        ("--extra-body 3", "--extra-body 3"),
        ("--extra-body {", "--extra-body {"),
        ("--timeout 0", "--timeout 0"),
        ("--goodput ttft", "--goodput ttft"),
        ("--url ftp://x", "--url ftp://x"),
        ("--llama-cpp /no/such/program", "no program /no/such/program"),
        ("--repeats 0", "--repeats 0"),
        ("--requests -1", "--requests -1"),
        ("--routing --replicas 1", "2 or more replicas"),
        ("--routing --cache-share nan", "--cache-share nan"),
    ],
)
def test_wrong_options(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(candidates, "run_server", None)  # nothing is started
    assert cli.main(["bench", "serve", "--device", "cpu", *arguments.split()]) == 1
    assert message in capsys.readouterr().err


# ---- what is started -----------------------------------------------------------------------------


def choose(arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Name → command line of the candidates that are servers."""
    monkeypatch.setattr(candidates, "_serve", lambda command, port, options, threads: command)
    options = cli.build_parser().parse_args(
        ["bench", "serve", "--device", "cpu", *arguments.split()]
    )
    workload = suite.read_workload(options, suite.read_mode(options))
    found = suite.choose_candidates(options, workload)
    return {one.name: one.open() for one in found if one.name != "engine-only"}  # type: ignore[misc]


def test_command_lines_of_our_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (ours,) = choose("--max-sequences 8 --server-args=--a=b", monkeypatch).values()
    assert ours[:5] == [sys.executable, "-m", "fulgurite", "serve", "--port"]
    assert ours[6:] == ["--model", "smollm2", "--max-sequences", "8", "--a=b"]
    (mock,) = choose("--mock", monkeypatch).values()
    assert mock[6:] == ["--mock"]
    routed = choose("--routing --cache-share 0", monkeypatch)
    assert [line[8:] for line in routed.values()] == [
        ["--data", "2"],
        ["--data", "2", "--routing", "round-robin"],
    ]
    routed = choose("--routing --replicas 3 --max-sequences 4 --groups 6", monkeypatch)
    assert routed["prefix-aware"][10:] == ["--data", "3", "--cache-tokens", str(4 * 1024 + 4 * 48)]


def test_llama_cpp_has_the_same_file_threads_and_slots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    found = choose(f"--llama-cpp {sys.executable} --threads 2 --model {model}", monkeypatch)
    assert list(found) == ["fulgurite", "llama.cpp"]
    line = " ".join(found["llama.cpp"])
    assert f"--model {model} " in line and "--threads 2 --threads-batch 2" in line
    assert "--parallel 16 --ctx-size 4096" in line  # 128 + 64 tokens: 256 a slot
    with pytest.raises(ArgumentError, match="llama.cpp can't load"):
        choose(f"--llama-cpp {sys.executable} --model {tmp_path}", monkeypatch)


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Handler.count += 1
        self.send_response(200 if Handler.count > 2 else 503)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_awaited_and_stopped_with_its_children() -> None:
    port = processes.find_free_port()
    with processes.run_server([sys.executable, "-c", SERVER, str(port)], port) as server:
        assert server.pid is not None and processes.is_ready(server.address)
        children = processes.list_descendants(server.pid)
        assert len(children) == 1 and (server.cpu_seconds() or 0) > 0
        pids = [server.pid, children[0][0]]
    deadline = time.monotonic() + 30
    while any(processes.read_start_time(pid) is not None for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_ends_is_an_error() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    server = processes.run_server(command, processes.find_free_port())
    with pytest.raises(ServerError, match="ended with status 1") as caught, server:
        pass
    assert "no such model" in str(caught.value)


def test_a_terminated_benchmark_stops_its_servers() -> None:
    before, stopped = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit), processes.exit_on_terminate():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            stopped.append(True)
    assert stopped and signal.getsignal(signal.SIGTERM) is before


def test_threads_of_a_process() -> None:
    assert processes.thread_environment(None) == dict(os.environ)
    assert processes.thread_environment(3)["OMP_NUM_THREADS"] == "3"


# ---- engine-only ---------------------------------------------------------------------------------


class FakeEngine:
    """The parts of an `LLM` and its engine that are used. A step gives every request a token."""

    def __init__(self) -> None:
        self.engine = self
        self.running: list[tuple[list[int], list[int], SamplingParams, Any]] = []
        self.most_running = 0

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return list(" ".join(message["content"] for message in messages).encode())

    def add_request(self, prompt: list[int], params: SamplingParams, listener: Any) -> None:
        if max(prompt) > 256:
            raise ArgumentError("not in the vocabulary")
        self.running.append((prompt, [], params, listener))
        self.most_running = max(self.most_running, len(self.running))

    def step(self) -> None:
        assert self.running, "a step without requests"
        for request in list(self.running):
            prompt, tokens, params, listener = request
            tokens.append(7)
            result = None
            if len(tokens) == params.max_tokens:
                self.running.remove(request)
                result = Result("", prompt, tokens, "word " * 4, "length", None, None, 0, 0.0, 0.0)
            listener(Update("", "word ", (7,), result))


def as_job(workload: Workload, load: Load) -> dict[str, Any]:
    conversations = make_job(workload, load).conversations
    turns = [[vars(turn) for turn in one] for one in conversations]
    return {
        "conversations": turns,
        "clients": load.clients,
        "arrivals": load.draw_arrivals(len(turns)),
    }


@pytest.mark.parametrize("load", [Load(6, clients=3), Load(6, rate=1000.0)])
def test_the_same_requests_without_a_server(load: Load) -> None:
    check_engine_job(FakeEngine(), load)


def test_clients_of_the_engine() -> None:
    engine = FakeEngine()
    check_engine_job(engine, Load(6, clients=2))
    assert engine.most_running == 2


@pytest.mark.slow  # it compiles kernels
def test_the_same_requests_on_a_real_engine(tmp_path: Path) -> None:
    llm = LLM(save_checkpoint(tmp_path), device="cpu", context=200, max_sequences=2)
    with torch.no_grad():
        check_engine_job(llm, Load(6, clients=3))


def check_engine_job(llm: Any, load: Load) -> None:
    workload = Workload("multi-turn", Lengths(2, 2), Lengths(4, 4), turns=2)
    found = run_job(llm, as_job(workload, load))
    replies = found["replies"]
    assert [reply["kind"] for reply in replies] == [OK] * 6
    assert [reply["output_tokens"] for reply in replies] == [4] * 6
    assert all(len(reply["gaps"]) == 3 for reply in replies) and found["seconds"] > 0
    assert max(reply["prompt_tokens"] for reply in replies) > 40  # a history
    json.dumps(found)


def test_refused_prompts_of_the_engine_are_recorded() -> None:
    engine: Any = FakeEngine()
    found = run_job(engine, as_job(SHORT, Load(3, clients=2)))
    assert [reply["kind"] for reply in found["replies"]] == ["refused"] * 3
    assert "vocabulary" in found["replies"][0]["detail"]


def test_replies_travel_as_json() -> None:
    reply = candidates.Reply(1.0, gaps=candidates.array("d", [0.5]))
    assert candidates.Reply(**{**encode_reply(reply), "gaps": reply.gaps}) == reply
