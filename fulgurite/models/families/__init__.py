"""Model families: read a config, build the modules, map checkpoint names to parameters.

family.py     ModelFamily, GGUFMapping
common.py     weight mappings, sharding rules and GGUF metadata that most families share
registry.py   architecture name -> family
presets.py    configurations of well-known models, by name
llama.py (also Mistral)  qwen.py  gemma.py  phi.py  mixtral.py  deepseek.py  llama4.py  gpt_oss.py
"""
