"""Models of transformers behind our KV cache: a checkpoint of any causal LM in, a `CausalLM` out.

An architecture that has no family of ours (families/registry.py) runs through transformers' own
modules. Their attention goes through transformers' attention interface; `attention.py` puts our
`KVCache` behind it. So the engine batches, pages and schedules such a model like any other.

    config.json ─ config.py ─▶ transformers' config, or why the model can't run this way
                      │ family.py: modules on the meta device
                      ▼
                  probe.py ─▶ an AttentionSpec a layer: heads, scale, window, softcap
                      │ family.py: weights from safetensors
                      ▼
                  model.py ─▶ TransformersModel, a CausalLM ─ check.py ─▶ equal to eager attention

transformers is an optional package. No code of a checkpoint is run, and no pickle is read.
"""
