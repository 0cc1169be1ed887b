"""Memory and speed of a model on a cluster, by formula.

In: a model configuration and a cluster. Out: a `MemoryPlan`, the meshes that fit, and text. No GPU is
needed. The engine (serve/) plans its memory with the same functions.

    limits.py, kv_cache.py, activations.py, memory.py    the memory plan of one rank
    meta_dispatch.py, rank_memory.py                     experts on other ranks; the plans of all ranks
    cluster.py, shard.py, search.py                      meshes of a cluster, and one rank's shard
    step_time.py, predict.py                             the time of a decode and of a prefill step
    command.py, text.py, expert_load.py                  `fulgurite plan`
"""
