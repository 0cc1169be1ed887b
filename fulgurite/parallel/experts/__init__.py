"""Expert parallelism: a layer's experts in, experts on many ranks out.

expert_parallel.py   `ExpertParallel`, the layer that dispatches tokens and runs this rank's experts
transport.py         options of users in, the `TokenDispatcher` that fits out
placement.py         which expert each slot holds; rebalance.py makes one from recorded load
"""
