"""Memory and speed of a model on a cluster, by formula.

In: a model configuration and a cluster. Out: a `MemoryPlan`, the meshes that fit, and text. No GPU is
needed. The engine (serve/) plans its memory with the same functions.

    limits.py, kv_cache.py, activations.py, memory.py    the memory plan of one engine
    cluster.py, shard.py, search.py                      meshes of a cluster, and one rank's shard
    command.py, text.py, expert_load.py                  `fulgurite plan`
"""
