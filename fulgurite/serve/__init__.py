"""Text generation: prompts in, tokens and text out, many requests at once.

prompt ─ Engine.add_request ─▶ Request
                                 │ scheduler.py    schedules the next step under a token budget
                                 ▼
                               ScheduledChunks ─ batch.py ─▶ flat tensors, block tables
                                 │ runner.py       runs the model with paged attention
                                 ▼
                               logits ─ sampler.py ─▶ one token a request
                                 │ engine_core.py  detokenizer.py: text, stop strings
                                 ▼
                               Updates and Results

llm.py, llm_config.py             `LLM`: all of it behind one class; its options
embedding.py                      `EmbeddingModel` and `fulgurite embed`: one vector a text
command.py                        `fulgurite generate` and `fulgurite chat`
serve_command.py, top.py          `fulgurite serve` and `fulgurite top`; scrape.py: its numbers
structured/                       grammars for structured output, by llguidance
remote/                           an engine in a process of its own: messages, loop, client
http/                             the server: endpoints, admission, routing, metrics, the chat page;
                                  it imports no torch, and launches its engines first
ray_serve.py                      the server as Ray Serve deployments, over many machines
worker_main.py                    the process of a worker rank
engine/engine.py                  `Engine`: requests, whole generations; async_engine.py for asyncio
engine/engine_core.py             `step`: schedule → launch → read → postprocess, steps in flight
engine/sampler.py                 settings of a step; sampling_rows.py: state on the device; logprobs.py
engine/scheduler.py, request.py   which request runs when
engine/block_manager.py           which KV-cache blocks belong to whom; prefix cache
engine/kv_cache.py                the blocks themselves: the model's `KVCache`
engine/captured_step.py           decode steps captured as CUDA graphs, or as native calls on CPUs
engine/coordinator.py, worker.py  one engine over many ranks
engine/out_of_memory.py           smaller steps on a device that runs out of memory
engine/grammar*.py, reply.py      requests with a grammar: compiled first, forced tokens
engine/prefix_blocks.py           KV-cache blocks of a prompt from one engine to another, as the
                                  chunks of prefix_chunk.py
engine/stats.py, profile.py       what it is doing: counts, log records, traces
engine/audit.py                   what is held without a request; nothing

The memory plan, and `fulgurite plan`, are in plan/.
"""
