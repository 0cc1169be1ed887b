"""Model families: read a config, build the modules, map checkpoint names to parameters.

family.py     ModelFamily, GGUFMapping
common.py     weight mappings, sharding rules and GGUF metadata that most families share
registry.py   architecture name -> family
presets.py    configurations of well-known models, by name; more_presets.py has the rest of them
layer_types.py   RoPE by layer type

All other files are families: llama.py, mistral.py, qwen.py, ... The table is in docs/models.md.
"""
