"""A tiny checkpoint on disk with a byte-level tokenizer of its own, for what starts from a name."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fulgurite.models.families.llama import WEIGHT_MAPPINGS
from fulgurite.models.weight_mapping import WeightMapping
from tests.serve.engines import FIELDS, tiny_model

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
SPECIAL = ("<s>", "</s>")
VOCABULARY = 256 + len(SPECIAL)


def byte_tokenizer() -> Tokenizer:
    """One token a byte: most characters outside ASCII take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: id for id, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return backend


def save_checkpoint(folder: Path, vocabulary: int = VOCABULARY) -> Path:
    model = tiny_model(vocab_size=vocabulary)
    parameters = dict(model.named_parameters())
    tensors = {}
    for name, parameter in parameters.items():
        parts = name.split(".")
        layer = parts[1] if parts[0] == "layers" else ""
        target = name.replace(f"layers.{layer}.", "layers.{layer}.") if layer else name
        rule: WeightMapping = next(rule for rule in WEIGHT_MAPPINGS if rule.target == target)
        tensors[rule.source.replace("{layer}", layer)] = parameter.data
    save_file(tensors, folder / "model.safetensors")
    fields = {
        **FIELDS,
        "vocab_size": vocabulary,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
