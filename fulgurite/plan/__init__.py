"""Memory and throughput of a model on a cluster, by formula.

In: a model configuration and a cluster. Out: a `MemoryPlan`, shardings that fit, and text. No GPU is needed.
"""
