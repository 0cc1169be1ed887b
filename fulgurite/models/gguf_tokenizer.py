"""The tokenizer inside a GGUF file: vocabulary, merges or scores in, a `tokenizers` backend out.

Two kinds are supported. `gpt2` is byte-level BPE; `tokenizer.ggml.pre` names its pre-tokenizer.
`llama` is SentencePiece BPE; its merges follow from the scores of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fulgurite.errors import WeightsError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"  # Chinese, and most scripts that are not Latin
DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Pre-tokenizer name -> the patterns it splits by, in order.
PRE_TOKENIZER_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (GPT2,),
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "dbrx": (LLAMA3,),
    "qwen2": (QWEN2,),
    "gpt-4o": (GPT4O,),
    "llama4": (GPT4O,),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1-qwen": (QWEN2,),
}


def build_backend(metadata: Mapping[str, object], where: str) -> tuple[Tokenizer, list[str]]:
    """Build the tokenizer; also returns its tokens in the order of their ids."""
    tokens = _read_strings(metadata, "tokens", where)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _build_byte_level_bpe(metadata, tokens, where)
    elif kind == "llama":
        backend = _build_sentencepiece_bpe(metadata, tokens, where)
    else:
        raise WeightsError(
            f"tokenizer model {kind!r} is not supported; supported: gpt2, llama", where=where
        )
    types = metadata.get("tokenizer.ggml.token_type")
    types = types if isinstance(types, list) else [NORMAL] * len(tokens)
    special = [text for text, type in zip(tokens, types, strict=False) if type == CONTROL]
    added = [text for text, type in zip(tokens, types, strict=False) if type == USER_DEFINED]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    return backend, tokens


def _build_byte_level_bpe(
    metadata: Mapping[str, object], tokens: list[str], where: str
) -> Tokenizer:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if name not in PRE_TOKENIZER_PATTERNS:
        raise WeightsError(
            f"pre-tokenizer {name!r} is not supported; "
            f"supported: {', '.join(PRE_TOKENIZER_PATTERNS)}",
            where=where,
            next="load the safetensors checkpoint; its tokenizer.json defines the pre-tokenizer",
        )
    merges = [_split_merge(text) for text in _read_strings(metadata, "merges", where)]
    vocabulary = {text: id for id, text in enumerate(tokens)}
    backend = _build_bpe(where, vocabulary, merges, fuse_unk=False, ignore_merges=False)
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        for pattern in PRE_TOKENIZER_PATTERNS[name]
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_sentencepiece_bpe(
    metadata: Mapping[str, object], tokens: list[str], where: str
) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    listed = scores if isinstance(scores, list) else []
    numbers = [score for score in listed if isinstance(score, float)]
    if len(numbers) != len(tokens):
        raise WeightsError("the tokenizer needs one score per token", where=where)
    vocabulary = {text: id for id, text in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise WeightsError(
            f"tokenizer.ggml.unknown_token_id={unknown!r} is not a token id", where=where
        )
    backend = _build_bpe(
        where,
        vocabulary,
        compute_merges(vocabulary, numbers),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefixed else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(content=" ", left=1, right=0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


def _build_bpe(
    where: str, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    """Build a byte-pair encoding; raises if a merge names unknown tokens."""
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(f"cannot build the tokenizer: {error}", where=where) from error


def compute_merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair with the best-scoring result, so every split is a merge."""
    found = []
    for piece, id in vocabulary.items():
        for split in range(1, len(piece)):
            left, right = piece[:split], piece[split:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[id], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _read_strings(metadata: Mapping[str, object], name: str, where: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise WeightsError(f"the file has no tokenizer.ggml.{name}", where=where)
    return [str(value) for value in values]


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
