"""Text generation: prompts in, tokens and text out, many requests at once.

prompt ─ Engine.add_request ─▶ Request
                                 │ scheduler.py    schedules the next step under a token budget
                                 ▼
                               ScheduledChunks ─ batch.py ─▶ flat tensors, block tables
                                 │ runner.py       runs the model with paged attention
                                 ▼
                               logits ─ sampler.py ─▶ one token a request
                                 │ engine.py       detokenizer.py: text, stop strings
                                 ▼
                               Updates and Results

llm.py                            `LLM`: all of it behind one class
command.py                        `fulgurite generate` and `fulgurite chat`
worker_main.py                    the process of a worker rank
engine/engine.py                  `Engine.step`: schedule → execute → postprocess; async_engine.py for
                                  asyncio
engine/scheduler.py, request.py   which request runs when
engine/block_manager.py           which KV-cache blocks belong to whom; prefix cache
engine/kv_cache.py                the blocks themselves: the model's `KVCache`
engine/captured_step.py           decode steps captured as CUDA graphs, or as native calls on CPUs
engine/coordinator.py, worker.py  one engine over many ranks

The memory plan, and `fulgurite plan`, are in plan/.
"""
