"""Text generation: prompts in, tokens and text out, many requests at a time.

prompt ─ Engine.add ─▶ Request
                         │ scheduler.py   who runs in the next step, under a budget of tokens
                         ▼
                       Pieces ─ batch.py ─▶ flat tensors, block tables
                         │ runner.py      the model over all of them, paged attention
                         ▼
                       logits ─ sampler.py ─▶ a token each
                         │ engine.py      detokenizer.py: text; stop strings, ends
                         ▼
                       Updates and Results

block_tables.py, blocks.py   which blocks hold whose keys; reuse of equal beginnings
kv_cache.py                  the blocks themselves; the model's `Cache`
memory.py                    the plan of memory before any is used
llm.py                       `LLM`, all of it behind one class;  async_engine.py for asyncio
ranks.py, follower.py        one engine over many ranks: what rank 0 tells, and who does it
follow.py                    a rank that an LLM started beside itself
terminal.py                  `fulgurite generate` and `fulgurite chat`
plan_command.py              `fulgurite plan`: what fits where on GPUs nobody has to have (plan.py,
                             rank_model.py, gpus.py; plan_text.py and load_text.py print it)
"""
