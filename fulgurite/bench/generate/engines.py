"""Prefill and decode throughput of one engine, measured in its own process.

In: JSON on the command line (engine, threads, prompt, new, batches, file). Out: a line of JSON with tokens per second.
It runs as a script, so that another Python interpreter can run it: each engine imports only what it needs.
"""

from __future__ import annotations

import importlib.util
import json
import random
import resource
import statistics
import sys
import time
from typing import Any

NOT_INSTALLED = 9
VOCABULARY = 49152


def random_tokens(count: int) -> list[int]:
    return [random.randrange(1000, VOCABULARY) for _ in range(count)]


def measure_fulgurite(wanted: dict[str, Any]) -> dict[str, float]:
    import torch

    from fulgurite.serve.engine.request import SamplingParams
    from fulgurite.serve.llm import LLM

    torch.set_num_threads(wanted["threads"])
    count, new = wanted["prompt"], wanted["new"]
    llm = LLM(wanted["file"], device="cpu", context=1024, max_sequences=16, prefix_caching=False)
    engine = llm.engine
    greedy = SamplingParams(temperature=0.0, max_tokens=2 * new, ignore_eos=True)
    engine.generate([random_tokens(count)], SamplingParams(temperature=0.0, max_tokens=3))
    found: dict[str, float] = {}
    firsts = []
    for batch in wanted["batches"]:
        for _ in range(batch):
            engine.add_request(random_tokens(count if batch == 1 else 16), greedy)
        start = time.perf_counter()
        while not any(engine.step()):
            pass
        firsts.append(time.perf_counter() - start)
        for _ in range(3):  # warm up: the decode step of this batch size is captured
            engine.step()
        times = []
        for _ in range(new if batch == 1 else new // 2):
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        speed = batch / statistics.median(times)
        found["decode" if batch == 1 else f"decode_{batch}"] = speed
        for id in list(engine.requests):
            engine.cancel(id)
    return {"prefill": count / firsts[0], **found, "first_token_ms": 1e3 * firsts[0]}


def measure_llama_cpp(wanted: dict[str, Any]) -> dict[str, float]:
    if importlib.util.find_spec("llama_cpp") is None:
        sys.exit(NOT_INSTALLED)
    from llama_cpp import Llama

    threads = wanted["threads"]
    model = Llama(
        wanted["file"], n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads,
        verbose=False,
    )  # fmt: skip
    model.eval(random_tokens(wanted["prompt"]))
    model.reset()
    start = time.perf_counter()
    model.eval(random_tokens(wanted["prompt"]))
    first = time.perf_counter() - start
    times = []
    for token in random_tokens(wanted["new"]):
        start = time.perf_counter()
        model.eval([token])
        times.append(time.perf_counter() - start)
    found = {
        "prefill": wanted["prompt"] / first,
        "decode": 1 / statistics.median(times),
        "first_token_ms": 1e3 * first,
    }
    for batch in wanted["batches"]:
        if batch > 1:
            found[f"decode_{batch}"] = batch / _time_llama_batch(
                model, batch, threads, wanted["new"] // 2
            )
    return found


def _time_llama_batch(model: Any, batch: int, threads: int, steps: int, prompt: int = 16) -> float:
    """Seconds of one llama.cpp step of `batch` sequences, through its C API."""
    import llama_cpp

    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = 256 * batch, 512, batch
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model._model.model, params)
    room = llama_cpp.llama_batch_init(batch * prompt, 0, 1)

    def decode(position: int, count: int) -> float:
        places = [(sequence, at) for sequence in range(batch) for at in range(count)]
        room.n_tokens = len(places)
        for index, (sequence, at) in enumerate(places):
            room.token[index], room.pos[index] = random_tokens(1)[0], position + at
            room.n_seq_id[index], room.seq_id[index][0] = 1, sequence
            room.logits[index] = at == count - 1
        start = time.perf_counter()
        status = llama_cpp.llama_decode(context, room)
        assert status == 0, f"llama_decode failed with {status}"
        llama_cpp.llama_synchronize(context)
        return time.perf_counter() - start

    decode(0, prompt)
    times = [decode(prompt + step, 1) for step in range(steps)]
    llama_cpp.llama_batch_free(room)
    llama_cpp.llama_free(context)
    return statistics.median(times)


def measure_transformers(wanted: dict[str, Any]) -> dict[str, float]:
    if importlib.util.find_spec("transformers") is None:
        sys.exit(NOT_INSTALLED)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(wanted["threads"])
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.inference_mode():
        model = LlamaForCausalLM(config).eval()
        ids = torch.tensor([random_tokens(wanted["prompt"])])
        model(ids[:, :8])
        start = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        first = time.perf_counter() - start
        times = []
        for token in random_tokens(wanted["new"] // 3):
            start = time.perf_counter()
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values)
            times.append(time.perf_counter() - start)
    return {
        "prefill": wanted["prompt"] / first,
        "decode": 1 / statistics.median(times),
        "first_token_ms": 1e3 * first,
    }


ENGINES = {
    "fulgurite": measure_fulgurite,
    "llama.cpp": measure_llama_cpp,
    "transformers": measure_transformers,
}


def main(wanted: dict[str, Any]) -> None:
    random.seed(0)
    found = ENGINES[wanted["engine"]](wanted)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**found, "peak_mib": peak}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
