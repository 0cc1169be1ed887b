"""Layers with a state of fixed size a sequence: new tokens and states in, outputs and new states out.

causal_conv         a short convolution over time, with the last inputs as its state
gated_delta_rule    linear attention with a decaying matrix as its state (gated DeltaNet)
"""
